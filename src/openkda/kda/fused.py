"""`chunk_kda` on fused kernels: the stages in order, forward and backward, and what is kept between them.

    forward      tables -> prepare (chunks x heads) -> scan with outputs (serial over chunks)
    kept         the inputs, a, aqk, and S before every 4th chunk: 384 bytes a token and head (K = V = 128, bf16)
    backward     tables -> recompute (no levels, no inverse) -> re-scan (groups of 4 chunks) -> reverse scan (serial)
                 -> gradients (chunks x heads)

With save_intermediates the prepare stage's other results (1040 bytes a token and head more) are kept instead of being
recomputed. A long dense input passes through the stages in segments (`segments.py`), so that workspaces exist for one
segment at a time.

The stages run once for every call signature, on planned tensors (`frameworks/planned.py`). What they note down is a
plan, with a place for every workspace, that runs at each call. Both halves are operators that compilers, CUDA graphs
and autograd see as one node each; sizes come from shapes alone, and the host never waits for the device. Kernels and
names: `kernels/`, docs/maths.md.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

from openkda import frameworks
from openkda.frameworks.planned import Buffer, Plan, Planner
from openkda.kda.kernels import gradients, launch, prepare, scan
from openkda.kda.kernels.common import Activations
from openkda.kda.kernels.tables import CHUNK, GROUP, Layout, make_layout, zero_tail
from openkda.kda.segments import Segment, num_starts, overlaps, parts_of, split

INPUTS = ("q", "k", "v", "g", "beta")
KEPT = ("a", "aqk", "checkpoints", "starts")  # starts: S before every segment but the first, fp32
MORE = ("w", "u", "kg", "qg", "decay", "norms")  # kept with save_intermediates
PLANS = 128  # call signatures whose plans are remembered, for each half


class Options(NamedTuple):
    """All that is no tensor, in the order of the operators' schemas."""

    scale: float
    lower_bound: float | None
    l2norm: bool
    gate: bool
    beta_sigmoid: bool
    neg_eigval: bool
    v_first: bool
    batch_invariant: bool


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
        plan = _plan_forward(fw.compute_capability(args[0]), _signatures(fw, tensors), Options(*args[9:17]), *args[17:])
        return plan.run(fw, tensors, launch.current_stream)

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        """Unwritten results of the right sizes; sizes may be symbols."""
        sizes = _result_sizes(fw, args[:9], Options(*args[9:17]), *args[17:])
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
        tensors = _readable(fw, args[2:11])
        do = fw.zeros(fw.shape(tensors[2]), like=tensors[2]) if do is None else _matrix(fw, do)
        dfinal = None if dfinal is None else fw.contiguous(dfinal)
        tensors = (do, dfinal, *tensors[:2], _matrix(fw, tensors[2]), *tensors[3:], kept)
        options, wanted = Options(*args[12:20]), tuple(args[21])
        plan = _plan_backward(fw.compute_capability(do), _signatures(fw, tensors), options, args[20], wanted)
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
    tokens = (x if fw.strides(x)[-1] == 1 else fw.copy(x) for x in tokens)
    rest = (None if x is None else fw.contiguous(x) for x in (initial_state, A_log, dt_bias, cu_seqlens))
    return (*tokens, beta, *rest)


def _matrix(fw: ModuleType, x: Any) -> Any:
    """x [B, T, HV, V] if it is a matrix of B * T rows, as a tensor descriptor must be, else a copy that is one."""
    (B, T, HV, V), (stride_b, stride_t, stride_h, stride_v) = fw.shape(x), fw.strides(x)
    rows = (B == 1 or stride_b == T * stride_t) and stride_t % 8 == 0 and stride_t >= HV * V
    return x if rows and stride_v == 1 and (HV == 1 or stride_h == V) else fw.copy(x)


def _signatures(fw: ModuleType, tensors: tuple) -> tuple:
    return tuple(None if x is None else fw.signature(x) for x in tensors)


# ---------------------------------------------------------------- sizes
def workspace_dtype(fw: Any, x: Any) -> str:
    """fp32 for fp32 inputs, else bf16: fp16 would overflow where a state passes 65504."""
    return "float32" if fw.dtype_name(x) == "float32" else "bfloat16"


