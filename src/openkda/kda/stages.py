"""The stages of `chunk_kda` on fused kernels, in order, as plans, and what is kept between the two halves.

    forward      tables -> prepare (chunks x heads) -> scan with outputs (serial over chunks)
    kept         the inputs, a, aqk, and S before every 4th chunk: 384 bytes a token and head (K = V = 128, bf16)
    backward     tables -> recompute (no levels, no inverse) -> re-scan (groups of 4 chunks) -> reverse scan (serial)
                 -> gradients (chunks x heads), in parts

With save_intermediates the prepare stage's other results (1040 bytes a token and head more) are kept instead of being
recomputed. A long call of few heads passes through the stages in segments; `segments.py` says why, and what parts are.

The functions here run once for every call signature, on planned tensors (`frameworks/planned.py`). What they note down
is a plan, with a place for every workspace, that runs at each call. Kernels and names: `kernels/`, docs/maths.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from openkda.frameworks.planned import Buffer, Plan, Planner
from openkda.kda.kernels import gradients, prepare, scan
from openkda.kda.kernels.common import Activations
from openkda.kda.kernels.tables import CHUNK, GROUP, Layout, make_layout, zero_tail
from openkda.kda.segments import Segment, num_starts, overlaps, parts_of, split

INPUTS = ("q", "k", "v", "g", "beta")
PER_CHUNK = ("a", "aqk")  # kept; besides them the checkpoints, and S before every segment but the first
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


# ---------------------------------------------------------------- sizes
def workspace_dtype(fw: Any, x: Any) -> str:
    """fp32 for fp32 inputs, else bf16: fp16 would overflow where a state passes 65504."""
    return "float32" if fw.dtype_name(x) == "float32" else "bfloat16"


_FP32: dict[str, str] = dict.fromkeys(("decay", "norms"), "float32")  # the other workspaces have `workspace_dtype`


def _chunk_sizes(NC: Any, HV: int, K: int, V: int) -> dict[str, tuple]:
    """Shapes of workspaces; `kernels/scan.py` says what each one holds."""
    C = CHUNK
    sizes = {"a": (C, C), "aqk": (C, C), "states": (K, V), "dstates": (K, V), "decay": (K,), "norms": (2, C)}
    sizes |= dict.fromkeys(("w", "kg", "qg"), (C, K)) | dict.fromkeys(("u", "v_new", "dv_new"), (C, V))
    return {name: (NC, HV, *size) for name, size in sizes.items()}


def result_sizes(
    fw: Any, tensors: tuple, x: Options, final: bool, keep: bool, keep_all: bool
) -> list[tuple[tuple, str]]:
    """(shape, dtype) of every result of the forward operator. Written so that no symbolic size is compared."""
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    N = B if tensors[8] is None else fw.shape(tensors[8])[0] - 1
    state = (V, K) if x.v_first else (K, V)
    kept = _kept_sizes(fw, tensors, x, keep_all)[1] if keep else 0
    sizes = [((B, T, HV, V), fw.dtype_name(tensors[2])), ((N, HV, *state) if final else (0,), "float32")]
    return [*sizes, ((kept,), "uint8")]


def _kept_sizes(fw: Any, tensors: tuple, x: Options, keep_all: bool) -> tuple[dict[str, tuple[int, tuple, str]], Any]:
    """(offset in bytes, shape, dtype) of everything that is kept, in one piece of memory, and its size in bytes."""
    (B, T, _, K), (HV, V) = fw.shape(tensors[0]), fw.shape(tensors[2])[2:]
    packed, ws = tensors[8] is not None, workspace_dtype(fw, tensors[0])
    NC = T // CHUNK + fw.shape(tensors[8])[0] - 1 if packed else B * ((T + CHUNK - 1) // CHUNK)
    starts = num_starts(B, T, HV, packed=packed, batch_invariant=x.batch_invariant)
    chunks = _chunk_sizes(NC, HV, K, V)
    sizes = {n: (chunks[n], _FP32.get(n, ws)) for n in (*PER_CHUNK, *(MORE if keep_all else ()))}
    sizes["checkpoints"] = (NC // GROUP, HV, K, V), ws
    sizes["starts"] = (starts, B, HV, *((V, K) if x.v_first else (K, V))), "float32"
    parts, offset = {}, 0
    for name, (shape, dtype) in sizes.items():
        parts[name] = (offset, shape, dtype)
        nbytes = 4 if dtype == "float32" else 2
        for size in shape:  # which may be symbols
            nbytes = nbytes * size
        offset = offset + (nbytes + 511) // 512 * 512
    return parts, offset


# ---------------------------------------------------------------- what both halves begin with
class _Half:
    """The plan of one half in the making. tensors: as the forward operator takes them."""

    def __init__(self, p: Planner, tensors: Iterable[Buffer | None], x: Options, keep_all: bool) -> None:
        self.p, self.x, self.tensors = p, x, tuple(tensors)
        *tokens, self.initial_state, A_log, dt_bias, self.cu_seqlens = self.tensors
        self.inputs: dict[str, Any] = dict(zip(INPUTS, tokens, strict=True))
        self.act = Activations.of(x, A_log, dt_bias)
        self.flags: dict[str, Any] = {"state_v_first": x.v_first, "batch_invariant": x.batch_invariant}
        (B, T, self.H, self.K), (self.HV, self.V) = self.inputs["q"].shape, self.inputs["v"].shape[2:]
        self.segments = split(B, T, self.HV, packed=self.cu_seqlens is not None, batch_invariant=x.batch_invariant)
        # The serial scans run beside the other stages, which are one segment ahead of them, or in order.
        self.lag = int(len(self.segments) > 1 and overlaps(B, self.HV))
        self.side = p.beside(self.inputs["q"]) if self.lag else p.in_order()
        self.kept_sizes, _ = _kept_sizes(p, self.tensors, x, keep_all)

    def kept(self, memory: Buffer) -> dict[str, Buffer]:
        return {n: self.p.within(memory, *place) for n, place in self.kept_sizes.items()}

    def part(self, tensors: dict[str, Any], s: Segment) -> dict[str, Any]:
        """Views of token tensors [B, T, ..]; where there are segments B is 1, so that rows stay where they are."""
        return {name: t[:, s.tokens] for name, t in tensors.items()}

    def layout(self, s: Segment) -> Layout:
        return make_layout(self.inputs["q"][:, s.tokens], self.cu_seqlens)

    def workspaces(self, layout: Layout, *names: str) -> dict[str, Any]:
        sizes, q = _chunk_sizes(layout.num_chunks, self.HV, self.K, self.V), self.inputs["q"]
        ws = workspace_dtype(self.p, q)
        return {n: self.p.empty(sizes[n], like=q, dtype=_FP32.get(n, ws)) for n in names}


# ---------------------------------------------------------------- forward
@functools.lru_cache(maxsize=PLANS)
def plan_forward(
    place: tuple[int, int | None], signatures: tuple, x: Options, final: bool, keep: bool, keep_all: bool
) -> Plan:
    """place: device and compute capability. signatures: of the operator's tensors."""
    p = Planner(place[1])
    half = _Half(p, map(p.input, signatures), x, keep_all)
    o, final_state, memory = (p.result(*size) for size in result_sizes(p, half.tensors, x, final, keep, keep_all))
    kept = half.kept(memory) if keep else {}
    starts = kept["starts"] if keep else p.empty(half.kept_sizes["starts"][1], like=o, dtype="float32")
    running: list[Any] = []
    for s in half.segments:
        while len(running) > half.lag:
            half.side.join(running.pop(0))
        layout = half.layout(s)
        chunks: dict[str, Any] = {n: kept[n][s.chunks(layout)] for n in (*PER_CHUNK, *MORE) if n in kept}
        chunks |= half.workspaces(layout, *(n for n in (*PER_CHUNK, *MORE) if n not in kept))
        prepare.prepare_fwd(**half.part(half.inputs, s), **chunks, act=half.act, layout=layout)
        states = {"initial_state": s.state_before(half.initial_state, starts)}
        states["final_state"] = s.state_after(final_state if final else None, starts)
        states["checkpoints"] = kept["checkpoints"][s.checkpoints(layout)] if keep else None
        read = {n: t for n, t in chunks.items() if n not in ("a", "norms")} | {"o": o[:, s.tokens], "layout": layout}
        running.append(half.side.launch(functools.partial(scan.scan_fwd, **read, **states, **half.flags)))
        zero_tail(o, layout)
    for event in running:
        half.side.join(event)
    return p.finish()


