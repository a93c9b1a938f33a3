"""The linear attention of glm5_next, with its bounded gate, through openkda."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openkda.integrations import transformers as integration

Build = Callable[..., nn.Module]
Close = Callable[..., None]


def step(model: Any, tokens: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    y = model(tokens, use_cache=False, **inputs).last_hidden_state
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_outputs_and_every_gradient_equal_upstream(glm5_next: Build, tokens: Tensor, close: Close):
    model = glm5_next()
    want, want_grads = step(model, tokens)
    with integration.enabled():
        got, grads = step(model, tokens)
    close(got, want, 1e-5)
    assert grads.keys() == want_grads.keys()
    for name, want_grad in want_grads.items():
        close(grads[name], want_grad)


def test_gate_is_the_bounded_one(glm5_next: Build, tokens: Tensor):
    model: Any = glm5_next()
    with integration.enabled():
        bounded = model(tokens).last_hidden_state
        for layer in model.layers:
            layer.self_attn.forget_gate.safe_gate_lower_bound = None
        softplus = model(tokens).last_hidden_state
    assert (bounded - softplus).abs().max() > 1e-2


@torch.no_grad()
def test_hybrid_model_decodes_with_a_cache_as_upstream(glm5_next: Build, tokens: Tensor, close: Close):
    model: Any = glm5_next(("linear_attention", "indexed_attention")).eval()
    want = model(tokens[:, :20]).last_hidden_state
    with integration.enabled():
        first = model(tokens[:, :16], use_cache=True)
        rest = [model(tokens[:, t : t + 1], cache=first.cache).last_hidden_state for t in range(16, 20)]
    close(torch.cat([first.last_hidden_state, *rest], dim=1), want, 1e-5)


def test_packed_equals_separate(glm5_next: Build, tokens: Tensor, close: Close):
    model: Any = glm5_next()
    with integration.enabled():
        want = torch.cat([model(d[None]).last_hidden_state for d in tokens[0].split([3, 70, 77])], dim=1)
        position_ids = torch.cat([torch.arange(n) for n in (3, 70, 77)])[None]
        close(model(tokens[:1], position_ids=position_ids).last_hidden_state, want, 1e-5)
        cu_seqlens = torch.tensor([0, 3, 73, 150])
        close(model(tokens[:1], cu_seqlens=cu_seqlens).last_hidden_state, want, 1e-5)


def test_packed_sequences_refuse_sparse_attention(glm5_next: Build, tokens: Tensor):
    model = glm5_next(("linear_attention", "indexed_attention"))
    with integration.enabled(), pytest.raises(NotImplementedError, match="give each sequence a row of its own"):
        model(tokens[:1], cu_seqlens=torch.tensor([0, 3, 150]))
