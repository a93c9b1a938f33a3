"""`chunk_kda` on fused kernels: the stages in order, forward and backward, and what is kept between them.

    forward      tables -> prepare (chunks x heads) -> scan with outputs (serial over chunks)
    kept         the inputs, a, aqk, and S before every 4th chunk: 384 bytes a token and head (K = V = 128, bf16)
    backward     tables -> recompute (no levels, no inverse) -> re-scan (groups of 4 chunks) -> reverse scan (serial)
                 -> gradients (chunks x heads)

With save_intermediates the prepare stage's other results (1040 bytes a token and head more) are kept instead of being
recomputed. A workspace is dropped at the last stage that reads it. A long dense input passes
through the stages in segments (`segments.py`), so that workspaces exist for one segment at a time.

Both halves are operators that compilers, CUDA graphs and autograd see as one node each; sizes come from shapes alone,
and the host never waits for the device. Kernels and names: `kernels/`, docs/maths.md.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from openkda import frameworks
from openkda.kda.kernels import gradients, prepare, scan
from openkda.kda.kernels.common import Activations
from openkda.kda.kernels.tables import CHUNK, GROUP, Layout, make_layout, zero_tail
from openkda.kda.segments import Segment, num_starts, overlaps, split

INPUTS = ("q", "k", "v", "g", "beta")
KEPT = ("a", "aqk", "checkpoints", "starts")  # starts: S before every segment but the first, fp32
MORE = ("w", "u", "kg", "qg", "decay", "norms")  # kept with save_intermediates


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
_KEPT = ", ".join("Tensor " + name for name in KEPT + MORE)


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
    """The forward operator. Results that are not wanted or not kept have no elements."""

    NAME = "chunk_kda"
    SCHEMA = (
        f"({_TENSORS}, {_OPTIONS}, bool final, bool keep, bool keep_all) -> (Tensor o, Tensor final_state, {_KEPT})"
    )

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        return _forward(fw, args[:9], Options(*args[9:17]), *args[17:])

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        """Unwritten results of the right sizes; sizes may be symbols."""
        sizes = _result_sizes(fw, args[:9], Options(*args[9:17]), *args[17:])
        return tuple(fw.empty(size, like=args[2], dtype=dtype) for size, dtype in sizes)

    @staticmethod
    def keep(args: tuple, results: tuple) -> tuple[tuple, tuple]:
        """Tensors and others that the backward needs."""
        return (*args[:9], *results[2:]), args[9:17]

    @staticmethod
    def backward(
        fw: ModuleType, tensors: tuple, options: tuple, needs: tuple, do: Any | None, dfinal: Any | None, *_: Any
    ) -> tuple:
        if do is None and dfinal is None:
            return (None,) * len(needs)
        wanted = [bool(n) for n in needs[:8]]
        grads = fw.operator(ChunkKDABackward)(do, dfinal, *tensors, *options, wanted)
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
        f"(Tensor? do, Tensor? dfinal, {_TENSORS}, {_KEPT}, {_OPTIONS}, bool[] wanted) -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state, Tensor dA_log, Tensor ddt_bias)"
    )

    @staticmethod
    def forward(fw: ModuleType, *args: Any) -> tuple:
        first, last = 11 + len(KEPT + MORE), len(args) - 1
        kept = dict(zip(KEPT + MORE, args[11:first], strict=True))
        return _backward(fw, args[0], args[1], args[2:11], kept, Options(*args[first:last]), args[last])

    @staticmethod
    def fake(fw: ModuleType, *args: Any) -> tuple:
        return _gradients_like(fw, args[2:10], args[-1])


# ---------------------------------------------------------------- sizes
def workspace_dtype(fw: ModuleType, x: Any) -> str:
    """fp32 for fp32 inputs, else bf16: fp16 would overflow where a state passes 65504."""
    return "float32" if fw.dtype_name(x) == "float32" else "bfloat16"


def _result_sizes(
    fw: ModuleType, tensors: tuple, x: Options, final: bool, keep: bool, keep_all: bool
) -> list[tuple[tuple, str]]:
    """(shape, dtype) of every result of the forward operator. Written so that no symbolic size is compared."""
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    packed, ws = tensors[8] is not None, workspace_dtype(fw, tensors[0])
    N = fw.shape(tensors[8])[0] - 1 if packed else B
    NC = T // CHUNK + N if packed else B * ((T + CHUNK - 1) // CHUNK)
    state = (V, K) if x.v_first else (K, V)
    kept = [((NC, HV, CHUNK, CHUNK), ws)] * 2 + [
        ((NC // GROUP, HV, K, V), ws),
        (_starts_size(fw, tensors, x), "float32"),
    ]
    more = [((NC, HV, CHUNK, width), ws) for width in (K, V, K, K)]
    more += [((NC, HV, K), "float32"), ((NC if x.l2norm else 0, HV, 2, CHUNK), "float32")]
    sizes = [((B, T, HV, V), fw.dtype_name(tensors[2])), ((N, HV, *state) if final else (0,), "float32")]
    sizes += [(size if keep else (0,), dtype) for size, dtype in kept]
    return sizes + [(size if keep_all else (0,), dtype) for size, dtype in more]


def _starts_size(fw: ModuleType, tensors: tuple, x: Options) -> tuple:
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    count = num_starts(B, T, HV, packed=tensors[8] is not None, batch_invariant=x.batch_invariant)
    return (count, B, HV, *((V, K) if x.v_first else (K, V)))


def _workspaces(fw: ModuleType, inputs: dict, layout: Layout, names: Iterable[str]) -> dict[str, Any]:
    """Unwritten workspaces [NC, HV, ..]; `kernels/scan.py` says what each one holds."""
    K, (HV, V), C = fw.shape(inputs["q"])[3], fw.shape(inputs["v"])[2:], CHUNK
    sizes = {"a": (C, C), "aqk": (C, C), "states": (K, V), "dstates": (K, V), "decay": (K,), "norms": (2, C)}
    sizes |= dict.fromkeys(("w", "kg", "qg"), (C, K)) | dict.fromkeys(("u", "v_new", "dv_new"), (C, V))
    ws, dtypes = workspace_dtype(fw, inputs["q"]), {"decay": "float32", "norms": "float32"}
    return {n: fw.empty((layout.num_chunks, HV, *sizes[n]), like=inputs["v"], dtype=dtypes.get(n, ws)) for n in names}


def _gradients_like(fw: ModuleType, tensors: tuple, wanted: list[bool]) -> tuple:
    return tuple(
        fw.empty(fw.shape(x) if want and x is not None else (0,), like=tensors[0] if x is None else x)
        for x, want in zip(tensors, wanted, strict=True)
    )


# ---------------------------------------------------------------- inputs as kernels take them
def _readable(fw: ModuleType, tensors: tuple, x: Options) -> tuple[dict[str, Any], Activations, Any | None]:
    """Token tensors, activations and initial state; copies only what no kernel can read in place."""
    *tokens, initial_state, A_log, dt_bias, _ = tensors
    inputs = {n: t if n == "beta" else _rows(fw, t) for n, t in zip(INPUTS, tokens, strict=True)}
    A_log, dt_bias, initial_state = (None if t is None else fw.contiguous(t) for t in (A_log, dt_bias, initial_state))
    gate = "none" if not x.gate else "softplus" if x.lower_bound is None else "bounded"
    beta_scale = 2.0 if x.neg_eigval else 1.0
    act = Activations(x.scale, x.l2norm, gate, A_log, dt_bias, x.lower_bound, x.beta_sigmoid, beta_scale)
    return inputs, act, initial_state


def _rows(fw: ModuleType, x: Any) -> Any:
    return x if fw.strides(x)[-1] == 1 else fw.copy(x)


def _segments(fw: ModuleType, inputs: dict, cu_seqlens: Any | None, x: Options) -> list[Segment]:
    (B, T), HV = fw.shape(inputs["q"])[:2], fw.shape(inputs["v"])[2]
    return split(B, T, HV, packed=cu_seqlens is not None, batch_invariant=x.batch_invariant)


def _part(tensors: dict[str, Any], s: Segment) -> dict[str, Any]:
    """Views of token tensors [B, T, ..]; of a segment in time B is 1, so that the views' rows stay where they are."""
    return {name: t[s.batch, s.tokens] for name, t in tensors.items()}


