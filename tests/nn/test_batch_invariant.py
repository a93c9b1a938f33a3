"""KimiDeltaAttention(batch_invariant=True): a token has the same bits in any batch, packing or cut into calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from openkda import testing
from openkda.nn import KDACache, KimiDeltaAttention
from openkda.nn.blocks import BlockState, walk

GATES = {"softplus": None, "bounded": -5.0}
# Widths that leave vector units a remainder, and widths for which one row and many go through different matmuls.
SIZES = {
    "odd": {"hidden_size": 24, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "head_v_dim": 5, "conv_size": 3},
    "even": {"hidden_size": 128, "num_heads": 4, "head_dim": 32},
}


def make(sizes: str, gate: str, dtype: torch.dtype = torch.float32, **options: Any) -> KimiDeltaAttention:
    call = SIZES[sizes] | {"layer_idx": 0, "lower_bound": GATES[gate], "batch_invariant": True} | options
    return KimiDeltaAttention(**call).to(dtype)


def draw(layer: KimiDeltaAttention, *shape: int) -> Tensor:
    return torch.randn(*shape, layer.sizes.hidden_size, dtype=layer.q_proj.weight.dtype)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes, dtype", [("odd", torch.float32), ("even", torch.bfloat16)], ids=str)
def test_decoding_token_by_token_gives_the_bits_of_the_whole_sequence(sizes, dtype, gate):
    layer, cache = make(sizes, gate, dtype), KDACache()
    x = draw(layer, 2, 66)
    want = layer(x)
    got = [layer(x[:, t : t + 1], cache=cache) for t in range(66)]
    assert torch.equal(torch.cat(got, 1), want)


@torch.no_grad()
def test_decoding_on_two_threads_gives_the_bits_of_the_whole_sequence(two_threads):
    layer, cache = make("even", "softplus"), KDACache()
    x = draw(layer, 1, 80)
    want = layer(x)
    got = [layer(part, cache=cache) for part in x.split([61, 1, 1, 1, 1, 15], 1)]
    assert torch.equal(torch.cat(got, 1), want)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_decoding_on_a_gpu_gives_the_bits_of_the_whole_sequence(backend, gate):
    layer = make("even", gate, torch.bfloat16, head_dim=64, backend=backend).cuda()
    cache, x = KDACache(), draw(layer, 3, 70).cuda()
    want = layer(x)
    got = [layer(part, cache=cache) for part in x.split([50, *[1] * 20], 1)]
    assert torch.equal(torch.cat(got, 1), want)
    assert torch.equal(layer(x[1:2]), want[1:2])
    packed = layer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 70, 140, 210], device="cuda"))
    assert torch.equal(packed[0], want.flatten(0, 1))


@torch.no_grad()
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes", SIZES)
def test_token_has_the_same_bits_alone_in_a_batch_packed_padded_and_in_pieces(sizes, gate):
    layer = make(sizes, gate)
    lengths = [7, 1, 130, 64, 2]
    docs = [draw(layer, 1, n) for n in lengths]
    alone = torch.cat([layer(doc) for doc in docs], 1)

    cu = torch.tensor([0, 7, 7, 8, 138, 202, 204])  # with an empty slot
    packed = torch.cat([*docs, draw(layer, 1, 3) * float("nan")], 1)
    y = layer(packed, cu_seqlens=cu)
    assert torch.equal(y[:, :204], alone)
    assert not y[:, 204:].any()

    x = torch.cat([F.pad(doc, (0, 0, 130 - doc.shape[1], 0), value=float("nan")) for doc in docs])
    mask = torch.stack([torch.arange(130) >= 130 - n for n in lengths])
    assert torch.equal(layer(x, mask)[mask], alone[0])

    long = docs[2]
    for pieces in ([130], [64, 66], [63, 1, 1, 65], [1, 2, 127], [0, 70, 60]):
        cache = KDACache()
        got = [layer(part.expand(2, -1, -1), cache=cache)[1:] for part in long.split(pieces, 1)]
        assert torch.equal(torch.cat(got, 1), alone[:, 8:138]), pieces


@torch.no_grad()
def test_rows_at_different_places_decode_together_and_are_selected():
    layer, cache = make("even", "softplus"), KDACache()
    docs = [draw(layer, 1, n) for n in (100, 68, 41)]
    want = [layer(doc) for doc in docs]
    prompts = [60, 30, 1]
    x = torch.cat([F.pad(doc[:, :n], (0, 0, 60 - n, 0)) for doc, n in zip(docs, prompts, strict=True)])
    layer(x, torch.stack([torch.arange(60) >= 60 - n for n in prompts]), cache=cache)
    for t in range(36):
        step = torch.cat([doc[:, n + t : n + t + 1] for doc, n in zip(docs, prompts, strict=True)])
        y = layer(step, cache=cache)
        for n in range(3):
            assert torch.equal(y[n], want[n][0, prompts[n] + t][None]), (n, t)
    cache.select(torch.tensor([2, 0]))
    y = layer(torch.cat([docs[2][:, 37:38], docs[0][:, 96:97]]), cache=cache)
    assert torch.equal(y, torch.cat([want[2][:, 37:38], want[0][:, 96:97]]))


def test_block_by_block_the_layer_and_its_gradients_are_those_of_the_plain_layer():
    plain = make("odd", "bounded", torch.float64, batch_invariant=False)
    layer = make("odd", "bounded", torch.float64)
    layer.load_state_dict(plain.state_dict())
    x, dy = draw(layer, 2, 130), draw(layer, 2, 130)
    results = []
    for module in (plain, layer):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        names, parameters = zip(*module.named_parameters(), strict=True)
        grads = torch.autograd.grad(y, (leaf, *parameters), dy)
        results.append({"y": y.detach()} | dict(zip(("dx", *names), grads, strict=True)))
    testing.assert_close(results[1], results[0], testing.FP64_LIMIT)


@torch.no_grad()
def test_invariant_layer_takes_empty_inputs():
    layer, cache = make("odd", "softplus"), KDACache()
    assert layer(draw(layer, 0, 3)).shape == (0, 3, 24)
    assert layer(draw(layer, 2, 0), cache=cache).shape == (2, 0, 24)
    assert layer(draw(layer, 2, 1), cache=cache).shape == (2, 1, 24)


def test_save_intermediates_and_batch_invariant_reach_the_operator(monkeypatch):
    from openkda.nn import attention

    seen = []

    def spy(*args, **kwargs):
        seen.append({name: kwargs[name] for name in ("save_intermediates", "batch_invariant")})
        return operator(*args, **kwargs)

    operator = attention.chunk_kda
    monkeypatch.setattr(attention, "chunk_kda", spy)
    for flags in ((False, False), (True, False), (True, True)):
        named = dict(zip(("save_intermediates", "batch_invariant"), flags, strict=True))
        layer = make("odd", "softplus", **named)
        layer(draw(layer, 1, 3)).sum().backward()
        assert seen.pop() == named


@pytest.mark.parametrize("name", ["save_intermediates", "batch_invariant"])
def test_layer_refuses_a_flag_that_is_no_bool(name):
    with pytest.raises(TypeError, match=rf"^KimiDeltaAttention: {name} must be a bool, got int"):
        make("odd", "softplus", **{name: 1})


def test_invariant_layer_refuses_context_parallelism_and_a_cache_of_other_sequences():
    layer, cache = make("odd", "softplus"), KDACache()
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: cp_context must be None with batch_invariant, got int"):
        layer(draw(layer, 1, 3), cp_context=1)
    layer(draw(layer, 2, 3), cache=cache)
    before = cache.get(0)
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: cache must hold as many .* input, 3, got 2"):
        layer(draw(layer, 3, 1), cache=cache)
    assert cache.get(0) is before


def test_walk_gives_every_block_the_same_shape_and_the_state_before_it():
    seen = []

    def step(block: Tensor, state: int | None) -> tuple[Tensor, int]:
        seen.append((tuple(block.shape), state, int((block != 0).sum())))
        return block * 2, (state or 0) + 1

    rows, state, outputs = torch.arange(1.0, 151), BlockState(), []
    for part in rows.split([3, 61, 1, 85]):
        y, state = walk(step, part, state)
        outputs.append(y)
    assert torch.equal(torch.cat(outputs), rows * 2)
    assert [shape for shape, _, _ in seen] == [(1, 64)] * len(seen)
    assert [(before, size) for _, before, size in seen] == [(None, 3), (None, 64), (1, 1), (1, 64), (2, 22)]
    assert state.state == 2
    assert torch.equal(state.rows, rows[128:])
