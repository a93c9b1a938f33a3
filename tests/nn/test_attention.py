"""KimiDeltaAttention: against a layer written out in plain torch, its three forms of input, decoding, parameters."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import openkda
from openkda import testing
from openkda.nn import KDACache, KimiDeltaAttention

F64 = torch.float64
GATES = {"softplus": None, "bounded": -5.0}
# What Kimi-Linear-48B-A3B stores for one attention layer, scaled down to D = 32, H = 4, K = 8 and W = 4.
ON_DISK = {
    "A_log": (1, 1, 4, 1), "dt_bias": (32,), "o_norm.weight": (8,), "o_proj.weight": (32, 32),
    "q_proj.weight": (32, 32), "k_proj.weight": (32, 32), "v_proj.weight": (32, 32),
    "q_conv1d.weight": (32, 1, 4), "k_conv1d.weight": (32, 1, 4), "v_conv1d.weight": (32, 1, 4),
    "f_a_proj.weight": (8, 32), "f_b_proj.weight": (32, 8), "b_proj.weight": (4, 32),
    "g_a_proj.weight": (8, 32), "g_b_proj.weight": (32, 8),
}  # fmt: skip


def make(dtype: torch.dtype = F64, **options: Any) -> KimiDeltaAttention:
    """D = 24, H = 2, HV = 4, K = 8, V = 5, W = 3: no two sizes that could be mistaken for one another."""
    sizes = {"hidden_size": 24, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "head_v_dim": 5, "conv_size": 3}
    layer = KimiDeltaAttention(**(sizes | {"layer_idx": 0} | options)).to(dtype)
    with torch.no_grad():
        layer.o_norm.weight.normal_(1.0, 0.3)
        layer.dt_bias.add_(torch.randn_like(layer.dt_bias))
    return layer


def plain_layer(p: dict[str, Tensor], x: Tensor, lower_bound: float | None, beta_scale: int) -> Tensor:
    """One KDA layer, x [T, D], in nothing but torch: the projections of Kimi Linear around the paper's recurrence."""
    HV, T = p["A_log"].numel(), x.shape[0]
    K, V = p["dt_bias"].numel() // HV, p["o_norm.weight"].numel()

    def branch(name: str, width: int) -> Tensor:
        weight = p[f"{name}_conv1d.weight"]
        y = (x @ p[f"{name}_proj.weight"].T).T[None]
        y = F.conv1d(F.pad(y, (weight.shape[-1] - 1, 0)), weight, groups=weight.shape[0])[0].T
        return F.silu(y).view(T, -1, width)

    q, k, v = branch("q", K), branch("k", K), branch("v", V)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HV // y.shape[1], 1) for y in (q * K**-0.5, k))
    raw = (x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T + p["dt_bias"]).view(T, HV, K)
    rate = p["A_log"].view(HV, 1).exp()
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    beta = beta_scale * torch.sigmoid(x @ p["b_proj.weight"].T)
    state, outputs = x.new_zeros(HV, K, V), []
    for t in range(T):
        state = g[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv,h->hkv", k[t], error, beta[t])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    o = torch.stack(outputs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["o_norm.weight"]
    gate = (x @ p["g_a_proj.weight"].T @ p["g_b_proj.weight"].T).view(T, HV, V)
    return (o * torch.sigmoid(gate)).flatten(1) @ p["o_proj.weight"].T


def gradients(layer: KimiDeltaAttention, y: Tensor, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    names, leaves = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, (x, *leaves), dy)
    return {"y": y.detach()} | dict(zip(("dx", *(f"d{n}" for n in names)), grads, strict=True))


def assert_same(got: Tensor, want: Tensor) -> None:
    testing.assert_close({"y": got}, {"y": want}, testing.FP64_LIMIT)


# ---- against plain torch
@pytest.mark.parametrize("beta_scale", [1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_layer_matches_a_layer_written_out_in_plain_torch(gate: str, beta_scale: int):
    layer = make(lower_bound=GATES[gate], allow_neg_eigval=beta_scale == 2)
    x, dy = torch.randn(2, 70, 24, dtype=F64, requires_grad=True), torch.randn(2, 70, 24, dtype=F64)
    got = gradients(layer, layer(x), x, dy)
    rows = [plain_layer(dict(layer.named_parameters()), row, GATES[gate], beta_scale) for row in x]
    testing.assert_close(got, gradients(layer, torch.stack(rows), x, dy), testing.FP64_LIMIT)


def test_fp32_layer_stays_within_the_fp32_limit_of_fp64():
    exact, x, dy = make(), torch.randn(2, 70, 24, dtype=F64), torch.randn(2, 70, 24, dtype=F64)
    layer = copy.deepcopy(exact).float()
    exact = copy.deepcopy(layer).double()  # the same rounded parameters
    x, dy = x.float(), dy.float()
    x64 = x.double().requires_grad_()
    x.requires_grad_()
    want = gradients(exact, exact(x64), x64, dy.double())
    testing.assert_close(gradients(layer, layer(x), x, dy), want, testing.FP32_LIMIT)


def test_bf16_layer_runs_and_every_parameter_has_a_finite_gradient():
    layer = make(torch.bfloat16)
    y = layer(torch.randn(2, 70, 24).bfloat16())
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_operator_keeps_its_precision_under_autocast():
    def mixed(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return openkda.chunk_kda(*args, **options)

    inputs = testing.make_inputs(T=70, dtype="float32")
    want, got = testing.run(openkda.chunk_kda, inputs), testing.run(mixed, inputs)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_fp32_layer_trains_under_autocast():
    layer, x = make(torch.float32), torch.randn(2, 70, 24)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.A_log.grad is not None
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    # bf16 has 8 bits; a layer whose state were rounded as well would be off by several times as much
    assert testing.relative_rms(y, layer(x)) < 2**-6


# ---- dense = packed = padded
LENGTHS = [7, 1, 0, 66, 2]


def test_packed_and_padded_input_give_what_each_sequence_gives_alone():
    layer, total, longest = make(), sum(LENGTHS), max(LENGTHS)
    docs = [torch.randn(1, n, 24, dtype=F64) for n in LENGTHS]
    alone = [layer(doc) for doc in docs]

    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    packed = layer(torch.cat(docs, 1), cu_seqlens=cu)
    assert_same(packed, torch.cat(alone, 1))

    for side in ("right", "left"):  # and padding holds NaN
        x = torch.full((len(docs), longest, 24), float("nan"), dtype=F64)
        mask = torch.zeros(len(docs), longest, dtype=torch.long)
        for n, length in enumerate(LENGTHS):
            rows = slice(0, length) if side == "right" else slice(longest - length, longest)
            x[n, rows], mask[n, rows] = docs[n][0], 1
        y = layer(x, mask)
        assert_same(y[mask.bool()], packed[0, :total])
        assert not y[~mask.bool()].any()


def test_padding_affects_no_gradient():
    layer, dy = make(), torch.randn(3, 9, 24, dtype=F64)
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 9])
    clean = (torch.randn(3, 9, 24, dtype=F64) * mask[..., None]).requires_grad_()
    dirty = clean.detach().masked_fill(mask[..., None] == 0, float("nan")).requires_grad_()
    want = gradients(layer, layer(clean, mask), clean, dy)
    got = gradients(layer, layer(dirty, mask.bool()), dirty, dy)
    for name in want:
        assert torch.equal(got[name], want[name]), name
    assert not got["dx"][mask == 0].any()


def test_padded_gradients_equal_those_of_the_sequences_alone():
    layer, dy = make(), torch.randn(2, 9, 24, dtype=F64)
    x = torch.randn(2, 9, 24, dtype=F64, requires_grad=True)
    mask = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
    got = gradients(layer, layer(x, mask), x, dy)
    first, second = (gradients(layer, layer(row), x, d) for row, d in ((x[:1], dy[:1]), (x[1:, 5:], dy[1:, 5:])))
    testing.assert_close(got, {n: first[n] + second[n] for n in first if n != "y"}, testing.FP64_LIMIT)


def test_mask_of_ones_changes_nothing():
    layer, x = make(), torch.randn(2, 9, 24, dtype=F64)
    assert_same(layer(x, torch.ones(2, 9)), layer(x))


def test_all_padding_gives_zeros():
    layer, x = make(), torch.full((2, 3, 24), float("nan"), dtype=F64)
    assert not layer(x, torch.zeros(2, 3, dtype=torch.bool)).any()


def test_documents_do_not_leak_into_each_other():
    layer, cu = make(), torch.tensor([0, 5, 12])
    x = torch.randn(1, 12, 24, dtype=F64)
    changed = x.clone()
    changed[:, :5] = torch.randn(1, 5, 24, dtype=F64)
    assert torch.equal(layer(x, cu_seqlens=cu)[:, 5:], layer(changed, cu_seqlens=cu)[:, 5:])


# ---- decoding
@pytest.mark.parametrize("prompt", [1, 2, 65, 70])
@pytest.mark.parametrize("gate", GATES)
def test_cached_decoding_gives_the_full_forward(gate: str, prompt: int):
    layer, x = make(lower_bound=GATES[gate]), torch.randn(2, 70, 24, dtype=F64)
    cache = KDACache()
    with torch.no_grad():
        steps = [layer(x[:, :prompt], cache=cache)]
        steps += [layer(x[:, t : t + 1], cache=cache) for t in range(prompt, 70)]
        assert_same(torch.cat(steps, 1), layer(x))


def test_fp32_decoding_stays_within_the_fp32_limit_of_the_full_forward():
    layer, x, cache = make(torch.float32), torch.randn(2, 70, 24), KDACache()
    with torch.no_grad():
        steps = [layer(x[:, :40], cache=cache)] + [layer(x[:, t : t + 1], cache=cache) for t in range(40, 70)]
        testing.assert_close({"y": torch.cat(steps, 1)}, {"y": layer(x)}, testing.FP32_LIMIT)


def test_prefill_may_come_in_pieces_of_any_size():
    layer, x, cache = make(), torch.randn(2, 70, 24, dtype=F64), KDACache()
    pieces = [layer(part, cache=cache) for part in x.split([1, 2, 0, 40, 27], 1)]
    assert_same(torch.cat(pieces, 1), layer(x))


def test_batch_with_left_padding_decodes_like_each_row_alone():
    layer = make()
    prompts = [torch.randn(1, n, 24, dtype=F64) for n in (6, 2)]
    steps = torch.randn(2, 3, 24, dtype=F64)
    x = torch.cat([prompts[0], F.pad(prompts[1], (0, 0, 4, 0))])
    mask = torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    cache = KDACache()
    with torch.no_grad():
        layer(x, mask, cache=cache)
        got = []
        for t in range(3):  # the mask grows with the text, as in transformers
            mask = F.pad(mask, (0, 1), value=1)
            got.append(layer(steps[:, t : t + 1], mask, cache=cache))
        for n, prompt in enumerate(prompts):
            want = layer(torch.cat([prompt, steps[n : n + 1]], 1))[:, -3:]
            assert_same(torch.cat(got, 1)[n : n + 1], want)


def test_finished_row_keeps_its_state_while_others_decode():
    layer, x, cache = make(), torch.randn(2, 5, 24, dtype=F64), KDACache()
    with torch.no_grad():
        layer(x, cache=cache)
        before = cache.get(0)
        y = layer(torch.randn(2, 1, 24, dtype=F64), torch.tensor([[1], [0]]), cache=cache)
    after = cache.get(0)
    assert before is not None
    assert after is not None
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[1], old[1])
        assert not torch.equal(new[0], old[0])
    assert not y[1].any()


def test_packed_prompts_decode_together():
    layer, cache = make(), KDACache()
    prompts, step = torch.randn(1, 9, 24, dtype=F64), torch.randn(1, 2, 24, dtype=F64)
    with torch.no_grad():
        layer(prompts, cu_seqlens=torch.tensor([0, 4, 9]), cache=cache)
        got = layer(step, cu_seqlens=torch.tensor([0, 1, 2]), cache=cache)
        first, second = (
            layer(torch.cat([prompts[:, :4], step[:, :1]], 1)),
            layer(torch.cat([prompts[:, 4:], step[:, 1:]], 1)),
        )
    assert_same(got, torch.cat([first[:, -1:], second[:, -1:]], 1))


def test_cache_selects_sequences_and_forgets():
    layer, cache = make(), KDACache()
    x, step = torch.randn(3, 5, 24, dtype=F64), torch.randn(2, 1, 24, dtype=F64)
    with torch.no_grad():
        layer(x, cache=cache)
        cache.select(torch.tensor([2, 0]))
        got = layer(step, cache=cache)
        want = layer(torch.cat([x[[2, 0]], step], 1))[:, -1:]
    assert_same(got, want)
    assert len(cache) == 1
    cache.reset()
    assert cache.get(0) is None


def test_cache_has_a_fixed_size_and_is_left_alone_by_a_call_that_fails():
    layer, cache = make(torch.float32), KDACache()
    with torch.no_grad():
        layer(torch.randn(2, 50, 24), cache=cache)
        state = cache.get(0)
        assert state is not None
        assert [tuple(x.shape) for x in state] == [(2, 16, 2), (2, 16, 2), (2, 20, 2), (2, 4, 8, 5)]
        with pytest.raises(ValueError, match=r"initial_state must have shape \[N, C, W-1\] = \[3, 16, 2\]"):
            layer(torch.randn(3, 1, 24), cache=cache)
    assert cache.get(0) is state


def test_gradient_flows_through_a_cache():
    layer, x, cache = make(), torch.randn(1, 8, 24, dtype=F64, requires_grad=True), KDACache()
    layer(x[:, :7], cache=cache)
    (got,) = torch.autograd.grad(layer(x[:, 7:], cache=cache).sum(), x)
    (want,) = torch.autograd.grad(layer(x)[:, 7:].sum(), x)
    assert_same(got, want)


# ---- parameters
@pytest.mark.parametrize("options", [{}, {"num_v_heads": 8, "head_v_dim": 6}], ids=["plain", "grouped"])
def test_rules_name_every_parameter_and_its_shape(options: dict[str, int]):
    layer = KimiDeltaAttention(32, 4, 8, **options)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == layer.sizes.parameters()
    assert set(layer.state_dict()) == set(ON_DISK)


def test_checkpoint_names_and_shapes_load_strictly():
    layer = KimiDeltaAttention(32, 4, 8)
    disk = {name: torch.randn(shape) for name, shape in ON_DISK.items()}
    layer.load_state_dict(disk)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.flatten(), disk[name].flatten()), name
    assert layer.A_log.shape == (4,)
    assert disk["A_log"].shape == (1, 1, 4, 1)  # the caller's dictionary is not changed


