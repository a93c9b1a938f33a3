"""The two normalisations on Triton kernels, forward and backward, each one operator for compilers and autograd.

Only the inputs are kept. Kernels: `kernels/`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.norm.kernels import l2norm as unit
from openkda.norm.kernels import rms_norm_gated as gated


def _no_derivative(op: str) -> str:
    return (
        f"{op}: a second derivative must not be asked for, got a backward through the backward of "
        'backend="triton"; use backend="eager" or "reference", which have one'
    )


def l2norm(x: Any, eps: float = 1e-6) -> Any:
    """`openkda.l2norm` on Triton kernels, arguments unchecked; see there."""
    return frameworks.of(x).operator(L2Norm)(x, float(eps))


def rms_norm_gated(x: Any, gate: Any, weight: Any, *, activation: str, eps: float = 1e-5) -> Any:
    """`openkda.rms_norm_gated` on Triton kernels, arguments unchecked; see there."""
    return frameworks.of(x).operator(RMSNormGated)(x, gate, weight, float(eps), activation == "silu")


class L2Norm:
    NAME = "l2norm"
    SCHEMA = "(Tensor x, float eps) -> Tensor"

    @staticmethod
    def forward(fw: ModuleType, x: Any, eps: float) -> Any:
        y = fw.empty(fw.shape(x), like=x)
        unit.l2norm_fwd(x=x, y=y, eps=eps)
        return y

    @staticmethod
    def fake(fw: ModuleType, x: Any, eps: float) -> Any:
        return fw.empty(fw.shape(x), like=x)

    @staticmethod
    def keep(args: tuple, results: Any) -> tuple[tuple, tuple]:
        """Tensors and others that the backward needs."""
        return args[:1], args[1:]

    @staticmethod
    def backward(fw: ModuleType, tensors: tuple, others: tuple, needs: tuple, dy: Any | None) -> tuple:
        return None if dy is None else fw.operator(L2NormBackward)(dy, *tensors, *others), None


class L2NormBackward:
    NAME = "l2norm_bwd"
    NO_DERIVATIVE = _no_derivative("l2norm")
    SCHEMA = "(Tensor dy, Tensor x, float eps) -> Tensor"

    @staticmethod
    def forward(fw: ModuleType, dy: Any, x: Any, eps: float) -> Any:
        dx = fw.empty(fw.shape(x), like=x)
        unit.l2norm_bwd(x=x, dy=dy, dx=dx, eps=eps)
        return dx

    @staticmethod
    def fake(fw: ModuleType, dy: Any, x: Any, eps: float) -> Any:
        return fw.empty(fw.shape(x), like=x)


class RMSNormGated:
    NAME = "rms_norm_gated"
    SCHEMA = "(Tensor x, Tensor gate, Tensor weight, float eps, bool silu) -> Tensor"

    @staticmethod
    def forward(fw: ModuleType, x: Any, gate: Any, weight: Any, eps: float, silu: bool) -> Any:
        y = fw.empty(fw.shape(x), like=x)
        gated.rms_norm_gated_fwd(x=x, gate=gate, weight=fw.contiguous(weight), y=y, eps=eps, silu=silu)
        return y

    @staticmethod
    def fake(fw: ModuleType, x: Any, *_: Any) -> Any:
        return fw.empty(fw.shape(x), like=x)

    @staticmethod
    def keep(args: tuple, results: Any) -> tuple[tuple, tuple]:
        """Tensors and others that the backward needs."""
        return args[:3], args[3:]

    @staticmethod
    def backward(fw: ModuleType, tensors: tuple, others: tuple, needs: tuple, dy: Any | None) -> tuple:
        if dy is None:
            return (None,) * len(needs)
        grads = fw.operator(RMSNormGatedBackward)(dy, *tensors, *others)
        return (*(grad if want else None for grad, want in zip(grads, needs[:3], strict=True)), None, None)


class RMSNormGatedBackward:
    """dx, dgate and dweight; one pass makes all three."""

    NAME = "rms_norm_gated_bwd"
    NO_DERIVATIVE = _no_derivative("rms_norm_gated")
    SCHEMA = (
        "(Tensor dy, Tensor x, Tensor gate, Tensor weight, float eps, bool silu) -> "
        "(Tensor dx, Tensor dgate, Tensor dweight)"
    )

    @staticmethod
    def forward(fw: ModuleType, dy: Any, x: Any, gate: Any, weight: Any, eps: float, silu: bool) -> tuple:
        dx, dgate, dweight = grads = RMSNormGatedBackward.fake(fw, dy, x, gate, weight)
        gated.rms_norm_gated_bwd(
            x=x, gate=gate, weight=fw.contiguous(weight), dy=dy, dx=dx, dgate=dgate, dweight=dweight, eps=eps, silu=silu
        )
        return grads

    @staticmethod
    def fake(fw: ModuleType, dy: Any, x: Any, gate: Any, weight: Any, *_: Any) -> tuple:
        return tuple(fw.empty(fw.shape(t), like=t) for t in (x, gate, weight))