# ---------------------------------------------------------------- backward
@functools.lru_cache(maxsize=PLANS)
def plan_backward(
    place: tuple[int, int | None], signatures: tuple, x: Options, keep_all: bool, wanted: tuple[bool, ...]
) -> Plan:
    """signatures: of do, dfinal, the forward operator's tensors, and what it kept. do and v are matrices."""
    p = Planner(place[1])
    return _Backward(p, tuple(map(p.input, signatures)), x, keep_all, wanted).plan()


class _Backward(_Half):
    def __init__(self, p: Planner, tensors: tuple, x: Options, keep_all: bool, wanted: tuple[bool, ...]) -> None:
        super().__init__(p, tensors[2:11], x, keep_all)
        self.do, self.dfinal, self.kept_tensors = tensors[0], tensors[1], self.kept(tensors[11])
        grads = [
            p.result(t.shape, t.dtype) if want and t is not None else p.result((0,), (t or self.do).dtype)
            for t, want in zip(self.tensors[:8], wanted, strict=True)
        ]
        # The gradient stage writes all token gradients: those that nobody asked for are workspaces.
        self.dtokens = {
            "d" + name: grad if want else p.empty(self.inputs[name].shape, like=self.inputs[name])
            for name, grad, want in zip(INPUTS, grads, wanted, strict=False)
        }
        self.dstate = grads[5] if wanted[5] else None
        self.sums = {"A_log": grads[6] if wanted[6] else None, "dt_bias": grads[7] if wanted[7] else None}
        self.sums_wanted, self.stage_wanted = any(wanted[6:]), any(wanted[:5]) or any(wanted[6:])
        given_beta = wanted[4] and not x.beta_sigmoid
        self.keys_wanted = any(wanted[i] for i in (0, 1, 3)) or self.sums_wanted or given_beta
        self.tails = [self.dtokens["d" + name] for name, want in zip(INPUTS, wanted, strict=False) if want]

    def plan(self) -> Plan:
        waiting, dafter = [], self.dfinal
        for s in reversed(self.segments):
            before = self.dstate if s.index == 0 else self._state()
            layout = self.layout(s)
            waiting.append((s, layout, *self._scans(s, layout, dafter, before)))
            dafter = before
            while len(waiting) > self.lag:
                self._gradients(*waiting.pop(0))
        for item in waiting:
            self._gradients(*item)
        for gradient in self.tails:
            zero_tail(gradient, layout)
        return self.p.finish()

    def _state(self) -> Buffer:
        return self.p.empty(self.kept_tensors["starts"].shape[1:], like=self.do, dtype="float32")

    def _scans(self, s: Segment, layout: Layout, dafter: Any, dbefore: Any) -> tuple[Any, dict[str, Any]]:
        """All before the gradient stage, the reverse scan beside the re-scan: neither reads what the other writes.

        Returns: what to wait for, and the workspaces that the gradient stage reads.
        """
        kept = self.kept_tensors
        chunks: dict[str, Any] = {n: kept[n][s.chunks(layout)] for n in (*PER_CHUNK, *MORE) if n in kept}
        chunks |= self.workspaces(layout, "states", "dstates", "dv_new")
        if "w" in kept:
            chunks |= self.workspaces(layout, "v_new")
        else:
            chunks |= (again := self.workspaces(layout, *MORE))
            part = self.part(self.inputs, s)
            prepare.recompute_fwd(**part, **again, a=chunks["a"], act=self.act, layout=layout)
            chunks["v_new"] = chunks["u"]  # the re-scan reads each tile of u before it writes that of v_new
        reverse = {n: chunks[n] for n in ("w", "kg", "qg", "aqk", "decay", "dv_new", "dstates")}
        reverse |= {"do": self.do[:, s.tokens], "dfinal_state": dafter, "dinitial_state": dbefore, "layout": layout}
        event = self.side.launch(functools.partial(scan.reverse_scan_bwd, **reverse, **self.flags))
        if self.stage_wanted:
            forward: dict[str, Any] = {n: chunks[n] for n in ("w", "u", "kg", "decay", "states", "v_new")}
            forward["checkpoints"] = kept["checkpoints"][s.checkpoints(layout)]
            forward["initial_state"] = s.state_before(self.initial_state, kept["starts"])
            scan.rescan_fwd(**forward, layout=layout, **self.flags)
        names = ("states", "dstates", "v_new", "dv_new", "qg", "norms", "a", "aqk")
        return event, {n: chunks[n] for n in names}

    def _gradients(self, s: Segment, layout: Layout, event: Any, work: dict[str, Any]) -> None:
        self.side.join(event)
        if not self.stage_wanted:
            return
        partials = gradients.parameter_partials(self.inputs["q"], self.inputs["v"], self.act, layout)
        for part in parts_of(s, layout, self.H, self.HV):
            tokens = {**self.inputs, "do": self.do, **self.dtokens}
            tokens = {n: t[part.batch, part.tokens] for n, t in tokens.items()}
            chunks = {n: t[part.chunks] for n, t in work.items()}
            mine = {n: t[part.chunks] for n, t in partials.items()}
            flags = {"keys": self.keys_wanted, "act": self.act, "layout": part.layout}
            gradients.gradients_bwd(**tokens, **chunks, partials=mine, **flags)
        if self.sums_wanted:
            gradients.sum_over_chunks(partials, self.sums, add=not s.last)


def forget_plans() -> None:
    """Make all plans anew: for whoever changes what they depend on besides a call, such as the tables of tile sizes."""
    plan_forward.cache_clear()
    plan_backward.cache_clear()
