"""The forwards that `enable` puts into classes of transformers 5.24.0.

Each takes and returns what the one it replaces does. Import this only when the release is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.utils.deprecation import deprecate_kwarg

import openkda
from openkda import checks
from openkda.integrations.transformers import packed

_FORGET_GATES = (kimi_linear.KimiLinearForgetGate, glm5_next.Glm5NextTextForgetGate)


def replacements() -> dict[tuple[type, str], Callable[..., Any]]:
    """What to put where: (class, attribute) -> function."""
    return {
        (kimi_linear.KimiLinearDeltaAttention, "forward"): attend,
        (glm5_next.Glm5NextTextLinearAttention, "forward"): attend,
        (kimi_linear.KimiLinearRMSNormGated, "forward"): norm,
        (glm5_next.Glm5NextTextRMSNormGated, "forward"): norm,
        (kimi_linear.KimiLinearModel, "forward"): _kimi_linear_model(kimi_linear.KimiLinearModel.forward),
        (glm5_next.Glm5NextTextModel, "forward"): _glm5_next_model(glm5_next.Glm5NextTextModel.forward),
    }


# ---- layers
def norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The gated normalisation, `[.., V]`."""
    return openkda.rms_norm_gated(
        hidden_states, gate, self.weight, activation=self.activation, eps=self.variance_epsilon
    )


@force_accelerate_hooks(["conv1d", "forget_gate"])  # their parameters are used without calling them
@deprecate_kwarg("cache_params", "5.40.0", new_name="cache")
def attend(
    self: Any, hidden_states: Tensor, cache: Any | None = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """KDA with its projections: hidden_states `[B, T, D]` -> `[B, T, D]`.

    cache is transformers' and is updated. attention_mask `[B, T]` is not 0 where a token is. Packed sequences come as
    cu_seqlens, which may count the tokens of a whole batch folded into one row, or as seq_idx; see `packed`.

    Raises: ValueError for packed sequences with a cache.
    """
    B, T, D = hidden_states.shape
    cu_seqlens = _offsets(type(self).__name__, kwargs, B, T, cache)
    x = hidden_states
    if attention_mask is not None:
        x = torch.where(attention_mask[..., None] != 0, x, 0.0)
    if cu_seqlens is not None:
        x = x.reshape(1, B * T, D)
    q, k, v = _convolve(self, x, cache, cu_seqlens)
    raw_gate, gate = _forget(self.forget_gate, x)
    state = None if cache is None else _kept(cache.get_recurrent_state(self.layer_idx, state_idx=0))
    decode = cache is not None and T == 1 and not torch.is_grad_enabled()
    o, state = (openkda.recurrent_kda if decode else openkda.chunk_kda)(
        q,
        k,
        v,
        raw_gate,
        self.b_proj(x),
        initial_state=state,
        output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        cu_seqlens=cu_seqlens,
        **gate,
    )
    if cache is not None:
        cache.update_recurrent_state(state, self.layer_idx)
    output_gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (-1, self.head_dim))  # [B, T, H, V]
    return self.o_proj(self.o_norm(o, output_gate).flatten(-2)).view(B, T, -1)


def _offsets(op: str, kwargs: dict[str, Any], batch: int, tokens: int, cache: Any | None) -> Tensor | None:
    """cu_seqlens over the batch folded into one row, or None."""
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is None:
        found = packed.from_keywords(op, kwargs, batch, tokens)
        cu_seqlens = None if found is None else found.cu_seqlens
    if cu_seqlens is not None and cache is not None:
        _no_cache(op, cache)
    return cu_seqlens


def _convolve(self: Any, x: Tensor, cache: Any | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """q, k, v `[B, T, H, K]` after the short convolution; the cache gets its inputs.

    transformers keeps the last W inputs and openkda starts from W-1: the oldest is of no use to a next token.
    """
    qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)  # [B, T, 3*H*K]
    W = self.conv_kernel_size
    before = None if cache is None else _kept(cache.get_conv_state(self.layer_idx, state_idx=0))  # [B, 3*H*K, >= W]
    if before is not None:
        before = before[..., before.shape[-1] - (W - 1) :].to(qkv.dtype)
    y, _ = openkda.causal_conv1d(
        qkv,
        self.conv1d.weight[:, 0],
        self.conv1d.bias,
        activation=self.activation,
        initial_state=before,
        cu_seqlens=cu_seqlens,
    )
    if cache is not None:
        cache.update_conv_state(qkv.transpose(1, 2), self.layer_idx, conv_kernel_size=W)
    return y.unflatten(-1, (3, -1, self.head_dim)).unbind(2)