def _result_sizes(
    fw: ModuleType, tensors: tuple, x: Options, final: bool, keep: bool, keep_all: bool
) -> list[tuple[tuple, str]]:
    """(shape, dtype) of every result of the forward operator. Written so that no symbolic size is compared."""
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    N = B if tensors[8] is None else fw.shape(tensors[8])[0] - 1
    state = (V, K) if x.v_first else (K, V)
    kept = _kept(fw, tensors, x, keep_all)["end"][2] if keep else 0
    sizes = [((B, T, HV, V), fw.dtype_name(tensors[2])), ((N, HV, *state) if final else (0,), "float32")]
    return [*sizes, ((kept,), "uint8")]


def _kept(fw: Any, tensors: tuple, x: Options, keep_all: bool) -> dict[str, tuple[tuple, str, int]]:
    """(shape, dtype, offset in bytes) of everything that is kept, in one piece of memory; and of its end."""
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    packed, ws = tensors[8] is not None, workspace_dtype(fw, tensors[0])
    NC = T // CHUNK + fw.shape(tensors[8])[0] - 1 if packed else B * ((T + CHUNK - 1) // CHUNK)
    starts = num_starts(B, T, HV, packed=packed, batch_invariant=x.batch_invariant)
    sizes = {n: (shape, ws) for n, shape in _chunk_sizes(NC, HV, K, V).items() if n in ("a", "aqk")}
    sizes["checkpoints"] = (NC // GROUP, HV, K, V), ws
    sizes["starts"] = (starts, B, HV, *((V, K) if x.v_first else (K, V))), "float32"
    if keep_all:
        sizes |= {n: (_chunk_sizes(NC, HV, K, V)[n], _FP32.get(n, ws)) for n in MORE}
    parts, offset = {}, 0
    for name, (shape, dtype) in sizes.items():
        parts[name] = (shape, dtype, offset)
        nbytes = 4 if dtype == "float32" else 2
        for size in shape:
            nbytes = nbytes * size
        offset = offset + (nbytes + 511) // 512 * 512
    return {**parts, "end": ((), "uint8", offset)}


_FP32 = dict.fromkeys(("decay", "norms"), "float32")  # the other workspaces have `workspace_dtype`


def _chunk_sizes(NC: Any, HV: int, K: int, V: int) -> dict[str, tuple]:
    """Shapes of workspaces; `kernels/scan.py` says what each one holds."""
    C = CHUNK
    sizes = {"a": (C, C), "aqk": (C, C), "states": (K, V), "dstates": (K, V), "decay": (K,), "norms": (2, C)}
    sizes |= dict.fromkeys(("w", "kg", "qg"), (C, K)) | dict.fromkeys(("u", "v_new", "dv_new"), (C, V))
    return {name: (NC, HV, *size) for name, size in sizes.items()}


def _workspaces(p: Planner, inputs: dict[str, Buffer], layout: Layout, *names: str) -> dict[str, Buffer]:
    K, (HV, V) = inputs["q"].shape[3], inputs["v"].shape[2:]
    sizes, ws = _chunk_sizes(layout.num_chunks, HV, K, V), workspace_dtype(p, inputs["q"])
    return {n: p.empty(sizes[n], like=inputs["q"], dtype=_FP32.get(n, ws)) for n in names}


# ---------------------------------------------------------------- what both plans begin with
def _begin(
    p: Planner, tensors: tuple, x: Options
) -> tuple[dict[str, Any], Activations, Any | None, Any | None, list[Segment]]:
    """Token tensors, activations, initial state, offsets and segments."""
    *tokens, initial_state, A_log, dt_bias, cu_seqlens = tensors
    inputs = dict(zip(INPUTS, tokens, strict=True))
    gate = "none" if not x.gate else "softplus" if x.lower_bound is None else "bounded"
    beta_scale = 2.0 if x.neg_eigval else 1.0
    act = Activations(x.scale, x.l2norm, gate, A_log, dt_bias, x.lower_bound, x.beta_sigmoid, beta_scale)
    (B, T), HV = inputs["q"].shape[:2], inputs["v"].shape[2]
    segments = split(B, T, HV, packed=cu_seqlens is not None, batch_invariant=x.batch_invariant)
    return inputs, act, initial_state, cu_seqlens, segments


def _side(p: Planner, like: Buffer, segments: list[Segment]) -> tuple[Any, int]:
    """Where the serial scans run, and how many segments run ahead of them."""
    lag = int(len(segments) > 1 and overlaps(like.shape[0], like.shape[2]))
    return (p.beside(like) if lag else p.in_order()), lag


def _part(tensors: dict[str, Any], s: Segment) -> dict[str, Any]:
    """Views of token tensors [B, T, ..]; of a segment in time B is 1, so that the views' rows stay where they are."""
    return {name: t[:, s.tokens] for name, t in tensors.items()}


# ---------------------------------------------------------------- the stages, in order
@functools.lru_cache(maxsize=PLANS)
def _plan_forward(
    capability: int | None, signatures: tuple, x: Options, final: bool, keep: bool, keep_all: bool
) -> Plan:
    p = Planner(capability)
    tensors = tuple(map(p.input, signatures))
    inputs, act, initial_state, cu_seqlens, segments = _begin(p, tensors, x)
    o, final_state, memory = (p.result(*size) for size in _result_sizes(p, tensors, x, final, keep, keep_all))
    parts = _kept(p, tensors, x, keep_all)
    parts.pop("end")
    kept = {n: p.within(memory, at, shape, dtype) for n, (shape, dtype, at) in parts.items()} if keep else {}
    starts = kept["starts"] if keep else p.empty(parts["starts"][0], like=o, dtype="float32")
    others = [n for n in ("a", "aqk", *MORE) if n not in kept]
    (side, lag), running = _side(p, o, segments), []
    for s in segments:
        while len(running) > lag:  # one segment more has workspaces than there are in the scan
            side.join(running.pop(0))
        part = _part(inputs, s)
        layout = make_layout(part["q"], cu_seqlens)
        chunks = {n: kept[n][s.chunks(layout)] for n in kept if n in ("a", "aqk", *MORE)}
        chunks |= _workspaces(p, part, layout, *others)
        prepare.prepare_fwd(**part, **chunks, act=act, layout=layout)
        del chunks["a"], chunks["norms"]
        states = {"initial_state": s.state_before(initial_state, starts)}
        states["final_state"] = s.state_after(final_state if final else None, starts)
        states["checkpoints"] = kept["checkpoints"][s.checkpoints(layout)] if keep else None
        stage = functools.partial(scan.scan_fwd, **chunks, **states, o=o[:, s.tokens], layout=layout)
        flags = {"state_v_first": x.v_first, "batch_invariant": x.batch_invariant}
        running.append(side.launch(functools.partial(stage, **flags)))
        zero_tail(o, layout)
    for event in running:
        side.join(event)
    return p.finish()


@functools.lru_cache(maxsize=PLANS)
def _plan_backward(
    capability: int | None, signatures: tuple, x: Options, keep_all: bool, wanted: tuple[bool, ...]
) -> Plan:
    p = Planner(capability)
    do, dfinal, *tensors, memory = map(p.input, signatures)
    inputs, act, initial_state, cu_seqlens, segments = _begin(p, tuple(tensors), x)
    parts = _kept(p, tuple(tensors), x, keep_all)
    parts.pop("end")
    kept = {n: p.within(memory, at, shape, dtype) for n, (shape, dtype, at) in parts.items()}
    grads = [
        p.result(t.shape, t.dtype) if want and t is not None else p.result((0,), (t or inputs["q"]).dtype)
        for t, want in zip(tensors[:8], wanted, strict=True)
    ]
    # The gradient stage writes all token gradients: those that nobody asked for are workspaces.
    dtokens = {
        "d" + name: grads[i] if wanted[i] else p.empty(tensors[i].shape, like=tensors[i])
        for i, name in enumerate(INPUTS)
    }
    sums = {name: grads[i] if wanted[i] else None for i, name in ((6, "A_log"), (7, "dt_bias"))}
    stage_wanted = any(wanted[:5]) or any(wanted[6:])
    (side, lag), waiting, dstate = _side(p, do, segments), [], None
    keys = any(wanted[n] for n in (0, 1, 3, 6, 7)) or (wanted[4] and not x.beta_sigmoid)

    def finish(s: Segment, layout: Layout, event: Any, work: dict) -> None:
        side.join(event)
        if not stage_wanted:
            return
        partials = gradients.parameter_partials(inputs["q"], inputs["v"], act, layout)
        for part in parts_of(s, layout, inputs["q"].shape[2], inputs["v"].shape[2]):
            tokens = {n: t[part.batch, part.tokens] for n, t in {**inputs, "do": do, **dtokens}.items()}
            chunks = {n: t[part.chunks] for n, t in work.items()}
            mine = {n: t[part.chunks] for n, t in partials.items()}
            gradients.gradients_bwd(**tokens, **chunks, partials=mine, keys=keys, act=act, layout=part.layout)
        if any(wanted[6:]):
            gradients.sum_over_chunks(partials, sums, add=not s.last)

    for s in reversed(segments):
        layout = make_layout(_part(inputs, s)["q"], cu_seqlens)
        mine = {n: t[s.chunks(layout)] for n, t in kept.items() if n in ("a", "aqk", *MORE)}
        mine["checkpoints"] = kept["checkpoints"][s.checkpoints(layout)]
        dafter = dfinal if s.last else dstate
        if s.index > 0:
            dstate = p.empty(kept["starts"].shape[1:], like=do, dtype="float32")
        else:
            dstate = grads[5] if wanted[5] else None
        states = {"initial_state": s.state_before(initial_state, kept["starts"])}
        states |= {"dfinal_state": dafter, "dinitial_state": dstate}
        part = _part({**inputs, "do": do}, s)
        waiting.append((s, layout, *_backward_scans(p, side, part, mine, states, act, x, layout, stage_wanted)))
        while len(waiting) > lag:
            finish(*waiting.pop(0))
    for item in waiting:
        finish(*item)
    for name, gradient in dtokens.items():
        if wanted[INPUTS.index(name[1:])]:
            zero_tail(gradient, layout)
    return p.finish()


def _backward_scans(
    p: Planner,
    side: Any,
    part: dict,
    kept: dict,
    states: dict,
    act: Activations,
    x: Options,
    layout: Layout,
    rescan: bool,
) -> tuple[Any, dict[str, Any]]:
    """Everything before the gradient stage, the reverse scan beside the re-scan: neither reads what the other writes.

    Returns: what to wait for, and the workspaces that the gradient stage reads.
    """
    common = {"layout": layout, "state_v_first": x.v_first, "batch_invariant": x.batch_invariant}
    do = part.pop("do")
    again = "w" not in kept
    w = {n: kept[n] for n in MORE} if not again else _workspaces(p, part, layout, *MORE)
    if again:
        prepare.recompute_fwd(**part, **w, a=kept["a"], act=act, layout=layout)
    work = _workspaces(p, part, layout, "states", "dstates", "dv_new", *(() if again else ("v_new",)))
    if again:
        work["v_new"] = w["u"]  # the re-scan reads each tile of u before it writes that of v_new
    reverse = {n: w[n] for n in ("w", "kg", "qg", "decay")} | {n: work[n] for n in ("dstates", "dv_new")}
    reverse |= {n: states[n] for n in ("dfinal_state", "dinitial_state")}
    event = side.launch(functools.partial(scan.reverse_scan_bwd, **reverse, aqk=kept["aqk"], do=do, **common))
    if rescan:
        forward = {n: w[n] for n in ("w", "u", "kg", "decay")} | {n: work[n] for n in ("states", "v_new")}
        scan.rescan_fwd(**forward, checkpoints=kept["checkpoints"], initial_state=states["initial_state"], **common)
    return event, {**work, "qg": w["qg"], "norms": w["norms"], "a": kept["a"], "aqk": kept["aqk"]}


def forget_plans() -> None:
    """Make all plans anew: for whoever changes what they depend on besides a call, such as the tables of tile sizes."""
    _plan_forward.cache_clear()
    _plan_backward.cache_clear()
