"""`causal_conv1d` on Triton kernels, forward and backward, each one operator for compilers and autograd.

Only the inputs are kept: the backward computes the sums before the activation once more. Sizes come from shapes alone,
and the host never waits for the device. Kernels: `kernels/`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.conv.kernels import backward, forward, update

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens"


def causal_conv1d(
    x: Any, weight: Any, bias: Any | None = None, *, activation: str | None, initial_state: Any | None,
    output_final_state: bool, cu_seqlens: Any | None,
) -> tuple[Any, Any | None]:  # fmt: skip
    """`openkda.causal_conv1d` on Triton kernels, arguments unchecked; see there."""
    call = (x, weight, bias, initial_state, cu_seqlens, activation == "silu", output_final_state)
    y, final_state = frameworks.of(x).operator(CausalConv1d)(*call)
    return y, final_state if output_final_state else None


def causal_conv1d_update(
    x: Any, conv_state: Any, weight: Any, bias: Any | None, *, silu: bool, state_indices: Any | None
) -> Any:
    """`openkda.causal_conv1d_update` on its Triton kernel, arguments unchecked; see there."""
    return frameworks.of(x).operator(CausalConv1dUpdate)(x, conv_state, weight, bias, state_indices, silu)


def _rows(fw: ModuleType, x: Any) -> Any:
    """x itself where its channels are side by side, rows wherever they are; else a copy."""
    return x if fw.strides(x)[-1] == 1 or fw.shape(x)[-1] == 1 else fw.copy(x)


def _contiguous(fw: ModuleType, *xs: Any | None) -> tuple:
    return tuple(None if x is None else fw.contiguous(x) for x in xs)


class CausalConv1d:
    """The forward operator. A final state that is not wanted has no elements."""

    NAME = "causal_conv1d"
    SCHEMA = f"({_TENSORS}, bool silu, bool final) -> (Tensor y, Tensor final_state)"

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        x, weight, bias, initial_state, cu_seqlens, silu, final = args
        y, final_state = CausalConv1d.fake(fw, *args)
        x = _rows(fw, x)
        weight, bias, initial_state, cu_seqlens = _contiguous(fw, weight, bias, initial_state, cu_seqlens)
        inputs = {"x": x, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        forward.conv_fwd(**inputs, weight=weight, bias=bias, y=y, silu=silu)
        if final:
            forward.final_state(**inputs, final_state=final_state)
        return y, final_state

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        """Unwritten results of the right sizes; sizes may be symbols."""
        x, weight, _, _, cu_seqlens, _, final = args
        (B, _, C), W = fw.shape(x), fw.shape(weight)[1]
        N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
        return fw.empty(fw.shape(x), like=x), fw.empty((N, C, W - 1) if final else (0,), like=x)

    @staticmethod
    def keep(args: tuple, results: tuple) -> tuple[tuple, tuple]:
        """Tensors and others that the backward needs."""
        return args[:5], args[5:6]

    @staticmethod
    def backward(
        fw: ModuleType, tensors: tuple, others: tuple, needs: tuple, dy: Any | None, dfinal: Any | None
    ) -> tuple:
        if dfinal is not None and len(fw.shape(dfinal)) == 1:  # Paddle has one for a result without elements, too
            dfinal = None
        if dy is None and dfinal is None:
            return (None,) * len(needs)
        wanted = [bool(n) for n in needs[:4]]
        grads = fw.operator(CausalConv1dBackward)(dy, dfinal, *tensors, *others, wanted)
        asked = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return (*asked, *(None,) * (len(needs) - len(wanted)))


class CausalConv1dBackward:
    """The backward operator; it has no derivative of its own. Gradients that are not wanted have no elements."""

    NAME = "causal_conv1d_bwd"
    NO_DERIVATIVE = (
        "causal_conv1d: a second derivative must not be asked for, got a backward through the backward of "
        'backend="triton"; use backend="eager" or "reference", which have one'
    )
    SCHEMA = (
        f"(Tensor? dy, Tensor? dfinal, {_TENSORS}, bool silu, bool[] wanted) -> "
        "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)"
    )

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        dy, dfinal, x, weight, bias, initial_state, cu_seqlens, silu, wanted = args
        dx, dweight, dbias, dinitial = grads = CausalConv1dBackward.fake(fw, *args)
        x, dy = _rows(fw, x), fw.zeros(fw.shape(x), like=x) if dy is None else _rows(fw, dy)
        weight, bias, initial_state, cu_seqlens, dfinal = _contiguous(
            fw, weight, bias, initial_state, cu_seqlens, dfinal
        )
        common: dict[str, Any] = {"x": x, "dy": dy, "weight": weight, "bias": bias, "initial_state": initial_state}
        common |= {"cu_seqlens": cu_seqlens, "dfinal_state": dfinal, "silu": silu}
        if any(wanted[:3]):
            if not wanted[0]:
                dx = fw.empty(fw.shape(x), like=x)  # the pass makes it in any case
            dweight, dbias = dweight if wanted[1] else None, dbias if wanted[2] else None
            backward.conv_bwd(**common, dx=dx, dweight=dweight, dbias=dbias)
        if wanted[3]:
            backward.initial_state_bwd(**common, dinitial_state=dinitial)
        return grads

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        x, wanted = args[2], args[-1]
        return tuple(
            fw.empty(fw.shape(t) if want and t is not None else (0,), like=x if t is None else t)
            for t, want in zip(args[2:6], wanted, strict=True)
        )


class CausalConv1dUpdate:
    """One token a sequence; the state is edited in place. Inference only."""

    NAME = "causal_conv1d_update_"
    SCHEMA = "(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? indices, bool silu) -> Tensor"

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> Any:
        x, state, weight, bias, indices, silu = args
        y = CausalConv1dUpdate.fake(fw, *args)
        weight, bias, indices = _contiguous(fw, weight, bias, indices)
        update.conv_update(x=_rows(fw, x), pool=state, weight=weight, bias=bias, indices=indices, y=y, silu=silu)
        return y

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> Any:
        return fw.empty(fw.shape(args[0]), like=args[0])