# ---------------------------------------------------------------- the stages, in order
def _forward(fw: ModuleType, tensors: tuple, x: Options, final: bool, keep: bool, keep_all: bool) -> tuple:
    inputs, act, initial_state = _readable(fw, tensors, x)
    sizes = _result_sizes(fw, tensors, x, final, keep, keep_all)
    o, final_state, *results = (fw.empty(size, like=inputs["v"], dtype=dtype) for size, dtype in sizes)
    kept: dict[str, Any] = dict(zip(KEPT + MORE, results, strict=True))
    starts = kept["starts"] if keep else fw.empty(_starts_size(fw, tensors, x), like=inputs["v"], dtype="float32")
    names = (("a", "aqk") if keep else ()) + (MORE if keep_all else ())
    others = [n for n in ("a", "aqk", *MORE) if n not in names]
    segments = _segments(fw, inputs, tensors[8], x)
    lag = int(len(segments) > 1 and overlaps(fw.shape(o)[0], fw.shape(o)[2]))  # segments that run ahead of the scans
    side, running = fw.beside(o) if lag else fw.in_order(), []
    for s in segments:
        while len(running) > lag:  # one segment more has workspaces than there are in the scan
            event, workspaces = running.pop(0)
            side.join(event)
            workspaces.clear()
        part = _part(inputs, s)
        layout = make_layout(part["q"], tensors[8])
        p = {n: kept[n][s.chunks(layout)] for n in names} | _workspaces(fw, part, layout, others)
        prepare.prepare_fwd(**part, **p, act=act, layout=layout)
        del p["a"], p["norms"]
        launch = functools.partial(
            scan.scan_fwd, **p, o=o[s.batch, s.tokens], layout=layout,
            initial_state=s.state_before(initial_state, starts),
            final_state=s.state_after(final_state if final else None, starts),
            checkpoints=kept["checkpoints"][s.checkpoints(layout)] if keep else None,
            state_v_first=x.v_first, batch_invariant=x.batch_invariant,
        )  # fmt: skip
        running.append((side.launch(launch), p))
        zero_tail(o, layout)
    side.join(running[-1][0])
    return (o, final_state, *results)


