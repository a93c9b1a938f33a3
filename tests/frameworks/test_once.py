"""A derivative that autograd would take for a constant refuses to be differentiated."""

from typing import Any

import pytest
import torch

from openkda.frameworks import torch as fw


class Cube:
    """x^3 as a fused operator has it: its backward is no operation that autograd could see."""

    NAME = "cube"

    @staticmethod
    def forward(fw: Any, x: torch.Tensor) -> tuple:
        return (x**3,)

    @staticmethod
    def keep(args: tuple, results: tuple) -> tuple:
        return args, None

    @staticmethod
    def backward(fw: Any, tensors: tuple, others: None, needs: tuple, dy: torch.Tensor) -> tuple:
        return (dy * 3 * tensors[0].detach() ** 2,)


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


@pytest.mark.parametrize(
    "name, f, slope",
    [("cube", lambda x: fw.operator(Cube)(x)[0], 12.0), ("square", lambda x: fw.custom(Square, x), 4.0)],
    ids=["operator", "custom"],
)
def test_second_derivative_raises(name: str, f: Any, slope: float):
    x = torch.tensor([2.0], requires_grad=True)
    (dx,) = torch.autograd.grad(f(x).sum(), x)
    assert dx.item() == slope
    assert not dx.requires_grad
    message = f"^{name}: a second derivative must not be asked for on a fast backend, got create_graph=True"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(f(x).sum(), x, create_graph=True)
