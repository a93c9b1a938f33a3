"""Tiny models of transformers, and the integration off before and after every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra openkda[transformers]")

from openkda.integrations import transformers as integration

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts_per_tok": 2,
    "linear_attn_config": {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4},
    "pad_token_id": 60,
    "bos_token_id": 58,
    "eos_token_id": 59,
}


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    assert not integration.is_enabled()
    yield
    integration.disable()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where models and tokens lie, and the tensors that a test makes."""
    with torch.device(request.param) as here:
        yield here


@pytest.fixture
def kimi_linear(device: torch.device) -> nn.Module:
    """Dense KDA, sparse KDA, sparse full attention; fp32, in training mode."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    attention = {**SIZES["linear_attn_config"], "kda_layers": [1, 2], "full_attn_layers": [3]}
    extra = {"num_hidden_layers": 3, "num_local_experts": 4, "qk_rope_head_dim": 8, "linear_attn_config": attention}
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same weights everywhere
        model = KimiLinearForCausalLM(KimiLinearConfig(**{**SIZES, **extra})).float().train()
    return _livelier(model).to(device)


@pytest.fixture
def glm5_next(device: torch.device) -> Callable[..., nn.Module]:
    """A text model of two linear layers, or of the kinds that are asked for."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

    def build(kinds: tuple[str, ...] = ("linear_attention", "linear_attention")) -> nn.Module:
        extra = {
            "num_hidden_layers": len(kinds),
            "n_routed_experts": 4,
            "q_lora_rank": 16,
            "mlp_layer_types": ["dense"] * len(kinds),
            "layer_types": list(kinds),
            "index_head_dim": 8,
            "index_n_heads": 2,
            "index_topk": 16,
            "index_kpool": 4,
            "hc_mult": 2,
            "use_cache": False,  # transformers' cache asks a layer with full attention for its length
        }
        torch.manual_seed(0)
        with torch.device("cpu"):
            model = Glm5NextTextModel(Glm5NextTextConfig(**{**SIZES, **extra})).float().train()
        return _livelier(model).to(device)

    return build


def _livelier(model: nn.Module) -> nn.Module:
    """Weights ten times those of a new model: its layers would add next to nothing to the embeddings."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(10)
            if name.endswith("dt_bias"):
                p.add_(torch.linspace(-1, 5, p.numel(), device=p.device))  # decays from weak to strong
    return model


@pytest.fixture
def tokens(device: torch.device) -> Tensor:
    return torch.randint(0, 58, (2, 150), generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(device)


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """Root mean square of the difference at most 1e-4 of that of the reference."""

    def check(got: Tensor, want: Tensor, ratio: float = 1e-4) -> None:
        assert torch.isfinite(got).all()
        assert (got - want).square().mean().sqrt() <= ratio * want.square().mean().sqrt()

    return check