def _backward(
    fw: ModuleType, do: Any | None, dfinal: Any | None, tensors: tuple, kept: dict, x: Options, wanted: list[bool]
) -> tuple:
    inputs, act, initial_state = _readable(fw, tensors, x)
    do = fw.zeros(fw.shape(inputs["v"]), like=inputs["v"]) if do is None else _rows(fw, do)
    dfinal = None if dfinal is None else fw.contiguous(dfinal)
    grads: list[Any] = [None] * 8
    if wanted[5]:
        (grads[5],) = _gradients_like(fw, tensors[5:6], [True])
    stage_wanted = any(wanted[:5]) or any(wanted[6:])
    dtokens: dict[str, Any] = {}
    dparameters: list[dict[str, Any]] = []
    segments = _segments(fw, inputs, tensors[8], x)
    lag = int(len(segments) > 1 and overlaps(fw.shape(do)[0], fw.shape(do)[2]))
    side, waiting, dstate = fw.beside(do) if lag else fw.in_order(), [], None

    def finish(s: Segment, layout: Layout, event: Any, workspaces: dict, work: dict) -> None:
        side.join(event)
        workspaces.clear()
        if stage_wanted:
            if not dtokens:  # not before the first scans are done with their workspaces
                # the stage writes all token gradients; those that nobody asked for are dropped at the end
                grads[:5] = _gradients_like(fw, tensors[:5], [True] * 5)
                dtokens.update(zip(["d" + n for n in INPUTS], grads, strict=False))
            part = _part({**inputs, "do": do, **dtokens}, s)
            dparameters.append(gradients.gradients_bwd(**part, **work, act=act, layout=layout))

    for s in reversed(segments):
        layout = make_layout(_part(inputs, s)["q"], tensors[8])
        mine = {n: t[s.chunks(layout)] for n, t in kept.items() if n in ("a", "aqk", *MORE)}
        mine["checkpoints"] = kept["checkpoints"][s.checkpoints(layout)]
        dafter = dstate if not s.last else None if dfinal is None else dfinal[s.batch]
        if s.index > 0:
            dstate = fw.empty(fw.shape(kept["starts"])[1:], like=kept["starts"])
        else:
            dstate = grads[5][s.batch] if wanted[5] else None
        states = {"initial_state": s.state_before(initial_state, kept["starts"])}
        states |= {"dfinal_state": dafter, "dinitial_state": dstate}
        part = _part({**inputs, "do": do}, s)
        waiting.append((s, layout, *_backward_scans(fw, side, part, mine, states, act, x, layout)))
        while len(waiting) > lag:
            finish(*waiting.pop(0))
    for item in waiting:
        finish(*item)

    for i, name in ((6, "A_log"), (7, "dt_bias")):
        if wanted[i]:
            total = functools.reduce(operator.add, [d[name] for d in dparameters])
            grads[i] = fw.reshape(total, fw.shape(tensors[i]))
    for gradient in dtokens.values():
        zero_tail(gradient, layout)
    return tuple(
        grad if want else fw.empty((0,), like=tensors[0] if x is None else x)
        for grad, want, x in zip(grads, wanted, tensors[:8], strict=True)
    )


def _backward_scans(
    fw: ModuleType, side: Any, part: dict, kept: dict, states: dict, act: Activations, x: Options, layout: Layout
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Everything before the gradient stage, the reverse scan beside the re-scan: neither reads what the other writes.

    Returns: what to wait for; workspaces to keep till then, as memory that is let go may be handed out at once; and the
    workspaces that the gradient stage reads.
    """
    common = {"layout": layout, "state_v_first": x.v_first, "batch_invariant": x.batch_invariant}
    do = part.pop("do")
    p = {n: kept[n] for n in MORE}
    if fw.shape(p["w"])[0] == 0:  # not kept
        p = _workspaces(fw, part, layout, MORE)
        prepare.recompute_fwd(**part, **p, a=kept["a"], act=act, layout=layout)
    work = _workspaces(fw, part, layout, ("states", "v_new", "dstates", "dv_new"))
    reverse = {n: p[n] for n in ("w", "kg", "qg", "decay")} | {n: work[n] for n in ("dstates", "dv_new")}
    reverse |= {n: states[n] for n in ("dfinal_state", "dinitial_state")}
    event = side.launch(functools.partial(scan.reverse_scan_bwd, **reverse, aqk=kept["aqk"], do=do, **common))
    forward = {n: p[n] for n in ("w", "u", "kg", "decay")} | {n: work[n] for n in ("states", "v_new")}
    scan.rescan_fwd(**forward, checkpoints=kept["checkpoints"], initial_state=states["initial_state"], **common)
    return event, p, {**work, "qg": p["qg"], "norms": p["norms"], "a": kept["a"], "aqk": kept["aqk"]}