def _kept(state: Tensor | None) -> Tensor | None:
    """A state that may go into a graph: the cache edits its own in place afterwards."""
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def _forget(gate: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The gate as the operator takes it: raw `[B, T, H, K]` with its parameters, or log-decay of a gate we do not know.

    A_log is [1, 1, H, 1] in Kimi Linear, and in 16 bits in a 16-bit model of transformers.
    """
    if not isinstance(gate, _FORGET_GATES):
        return gate(x), {}
    raw = gate.f_b_proj(gate.f_a_proj(x)).unflatten(-1, (-1, gate.head_dim))
    return raw, {
        "use_gate_in_kernel": True,
        "A_log": gate.A_log.float().flatten(),
        "dt_bias": gate.dt_bias.float(),
        "lower_bound": getattr(gate, "safe_gate_lower_bound", None),
    }


# ---- models
def _kimi_linear_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward with packed sequences kept apart in all of its layers.

    The linear layers get offsets. The others get positions that restart, from which transformers makes their mask, but
    only when neither a cache nor a padding mask is there: so there is no cache, and with padding the mask is made here.
    """

    @functools.wraps(original)
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        found = _packed(self, inputs, attention_mask, position_ids, cache, use_cache, kwargs)
        if found is not None:
            position_ids, use_cache = found.position_ids(), False
            kwargs = {**kwargs, "cu_seqlens": found.cu_seqlens}
            if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
                if inputs_embeds is None:
                    inputs = {"input_ids": None, "inputs_embeds": self.embed_tokens(input_ids)}
                attention_mask = _masks(self, inputs["inputs_embeds"], attention_mask, found)
        return original(
            self,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **inputs,
            **kwargs,
        )

    return forward


def _masks(self: Any, embeds: Any, padding: Tensor, found: packed.Packed) -> dict[str, Any]:
    """Masks of packed rows that also hold padding, `[B, T]`, per kind of layer, as transformers' model takes them."""
    if "flash" in str(self.config._attn_implementation):
        checks.bad_value(
            type(self).__name__,
            "attention_mask",
            "be None for packed sequences with flash attention",
            list(padding.shape),
            "leave padding out of a packed row",
        )
    full = create_causal_mask(
        config=self.config,
        inputs_embeds=embeds,
        attention_mask=padding,
        cache=None,
        and_mask_function=packed_sequence_mask_function(found.sequence_ids()),
    )
    return {"full_attention": full, "linear_attention": padding}


def _glm5_next_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward, which refuses packed sequences unless all its layers are linear: the index of its sparse
    attention would let them leak.
    """

    @functools.wraps(original)
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
        found = _packed(self, inputs, attention_mask, position_ids, cache, use_cache, kwargs)
        if found is not None:
            if any(kind != "linear_attention" for kind in self.config.layer_types):
                raise NotImplementedError(
                    "Glm5NextTextModel: packed sequences must meet linear attention only, got layers with sparse "
                    "attention, which cannot keep them apart; give each sequence a row of its own"
                )
            use_cache, kwargs = False, {**kwargs, "cu_seqlens": found.cu_seqlens}
        return original(
            self,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            **inputs,
            **kwargs,
        )

    return forward


def _packed(
    self: Any,
    inputs: dict[str, Any],
    attention_mask: Any | None,
    position_ids: Tensor | None,
    cache: Any | None,
    use_cache: bool | None,
    kwargs: dict[str, Any],
) -> packed.Packed | None:
    """The packed sequences that a call of a model describes, or None. Positions count only without a cache."""
    op = type(self).__name__
    some = next((x for x in inputs.values() if x is not None), None)
    if some is None:
        return None  # the model says what is missing
    B, T = some.shape[:2]
    found = packed.from_keywords(op, kwargs, B, T)
    by_position = found is None and cache is None and position_ids is not None and T > 1
    if by_position and position_ids is not None and position_ids.ndim == 2:
        padding = attention_mask.get("linear_attention") if isinstance(attention_mask, dict) else attention_mask
        usable = isinstance(padding, Tensor) and padding.shape == (B, T)
        found = packed.from_positions(position_ids, padding if usable else None, B)
    if found is not None and (cache is not None or use_cache):
        _no_cache(op, cache if cache is not None else "use_cache=True")
    return found


def _no_cache(op: str, cache: Any) -> NoReturn:
    got = cache if isinstance(cache, str) else type(cache).__name__
    checks.bad_value(op, "cache", "be None with packed sequences", got, "a cache holds one sequence per row")
