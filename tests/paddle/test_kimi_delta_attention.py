"""The Paddle layers: the training data flow in its three forms, decoding, casts, and weights shared with torch."""

import paddle
import pytest
import safetensors.torch
import torch

from openkda import nn as torch_nn
from openkda import testing
from openkda.nn import _rules
from openkda.paddle import checkpoint
from openkda.paddle.nn import FusedRMSNormGated, KDACache, KimiDeltaAttention, ShortConvolution
from openkda.testing.paddle import to_paddle, to_torch

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 8}
VARIANTS = {
    "plain": {},
    "gva": {"num_v_heads": 4, "head_v_dim": 16},
    "bounded": {"lower_bound": -5.0},
    "neg_eigval": {"allow_neg_eigval": True, "conv_size": 3},
}
FP32 = 5e-6


def pair(**options):
    """A Paddle layer and a torch layer with the same weights."""
    mine, theirs = KimiDeltaAttention(**SIZES, **options), torch_nn.KimiDeltaAttention(**SIZES, **options)
    checkpoint.load_state_dict(mine, {name: to_paddle(x) for name, x in theirs.state_dict().items()})
    return mine, theirs


def parameter_gradients(mine, theirs):
    turned = {name: layer for name, layer in mine.named_sublayers() if isinstance(layer, paddle.nn.Linear)}
    got = {}
    for name, parameter in mine.named_parameters():
        grad = to_torch(parameter.grad)
        got["d" + name] = grad.T if name.rpartition(".")[0] in turned else grad
    return got, {"d" + name: parameter.grad for name, parameter in theirs.named_parameters()}


