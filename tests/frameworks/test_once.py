"""A derivative that autograd would take for a constant refuses to be differentiated."""

from typing import Any

import pytest
import torch

from openkda.frameworks import torch as fw


class Square:
    """x^2 with a derivative that keeps what its forward computed."""

    ONCE = "square"

    @staticmethod
    def forward(fw: Any, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * x)
        return x * x

    @staticmethod
    def backward(fw: Any, ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * dy


def test_second_derivative_raises():
    x = torch.tensor([2.0], requires_grad=True)
    (dx,) = torch.autograd.grad(fw.custom(Square, x).sum(), x)
    assert dx.item() == 4.0
    message = "^square: a second derivative must not be asked for on a fast backend, got create_graph=True"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(fw.custom(Square, x).sum(), x, create_graph=True)
