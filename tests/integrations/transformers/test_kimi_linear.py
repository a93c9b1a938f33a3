"""Kimi Linear through openkda equals Kimi Linear through transformers' own operators."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear

import openkda
from openkda.integrations import transformers as integration

Close = Callable[..., None]


def step(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and all gradients of the loss."""
    model.zero_grad()
    out = model(**inputs, labels=inputs["input_ids"], use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_logits_and_every_gradient_equal_upstream(kimi_linear: Any, tokens: Tensor, close: Close):
    want, want_grads = step(kimi_linear, input_ids=tokens)
    with integration.enabled():  # the model exists already
        got, grads = step(kimi_linear, input_ids=tokens)
    close(got, want, 1e-5)
    assert grads.keys() == want_grads.keys()
    assert {name.split(".")[-1] for name in grads} >= {"A_log", "dt_bias"}
    for name, want_grad in want_grads.items():
        close(grads[name], want_grad)


def test_upstream_operators_are_not_called(kimi_linear: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch):
    for name in (
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        monkeypatch.setattr(modeling_kimi_linear, name, None)
    with integration.enabled():
        step(kimi_linear, input_ids=tokens[:, :8])
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        kimi_linear(tokens[:, :8])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_equals_upstream(side: str, kimi_linear: Any, tokens: Tensor, close: Close):
    mask = torch.ones_like(tokens)
    mask[1, slice(0, 30) if side == "left" else slice(120, None)] = 0
    labels = tokens.masked_fill(mask == 0, -100)

    def run() -> tuple[Tensor, Tensor]:
        kimi_linear.zero_grad()
        out = kimi_linear(tokens, attention_mask=mask, labels=labels)
        out.loss.backward()
        return out.logits[mask == 1].detach(), kimi_linear.model.embed_tokens.weight.grad.clone()

    want, want_grad = run()
    with integration.enabled():
        got, grad = run()
    close(got, want, 1e-5)
    close(grad, want_grad)


def test_gradient_checkpointing_changes_nothing(kimi_linear: Any, tokens: Tensor):
    integration.enable()
    want, want_grads = step(kimi_linear, input_ids=tokens[:, :70])
    kimi_linear.activation_checkpointing_enable()
    got, grads = step(kimi_linear, input_ids=tokens[:, :70])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    for name, want_grad in want_grads.items():
        torch.testing.assert_close(grads[name], want_grad, rtol=0, atol=0)


def test_another_gate_is_the_one_that_runs(kimi_linear: Any, tokens: Tensor, close: Close):
    # glm5_next's bounded gate in place of Kimi Linear's softplus gate, and one that nobody knows.
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    class Constant(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.new_full((*x.shape[:2], 2, 16), -0.3)

    config = kimi_linear.config
    config.linear_lower_bound = -5.0
    bounded = Glm5NextTextForgetGate(config)
    torch.nn.init.normal_(bounded.dt_bias)
    torch.nn.init.normal_(bounded.A_log)
    kimi_linear.model.layers[0].self_attn.forget_gate = bounded
    kimi_linear.model.layers[1].self_attn.forget_gate = Constant()
    want, want_grads = step(kimi_linear, input_ids=tokens[:, :70])
    with integration.enabled():
        got, grads = step(kimi_linear, input_ids=tokens[:, :70])
    close(got, want, 1e-5)
    close(grads["model.layers.0.self_attn.forget_gate.A_log"], want_grads["model.layers.0.self_attn.forget_gate.A_log"])


def test_16_bit_model_equals_upstream_within_16_bits(kimi_linear: Any, tokens: Tensor, close: Close):
    want = kimi_linear.eval()(tokens).logits
    kimi_linear.bfloat16()
    upstream = kimi_linear(tokens).logits.float()
    with integration.enabled():
        ours = kimi_linear(tokens).logits.float()

    def error(x: Tensor) -> float:
        return (x - want).square().mean().sqrt().item()

    assert error(ours) <= 1.5 * error(upstream)


@torch.no_grad()
def test_generate_with_a_cache_equals_upstream(kimi_linear: Any, tokens: Tensor):
    kimi_linear.eval()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    mask = torch.ones_like(tokens[:, :20])
    mask[0, :7] = 0  # padding on the left, as generation wants it
    want = kimi_linear.generate(tokens[:, :20], attention_mask=mask, **options)
    with integration.enabled():
        got = kimi_linear.generate(tokens[:, :20], attention_mask=mask, **options)
        again = kimi_linear.generate(tokens[:, :20], attention_mask=mask, use_cache=False, **options)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(again.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_beam_search_reorders_the_cache_as_upstream_does(kimi_linear: Any, tokens: Tensor):
    kimi_linear.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    want = kimi_linear.generate(tokens[:, :9], **options)
    with integration.enabled():
        assert torch.equal(kimi_linear.generate(tokens[:, :9], **options), want)


@pytest.mark.parametrize("parts", [(70, 80), (1, 1, 1, 147), (149, 1), (2, 148)], ids=str)
@torch.no_grad()
def test_cache_goes_on_where_the_last_call_ended(
    parts: tuple[int, ...], kimi_linear: Any, tokens: Tensor, close: Close
):
    # Parts shorter than the convolution, single tokens and long ones.
    from transformers import DynamicCache

    integration.enable()
    kimi_linear.eval()
    whole = kimi_linear(tokens, use_cache=False).logits
    cache = DynamicCache(config=kimi_linear.config)
    got = [kimi_linear(part, cache=cache).logits for part in tokens.split(parts, dim=1)]
    close(torch.cat(got, dim=1), whole, 1e-5)


@torch.no_grad()
def test_cache_is_upstreams_and_either_can_go_on_from_it(kimi_linear: Any, tokens: Tensor, close: Close):
    kimi_linear.eval()
    integration.enable()
    ours = kimi_linear(tokens[:, :20], use_cache=True).cache
    integration.disable()
    theirs = kimi_linear(tokens[:, :20], use_cache=True).cache
    for got, want in zip(ours.layers[:2], theirs.layers[:2], strict=True):
        assert got.conv_states[0].shape == (2, 3 * 2 * 16, 4)  # W columns, not W-1
        close(got.conv_states[0], want.conv_states[0], 1e-5)
        close(got.recurrent_states[0], want.recurrent_states[0], 1e-5)
        assert got.recurrent_states[0].dtype == torch.float32
    want = kimi_linear(tokens[:, 20:21], cache=theirs).logits
    close(kimi_linear(tokens[:, 20:21], cache=ours).logits, want, 1e-5)


@torch.no_grad()
def test_cache_may_come_by_its_old_name(kimi_linear: Any, tokens: Tensor):
    from transformers import DynamicCache

    integration.enable()
    model = kimi_linear.model.eval()
    cache = DynamicCache(config=kimi_linear.config)
    with pytest.warns(FutureWarning, match="past_key_values"):
        model(tokens[:, :20], past_key_values=cache)
    assert cache.layers[0].has_previous_state[0]


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_gradients_pass_through_a_cache(
    backend: str, kimi_linear: Any, tokens: Tensor, close: Close, monkeypatch: pytest.MonkeyPatch
):
    # transformers edits its cache in place after the layer has read it; what the graph holds must not change with it.
    # The eager operator happens to copy the state first; the reference does not.
    monkeypatch.setattr(openkda, "chunk_kda", functools.partial(openkda.chunk_kda, backend=backend))
    integration.enable()
    embed = kimi_linear.model.embed_tokens.weight
    whole = kimi_linear(tokens[:, :50], use_cache=False).logits[:, 20:]
    (want,) = torch.autograd.grad(whole.square().sum(), embed)
    cache = kimi_linear(tokens[:, :20], use_cache=True).cache
    (got,) = torch.autograd.grad(kimi_linear(tokens[:, 20:50], cache=cache).logits.square().sum(), embed)
    close(got, want)


def test_single_tokens_run_the_recurrent_operator(kimi_linear: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch):
    integration.enable()
    kimi_linear.eval()
    called: list[str] = []
    for name in ("chunk_kda", "recurrent_kda"):
        operator = getattr(openkda, name)

        def spy(*args: Any, name: str = name, operator: Callable[..., Any] = operator, **kwargs: Any) -> Any:
            called.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(openkda, name, spy)
    with torch.no_grad():
        cache = kimi_linear(tokens[:, :5], use_cache=True).cache
        kimi_linear(tokens[:, 5:6], cache=cache)
    assert called == ["chunk_kda"] * 2 + ["recurrent_kda"] * 2
