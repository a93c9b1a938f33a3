"""Paddle layers with fla's signatures give what the PyTorch ones give, the state of W columns included."""

import numpy as np
import paddle
import pytest
import torch

from openkda.integrations.fla import layers, paddle_layers

C, W = 6, 4


def both(*arrays):
    return [(torch.from_numpy(a), paddle.to_tensor(a)) for a in arrays]


def same(t, p):
    np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_convolution_and_its_state(packed):
    rng = np.random.default_rng(0)
    conv_t, conv_p = layers.ShortConvolution(C, W, bias=True), paddle_layers.ShortConvolution(C, W, bias=True)
    conv_p.weight.set_value(conv_t.weight.detach().numpy())
    conv_p.bias.set_value(conv_t.bias.detach().numpy())
    N = 4 if packed else 2
    draw = [(1, 8, C), (1, 8, C)] if packed else [(2, 5, C), (2, 5, C)]
    (x_t, x_p), (r_t, r_p), (c_t, c_p) = both(*(rng.standard_normal(s).astype("float32") for s in (*draw, (N, C, W))))
    cu = [0, 1, 1, 3, 8]
    cu_t, cu_p = (torch.tensor(cu), paddle.to_tensor(cu)) if packed else (None, None)
    x_t.requires_grad_()
    x_p.stop_gradient = False
    y_t, s_t = conv_t(x_t, r_t, cache=c_t, output_final_state=True, cu_seqlens=cu_t)
    y_p, s_p = conv_p(x_p, r_p, cache=c_p, output_final_state=True, cu_seqlens=cu_p)
    same(y_t, y_p)
    same(s_t, s_p)
    (y_t.sum() + s_t.square().sum()).backward()
    (y_p.sum() + s_p.square().sum()).backward()
    same(x_t.grad, x_p.grad)


def test_single_tokens_edit_the_cache_in_place():
    conv = paddle_layers.ShortConvolution(C, W)
    x, cache = paddle.randn([3, 1, C]), paddle.randn([3, C, W])
    before = cache.clone()
    with paddle.no_grad():
        _, state = conv(x, cache=cache, output_final_state=True)
    want = paddle.concat([before[:, :, 1:], paddle.transpose(x, [0, 2, 1])], -1)
    np.testing.assert_array_equal(cache.numpy(), want.numpy())
    np.testing.assert_array_equal(state.numpy(), want.numpy())


@pytest.mark.parametrize("affine", [True, False])
def test_norm(affine):
    rng = np.random.default_rng(0)
    (x_t, x_p), (g_t, g_p), (r_t, r_p) = both(*(rng.standard_normal((3, C)).astype("float32") for _ in range(3)))
    y_t, kept_t = layers.FusedRMSNormGated(C, affine)(x_t, g_t, residual=r_t, prenorm=True)
    y_p, kept_p = paddle_layers.FusedRMSNormGated(C, affine)(x_p, g_p, residual=r_p, prenorm=True)
    same(y_t, y_p)
    same(kept_t, kept_p)
