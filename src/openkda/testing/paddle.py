"""The checks of `openkda.testing` on Paddle tensors: the same inputs, given to Paddle by DLPack, and results back.

Needs both libraries; numbers are never copied through text or NumPy, so bf16 works too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import torch

from openkda.testing.inputs import KDAInputs


def to_paddle(x: Any) -> Any:
    """A torch tensor as a Paddle tensor with memory of its own and the same strides; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    order = sorted(range(x.dim()), key=lambda axis: -x.stride(axis))  # memory of its own, axes in the order of x's
    own = x.detach().permute(order).clone(memory_format=torch.contiguous_format)
    return paddle.from_dlpack(own.permute([order.index(axis) for axis in range(x.dim())]))


def to_torch(x: Any) -> torch.Tensor:
    """A Paddle tensor as a torch tensor that shares its memory."""
    return torch.from_dlpack(x.detach())


def run(fn: Callable[..., Any], inputs: KDAInputs, **options: Any) -> dict[str, torch.Tensor]:
    """`openkda.testing.run` with Paddle tensors: fn is called on them, forward and backward, and torch tensors come
    back, so that the limits and budgets of `openkda.testing` apply as they are.
    """
    leaves = {name: to_paddle(tensor) for name, tensor in inputs.tensors.items()}
    for leaf in leaves.values():
        leaf.stop_gradient = False
    args = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    kwargs = {name: to_paddle(value) for name, value in inputs.kwargs.items()}
    kwargs |= {name: leaves[name] for name in leaves if name in inputs.kwargs} | options
    o, final_state = fn(*args, **kwargs)
    pairs = [(o, to_paddle(inputs.grad_o)), (final_state, to_paddle(inputs.grad_final_state))]
    reached = [(value, grad.astype(value.dtype)) for value, grad in pairs if not value.stop_gradient]
    grads: list[Any] = [None] * len(leaves)
    if reached:
        values, cotangents = zip(*reached, strict=True)
        grads = paddle.grad(list(values), list(leaves.values()), list(cotangents), allow_unused=True)
    result = {"o": to_torch(o), "final_state": to_torch(final_state)}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        result[f"d{name}"] = to_torch(paddle.zeros_like(leaf) if grad is None else grad)
    return result
