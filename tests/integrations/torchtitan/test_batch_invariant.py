"""A whole model with batch_invariant=True: what a rollout says of a token and what training says are the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from openkda import testing
from openkda.integrations.torchtitan.decode import BlockCache, stream
from openkda.integrations.torchtitan.model import KimiLinearModel

MakeModel = Callable[..., KimiLinearModel]


@pytest.fixture
def make_invariant(make_model: MakeModel) -> MakeModel:
    """The tiny model with the flag, and parameters that leave nothing at its initial value."""
    from dataclasses import replace

    from openkda.integrations.torchtitan.builders import SIZES, model_config

    def make(flavor: str, batch_invariant: bool = True, **sizes: object) -> KimiLinearModel:
        config = model_config(replace(SIZES[flavor], **sizes), attention_backend="masked")
        config.batch_invariant = batch_invariant
        model = config.build()
        model.load_state_dict(make_model(flavor, **sizes).state_dict())
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lm_head" not in name:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[.., vocabulary], [..] -> [..], every row alone, as a rollout has them."""
    rows = [F.log_softmax(row.clone(), -1) for row in logits.flatten(0, -2)]
    return torch.stack(rows).gather(-1, tokens.reshape(-1, 1))[:, 0].view(tokens.shape)


@pytest.mark.parametrize("flavor, threads", [("tiny", 1), ("tiny-bounded", 2)], indirect=["threads"])
def test_rollout_and_training_log_probabilities_are_equal_to_the_bit(make_invariant: MakeModel, flavor: str, threads):
    # Two rows sampled after prompts of 30 tokens, across the end of a block; then both in training, one row each, one
    # longer batch, and packed behind another document.
    model = make_invariant(flavor)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 256, (2, 30))
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    model.eval()
    sampled = torch.stack(list(stream(model, prompt, max_new_tokens=40, choose=choose)), 1)  # [2, 40]
    rollout = log_probabilities(torch.stack(seen, 1), sampled)

    model.train()
    tokens = torch.cat([prompt, sampled], 1)
    trained = model(tokens)
    assert trained.requires_grad
    assert torch.equal(trained[:, 29:-1], torch.stack(seen, 1))
    assert torch.equal(log_probabilities(trained[:, 29:-1], sampled), rollout)
    trained.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    with torch.no_grad():
        alone = model(tokens[1:])
        assert torch.equal(alone[0], trained[1])
        longer = model(torch.cat([torch.randint(0, 256, (2, 70)), tokens])[:, :70])
        assert torch.equal(longer[2:], trained)
        packed = torch.cat([torch.randint(0, 256, (1, 5)), tokens[:1], tokens[1:]], 1)
        positions = torch.cat([torch.arange(5), torch.arange(70), torch.arange(70)])[None]
        for masks in (None, model.get_attention_masks(positions)):
            together = model(packed, None if masks else positions, masks)
            assert torch.equal(together[0, 5:75], trained[0])
            assert torch.equal(together[0, 75:], trained[1])


def test_pieces_of_any_size_give_the_bits_of_one_call(make_invariant: MakeModel):
    model = make_invariant("tiny").eval()
    tokens = torch.randint(0, 256, (1, 130))
    with torch.no_grad():
        want = model(tokens)
        for pieces in ([70, 60], [63, 1, 1, 65], [129, 1]):
            cache = model.init_cache(1, max_length=1)  # it has no limit
            got = torch.cat([model(part, cache=cache) for part in tokens.split(pieces, 1)], 1)
            assert torch.equal(got, want), pieces
            assert isinstance(cache, BlockCache)
            assert cache.length == 130


@pytest.mark.parametrize("expert_dtype", ["float32", "bfloat16"])
def test_block_by_block_the_model_and_its_gradients_are_those_of_the_plain_model(make_invariant, expert_dtype):
    tokens = torch.randint(0, 256, (2, 100))
    positions = torch.cat([torch.arange(70), torch.arange(30)]).expand(2, -1)
    results = []
    for flag in (False, True):
        model = make_invariant("tiny", flag, expert_dtype=expert_dtype)
        logits = model(tokens, positions)
        logits.square().mean().backward()
        results.append({"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()})
    plain, blocks = results
    # fp32: sums in another order; the experts' three products in bf16 round in between, 2**-9 each
    limit = testing.FP32_LIMIT if expert_dtype == "float32" else 2**-7
    errors = {name: testing.relative_rms(blocks[name], plain[name].double()) for name in plain}
    assert max(errors.values()) < limit, max(errors.items(), key=lambda item: item[1])


def test_a_call_leaves_the_caches_before_it_alone(make_invariant: MakeModel):
    model = make_invariant("tiny").eval()
    cache = model.init_cache(1, max_length=100)
    with torch.no_grad():
        model(torch.randint(0, 256, (1, 70)), cache=cache)
        before = [cache.rows[0].rows.clone(), *(vars_of(c) for c in cache.rows[0].state)]
        kept = cache.rows[0]
        model(torch.randint(0, 256, (1, 60)), cache=cache)
    after = [kept.rows, *(vars_of(c) for c in kept.state)]
    for old, new in zip(before, after, strict=True):
        flat = [(old, new)] if isinstance(old, torch.Tensor) else list(zip(old, new, strict=True))
        assert all(torch.equal(x, y) for x, y in flat)


def vars_of(cache: object) -> list[torch.Tensor]:
    return [getattr(cache, name).clone() for name in cache.__slots__]


def test_operator_follows_torchtitans_batch_invariant_mode(make_model: MakeModel, monkeypatch):
    from openkda.integrations.torchtitan import kda
    from openkda.integrations.torchtitan.decode import KDACache
    from openkda.kda.replay import ReplayState

    inner = make_model().layers["0"].kda.inner_kda
    shapes = [(2, 70, 128)] * 4 + [(2, 70, 4)]
    x, weights = [torch.randn(*shape) for shape in shapes], [torch.randn(128, 1, 4) for _ in range(3)]
    gate = (torch.zeros(4), torch.zeros(4, 32))
    monkeypatch.setattr(kda, "is_in_batch_invariant_mode", lambda: True)
    with torch.no_grad():
        want = inner(*x, *weights, *gate)
        cache, got = KDACache(), []
        for t in range(70):
            got.append(inner(*(part[:, t : t + 1] for part in x), *weights, *gate, cache=cache))
    assert isinstance(cache.state, ReplayState)
    # The convolution before it runs on one token at a time here and on 70 there: its rows must be alike for the bits.
    assert testing.relative_rms(torch.cat(got, 1), want.double()) < 1e-6


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "expert"])
def test_batch_invariance_refuses_a_model_that_is_cut(kind: str):
    from openkda.integrations.torchtitan.config_registry import kimi_linear_tiny

    config = kimi_linear_tiny()
    config.model_spec.model.batch_invariant = True
    config.model_spec.model.update_from_config(config=config)
    setattr(config.parallelism, f"{kind}_parallel_degree", 2)
    with pytest.raises(ValueError, match=f"^kimi_linear: {kind}_parallel_degree must be 1 with batch_invariant, got 2"):
        config.model_spec.model.update_from_config(config=config)
