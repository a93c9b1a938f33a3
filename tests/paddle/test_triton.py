"""The fused operator on Paddle tensors: in Triton's interpreter the same bits as on torch tensors; and a test for a GPU
with a CUDA build of Paddle.
"""

import paddle
import pytest
import torch

import openkda
from openkda import testing
from openkda.testing import interpreter
from openkda.testing import paddle as on_paddle
from openkda.testing.paddle import to_paddle

if interpreter.is_on():
    interpreter.install()

CASES = {
    "softplus": {"gate": "softplus", "T": 70, "V": 32},
    "bounded_gva": {
        "gate": "bounded",
        "T": 66,
        "H": 1,
        "HV": 2,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    },
    "packed": {"gate": "given", "T": 70, "cu_seqlens": [0, 5, 5, 66]},
}


@pytest.fixture
def interpreted():
    if not interpreter.is_on():
        pytest.skip("launches kernels on a CPU: needs TRITON_INTERPRET=1")


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case, dtype", [*((case, "float32") for case in CASES), ("bounded_gva", "bfloat16")])
def test_fused_gives_the_bits_of_torch(case, dtype):
    inputs = testing.make_inputs(dtype=dtype, **CASES[case])
    got = on_paddle.run(openkda.chunk_kda, inputs, backend="triton")
    want = testing.run(openkda.chunk_kda, inputs, backend="triton")
    assert not [name for name in want if not torch.equal(got[name], want[name])]
    if dtype == "float32":
        testing.assert_close(got, testing.oracle(inputs), testing.FP32_LIMIT)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("save", [False, True], ids=["recompute", "save"])
def test_fused_gradients_are_those_that_are_wanted(save):
    inputs = testing.make_inputs(dtype="float32", gate="softplus", T=20)
    want = testing.run(openkda.chunk_kda, inputs, backend="triton", save_intermediates=save)
    tensors = {name: to_paddle(x) for name, x in inputs.tensors.items()}
    tensors["v"].stop_gradient = False
    kwargs = {name: to_paddle(value) for name, value in inputs.kwargs.items()} | tensors
    o, final = openkda.chunk_kda(**kwargs, backend="triton", save_intermediates=save)
    paddle.autograd.backward([o, final], [to_paddle(inputs.grad_o), to_paddle(inputs.grad_final_state)])
    assert {name for name, x in tensors.items() if x.grad is not None} == {"v"}
    assert torch.equal(on_paddle.to_torch(tensors["v"].grad), want["dv"])


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
def test_fused_refuses_a_second_derivative():
    q = paddle.randn([1, 4, 1, 16])
    q.stop_gradient = False
    o, _ = openkda.chunk_kda(q, q, q, -paddle.abs(q), q[..., 0].sigmoid(), backend="triton")
    (dq,) = paddle.grad(o.sum(), [q], create_graph=True)
    with pytest.raises(OSError, match="chunk_kda: a second derivative must not be asked for"):
        paddle.grad(dq.sum(), [q])


def test_a_missing_triton_is_one_clear_line(monkeypatch):
    from openkda import backends

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a CPU tensor is then no reason to refuse
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    q = paddle.zeros([1, 4, 1, 8])
    with pytest.raises(openkda.BackendUnavailable, match="needs the package triton, which is not installed; use"):
        openkda.chunk_kda(q, q, q, q, q[..., 0], backend="triton")


@pytest.mark.paddle  # not `gpu`, which asks torch for a device
def test_fused_on_a_gpu_agrees_with_eager():
    if not paddle.is_compiled_with_cuda() or paddle.device.cuda.device_count() < 1:
        pytest.skip("needs a CUDA build of Paddle, and a GPU")
    paddle.set_device("gpu")
    inputs = testing.make_inputs(dtype="float32", gate="softplus", T=300, K=64)
    results = []
    for backend in ("triton", "eager"):
        tensors = {name: paddle.to_tensor(x.numpy(), stop_gradient=False) for name, x in inputs.tensors.items()}
        o, final = openkda.chunk_kda(**tensors, use_gate_in_kernel=True, output_final_state=True, backend=backend)
        (o.sum() + final.sum()).backward()
        grads = {name: x.grad for name, x in tensors.items()}
        results.append({"o": o, "final": final} | grads)
    for name, want in results[1].items():
        difference = (results[0][name] - want).detach().astype("float64")
        assert float(difference.norm() / want.detach().astype("float64").norm()) < 1e-5, name
