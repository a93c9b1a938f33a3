"""Outputs and gradients of any function with the signature of `chunk_kda`, and what they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openkda.kda import eager, reference
from openkda.testing.inputs import KDAInputs

#: Names in the result of `run`, in the order of every table: the two results, then the eight gradients.
TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dinitial_state")

#: Longest sequence, in tokens, for the token-by-token recurrence; the eager operator in fp64 is checked against it up
#: to here and takes over beyond.
RECURRENCE_LIMIT = 2048


def run(fn: Callable[..., Any], inputs: KDAInputs, **options: Any) -> dict[str, Tensor]:
    """Call fn forward and backward.

    Args:
        fn: Has the signature of `openkda.chunk_kda`.
        inputs: The call; every differentiable tensor in it gets a gradient.
        options: Further keyword arguments for fn.
    Returns: o, final_state and d<name> for every name in `inputs.tensors`, detached, in the dtypes that fn gives. dg is
        the gradient of the logits where the gate is computed inside.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.tensors.items()}
    args = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    kwargs = inputs.kwargs | {name: leaves[name] for name in leaves if name in inputs.kwargs} | options
    o, final_state = fn(*args, **kwargs)
    result = {"o": o.detach(), "final_state": final_state.detach()}
    # A result that no input reaches (no tokens, no initial state) is left out, and an input that reaches no result has
    # gradient 0. A path that an implementation lost shows as a wrong 0 beside the oracle.
    pairs = [(o, inputs.grad_o), (final_state, inputs.grad_final_state)]
    reached = [(value, grad.to(value.dtype)) for value, grad in pairs if value.requires_grad]
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if reached:
        values, cotangents = zip(*reached, strict=True)
        grads = torch.autograd.grad(values, list(leaves.values()), cotangents, materialize_grads=True)
    return result | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def oracle(inputs: KDAInputs, **options: Any) -> dict[str, Tensor]:
    """The right answer for exactly these (rounded) numbers, in fp64: see `run` for the names.

    The recurrence, token by token, up to T = 2048, and the eager operator in fp64 beyond.
    """
    fn = reference.chunk_kda if inputs.q.shape[1] <= RECURRENCE_LIMIT else eager.chunk_kda
    return run(fn, inputs.to(torch.float64), **options)


def rounded(inputs: KDAInputs, operand_dtype: str = "bfloat16", **options: Any) -> dict[str, Tensor]:
    """What honest 16-bit arithmetic gives: the eager operator with every matmul operand rounded, forward and backward.

    Its distance to `oracle` is the measure of the 16-bit error budget.
    """
    return run(eager.chunk_kda, inputs, operand_dtype=operand_dtype, **options)