@pytest.mark.parametrize("assign", [False, True])
def test_nested_16_bit_checkpoint_loads_with_fp32_gate_parameters(assign: bool):
    model = torch.nn.Sequential(torch.nn.Identity(), KimiDeltaAttention(32, 4, 8, dtype=torch.bfloat16))
    disk = {f"1.{name}": torch.randn(shape).bfloat16() for name, shape in ON_DISK.items()}
    disk["1.dt_bias"] = disk["1.dt_bias"].view(4, 8)
    model.load_state_dict(disk, assign=assign)
    layer = model[1]
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.A_log, disk["1.A_log"].flatten().float())
    assert torch.equal(layer.dt_bias, disk["1.dt_bias"].flatten().float())


def test_checkpoint_of_another_head_count_is_refused():
    with pytest.raises(RuntimeError, match="A_log"):
        KimiDeltaAttention(32, 4, 8).load_state_dict(
            {n: torch.zeros(s) for n, s in (ON_DISK | {"A_log": (8,)}).items()}
        )


@pytest.mark.parametrize("move", ["bfloat16", "half", "to"])
def test_gate_parameters_stay_fp32_when_the_layer_becomes_16_bit(move: str):
    layer = make(torch.float32)
    layer(torch.randn(1, 4, 24)).sum().backward()
    before = {name: getattr(layer, name).detach().clone() for name in ("A_log", "dt_bias")}
    layer = {"bfloat16": layer.bfloat16, "half": layer.half, "to": lambda: layer.to(torch.bfloat16)}[move]()
    for name, value in before.items():
        parameter = getattr(layer, name)
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter, value)
    assert layer.q_proj.weight.dtype.itemsize == 2
    assert {p.dtype for p in layer.double().parameters()} == {F64}


