"""Decoding with caches gives what the full forward gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from openkda.integrations.torchtitan.decode import stream
from openkda.integrations.torchtitan.model import KimiLinearModel

MakeModel = Callable[..., KimiLinearModel]


@pytest.mark.parametrize("flavor", ["tiny", "tiny-bounded"])
@pytest.mark.parametrize(
    "steps",
    [
        (70, *[1] * 10),  # a prompt longer than a chunk, then token by token
        (1,) * 12,  # from the first token on
        (2, 3, 1, 40, 1),  # prompts in pieces, shorter than the convolution at first
    ],
    ids=["prefill_then_decode", "decode_only", "pieces"],
)
def test_cached_logits_equal_the_full_forward(make_model: MakeModel, flavor: str, steps: tuple[int, ...]) -> None:
    model = make_model(flavor).eval()
    tokens = torch.randint(0, 256, (2, sum(steps)))
    with torch.no_grad():
        full = model(tokens)
        cache = model.init_cache(2, max_length=sum(steps))
        cached = torch.cat([model(part, cache=cache) for part in tokens.split(steps, dim=1)], dim=1)
    assert cache.length == sum(steps)
    assert ((cached - full).norm() / full.norm()).item() < 1e-5
    assert torch.equal(cached.argmax(-1), full.argmax(-1))


def test_greedy_stream_is_the_argmax_of_the_full_forward_token_by_token(make_model: MakeModel) -> None:
    model = make_model().eval()
    prompt = torch.randint(0, 256, (2, 9))
    generated = torch.stack(list(stream(model, prompt, max_new_tokens=20)), dim=1)
    tokens = prompt
    with torch.no_grad():
        for _ in range(20):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, tokens[:, 9:])


def test_stream_hands_logits_to_choose_and_stops_when_every_row_has_stopped(make_model: MakeModel) -> None:
    model = make_model().eval()
    script = iter([torch.tensor([7, 1]), torch.tensor([2, 7]), torch.tensor([3, 3])])
    seen = []

    def choose(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.shape)
        return next(script)

    out = list(stream(model, torch.zeros(2, 3, dtype=torch.long), max_new_tokens=5, choose=choose, stop=7))
    assert [t.tolist() for t in out] == [[7, 1], [2, 7]]
    assert seen == [(2, 260), (2, 260)]


def test_stream_rejects_an_empty_prompt(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"prompt must be token ids \[B, L\] with L >= 1, got shape \[1, 0\]"):
        next(stream(make_model(), torch.zeros(1, 0, dtype=torch.long), max_new_tokens=1))


def test_cache_says_when_it_is_full(make_model: MakeModel) -> None:
    model = make_model()
    cache = model.init_cache(1, max_length=4)
    with torch.no_grad(), pytest.raises(ValueError, match="must fit max_length = 4, got 5 tokens"):
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_kda_cache_does_not_grow_with_the_sequence(make_model: MakeModel) -> None:
    model = make_model()
    cache = model.init_cache(1, max_length=40)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
        first = cache.layers[0]
        shapes = (first.state.shape, first.q_conv.shape)
        model(torch.zeros(1, 30, dtype=torch.long), cache=cache)
    assert shapes == ((1, 4, 32, 32), (1, 128, 3))
    assert (first.state.shape, first.q_conv.shape) == shapes
    assert first.state.dtype == torch.float32


def test_cache_and_packing_exclude_each_other(make_model: MakeModel) -> None:
    kda = make_model().layers["0"].kda
    from openkda.integrations.torchtitan.decode import KDACache

    with pytest.raises(ValueError, match="cache must be None with cu_seqlens"):
        kda(torch.randn(1, 4, 128), torch.tensor([0, 4], dtype=torch.int32), cache=KDACache())
