"""The steps of a block that both models have, in the order in which they are computed.

The first step that differs, given equal inputs, is where the fault is: later ones only pass it on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One step of a block.

    name: What the report calls it.
    ours, reference: Paths of the submodules whose output it is; empty for a value that record.py takes elsewhere.
    parameters: What it depends on beside its input, by their names on disk within the layer.
    """

    name: str
    ours: str = ""
    reference: str = ""
    parameters: tuple[str, ...] = ()


def _linear(name: str, ours: str, disk: str, reference: str | None = None) -> Stage:
    return Stage(name, ours, disk if reference is None else reference, (f"{disk}.weight",))


ATTENTION = "attention"  # what the mixer's output projection, or gated norm, is given
STATE, DECODE = "final state", "decoding"

_KDA = (
    _linear("attention norm", "attention_norm", "input_layernorm"),
    *(_linear(f"{x}_proj", f"kda.{x}_proj", f"self_attn.{x}_proj") for x in "qkv"),
    *(Stage(f"{x} after convolution", parameters=(f"self_attn.{x}_conv1d.weight",)) for x in "qkv"),
    Stage(
        "gate logits",
        "kda.f_b_proj",
        "self_attn.forget_gate.f_b_proj",
        ("self_attn.f_a_proj.weight", "self_attn.f_b_proj.weight"),
    ),
    Stage("log-decay", parameters=("self_attn.A_log", "self_attn.dt_bias")),
    _linear("beta logits", "kda.b_proj", "self_attn.b_proj"),
    Stage(ATTENTION),
    Stage(STATE),
    Stage(
        "output gate", "kda.g_b_proj", "self_attn.g_b_proj", ("self_attn.g_a_proj.weight", "self_attn.g_b_proj.weight")
    ),
    _linear("gated norm", "kda.o_norm", "self_attn.o_norm"),
    _linear("o_proj", "kda.o_proj", "self_attn.o_proj"),
    Stage(DECODE),
)
_MLA = (
    _linear("attention norm", "attention_norm", "input_layernorm"),
    _linear("q_proj", "attention.wq", "self_attn.q_proj"),
    _linear("kv_a_proj", "attention.wkv_a", "self_attn.kv_a_proj_with_mqa"),
    _linear("latent norm", "attention.kv_norm", "self_attn.kv_a_layernorm"),
    _linear("kv_b_proj", "attention.wkv_b", "self_attn.kv_b_proj"),
    Stage(ATTENTION),
    _linear("o_proj", "attention.wo", "self_attn.o_proj"),
    Stage(DECODE),
)
_DENSE = (
    _linear("ffn norm", "ffn_norm", "post_attention_layernorm"),
    _linear("gate_proj", "feed_forward.w1", "mlp.gate_proj"),
    _linear("up_proj", "feed_forward.w3", "mlp.up_proj"),
    _linear("down_proj", "feed_forward.w2", "mlp.down_proj"),
)
_MOE = (
    _linear("ffn norm", "ffn_norm", "post_attention_layernorm"),
    Stage("router scores", parameters=("block_sparse_moe.gate.weight",)),
    Stage(
        "shared experts",
        "moe.shared_experts",
        "mlp.shared_experts",
        tuple(f"block_sparse_moe.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")),
    ),
    Stage("routed experts", "moe.routed_experts", "mlp.experts", ("block_sparse_moe.experts.*",)),
)
BLOCK = Stage("block output")


# Names of all steps, in an order that is right for every kind of layer.
ORDER = tuple(dict.fromkeys(stage.name for stage in (*_KDA[:4], *_MLA[2:5], *_KDA[4:], *_DENSE, *_MOE, BLOCK)))


def stages_of(*, is_kda: bool, is_moe: bool) -> tuple[Stage, ...]:
    """The steps of a layer, in order."""
    return (*(_KDA if is_kda else _MLA), *(_MOE if is_moe else _DENSE), BLOCK)