def marked(layer: torch.nn.Module) -> set[str]:
    return {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}


def test_gate_parameters_are_marked_against_weight_decay_and_stay_so():
    layer = KimiDeltaAttention(32, 4, 8, device="meta")
    for copied in (layer, layer.to_empty(device="cpu"), layer.bfloat16(), copy.deepcopy(layer),
                   pickle.loads(pickle.dumps(layer))):  # fmt: skip
        assert marked(copied) == {"A_log", "dt_bias"}
    layer.reset_parameters()
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert marked(layer) == {"A_log", "dt_bias"}


@pytest.mark.parametrize("gate", GATES)
def test_new_gate_parameters_follow_their_model(gate: str):
    layer = KimiDeltaAttention(64, 64, 32, lower_bound=GATES[gate])
    rate = layer.A_log.exp()
    assert 1 <= rate.min() < 2
    assert 15 < rate.max() <= 16
    assert abs(rate.mean().item() - 8.5) < 2.5  # uniform, 64 draws: standard error 0.54
    if gate == "bounded":
        assert not layer.dt_bias.any()
        return
    step = F.softplus(layer.dt_bias.double())
    assert 1e-3 * (1 - 1e-4) <= step.min() < 1.1e-3
    assert 0.09 < step.max() <= 0.1 * (1 + 1e-4)
    # log-uniform, 2048 draws: mean of the logarithms in the middle of the range, standard error 0.03
    assert abs(step.log().mean().item() - math.log(1e-2)) < 0.15


