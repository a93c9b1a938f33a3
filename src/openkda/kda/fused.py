"""`chunk_kda` on fused kernels: two operators, forward and backward, that compilers, CUDA graphs and autograd see as
one node each. What they do is in `stages.py`; sizes come from shapes alone, and the host never waits for the device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from openkda import frameworks
from openkda.kda import stages
from openkda.kda.kernels import launch
from openkda.kda.kernels.common import as_matrix
from openkda.kda.stages import Options

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens"
)
_OPTIONS = (
    "float scale, float? lower_bound, bool l2norm, bool gate, bool beta_sigmoid, bool neg_eigval, bool v_first, "
    "bool batch_invariant"
)


def chunk_kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, scale: float | None, initial_state: Any | None,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool, use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool, A_log: Any | None, dt_bias: Any | None, lower_bound: float | None, cu_seqlens: Any | None,
    state_v_first: bool, save_intermediates: bool, batch_invariant: bool,
) -> tuple[Any, Any | None]:  # fmt: skip
    """`openkda.chunk_kda` on fused kernels, arguments unchecked; see there."""
    fw = frameworks.of(q)
    options = Options(
        float(fw.shape(q)[3] ** -0.5 if scale is None else scale),
        None if lower_bound is None else float(lower_bound),
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        batch_invariant,
    )
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
    keep = fw.needs_grad(*tensors[:8])
    results = fw.operator(ChunkKDA)(*tensors, *options, output_final_state, keep, keep and save_intermediates)
    return results[0], results[1] if output_final_state else None


# ---------------------------------------------------------------- the operators
class ChunkKDA:
    """The forward operator. kept: all that the backward reads, one piece of memory. What is not wanted is empty."""

    NAME = "chunk_kda"
    SCHEMA = (
        f"({_TENSORS}, {_OPTIONS}, bool final, bool keep, bool keep_all) -> (Tensor o, Tensor final_state, Tensor kept)"
    )

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        tensors = _readable(fw, args[:9])
        plan = stages.plan_forward(_place(fw, args[0]), _signatures(fw, tensors), Options(*args[9:17]), *args[17:])
        return plan.run(fw, tensors, launch.current_stream)

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        """Unwritten results of the right sizes; sizes may be symbols."""
        sizes = stages.result_sizes(fw, args[:9], Options(*args[9:17]), *args[17:])
        return tuple(fw.empty(size, like=args[2], dtype=dtype) for size, dtype in sizes)

    @staticmethod
    def keep(args: tuple, results: tuple) -> tuple[tuple, tuple]:
        """Tensors and others that the backward needs."""
        return (*args[:9], results[2]), (*args[9:17], args[19])

    @staticmethod
    def backward(
        fw: ModuleType, tensors: tuple, others: tuple, needs: tuple, do: Any | None, dfinal: Any | None, *_: Any
    ) -> tuple:
        if do is None and dfinal is None:
            return (None,) * len(needs)
        wanted = [bool(n) for n in needs[:8]]
        grads = fw.operator(ChunkKDABackward)(do, dfinal, *tensors, *others, wanted)
        asked = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return (*asked, *(None,) * (len(needs) - len(wanted)))


class ChunkKDABackward:
    """The backward operator; it has no derivative of its own. Gradients that are not wanted have no elements."""

    NAME = "chunk_kda_bwd"
    NO_DERIVATIVE = (
        "chunk_kda: a second derivative must not be asked for, got a backward through the backward of "
        'backend="triton"; only backend="reference" has one'
    )
    SCHEMA = (
        f"(Tensor? do, Tensor? dfinal, {_TENSORS}, Tensor kept, {_OPTIONS}, bool keep_all, bool[] wanted) -> (Tensor "
        "dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state, Tensor dA_log, Tensor ddt_bias)"
    )

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        do, dfinal, kept = args[0], args[1], args[11]
        q, k, v, *others = _readable(fw, args[2:11])
        do = fw.zeros(fw.shape(v), like=v) if do is None else as_matrix(_rows(fw, do))
        dfinal = None if dfinal is None else fw.contiguous(dfinal)
        tensors = (do, dfinal, q, k, as_matrix(v), *others, kept)
        options, wanted = Options(*args[12:20]), tuple(args[21])
        plan = stages.plan_backward(_place(fw, q), _signatures(fw, tensors), options, args[20], wanted)
        return plan.run(fw, tensors, launch.current_stream)

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        return tuple(
            fw.empty(fw.shape(x) if want and x is not None else (0,), like=args[2] if x is None else x)
            for x, want in zip(args[2:10], args[-1], strict=True)
        )


# ---------------------------------------------------------------- inputs as kernels take them
def _readable(fw: ModuleType, tensors: tuple) -> tuple:
    """Copies only what no kernel can read in place."""
    *tokens, beta, initial_state, A_log, dt_bias, cu_seqlens = tensors
    rest = (None if x is None else fw.contiguous(x) for x in (initial_state, A_log, dt_bias, cu_seqlens))
    return (*(_rows(fw, x) for x in tokens), beta, *rest)


def _rows(fw: ModuleType, x: Any) -> Any:
    return x if fw.strides(x)[-1] == 1 else fw.copy(x)


def _place(fw: ModuleType, x: Any) -> tuple[int, int | None]:
    """What a plan depends on besides the call: a compiled kernel belongs to one device."""
    return fw.device_index(x), fw.compute_capability(x)


def _signatures(fw: ModuleType, tensors: tuple) -> tuple:
    return tuple(None if x is None else fw.signature(x) for x in tensors)
