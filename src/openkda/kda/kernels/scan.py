"""The stages that carry the state from chunk to chunk: forward scan with outputs, forward re-scan, reverse scan.

C tokens a chunk; S [K, V] is the state before the chunk and S' the state after it, in fp32; dX is the gradient of X.
Operands w, u, kg, qg, aqk, decay come from the prepare stage (maths.md sections 2 and 3; qg and aqk include the scale):

    scan_fwd            Vn = u - w S        O = qg S + aqk Vn        S' = decay * S + kg^T Vn
    rescan_fwd          the same Vn and S, every group of chunks from its checkpoint, without O
    reverse_scan_bwd    dVn = aqk^T dO + kg dS'        dS = decay * dS' + qg^T dO - w^T dVn

    w, kg, qg   WS [NC, HV, C, K]       u, v_new, dv_new       WS [NC, HV, C, V]       aqk   WS [NC, HV, C, C]
    decay     fp32 [NC, HV, K]          states, dstates        WS [NC, HV, K, V]
    checkpoints                         WS [num_checkpoints, HV, K, V]
    initial_state, final_state, dfinal_state, dinitial_state   fp32 [N, HV, K, V], or [N, HV, V, K] with state_v_first

WS, the type of workspaces, is bf16 for 16-bit inputs and fp32 for fp32 inputs, whose dots then take three tf32 passes.
Rows of a chunk behind its last token hold zeros in every workspace, so only o and dO, which live at token positions,
need row masks. Columns of V do not meet, so programs share a head by tiles of BV columns. A program walks over the
chunks of its sequence with the state in registers; a sequence without tokens passes its state through, bit for bit.
Workspaces are read through pointers, or on Hopper and later (TMA) through descriptors, which need no address registers.

On Hopper with K = V = 128 and bf16 the serial scans run in `scan_hopper.py`, in 0.6 times the time.

oracle: the loop over chunks in tests/kda/kernels/test_scan.py, which is maths.md word for word
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# (a launch passes plain values for constexpr parameters, and loops over tl.range)
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from openkda import frameworks
from openkda.kda.kernels import tuning
from openkda.kda.kernels.common import hopper_module
from openkda.kda.kernels.launch import launch
from openkda.kda.kernels.tables import CHUNK, GROUP, Layout


# ---- device helpers
@triton.jit
def _load(
    x, row, column, ROWS: tl.constexpr, HEIGHT: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Tile [ROWS, COLS] of a matrix x [.., WIDTH] from (row, column); 0 from row HEIGHT and from column WIDTH on."""
    if TMA:  # tiles then divide WIDTH, and ROWS == HEIGHT
        return x.load([row.to(tl.int32), column])
    else:  # no early return: Triton compiles what follows one
        o_r, o_c = tl.arange(0, ROWS), column + tl.arange(0, COLS)
        p = x + (row + o_r)[:, None] * WIDTH + o_c[None, :]
        if HEIGHT == ROWS and WIDTH % COLS == 0:
            return tl.load(p)
        else:
            return tl.load(p, mask=(o_r < HEIGHT)[:, None] & (o_c < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(
    x, value, row, column,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The converse of `_load`: what lies from row HEIGHT and column WIDTH on is not written."""
    if TMA:
        x.store([row.to(tl.int32), column], value)
    else:
        o_r, o_c = tl.arange(0, ROWS), column + tl.arange(0, COLS)
        p = x + (row + o_r)[:, None] * WIDTH + o_c[None, :]
        if HEIGHT == ROWS and WIDTH % COLS == 0:
            tl.store(p, value)
        else:
            tl.store(p, value, mask=(o_r < HEIGHT)[:, None] & (o_c < WIDTH)[None, :])


@triton.jit
def _state_tile(
    i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr
):  # fmt: skip
    """Element offsets of columns i_v .. of a state [K, V] or, with V_FIRST, [V, K]; and which of them exist."""
    o_k, o_v = tl.arange(0, BK)[:, None], i_v + tl.arange(0, BV)[None, :]
    if V_FIRST:
        return o_v * K + o_k, (o_k < K) & (o_v < V)
    return o_k * V + o_v, (o_k < K) & (o_v < V)


@triton.jit
def _load_state(
    state, i_head, i_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr
):
    """Columns i_v .. of an fp32 state; zeros where there is none."""
    if state is None:
        return tl.zeros([BK, BV], tl.float32)
    else:  # no early return: Triton compiles what follows one
        offsets, mask = _state_tile(i_v, K, V, BK, BV, V_FIRST)
        return tl.load(state + i_head * (K * V) + offsets, mask=mask, other=0.0)


@triton.jit
def _store_state(
    state, value, i_head, i_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    if state is not None:
        offsets, mask = _state_tile(i_v, K, V, BK, BV, V_FIRST)
        tl.store(state + i_head * (K * V) + offsets, value, mask=mask)


@triton.jit
def _sequence(n, cu_seqlens, T, stride_b, stride_t, C: tl.constexpr, PACKED: tl.constexpr):
    """Number of tokens of sequence n, its first chunk, and the element offset of its first token in a token tensor."""
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        tokens = tl.load(cu_seqlens + n + 1) - begin
        return tokens.to(tl.int32), begin // C + n, begin * stride_t
    return T, n * tl.cdiv(T, C), n * stride_b


# ---- forward scan
@triton.jit(do_not_specialize=["T", "HV"])
def _scan_fwd_kernel(
    w, u, kg, qg, aqk, decay, initial_state, o, final_state, checkpoints, cu_seqlens,
    T, HV, stride_b, stride_t, stride_h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Which work: V tiles of one head are neighbours and share its tiles in L2. One axis, as y and z end at 65535.
    NV: tl.constexpr = (V + BV - 1) // BV
    i_head = (tl.program_id(0) // NV).to(tl.int64)  # sequence * HV + head
    i_n, i_h = i_head // HV, i_head % HV
    i_v = (tl.program_id(0) % NV) * BV
    stride_t = tl.cast(stride_t, tl.int64)
    tokens, first, o_token = _sequence(i_n, cu_seqlens, T, stride_b, stride_t, C, PACKED)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v + tl.arange(0, BV)
    p_o = o + o_token + i_h * stride_h + o_c[:, None] * stride_t + o_v[None, :]

    b_s = _load_state(initial_state, i_head, i_v, K, V, BK, BV, V_FIRST)  # S [BK, BV]
    for i in range(tl.cdiv(tokens, C)):
        i_ch = (first + i) * HV + i_h
        # Vn = u - w S
        b_w = _load(w, i_ch * C, 0, C, C, BK, K, TMA)
        b_u = _load(u, i_ch * C, i_v, C, C, BV, V, TMA)
        b_s_ws = b_s.to(b_w.dtype)
        b_vn = (b_u.to(tl.float32) - tl.dot(b_w, b_s_ws, input_precision=PRECISION)).to(b_w.dtype)
        # O = qg S + aqk Vn
        b_qg = _load(qg, i_ch * C, 0, C, C, BK, K, TMA)
        b_aqk = _load(aqk, i_ch * C, 0, C, C, C, C, TMA)
        b_o = tl.dot(b_qg, b_s_ws, input_precision=PRECISION)
        b_o = tl.dot(b_aqk, b_vn, b_o, input_precision=PRECISION)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(o_c < tokens - i * C)[:, None] & (o_v < V)[None, :])
        p_o += C * stride_t
        if checkpoints is not None:
            if (i % M == 0) & (i > 0):
                i_slot = (first // M + (i // M - 1)) * HV + i_h
                _store(checkpoints, b_s_ws, i_slot * K, i_v, BK, K, BV, V, False)
        # S' = decay * S + kg^T Vn
        b_decay = tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
        b_kg = _load(kg, i_ch * C, 0, C, C, BK, K, TMA)
        b_s = tl.dot(tl.trans(b_kg), b_vn, b_s * b_decay[:, None], input_precision=PRECISION)
    _store_state(final_state, b_s, i_head, i_v, K, V, BK, BV, V_FIRST)


# ---- forward re-scan, for the backward
@triton.jit(do_not_specialize=["HV", "groups_per_sequence", "chunks_per_sequence"])
def _rescan_fwd_kernel(
    w, u, kg, decay, initial_state, checkpoints, states, v_new, groups,
    HV, groups_per_sequence, chunks_per_sequence,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Which work: group i_g of sequence i_n, M chunks of it from chunk `first` on.
    NV: tl.constexpr = (V + BV - 1) // BV
    i_row = (tl.program_id(0) // NV).to(tl.int64)  # group * HV + head
    i_h, i_v = i_row % HV, (tl.program_id(0) % NV) * BV
    if PACKED:
        p_group = groups + i_row // HV * 4
        first, chunks = tl.load(p_group).to(tl.int64), tl.load(p_group + 1)
        i_n, i_g = tl.load(p_group + 2).to(tl.int64), tl.load(p_group + 3)
    else:
        i_n, i_g = i_row // HV // groups_per_sequence, (i_row // HV % groups_per_sequence).to(tl.int32)
        first, chunks = i_n * chunks_per_sequence + i_g * M, tl.minimum(chunks_per_sequence - i_g * M, M)
    o_k = tl.arange(0, BK)

    if i_g == 0:
        b_s = _load_state(initial_state, i_n * HV + i_h, i_v, K, V, BK, BV, V_FIRST)
    else:
        i_slot = ((first - i_g * M) // M + (i_g - 1)) * HV + i_h
        b_s = _load(checkpoints, i_slot * K, i_v, BK, K, BV, V, False).to(tl.float32)
    for i in range(chunks):
        i_ch = (first + i) * HV + i_h
        b_w = _load(w, i_ch * C, 0, C, C, BK, K, TMA)
        b_u = _load(u, i_ch * C, i_v, C, C, BV, V, TMA)
        b_s_ws = b_s.to(b_w.dtype)
        _store(states, b_s_ws, i_ch * K, i_v, BK, K, BV, V, TMA)
        # Vn = u - w S
        b_vn = (b_u.to(tl.float32) - tl.dot(b_w, b_s_ws, input_precision=PRECISION)).to(b_w.dtype)
        _store(v_new, b_vn, i_ch * C, i_v, C, C, BV, V, TMA)
        # S' = decay * S + kg^T Vn
        b_decay = tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
        b_kg = _load(kg, i_ch * C, 0, C, C, BK, K, TMA)
        b_s = tl.dot(tl.trans(b_kg), b_vn, b_s * b_decay[:, None], input_precision=PRECISION)


# ---- reverse scan
@triton.jit(do_not_specialize=["T", "HV"])
def _reverse_scan_bwd_kernel(
    w, kg, qg, aqk, decay, do, dfinal_state, dv_new, dstates, dinitial_state, cu_seqlens,
    T, HV, stride_b, stride_t, stride_h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Which work: as in the forward scan, from the last chunk to the first.
    NV: tl.constexpr = (V + BV - 1) // BV
    i_head = (tl.program_id(0) // NV).to(tl.int64)
    i_n, i_h = i_head // HV, i_head % HV
    i_v = (tl.program_id(0) % NV) * BV
    stride_t = tl.cast(stride_t, tl.int64)
    tokens, first, o_token = _sequence(i_n, cu_seqlens, T, stride_b, stride_t, C, PACKED)
    chunks = tl.cdiv(tokens, C)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), i_v + tl.arange(0, BV)
    p_do = do + o_token + i_h * stride_h + (chunks - 1) * (C * stride_t) + o_c[:, None] * stride_t + o_v[None, :]

    b_ds = _load_state(dfinal_state, i_head, i_v, K, V, BK, BV, V_FIRST)  # dS' [BK, BV]
    for j in range(chunks):
        i = chunks - 1 - j
        i_ch = (first + i) * HV + i_h
        # rows behind the sequence belong to others or to nobody, and may be NaN: they are selected away, not multiplied
        m_do = (o_c < tokens - i * C)[:, None] & (o_v < V)[None, :]
        b_aqk = _load(aqk, i_ch * C, 0, C, C, C, C, TMA)
        b_do = tl.load(p_do, mask=m_do, other=0.0).to(b_aqk.dtype)
        p_do -= C * stride_t
        # dVn = aqk^T dO + kg dS'
        b_kg = _load(kg, i_ch * C, 0, C, C, BK, K, TMA)
        b_ds_ws = b_ds.to(b_kg.dtype)
        _store(dstates, b_ds_ws, i_ch * K, i_v, BK, K, BV, V, TMA)
        b_dvn = tl.dot(tl.trans(b_aqk), b_do, input_precision=PRECISION)
        b_dvn = tl.dot(b_kg, b_ds_ws, b_dvn, input_precision=PRECISION)
        b_dvn_ws = b_dvn.to(b_kg.dtype)
        _store(dv_new, b_dvn_ws, i_ch * C, i_v, C, C, BV, V, TMA)
        # dS = decay * dS' + qg^T dO - w^T dVn
        b_decay = tl.load(decay + i_ch * K + o_k, mask=o_k < K, other=0.0)
        b_qg = _load(qg, i_ch * C, 0, C, C, BK, K, TMA)
        b_ds = tl.dot(tl.trans(b_qg), b_do, b_ds * b_decay[:, None], input_precision=PRECISION)
        b_w = _load(w, i_ch * C, 0, C, C, BK, K, TMA)
        b_ds = tl.dot(tl.trans(b_w), (-b_dvn).to(b_kg.dtype), b_ds, input_precision=PRECISION)
    _store_state(dinitial_state, b_ds, i_head, i_v, K, V, BK, BV, V_FIRST)


# ---- launchers
def _tile(stage: str, x: Any, *, K: int, V: int, work: int, batch_invariant: bool, tile: dict | None) -> dict[str, Any]:
    """Tile sizes and flags of one launch. x: a workspace; work: programs before V is split."""
    BK = max(16, triton.next_power_of_2(K))
    fp32 = frameworks.of(x).dtype_name(x) == "float32"
    if tile is not None:
        settings = dict(tile)
    elif fp32 or BK > 128:
        settings = tuning.general(K=BK, fp32=fp32)
    else:
        settings = tuning.lookup(stage, tuning.family_of(x), work=0 if batch_invariant else work)
    BV = min(settings.pop("BV"), max(16, triton.next_power_of_2(V)))
    # a descriptor clips at the ends of the tensor, not of a head: only for tiles that divide K and V
    TMA = settings.pop("TMA") and BK == K and V % BV == 0 and int(x.shape[0]) > 0
    return {
        "K": K,
        "V": V,
        "BK": BK,
        "BV": BV,
        "C": CHUNK,
        "TMA": TMA,
        "PRECISION": "tf32x3" if fp32 else "tf32",
        **settings,
    }


def _matrix(x: Any, rows: int, cols: int, TMA: bool) -> Any:
    """A workspace as kernels want it: itself, or a descriptor of its tiles [rows, cols]."""
    if not TMA or x is None:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    width = int(x.shape[-1])
    height = 1
    for size in x.shape[:-1]:
        height *= int(size)
    return TensorDescriptor(frameworks.of(x).descriptor_base(x), [height, width], [width, 1], [rows, cols])


def scan_fwd(
    *, w: Any, u: Any, kg: Any, qg: Any, aqk: Any, decay: Any, o: Any, layout: Layout, initial_state: Any = None,
    final_state: Any = None, checkpoints: Any = None, state_v_first: bool = False, batch_invariant: bool = False,
    tile: dict | None = None,
) -> None:  # fmt: skip
    """Forward scan with the outputs in it: Vn = u - w S; O = qg S + aqk Vn; S' = decay * S + kg^T Vn.

    Args:
        w, kg, qg: WS [NC, HV, C, K]; u: WS [NC, HV, C, V]; aqk: WS [NC, HV, C, C]; decay: fp32 [NC, HV, K].
        initial_state: fp32 [N, HV, K, V] ([N, HV, V, K] with state_v_first), contiguous; None means zeros.
        o: Written, [B, T, HV, V], last axis contiguous; rows behind the last offset are left as they are.
        final_state: Written, like initial_state; None where it is not wanted.
        checkpoints: Written, WS [num_checkpoints, HV, K, V]: S before every group but the first; None where not wanted.
    Cost (K = V = 128, bf16, a token and head): reads 1160 bytes, writes 256 (+ 128 with checkpoints); 115 kflop.
    """
    HV, K, V = int(w.shape[1]), int(w.shape[3]), int(u.shape[3])
    if tile is None and (hopper := hopper_module("scan_hopper", w, o)) is not None:
        settings = tuning.lookup("scan_fwd_hopper", 90, work=0 if batch_invariant else layout.N * HV)
        hopper.scan_fwd(
            w=w, u=u, kg=kg, qg=qg, aqk=aqk, decay=decay, o=o, layout=layout, initial_state=initial_state,
            final_state=final_state, checkpoints=checkpoints, state_v_first=state_v_first, **settings,
        )  # fmt: skip
        return
    t = _tile("scan_fwd", w, K=K, V=V, work=layout.N * HV, batch_invariant=batch_invariant, tile=tile)
    TMA, BK, BV = t["TMA"], t["BK"], t["BV"]
    fw = frameworks.of(w)
    with fw.on_device(w):
        launch(
            _scan_fwd_kernel, layout.N * HV * -(-V // BV),
            _matrix(w, CHUNK, BK, TMA), _matrix(u, CHUNK, BV, TMA), _matrix(kg, CHUNK, BK, TMA),
            _matrix(qg, CHUNK, BK, TMA), _matrix(aqk, CHUNK, CHUNK, TMA), decay, initial_state, o, final_state,
            checkpoints, layout.cu_seqlens, layout.T, HV, *fw.strides(o)[:3],
            M=GROUP, V_FIRST=state_v_first, PACKED=layout.packed, **t,
        )  # fmt: skip


def rescan_fwd(
    *, w: Any, u: Any, kg: Any, decay: Any, checkpoints: Any, states: Any, v_new: Any, layout: Layout,
    initial_state: Any = None, state_v_first: bool = False, batch_invariant: bool = False, tile: dict | None = None,
) -> None:  # fmt: skip
    """The state before every chunk and the written values, again: every group from its checkpoint, in parallel.

    Args:
        w, u, kg, decay, checkpoints, initial_state: What `scan_fwd` read and wrote.
        states: Written, WS [NC, HV, K, V], S before the chunk; v_new: written, WS [NC, HV, C, V], Vn.
    Cost (K = V = 128, bf16, a token and head): reads 904 bytes, writes 768; 66 kflop.
    """
    HV, K, V = int(w.shape[1]), int(w.shape[3]), int(u.shape[3])
    work = layout.num_groups * HV
    t = _tile("rescan_fwd", w, K=K, V=V, work=work, batch_invariant=batch_invariant, tile=tile)
    TMA, BK, BV = t["TMA"], t["BK"], t["BV"]
    with frameworks.of(w).on_device(w):
        launch(
            _rescan_fwd_kernel, work * -(-V // BV),
            _matrix(w, CHUNK, BK, TMA), _matrix(u, CHUNK, BV, TMA), _matrix(kg, CHUNK, BK, TMA), decay, initial_state,
            checkpoints, _matrix(states, BK, BV, TMA), _matrix(v_new, CHUNK, BV, TMA), layout.groups,
            HV, -(-layout.chunks_per_sequence // GROUP), layout.chunks_per_sequence,
            M=GROUP, V_FIRST=state_v_first, PACKED=layout.packed, **t,
        )  # fmt: skip


def reverse_scan_bwd(
    *, w: Any, kg: Any, qg: Any, aqk: Any, decay: Any, do: Any, dv_new: Any, dstates: Any, layout: Layout,
    dfinal_state: Any = None, dinitial_state: Any = None, state_v_first: bool = False, batch_invariant: bool = False,
    tile: dict | None = None,
) -> None:  # fmt: skip
    """Gradients of written values and states: dVn = aqk^T dO + kg dS'; dS = decay * dS' + qg^T dO - w^T dVn.

    Args:
        w, kg, qg, aqk, decay: As in `scan_fwd`.
        do: [B, T, HV, V], last axis contiguous, other strides free; what lies behind the last offset is not looked at.
        dfinal_state: Gradient of the final state, fp32, contiguous; None means zeros.
        dv_new: Written, WS [NC, HV, C, V]; dstates: written, WS [NC, HV, K, V], gradient of the state AFTER it.
        dinitial_state: Written, like dfinal_state; None where it is not wanted.
    Cost (K = V = 128, bf16, a token and head): reads 1160 bytes, writes 768; 115 kflop.
    """
    HV, K, V = int(w.shape[1]), int(w.shape[3]), int(dv_new.shape[3])
    if tile is None and (hopper := hopper_module("scan_hopper", w, do)) is not None:
        settings = tuning.lookup("reverse_scan_bwd_hopper", 90, work=0 if batch_invariant else layout.N * HV)
        hopper.reverse_scan_bwd(
            w=w, kg=kg, qg=qg, aqk=aqk, decay=decay, do=do, dv_new=dv_new, dstates=dstates, layout=layout,
            dfinal_state=dfinal_state, dinitial_state=dinitial_state, state_v_first=state_v_first, **settings,
        )  # fmt: skip
        return
    t = _tile("reverse_scan_bwd", w, K=K, V=V, work=layout.N * HV, batch_invariant=batch_invariant, tile=tile)
    TMA, BK, BV = t["TMA"], t["BK"], t["BV"]
    fw = frameworks.of(w)
    with fw.on_device(w):
        launch(
            _reverse_scan_bwd_kernel, layout.N * HV * -(-V // BV),
            _matrix(w, CHUNK, BK, TMA), _matrix(kg, CHUNK, BK, TMA), _matrix(qg, CHUNK, BK, TMA),
            _matrix(aqk, CHUNK, CHUNK, TMA), decay, do, dfinal_state, _matrix(dv_new, CHUNK, BV, TMA),
            _matrix(dstates, BK, BV, TMA), dinitial_state, layout.cu_seqlens,
            layout.T, HV, *fw.strides(do)[:3], V_FIRST=state_v_first, PACKED=layout.packed, **t,
        )  # fmt: skip