@pytest.mark.parametrize("gate", GATES)
def test_meta_build_needs_only_reset_parameters(gate: str):
    layer = KimiDeltaAttention(32, 4, 8, lower_bound=GATES[gate], device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    again = KimiDeltaAttention(32, 4, 8, lower_bound=GATES[gate])
    again.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer(torch.randn(1, 5, 32)).isfinite().all()
    for p in (layer, again):
        assert p.A_log.dtype == torch.float32
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in again.named_parameters()}


def test_layer_takes_its_number_of_heads_from_its_weights():
    # A tensor-parallel slice: the first of two ranks holds heads 0 and 1 of 4; partial outputs add up to the whole.
    whole, x = KimiDeltaAttention(32, 4, 8).double(), torch.randn(1, 9, 32, dtype=F64)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(whole)
        for name, p in part.named_parameters():
            if name in ("f_a_proj.weight", "g_a_proj.weight", "o_norm.weight"):
                continue  # replicated
            p.data = p.data.chunk(2, 1 if name == "o_proj.weight" else 0)[rank]
        parts.append(part(x))
    assert_same(parts[0] + parts[1], whole(x))


def test_activation_checkpointing_gives_the_same_gradients():
    layer, x, dy = make(), torch.randn(1, 9, 24, dtype=F64, requires_grad=True), torch.randn(1, 9, 24, dtype=F64)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    want, got = gradients(layer, layer(x), x, dy), gradients(layer, again, x, dy)
    for name in want:
        assert torch.equal(got[name], want[name]), name


