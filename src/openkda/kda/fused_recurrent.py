"""`recurrent_kda` on its kernel: one launch, as operators that compilers and CUDA graphs see as one node.

Sizes come from shapes alone and the host never waits for the device: a recorded CUDA graph stays right when offsets,
slots, states and inputs are edited in place. Host code runs once for every call signature and leaves a plan
(`frameworks/planned.py`). Kernel: `kernels/recurrent.py`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

from openkda import frameworks
from openkda.frameworks.planned import Plan, Planner
from openkda.kda.kernels import launch, recurrent
from openkda.kda.kernels.common import Activations


class Options(NamedTuple):
    """All that is no tensor, in the order of the operators' schemas."""

    scale: float
    lower_bound: float | None
    l2norm: bool
    gate: bool
    beta_sigmoid: bool
    neg_eigval: bool
    v_first: bool


_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_GATE = "Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens"
_OPTIONS = "float scale, float? lower_bound, bool l2norm, bool gate, bool beta_sigmoid, bool neg_eigval, bool v_first"


def recurrent_kda(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, scale: float | None, initial_state: Any | None,
    state_indices: Any | None, output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool, A_log: Any | None, dt_bias: Any | None,
    lower_bound: float | None, cu_seqlens: Any | None, state_v_first: bool,
) -> tuple[Any, Any | None]:  # fmt: skip
    """`openkda.recurrent_kda` on its kernel, arguments unchecked; see there."""
    fw = frameworks.of(q)
    options = Options(
        float(fw.shape(q)[3] ** -0.5 if scale is None else scale),
        None if lower_bound is None else float(lower_bound),
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    tokens, gate = (q, k, v, g, beta), (A_log, dt_bias, cu_seqlens)
    if state_indices is not None:
        return fw.operator(RecurrentKDAPool)(*tokens, initial_state, state_indices, *gate, *options), None
    o, final = fw.operator(RecurrentKDA)(*tokens, initial_state, *gate, *options, output_final_state)
    return o, final if output_final_state else None


class RecurrentKDA:
    """States in, new states out. A final state that is not wanted has no elements."""

    NAME = "recurrent_kda"
    SCHEMA = f"({_TOKENS}, Tensor? initial_state, {_GATE}, {_OPTIONS}, bool final) -> (Tensor o, Tensor final_state)"

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        return _run(fw, (*args[:6], None, *args[6:9]), Options(*args[9:16]), final=args[16])

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        """Unwritten results of the right sizes; sizes may be symbols."""
        (q, _, v), cu_seqlens, x, final = args[:3], args[8], Options(*args[9:16]), args[16]
        (B, T, _, K), (HV, V) = fw.shape(q), fw.shape(v)[2:]
        N = B if cu_seqlens is None else fw.shape(cu_seqlens)[0] - 1
        state = (N, HV, *((V, K) if x.v_first else (K, V))) if final else (0,)
        return fw.empty((B, T, HV, V), like=v), fw.empty(state, like=v, dtype="float32")


class RecurrentKDAPool:
    """The states of a pool, read and written in place at the given slots."""

    NAME = "recurrent_kda_"
    SCHEMA = f"({_TOKENS}, Tensor(a!) pool, Tensor state_indices, {_GATE}, {_OPTIONS}) -> Tensor o"

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> Any:
        return _run(fw, args[:10], Options(*args[10:17]), final=False)[0]

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> Any:
        return fw.empty(fw.shape(args[2]), like=args[2])


def _run(fw: ModuleType, tensors: tuple, x: Options, *, final: bool) -> tuple:
    """tensors: q, k, v, g, beta, states, slots or None, A_log, dt_bias, cu_seqlens; copies only what the kernel cannot
    read in place.
    """
    tokens = (t if fw.strides(t)[-1] == 1 else fw.copy(t) for t in tensors[:4])
    others = (None if t is None else fw.contiguous(t) for t in tensors[6:])
    tensors = (*tokens, *tensors[4:6], *others)
    signatures = tuple(None if t is None else fw.signature(t) for t in tensors)
    plan = _plan((fw.device_index(tensors[0]), fw.compute_capability(tensors[0])), signatures, x, final)
    return plan.run(fw, tensors, launch.current_stream)


@functools.lru_cache(maxsize=128)
def _plan(place: tuple[int, int | None], signatures: tuple, x: Options, final: bool) -> Plan:
    """place: device and compute capability."""
    p = Planner(place[1])
    inputs: list[Any] = list(map(p.input, signatures))
    q, k, v, g, beta, states, slots, A_log, dt_bias, cu_seqlens = inputs
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = p.result((B, T, HV, V), v.dtype)
    after = p.result((N, HV, *((V, K) if x.v_first else (K, V))) if final else (0,), "float32")
    recurrent.recurrent_fwd(
        q=q, k=k, v=v, g=g, beta=beta, o=o, initial_state=states, slots=slots, cu_seqlens=cu_seqlens,
        final_state=states if slots is not None else after if final else None, state_v_first=x.v_first,
        act=Activations.of(x, A_log, dt_bias),
    )  # fmt: skip
    return p.finish()
