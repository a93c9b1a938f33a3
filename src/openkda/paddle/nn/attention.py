"""Kimi Delta Attention as a Paddle layer: the equations are in `openkda/nn/attention.py`, the layer for torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor, nn

from openkda import checks
from openkda.frameworks import paddle as fw
from openkda.kda.chunk import chunk_kda
from openkda.kda.recurrent import recurrent_kda
from openkda.nn import _rules
from openkda.nn.cache import KDACache, KDALayerState
from openkda.paddle.nn.convolution import ShortConvolution
from openkda.paddle.nn.normalization import FusedRMSNormGated

_OP = "KimiDeltaAttention"


def _linear(width_in: int, width_out: int, dtype: str | None) -> nn.Linear:
    """No bias; uniform in +-1/sqrt(in) at first, as torch's."""
    bound = 1 / math.sqrt(width_in)
    uniform = paddle.ParamAttr(initializer=nn.initializer.Uniform(-bound, bound))
    layer = nn.Linear(width_in, width_out, weight_attr=uniform, bias_attr=False)
    return layer if dtype is None else layer.to(dtype=dtype)


class KimiDeltaAttention(nn.Layer):
    """The attention layer of Kimi Linear and its relatives, with the parameters of `openkda.nn.KimiDeltaAttention`.

    A_log and dt_bias stay fp32 when the layer is cast to a 16-bit dtype (`layer.to(dtype=..)`, `layer.bfloat16()`),
    and bear the mark `_no_weight_decay`, for AdamW's `apply_decay_param_fun` to ask for.

    Args: as the torch layer, but for `dtype`, a string, of all other parameters; None for Paddle's default.
    Raises: TypeError or ValueError for sizes that make no sense, naming them.
    """

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
        backend: str = "auto",
        dtype: str | None = None,
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
        self.layer_idx, self.backend = layer_idx, backend

        D, K, keys, values = hidden_size, sizes.head_dim, sizes.key_width, sizes.value_width
        self.A_log = self.create_parameter([sizes.num_v_heads], dtype="float32")
        self.dt_bias = self.create_parameter([sizes.gate_width], dtype="float32")
        self.q_proj = _linear(D, keys, dtype)
        self.k_proj = _linear(D, keys, dtype)
        self.v_proj = _linear(D, values, dtype)
        self.q_conv1d = ShortConvolution(keys, conv_size, backend=backend, dtype=dtype)
        self.k_conv1d = ShortConvolution(keys, conv_size, backend=backend, dtype=dtype)
        self.v_conv1d = ShortConvolution(values, conv_size, backend=backend, dtype=dtype)
        self.f_a_proj = _linear(D, K, dtype)
        self.f_b_proj = _linear(K, sizes.gate_width, dtype)
        self.b_proj = _linear(D, sizes.num_v_heads, dtype)
        self.g_a_proj = _linear(D, sizes.head_v_dim, dtype)
        self.g_b_proj = _linear(sizes.head_v_dim, values, dtype)
        self.o_norm = FusedRMSNormGated(
            sizes.head_v_dim, activation="sigmoid", eps=norm_eps, backend=backend, dtype=dtype
        )
        self.o_proj = _linear(values, D, dtype)
        self._reset_gate()

    # ---- parameters
    @paddle.no_grad()
    def _reset_gate(self) -> None:
        """As the torch layer: exp(A_log) uniform; softplus(dt_bias) log-uniform, or dt_bias 0 with the bounded gate."""
        for name in _rules.GATE_PARAMETERS:
            getattr(self, name)._no_weight_decay = True
        self.A_log.set_value(paddle.log(paddle.uniform(self.A_log.shape, "float32", *_rules.RATE_RANGE)))
        if self.lower_bound is not None:
            self.dt_bias.set_value(paddle.zeros_like(self.dt_bias))
            return
        low, high = _rules.STEP_RANGE
        step = paddle.exp(paddle.uniform(self.dt_bias.shape, "float32", math.log(low), math.log(high)))
        step = paddle.clip(step, min=_rules.STEP_FLOOR)
        self.dt_bias.set_value(step + paddle.log(-paddle.expm1(-step)))  # the inverse of softplus

    def _apply(
        self, func: Callable[..., Any], device: Any, dtype: Any, blocking: Any, include_sublayers: bool = True
    ) -> None:
        """What `to`, `bfloat16` and the like go through: the gate's parameters stay wide."""
        gate = {name: self._parameters[name] for name in _rules.GATE_PARAMETERS}
        self._parameters.update(dict.fromkeys(gate))
        try:
            super()._apply(func, device, dtype, blocking, include_sublayers)
        finally:
            self._parameters.update(gate)
        wide = dtype if dtype is not None and str(dtype).removeprefix("paddle.") == "float64" else None
        with paddle.no_grad():
            for parameter in gate.values():
                func(parameter, device, wide, blocking)
                if parameter.grad is not None:
                    func(parameter._grad_ivar(), device, wide, blocking)

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
        Returns: `[B, T, D]`. No host synchronisation in any of the three forms.
        Raises: ValueError for a wrong shape, for attention_mask beside cu_seqlens, or for a cache without
            layer_idx.
        """
        self._check(hidden_states, attention_mask, cu_seqlens, cache)
        if attention_mask is None:
            return self._attend(hidden_states, cu_seqlens, cache, cp_context)
        tokens, cu_seqlens, places = _unpad(hidden_states, attention_mask)
        y = fw.take(self._attend(tokens, cu_seqlens, cache, cp_context)[0], places, 0)
        return paddle.reshape(y, hidden_states.shape)

    def _check(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: KDACache | None) -> None:
        checks.tensor(_OP, "hidden_states", x)
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

    def _attend(self, x: Tensor, cu_seqlens: Tensor | None, cache: KDACache | None, cp_context: Any | None) -> Tensor:
        old = cache.get(self.layer_idx) if cache is not None else None  # type: ignore[arg-type]
        keep = cache is not None
        new_states = []

        def conv(layer: ShortConvolution, x: Tensor, state: Tensor | None) -> Tensor:
            y, last = layer(
                x, initial_state=state, output_final_state=keep, cu_seqlens=cu_seqlens, cp_context=cp_context
            )
            new_states.append(last)
            return y

        def heads(x: Tensor, width: int) -> Tensor:
            return paddle.reshape(x, [*x.shape[:-1], x.shape[-1] // width, width])

        K, V = self.sizes.head_dim, self.sizes.head_v_dim
        q = heads(conv(self.q_conv1d, self.q_proj(x), old.q_conv if old else None), K)  # [B, T, H, K]
        k = heads(conv(self.k_conv1d, self.k_proj(x), old.k_conv if old else None), K)
        v = heads(conv(self.v_conv1d, self.v_proj(x), old.v_conv if old else None), V)  # [B, T, HV, V]
        raw_gate = heads(self.f_b_proj(self.f_a_proj(x)), K)  # [B, T, HV, K]
        raw_beta = self.b_proj(x)  # [B, T, HV]

        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        one_token_each = x.shape[0] * x.shape[1] <= sequences  # known from shapes alone
        options: dict[str, Any] = {}
        operator = recurrent_kda
        if cp_context is not None or not (keep and one_token_each) or paddle.is_grad_enabled():
            operator, options = chunk_kda, {"cp_context": cp_context}
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
            cache.set(self.layer_idx, KDALayerState(*new_states, recurrent))  # type: ignore[arg-type]
        gate = heads(self.g_b_proj(self.g_a_proj(x)), V)  # [B, T, HV, V]
        o = self.o_norm(o, gate)
        return self.o_proj(paddle.reshape(o, [*o.shape[:-2], o.shape[-2] * V]))

    def extra_repr(self) -> str:
        gate = "softplus" if self.lower_bound is None else f"bounded({self.lower_bound})"
        return f"{self.sizes}, gate={gate}, layer_idx={self.layer_idx}, backend={self.backend!r}"


def _unpad(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x [B, T, D] without padding, one after another, in a tensor that does not shrink: no host
    synchronisation.

    Returns: tokens [1, B*T, D], padding behind them as zeros; their offsets [B+1]; the place [B*T] of each token of
        x in there.
    """
    B, T, D = x.shape
    real = (mask[:, mask.shape[1] - T :] != 0).astype("int64")  # [B, T]
    cu_seqlens = fw.pad(paddle.cumsum(real.sum(1), 0), 0, 1, 0)
    order = paddle.argsort(1 - real.flatten(), stable=True)  # tokens first, in order, then padding
    kept = fw.take(real.flatten(), order, 0)[:, None] != 0
    tokens = fw.where(kept, fw.take(paddle.reshape(x, [B * T, D]), order, 0), 0.0)
    return tokens[None], cu_seqlens, paddle.argsort(order)
