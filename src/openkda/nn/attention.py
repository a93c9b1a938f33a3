"""Kimi Delta Attention as a layer: projections, short convolutions, the operator, gated normalisation, output
projection.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv))          l2norm of q and k, per head
    g       = gate(x Wfa Wfb, A_log, dt_bias)                               softplus or bounded, see `openkda.kda_gate`
    beta    = sigmoid(x Wb)
    o       = rmsnorm(kda(q, k, v, g, beta)) * weight * sigmoid(x Wga Wgb)
    y       = o Wo
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openkda import checks
from openkda.kda.chunk import chunk_kda
from openkda.kda.recurrent import recurrent_kda
from openkda.nn import _rules
from openkda.nn.blocks import BlockState, walk
from openkda.nn.cache import KDABlockStates, KDACache, KDALayerState
from openkda.nn.convolution import ShortConvolution
from openkda.nn.normalization import FusedRMSNormGated
from openkda.nn.recompute import Recipe, recomputed

_OP = "KimiDeltaAttention"


class KimiDeltaAttention(nn.Module):
    """The attention layer of Kimi Linear and its relatives. Parameters are named and shaped as in their
    checkpoints.

    A_log and dt_bias stay fp32 when the layer is cast to a 16-bit dtype (`layer.to(torch.bfloat16)`, `.half()`),
    and bear the mark `_no_weight_decay`. A_log of a checkpoint may be [1, 1, HV, 1] and dt_bias [HV, K]: both load.
    All that acts on heads takes their number from the weights, so a tensor-parallel slice of the parameters works
    as it is.

    Args:
        hidden_size: D.
        num_heads: Query and key heads H.
        head_dim: Their width K.
        num_v_heads: Value heads HV, a multiple of H; None means H.
        head_v_dim: Their width V; None means K.
        conv_size: Width W of the short convolutions.
        lower_bound: None for the softplus gate (Kimi Linear); below 0 for the bounded gate (Kimi K3: -5.0). Two
            different models.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        norm_eps: eps of the output normalisation.
        layer_idx: The layer's place in a model, its key in a cache.
        batch_invariant: A token has the same bits however its sequence is batched, packed or decoded: the layer runs
            block by block (`openkda.nn.blocks`), and reads offsets and masks on the host.
        save_intermediates: As in `chunk_kda`: keep more for the backward and recompute less.
        backend: As in the operators: "auto", "triton", "eager" or "reference".
    Raises: TypeError or ValueError for sizes that make no sense, naming them.
    Source: Kimi Linear, arXiv 2510.26692, section 4.
    """

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        batch_invariant: bool = False,
        save_intermediates: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = _rules.KDASizes(
            hidden_size,
            num_heads,
            num_heads if num_v_heads is None else num_v_heads,
            head_dim,
            head_dim if head_v_dim is None else head_v_dim,
            conv_size,
        )
        if lower_bound is not None:
            checks.lower_bound(_OP, lower_bound)
        self.sizes, self.lower_bound, self.allow_neg_eigval = sizes, lower_bound, allow_neg_eigval
        for name, flag in (("batch_invariant", batch_invariant), ("save_intermediates", save_intermediates)):
            if not isinstance(flag, bool):
                checks.bad_type(_OP, name, "be a bool", type(flag).__name__)
        self.layer_idx, self.backend = layer_idx, backend
        self.batch_invariant, self.save_intermediates = batch_invariant, save_intermediates

        new: dict[str, Any] = {"device": device, "dtype": dtype}
        D, keys, values = hidden_size, sizes.key_width, sizes.value_width
        self.A_log = nn.Parameter(torch.empty(sizes.num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(sizes.gate_width, device=device, dtype=torch.float32))
        self.q_proj = nn.Linear(D, keys, bias=False, **new)
        self.k_proj = nn.Linear(D, keys, bias=False, **new)
        self.v_proj = nn.Linear(D, values, bias=False, **new)
        self.q_conv1d = ShortConvolution(keys, conv_size, backend=backend, **new)
        self.k_conv1d = ShortConvolution(keys, conv_size, backend=backend, **new)
        self.v_conv1d = ShortConvolution(values, conv_size, backend=backend, **new)
        self.f_a_proj = nn.Linear(D, sizes.head_dim, bias=False, **new)
        self.f_b_proj = nn.Linear(sizes.head_dim, sizes.gate_width, bias=False, **new)
        self.b_proj = nn.Linear(D, sizes.num_v_heads, bias=False, **new)
        self.g_a_proj = nn.Linear(D, sizes.head_v_dim, bias=False, **new)
        self.g_b_proj = nn.Linear(sizes.head_v_dim, values, bias=False, **new)
        self.o_norm = FusedRMSNormGated(sizes.head_v_dim, activation="sigmoid", eps=norm_eps, backend=backend, **new)
        self.o_proj = nn.Linear(values, D, bias=False, **new)
        self.register_load_state_dict_pre_hook(_accept_checkpoint_shapes)
        self.register_load_state_dict_post_hook(_restore_marks)
        self._mark()
        self._reset_gate()

    # ---- parameters
    def reset_parameters(self) -> None:
        """Draw every parameter anew, sub-layers included: all that a meta build needs after `to_empty`.

        exp(A_log) is uniform in [1, 16]. With the softplus gate softplus(dt_bias) is log-uniform in [1e-3, 1e-1];
        with the bounded gate dt_bias is 0. The rest is as their layers do.
        """
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]
        self._reset_gate()

    @torch.no_grad()
    def _reset_gate(self) -> None:
        self.A_log.uniform_(*_rules.RATE_RANGE).log_()
        if self.lower_bound is not None:
            self.dt_bias.zero_()
            return
        low, high = _rules.STEP_RANGE
        step = self.dt_bias.uniform_(math.log(low), math.log(high)).exp_().clamp_min_(_rules.STEP_FLOOR)
        step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus: log(exp(s) - 1) = s + log(1 - exp(-s))

    def _mark(self) -> None:
        for name in _rules.GATE_PARAMETERS:
            getattr(self, name)._no_weight_decay = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiDeltaAttention:
        """What `to`, `half`, `cuda`, `to_empty` go through: the gate's parameters stay wide and keep their marks."""
        kept = [getattr(self, name) for name in _rules.GATE_PARAMETERS]
        kept += [p.grad for p in kept if p.grad is not None]

        def keep_wide(x: Tensor) -> Tensor:
            y = fn(x)
            narrowed = y.dtype.itemsize < torch.float32.itemsize and any(x is p for p in kept)
            return x.to(y.device) if narrowed else y

        super()._apply(keep_wide, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled layers: parameters lose their attributes on the way."""
        super().__setstate__(state)
        self._mark()

    # ---- forward
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        cache: KDACache | None = None,
        cp_context: Any | None = None,
    ) -> Tensor:
        """Attend. Sequences are the batch rows, or the rows without padding (attention_mask), or packed (cu_seqlens).

        Args:
            hidden_states: `[B, T, D]`.
            attention_mask: `[B, S]`, S >= T, bool or integer, not 0 where a token is; the last T columns count.
                Padding may be anywhere; what it holds, NaN included, affects nothing, and the result is 0 there.
            cu_seqlens: int32 or int64 `[N+1]` token offsets of packed sequences; B is then 1.
            cache: Where the states of the sequences come from, and where they go. Single tokens without gradient
                run `recurrent_kda`, everything else `chunk_kda`.
            cp_context: Context parallelism, as in the operators.
        Returns: `[B, T, D]`. No host synchronisation in any of the three forms, but for batch_invariant.
        Raises: ValueError for a wrong shape, for attention_mask beside cu_seqlens, for a cache without layer_idx, or
            for cp_context with batch_invariant.
        """
        self._check(hidden_states, attention_mask, cu_seqlens, cache)
        if self.batch_invariant and cp_context is not None:
            checks.bad_value(_OP, "cp_context", "be None with batch_invariant", type(cp_context).__name__)

        def attend(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
            if self.batch_invariant:
                return self._attend_in_blocks(x, cu_seqlens, cache)
            return self._attend(x, cu_seqlens, cache, cp_context)

        if attention_mask is None:
            return attend(hidden_states, cu_seqlens)
        tokens, cu_seqlens, places = _unpad(hidden_states, attention_mask)
        return attend(tokens, cu_seqlens)[0, places].view_as(hidden_states)

    def _check(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: KDACache | None) -> None:
        checks.rank(_OP, "hidden_states", x, "[B, T, D]")
        checks.shape(_OP, "hidden_states", x, (*x.shape[:2], self.sizes.hidden_size), "[B, T, D]")
        if mask is not None:
            if cu_seqlens is not None:
                checks.bad_value(
                    _OP, "attention_mask", "be None with cu_seqlens", list(mask.shape), "packed input has no padding"
                )
            checks.rank(_OP, "attention_mask", mask, "[B, S]")
            if mask.shape[0] != x.shape[0] or mask.shape[1] < x.shape[1]:
                rule = f"have shape [B, S] with B = {x.shape[0]} and S >= T = {x.shape[1]}"
                checks.bad_value(_OP, "attention_mask", rule, list(mask.shape))
        if cache is not None and self.layer_idx is None:
            checks.bad_value(_OP, "layer_idx", "be given to use a cache", None, "set it in the constructor")

    def _attend_in_blocks(self, x: Tensor, cu_seqlens: Tensor | None, cache: KDACache | None) -> Tensor:
        """`_attend`, every block of 64 tokens of every sequence alone: see `openkda.nn.blocks`."""
        offsets = None if cu_seqlens is None else cu_seqlens.tolist()
        sequences = list(x) if offsets is None else [x[0, a:b] for a, b in itertools.pairwise(offsets)]
        old = cache.get(self.layer_idx) if cache is not None else None  # type: ignore[arg-type]
        states = [BlockState()] * len(sequences) if old is None else old.sequences
        if len(states) != len(sequences):
            rule = f"hold as many sequences as the input, {len(sequences)}"
            checks.bad_value(_OP, "cache", rule, len(states), "reset or select it first")

        def block(x: Tensor, state: KDALayerState | None) -> tuple[Tensor, Any]:
            own = KDACache()
            if state is not None:
                own.set(0, state)
            return self._attend(x, None, own, None, key=0), own.get(0)

        outputs, after = [], []
        for rows, state in zip(sequences, states, strict=True):
            y, state = walk(block, rows, state) if rows.shape[0] else (rows, state)
            outputs.append(y)
            after.append(state)
        if cache is not None:
            cache.set(self.layer_idx, KDABlockStates(tuple(after)))  # type: ignore[arg-type]
        if offsets is None:
            return torch.stack(outputs) if outputs else x * 1.0
        return torch.cat([*outputs, x.new_zeros(x.shape[1] - offsets[-1], x.shape[2])])[None]

    def _attend(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        cache: KDACache | None,
        cp_context: Any | None,
        key: int | None = None,
    ) -> Tensor:
        key = self.layer_idx if key is None else key
        old = cache.get(key) if cache is not None else None  # type: ignore[arg-type]
        keep = cache is not None
        new_states = []
        recipes: list[Recipe] = []

        def conv(layer: ShortConvolution, x: Tensor, state: Tensor | None) -> Tensor:
            y, last = layer(
                x, initial_state=state, output_final_state=keep, cu_seqlens=cu_seqlens, cp_context=cp_context
            )
            new_states.append(last)
            if cp_context is None:  # else what comes from other ranks would be fetched once more
                inputs = (x, layer.weight, layer.bias, state, cu_seqlens)
                recipes.append(Recipe(y, layer.again, inputs))
            return y

        K, V = self.sizes.head_dim, self.sizes.head_v_dim
        q = conv(self.q_conv1d, self.q_proj(x), old.q_conv if old else None).unflatten(-1, (-1, K))  # [B, T, H, K]
        k = conv(self.k_conv1d, self.k_proj(x), old.k_conv if old else None).unflatten(-1, (-1, K))
        v = conv(self.v_conv1d, self.v_proj(x), old.v_conv if old else None).unflatten(-1, (-1, V))  # [B, T, HV, V]
        raw_gate = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (-1, K))  # [B, T, HV, K]
        raw_beta = self.b_proj(x)  # [B, T, HV]

        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        one_token_each = x.shape[0] * x.shape[1] <= sequences  # known from shapes alone
        operator: Callable[..., Any] = recurrent_kda
        options: dict[str, Any] = {}
        if cp_context is not None or not (keep and one_token_each) or torch.is_grad_enabled():
            operator = chunk_kda
            options = {"batch_invariant": self.batch_invariant, "save_intermediates": self.save_intermediates}
            options["cp_context"] = cp_context
        with recomputed(*recipes):
            o, recurrent = operator(
                q,
                k,
                v,
                raw_gate,
                raw_beta,
                initial_state=old.recurrent if old else None,
                output_final_state=keep,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                allow_neg_eigval=self.allow_neg_eigval,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                lower_bound=self.lower_bound,
                cu_seqlens=cu_seqlens,
                backend=self.backend,
                **options,
            )
        if cache is not None:
            cache.set(key, KDALayerState(*new_states, recurrent))  # type: ignore[arg-type]
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (-1, V))  # [B, T, HV, V]
        normed = self.o_norm(o, gate).flatten(-2)
        with recomputed(Recipe(normed, self._normed_again, (o, gate, self.o_norm.weight))):
            return self.o_proj(normed)

    def _normed_again(self, o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return self.o_norm.again(o, gate, weight).flatten(-2)

    def extra_repr(self) -> str:
        gate = "softplus" if self.lower_bound is None else f"bounded({self.lower_bound})"
        return f"{self.sizes}, gate={gate}, layer_idx={self.layer_idx}, backend={self.backend!r}" + (
            ", batch_invariant=True" if self.batch_invariant else ""
        )


def _unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x [B, T, D] without padding, one after another, in a tensor that does not shrink: no host
    synchronisation.

    Returns: tokens [1, B*T, D], padding behind them as zeros; their offsets [B+1]; the place [B*T] of each token of
        x in there.
    """
    B, T, D = x.shape
    real = (mask[:, mask.shape[1] - T :] != 0).flatten()  # [B*T]
    cu_seqlens = F.pad(real.view(B, T).sum(1).cumsum(0), (1, 0))
    order = torch.argsort(~real, stable=True)  # tokens first, in order, then padding
    tokens = torch.where(real[order, None], x.reshape(B * T, D)[order], 0.0)
    return tokens[None], cu_seqlens, torch.argsort(order)


def _accept_checkpoint_shapes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: the gate's parameters in the layer's shape, from [1, 1, HV, 1] or [HV, K], and in fp32."""
    for name in _rules.GATE_PARAMETERS:
        value, own = state_dict.get(prefix + name), getattr(module, name)
        if isinstance(value, Tensor) and value.numel() == own.numel():
            value = value if value.shape == own.shape else value.reshape(own.shape)
            state_dict[prefix + name] = value.float() if value.dtype.itemsize < own.dtype.itemsize else value


def _restore_marks(module: KimiDeltaAttention, _: Any) -> None:
    """After loading: `assign=True` replaces parameters."""
    module._mark()
