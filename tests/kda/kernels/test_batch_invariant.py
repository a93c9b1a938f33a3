"""batch_invariant=True on the fused kernels: one and the same bits alone, in a batch, packed, and decoded."""

import pytest
import torch

pytest.importorskip("triton")

from openkda import chunk_kda, recurrent_kda, testing
from openkda.kda.replay import ReplayState

pytestmark = pytest.mark.interpreter

FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
CALL = {"backend": "triton", "batch_invariant": True}
SMALL = {"H": 1, "HV": 2, "K": 16, "V": 16}
# What runs on Hopper's own scan kernels, on Triton's, and in fp32.
TUNED = [
    {"H": 4, "HV": 4, "K": 128, "V": 128, "dtype": "bfloat16"},
    {"H": 2, "HV": 4, "K": 64, "V": 96, "dtype": "bfloat16"},
    {"H": 2, "HV": 2, "K": 128, "V": 128, "dtype": "float16"},
    {"H": 2, "HV": 2, "K": 48, "V": 128, "dtype": "float32"},
]


def draw(device, T, B=1, gate="softplus", **shape):
    return testing.make_inputs(B=B, T=T, gate=gate, device=device, **({"dtype": "bfloat16"} | SMALL | FUSED | shape))


def decode(inputs, sizes):
    state, outputs, kwargs = inputs.initial_state, [], inputs.kwargs
    for pieces in zip(*(x.split(sizes, 1) for x in inputs.args), strict=True):
        o, state = recurrent_kda(*pieces, **kwargs | {"initial_state": state}, **CALL)
        outputs.append(o)
    assert isinstance(state, ReplayState)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("gate, dtype", [("softplus", "bfloat16"), ("bounded", "float32")])
def test_decoding_in_pieces_gives_the_bits_of_one_call(dtype, gate, device):
    inputs = draw(device, 67, B=2, gate=gate, dtype=dtype)
    o, _ = chunk_kda(*inputs.args, **inputs.kwargs, **CALL)
    got, state = decode(inputs, [40, 23, 1, 1, 2])
    assert torch.equal(got, o)
    assert state.length.tolist() == [3, 3]
    prefix, final = chunk_kda(*(x[:, :64] for x in inputs.args), **inputs.kwargs, **CALL)
    assert torch.equal(prefix, o[:, :64])
    assert torch.equal(state.state, final)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("shape", TUNED, ids=str)
def test_decoding_token_by_token_gives_the_bits_of_one_call_at_tuned_sizes(shape, gate, device):
    inputs = draw(device, 130, B=3, gate=gate, **shape)
    o, _ = chunk_kda(*inputs.args, **inputs.kwargs, **CALL)
    assert torch.equal(decode(inputs, [1] * 130)[0], o)
    assert torch.equal(decode(inputs, [100] + [1] * 30)[0], o)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TUNED, ids=str)
def test_sequence_has_the_same_bits_alone_in_a_batch_and_packed(shape, device):
    # 40 rows are more than a wave of programs; one of 3000 tokens would be cut into segments without the flag.
    for B, T in ((40, 130), (1, 3000)):
        inputs = draw(device, T, B=B, gate="bounded", **shape)
        o, final = chunk_kda(*inputs.args, **inputs.kwargs, **CALL)
        for n in {0, B - 1}:
            alone = inputs.kwargs | {"initial_state": inputs.initial_state[n : n + 1]}
            own, state = chunk_kda(*(x[n : n + 1, :129] for x in inputs.args), **alone, **CALL)
            assert torch.equal(own[0], o[n, :129])
            own, state = chunk_kda(*(x[n : n + 1] for x in inputs.args), **alone, **CALL)
            assert torch.equal(own[0], o[n])
            assert torch.equal(state[0], final[n])
        packed = [x.flatten(0, 1)[None] for x in inputs.args]
        cu_seqlens = torch.arange(0, B * T + 1, T, device=device)
        own, state = chunk_kda(*packed, **inputs.kwargs, cu_seqlens=cu_seqlens, **CALL)
        assert torch.equal(own[0], o.flatten(0, 1))
        assert torch.equal(state, final)


@pytest.mark.gpu
def test_invariant_decoding_replays_in_a_cuda_graph(device):
    inputs = draw(device, 70, B=3, K=128, V=128)
    want, _ = chunk_kda(*inputs.args, **inputs.kwargs, **CALL)
    token = [x[:, :1].clone() for x in inputs.args]
    _, first = recurrent_kda(*token, **inputs.kwargs, **CALL)
    state = ReplayState(*(x.clone() for x in first))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, after = recurrent_kda(*token, **inputs.kwargs | {"initial_state": state}, **CALL)
        for old, new in zip(state, after, strict=True):
            old.copy_(new)
    for old, new in zip(state, first, strict=True):
        old.copy_(new)
    for t in range(1, 70):
        for x, whole in zip(token, inputs.args, strict=True):
            x.copy_(whole[:, t : t + 1])
        graph.replay()
        assert torch.equal(o[:, 0], want[:, t]), t