# Dynamo itself (torch 2.13) makes the object that it warns about, for every custom derivative that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "form", [pytest.param("dense", marks=pytest.mark.slow), pytest.param("packed", marks=pytest.mark.slow), "padded"]
)
def test_layer_compiles_without_a_graph_break(form: str):
    layer, x = make(torch.float32), torch.randn(2, 5, 24)
    options: dict[str, Any] = {}
    if form == "packed":
        x, options = x.view(1, 10, 24), {"cu_seqlens": torch.tensor([0, 3, 9])}
    if form == "padded":
        options = {"attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])}
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, **options), layer(x, **options))


# ---- messages
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_v_heads": 3}, ValueError, r"num_v_heads must be a multiple of num_heads = 2, got 3"),
        ({"num_heads": 0}, ValueError, r"KimiDeltaAttention: num_heads must be at least 1, got 0"),
        ({"head_v_dim": 2.0}, TypeError, r"KimiDeltaAttention: head_v_dim must be an int, got 2.0"),
        ({"lower_bound": 0.0}, ValueError, r"KimiDeltaAttention: lower_bound must be finite and below 0, got 0.0"),
        ({"head_dims": 8}, TypeError, "head_dims"),
    ],
)
def test_constructor_names_what_is_wrong(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make(**options)


X = torch.zeros(2, 5, 24, dtype=F64)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (X[0], {}, r"KimiDeltaAttention: hidden_states must have shape \[B, T, D\], got \[5, 24\]"),
        (X[..., :8], {}, r"hidden_states must have shape \[B, T, D\] = \[2, 5, 24\], got \[2, 5, 8\]"),
        (X, {"attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must have shape \[B, S\], got \[2, 1, 5, 5\]"),
        (X, {"attention_mask": torch.ones(2, 4)}, r"have shape \[B, S\] with B = 2 and S >= T = 5, got \[2, 4\]"),
        (X, {"attention_mask": torch.ones(1, 5)}, r"have shape \[B, S\] with B = 2 and S >= T = 5, got \[1, 5\]"),
        (
            X[:1],
            {"attention_mask": torch.ones(1, 5), "cu_seqlens": torch.tensor([0, 5])},
            r"attention_mask must be None with cu_seqlens, got \[1, 5\]; packed input has no padding",
        ),
        (X, {"cu_seqlens": torch.tensor([0, 5])}, r"batch size must be 1 with cu_seqlens, got 2"),
    ],
)
def test_forward_names_what_is_wrong(x: Tensor, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make()(x, **options)


def test_cache_needs_a_layer_index():
    with pytest.raises(
        ValueError, match=r"layer_idx must be given to use a cache, got None; set it in the constructor"
    ):
        make(layer_idx=None)(X, cache=KDACache())


def test_context_parallel_wants_a_context():
    with pytest.raises(TypeError, match="cp_context must come from build_cp_context, got object"):
        make()(X, cp_context=object())
