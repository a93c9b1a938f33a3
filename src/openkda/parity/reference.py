"""transformers' Kimi Linear: drawn at random or read from disk, with either gate.

The reference is transformers' code throughout. The bounded gate is the forget gate of its glm5_next, put in place of
the one of kimi_linear: the two modules have the same parameters and the same output, log-decay per channel.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
from transformers.models.kimi_linear import modeling_kimi_linear

from openkda.integrations.torchtitan.hf_config import BOUNDED_TYPE, SOFTPLUS_TYPE

VERSION = "5.24.0"
ENTROPY = 3.0  # nats a token; what a trained model of this family has on text
TINY_EMBEDDING_STD = 0.4  # twenty times transformers' initializer_range: docs/parity.md says why

# Bytes, then begin, end and padding, as in our byte tokenizer.
_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
    },
    "model_max_length": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def require_transformers() -> None:
    """Raise ImportError unless transformers is the release this is written for."""
    if transformers.__version__.split("+")[0] != VERSION:
        raise ImportError(
            f"openkda.parity: transformers must be {VERSION}, got {transformers.__version__}; "
            "install the extra: pip install 'openkda[transformers]'"
        )


def require_own_operators() -> None:
    """Raise ValueError while transformers' layers run ours: the comparison would be of ours with itself."""
    integration: Any = sys.modules.get("openkda.integrations.transformers")
    if integration is not None and integration.is_enabled():
        raise ValueError(
            "compare: the reference must run transformers' own operators, got those of openkda; "
            "call openkda.integrations.transformers.disable() first"
        )


def tiny_config(lower_bound: float | None = None) -> dict[str, Any]:
    """config.json of a model with four layers of every kind, on bytes; with a bound, its gate is the bounded one."""
    config = {"model_type": SOFTPLUS_TYPE, **_TINY}
    if lower_bound is not None:
        config["model_type"] = BOUNDED_TYPE
        config["linear_attn_config"] = {**config["linear_attn_config"], "gate_lower_bound": lower_bound}
    return config


def write_random(config: dict[str, Any], folder: Path, *, seed: int, embedding_std: float | None = None) -> None:
    """Draw a model and write it as a checkpoint, with the weights in fp32.

    Args:
        config: config.json, of either gate.
        embedding_std: Standard deviation of the embeddings; None leaves transformers' own.
    """
    bounded = config["model_type"] == BOUNDED_TYPE
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM(KimiLinearConfig(**{k: v for k, v in config.items() if k != "model_type"})).float()
    with torch.no_grad():
        if embedding_std is not None:
            model.model.embed_tokens.weight.normal_(std=embedding_std)
        layers: Any = model.model.layers
        for layer in layers:
            if bounded and hasattr(layer.self_attn, "forget_gate"):
                # Rates near 1, as glm5_next starts with; kimi_linear's, up to 16, would saturate the sigmoid.
                layer.self_attn.forget_gate.A_log.uniform_(-0.5, 0.5)
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.e_score_correction_bias.normal_(std=1e-3)
    with quiet():
        model.save_pretrained(folder)
    if bounded:
        written = json.loads((folder / "config.json").read_text())
        written |= {"model_type": BOUNDED_TYPE, "linear_attn_config": config["linear_attn_config"]}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def load_reference(folder: Path, dtype: torch.dtype) -> KimiLinearForCausalLM:
    """transformers' model from a folder, in eval mode; its gate is what config.json says.

    Raises: ValueError when transformers finds weights missing, or more than it knows.
    """
    config = json.loads((folder / "config.json").read_text())
    bound = (config.get("linear_attn_config") or {}).get("gate_lower_bound")
    plain = KimiLinearConfig(**{k: v for k, v in config.items() if k not in ("model_type", "dtype")})
    with quiet():
        loaded: Any = KimiLinearForCausalLM.from_pretrained(
            folder, config=plain, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    model, said = loaded
    faults = {
        kind: sorted(said[kind])[:3] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if said[kind]
    }
    if faults:
        raise ValueError(f"{folder}: transformers cannot load it: {faults}")
    if bound is not None:
        replace_gates(model, bound)
    return model.eval()


def replace_gates(model: KimiLinearForCausalLM, lower_bound: float) -> None:
    """Give every KDA layer glm5_next's forget gate with this bound, keeping the parameters."""
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        if not hasattr(attention, "forget_gate"):
            continue
        old = attention.forget_gate
        sizes: Any = SimpleNamespace(
            hidden_size=attention.hidden_size,
            linear_head_dim=attention.head_dim,
            linear_num_heads=attention.num_heads,
            linear_lower_bound=lower_bound,
        )
        new = Glm5NextTextForgetGate(sizes)
        new.f_a_proj, new.f_b_proj, new.dt_bias = old.f_a_proj, old.f_b_proj, old.dt_bias
        new.A_log = nn.Parameter(old.A_log.detach().reshape(-1).float())
        attention.forget_gate = new


@torch.no_grad()
def lm_head_scale(model: KimiLinearForCausalLM, prompts: Sequence[torch.Tensor], entropy: float = ENTROPY) -> float:
    """The factor on lm_head that makes the mean entropy of the predictions on `prompts` (each `[1, T]`) this many nats.

    A random model predicts the uniform distribution, on which every implementation agrees. Bisection: entropy falls
    with the factor. A vocabulary too small for the entropy keeps its factor of 1.
    """
    logits = torch.cat([model(ids).logits[0].float() for ids in prompts])

    def mean_entropy(factor: float) -> float:
        p = (logits * factor).double().log_softmax(-1)
        return float(-(p.exp() * p).sum(-1).mean())

    low, high = 0.0, 1.0
    if mean_entropy(low) <= entropy:
        return 1.0
    while mean_entropy(high) > entropy:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_entropy(middle) > entropy else (low, middle)
    return high


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars, and its advice to install faster operators: its own are what is wanted."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def operator_home() -> Any:
    """The module whose functions transformers' KDA layers call."""
    return modeling_kimi_linear
