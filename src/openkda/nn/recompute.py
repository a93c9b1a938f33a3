"""What a layer does not keep for its backward: results that are cheap to compute again from what is kept anyway.

The convolution and the gated norm keep their inputs, the outputs of projections. What comes after them (the operator,
the output projection) would keep their results besides. Within `recomputed` autograd keeps the way to them instead.
All else that is saved goes where it would go without this: to autograd, or to the hooks of activation checkpointing or
offloading, which get the inputs of what is computed again as well.

Under torch.compile nothing happens here: its partitioner decides what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recipe(NamedTuple):
    """result = function(*inputs), bit for bit, whenever it is called."""

    result: Tensor
    function: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]


class _Kept(NamedTuple):
    """In place of a saved tensor that is a result, or a view of one."""

    function: Callable[..., Tensor]
    inputs: list[Any]  # as the hooks around keep them
    versions: list[int]
    layout: tuple[int, ...]  # strides of the result
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: Any  # from where the result begins


def recomputed(*recipes: Recipe) -> AbstractContextManager[Any]:
    """Within, autograd keeps the inputs of each recipe where it would keep its result, or a view of it.

    The backward raises RuntimeError if an input was edited in place since.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    known = {_memory(recipe.result): recipe for recipe in recipes if _memory(recipe.result)}
    # The hooks around; torch has no public way to ask for them. test_hooks_around_the_layer_see_everything_else tells
    # whether this one still works.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    keep, give = outer or (_same, _same)

    def pack(x: Tensor) -> Any:
        recipe = known.get(_memory(x))
        if recipe is None:
            return keep(x)
        inputs = [None if t is None else keep(t.detach()) for t in recipe.inputs]
        versions = [0 if t is None else t._version for t in recipe.inputs]
        offset = x.storage_offset() - recipe.result.storage_offset()
        return _Kept(recipe.function, inputs, versions, recipe.result.stride(), x.shape, x.stride(), offset)

    def unpack(kept: Any) -> Any:
        return _compute(kept, give) if isinstance(kept, _Kept) else give(kept)

    return _within(torch.autograd.graph.saved_tensors_hooks(pack, unpack), known)


@contextmanager
def _within(hooks: AbstractContextManager[Any], known: dict[int, Recipe]) -> Iterator[None]:
    with hooks:
        yield
    known.clear()  # what is saved keeps its hooks, and they would keep the results


def _compute(kept: _Kept, give: Callable[[Any], Any]) -> Tensor:
    with torch.no_grad():
        inputs = [None if t is None else give(t) for t in kept.inputs]
        if give is _same and any(t is not None and t._version != v for t, v in zip(inputs, kept.versions, strict=True)):
            raise RuntimeError(
                "KimiDeltaAttention: what its backward needs must not be edited in place, got a newer version; "
                "clone it first"
            )
        result = kept.function(*inputs)
        if result.stride() != kept.layout:  # inputs came back in other strides than they left
            result = result.new_empty_strided(result.shape, kept.layout).copy_(result)
        return result.as_strided(kept.size, kept.stride, kept.offset + result.storage_offset())


def _memory(x: Tensor) -> int:
    """What a tensor shares with its views alone; 0 for a tensor without memory."""
    return x.untyped_storage().data_ptr()


def _same(x: Any) -> Any:
    return x