@pytest.mark.parametrize("form", ["dense", "masked", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_agrees_with_torch(variant, form):
    mine, theirs = pair(**VARIANTS[variant])
    B = 1 if form == "packed" else 2
    x, dy = torch.randn(B, 70, 24), torch.randn(B, 70, 24)
    options = {}
    if form == "masked":
        mask = torch.ones(B, 70, dtype=torch.int64)
        mask[0, :9], mask[1, 50:], mask[1, 20] = 0, 0, 0
        options["attention_mask"] = mask
        x[mask == 0] = float("nan")
    if form == "packed":
        options["cu_seqlens"] = torch.tensor([0, 3, 3, 66, 70], dtype=torch.int32)
    leaf = x.clone().requires_grad_()
    theirs(leaf, **options).backward(dy)
    mine_x = to_paddle(x)
    mine_x.stop_gradient = False
    y = mine(mine_x, **{name: to_paddle(value) for name, value in options.items()})
    y.backward(to_paddle(dy))
    got, want = parameter_gradients(mine, theirs)
    with torch.no_grad():
        want |= {"y": theirs(x, **options), "dx": leaf.grad}
    got |= {"y": to_torch(y), "dx": to_torch(mine_x.grad)}
    testing.assert_close(got, want, FP32)


def test_masked_equals_packed_and_padding_is_zero():
    layer, x = KimiDeltaAttention(**SIZES), paddle.randn([2, 9, 24])
    mask = paddle.to_tensor([[0, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9])
    y = layer(x, mask)
    assert bool((y[0, :1] == 0).all())
    assert bool((y[0, 6:] == 0).all())
    packed = paddle.concat([x[0, 1:6], x[1]], 0)[None]
    z = layer(packed, cu_seqlens=paddle.to_tensor([0, 5, 14], dtype="int32"))
    assert paddle.allclose(paddle.concat([y[0, 1:6], y[1]], 0), z[0], atol=1e-6)


def test_decoding_continues_the_prompt():
    layer, x = KimiDeltaAttention(**SIZES, layer_idx=0), paddle.randn([2, 12, 24])
    with paddle.no_grad():
        whole, cache = layer(x), KDACache()
        parts = [layer(x[:, :7], cache=cache)] + [layer(x[:, t : t + 1], cache=cache) for t in range(7, 12)]
        assert paddle.allclose(paddle.concat(parts, 1), whole, atol=1e-5)
        cache.select(paddle.to_tensor([1]))
        assert cache.get(0).recurrent.shape[0] == 1


def test_overfits_one_batch():
    layer, x, target = KimiDeltaAttention(**SIZES), paddle.randn([2, 16, 24]), paddle.randn([2, 16, 24])
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
    losses = []
    for _ in range(40):
        loss = ((layer(x) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# ---- parameters
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_shapes_are_those_of_torch(variant):
    mine, theirs = pair(**VARIANTS[variant])
    got = {name: tuple(x.shape) for name, x in checkpoint.state_dict(mine).items()}
    assert got == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}


def test_new_parameters_are_drawn_as_in_torch():
    sizes = {"hidden_size": 256, "num_heads": 16, "head_dim": 32}
    mine, theirs = KimiDeltaAttention(**sizes), torch_nn.KimiDeltaAttention(**sizes)
    wanted = theirs.state_dict()
    for name, x in checkpoint.state_dict(mine).items():
        got, want = to_torch(x), wanted[name]
        if name == "A_log":  # 16 numbers: their range
            assert _rules.RATE_RANGE[0] <= got.exp().min()
            assert got.exp().max() <= _rules.RATE_RANGE[1]
            assert got.std() > 0.1
            continue
        for statistic in (torch.mean, torch.std, torch.min, torch.max):
            assert abs(statistic(got) - statistic(want)) < 0.05 * want.abs().max(), (name, statistic.__name__)
    assert KimiDeltaAttention(**SIZES, lower_bound=-5.0).dt_bias.abs().max().item() == 0


def test_gate_parameters_stay_wide_and_are_marked():
    for layer in (
        KimiDeltaAttention(**SIZES).to(dtype="bfloat16"),
        KimiDeltaAttention(**SIZES).bfloat16(),
        paddle.nn.Sequential(KimiDeltaAttention(**SIZES)).to(dtype="bfloat16")[0],
        KimiDeltaAttention(**SIZES, dtype="bfloat16"),
    ):
        kinds = {name: str(x.dtype) for name, x in layer.named_parameters()}
        narrow = {name for name, kind in kinds.items() if kind == "paddle.bfloat16"}
        assert narrow == kinds.keys() - {"A_log", "dt_bias"}
        assert kinds["A_log"] == kinds["dt_bias"] == "paddle.float32"
        assert [name for name, x in layer.named_parameters() if getattr(x, "_no_weight_decay", False)] == [
            "A_log",
            "dt_bias",
        ]
    assert KimiDeltaAttention(**SIZES).to(dtype="float64").A_log.dtype == paddle.float64


# ---- files
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_from_torch_by_file(tmp_path, dtype):
    theirs = torch_nn.KimiDeltaAttention(**SIZES, dtype=dtype)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    mine = KimiDeltaAttention(**SIZES, dtype=str(dtype).removeprefix("torch."))
    checkpoint.load(mine, tmp_path / "weights.safetensors")
    for name, x in checkpoint.state_dict(mine).items():
        assert to_torch(x).equal(theirs.state_dict()[name]), name


def test_weights_to_torch_by_file(tmp_path):
    mine = paddle.nn.Sequential(paddle.nn.Embedding(11, 24), KimiDeltaAttention(**SIZES), paddle.nn.Linear(24, 11))
    theirs = torch.nn.Sequential(
        torch.nn.Embedding(11, 24), torch_nn.KimiDeltaAttention(**SIZES), torch.nn.Linear(24, 11)
    )
    checkpoint.save(mine, tmp_path / "weights.safetensors")
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "weights.safetensors"))
    tokens = torch.randint(11, (2, 70))
    with torch.no_grad():
        want = theirs(tokens)
    testing.assert_close({"logits": to_torch(mine(to_paddle(tokens)))}, {"logits": want}, FP32)


def test_gate_parameters_as_in_checkpoints():
    mine, theirs = pair()
    weights = {name: to_paddle(x) for name, x in theirs.state_dict().items()}
    weights["A_log"] = paddle.reshape(weights["A_log"], [1, 1, 2, 1]).astype("bfloat16")
    weights["dt_bias"] = paddle.reshape(weights["dt_bias"], [2, 8])
    checkpoint.load_state_dict(mine, weights)
    assert mine.A_log.shape == [2]
    assert mine.A_log.dtype == paddle.float32
    assert to_torch(mine.A_log).equal(theirs.A_log.bfloat16().float())
    assert to_torch(mine.dt_bias).equal(theirs.dt_bias)


def test_weights_that_do_not_fit_change_nothing():
    mine, theirs = pair()
    before = {name: x.clone() for name, x in mine.state_dict().items()}
    weights = {name: to_paddle(x) + 1 for name, x in theirs.state_dict().items()}
    wrong = weights | {"o_proj.weight": paddle.zeros([24, 15])}
    with pytest.raises(ValueError, match=r"^load_state_dict: o_proj.weight must have shape \[24, 16\], got \[24, 15\]"):
        checkpoint.load_state_dict(mine, wrong)
    del wrong["o_proj.weight"]
    with pytest.raises(KeyError, match=r"missing \['o_proj.weight'\], unknown \['other'\]"):
        checkpoint.load_state_dict(mine, wrong | {"other": paddle.zeros([1])})
    assert all(bool((before[name] == x).all()) for name, x in mine.state_dict().items())


# ---- the small layers
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_short_convolution(bias, activation):
    mine = ShortConvolution(6, 4, bias, activation)
    theirs = torch_nn.ShortConvolution(6, 4, bias, activation)
    theirs.load_state_dict({name: to_torch(x) for name, x in mine.state_dict().items()})
    x = torch.randn(2, 9, 6)
    y, state = mine(to_paddle(x), output_final_state=True)
    want, want_state = theirs(x, output_final_state=True)
    testing.assert_close(
        {"y": to_torch(y), "state": to_torch(state)}, {"y": want.detach(), "state": want_state.detach()}, FP32
    )


def test_fused_rms_norm_gated():
    mine, theirs = FusedRMSNormGated(8, activation="silu"), torch_nn.FusedRMSNormGated(8, activation="silu")
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    testing.assert_close({"y": to_torch(mine(to_paddle(x), to_paddle(gate)))}, {"y": theirs(x, gate).detach()}, FP32)


# ---- wrong use
def test_wrong_use_of_layers():
    with pytest.raises(ValueError, match=r"^ShortConvolution: activation must be one of"):
        ShortConvolution(4, 4, activation="relu")
    with pytest.raises(ValueError, match=r"^ShortConvolution: kernel_size must be at least 1, got 0"):
        ShortConvolution(4, 0)
    with pytest.raises(ValueError, match=r"^FusedRMSNormGated: activation must be one of"):
        FusedRMSNormGated(4, activation="swish")
    with pytest.raises(
        ValueError, match=r"^KimiDeltaAttention: num_v_heads must be a multiple of num_heads = 2, got 3"
    ):
        KimiDeltaAttention(**SIZES, num_v_heads=3)
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: lower_bound must be finite and below 0, got 1"):
        KimiDeltaAttention(**SIZES, lower_bound=1.0)
    layer, x = KimiDeltaAttention(**SIZES), paddle.randn([2, 3, 24])
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: hidden_states must have shape \[B, T, D\]"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: attention_mask must be None with cu_seqlens"):
        layer(x, paddle.ones([2, 3]), cu_seqlens=paddle.to_tensor([0, 3]))
    with pytest.raises(ValueError, match=r"^KimiDeltaAttention: layer_idx must be given to use a cache"):
        layer(x, cache=KDACache())
    with pytest.raises(TypeError, match=r"^causal_conv1d: weight must be a torch tensor like x, got a paddle tensor$"):
        ShortConvolution(24, 4)(torch.zeros(2, 3, 24))
