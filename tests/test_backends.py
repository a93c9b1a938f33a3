"""Which implementation runs: chosen without looking at data, told on request, and never a silent fallback."""

import pytest
import torch

from openkda import backends, chunk_kda, explain, recurrent_kda
from openkda.errors import BackendUnavailable

X = torch.zeros(1, 5, 2, 8)
GATE, BETA = torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2)


def test_auto_takes_the_first_that_runs_here():
    available = {"triton": print, "eager": print, "reference": print}
    assert backends.choose("op", "auto", available, X) == "eager"


def test_triton_on_a_cpu_raises_with_the_device():
    with pytest.raises(
        BackendUnavailable, match=r'^op: backend="triton" needs a GPU tensor, got device cpu; use backend='
    ):
        backends.choose("op", "triton", {"triton": print, "eager": print}, X)


def test_a_kernel_that_does_not_exist_raises_and_says_so():
    with pytest.raises(
        BackendUnavailable, match=r'^op: backend="triton" cannot run, as this operator has no triton kernel'
    ):
        backends.choose("op", "triton", {"eager": print}, X)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^op: backend must be one of 'auto', 'triton', 'eager', 'reference', got 'cuda'"
    ):
        backends.choose("op", "cuda", {"eager": print}, X)


def test_backend_unavailable_is_a_runtime_error():
    assert issubclass(BackendUnavailable, RuntimeError)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_an_explicit_backend_is_the_one_that_runs(backend, monkeypatch):
    import openkda.kda.chunk as home

    ran = []
    for name, fn in home.AVAILABLE["chunk_kda"].items():

        def spy(*args, name=name, fn=fn, **kwargs):
            ran.append(name)
            return fn(*args, **kwargs)

        monkeypatch.setitem(home.AVAILABLE["chunk_kda"], name, spy)
    chunk_kda(X, X, X, GATE, BETA, backend=backend)
    assert ran == [backend]


@pytest.mark.parametrize(
    "op", ["chunk_kda", "recurrent_kda", "causal_conv1d", "causal_conv1d_update", "l2norm", "rms_norm_gated"]
)
def test_explain_names_the_backend_of_every_operator_and_the_reason(op):
    (line,) = [line for line in explain(X).splitlines() if line.split()[0] == op]
    assert "auto -> eager" in line
    assert "triton" in line


def test_explain_names_the_tensor():
    assert explain(X.bfloat16()).splitlines()[0] == "torch tensor, bfloat16, on cpu"


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
def test_every_backend_takes_batch_invariant(backend):
    o, _ = chunk_kda(X, X, X, GATE, BETA, batch_invariant=True, backend=backend)
    assert o.shape == X.shape


def test_chunk_kda_refuses_a_context_of_another_kind():
    with pytest.raises(TypeError, match=r"^chunk_kda: cp_context must come from build_cp_context, got object"):
        chunk_kda(X, X, X, GATE, BETA, cp_context=object())


def test_save_intermediates_changes_no_result():
    q = torch.randn(1, 70, 2, 8)
    calls = [chunk_kda(q, q, q, -q.abs(), BETA[:, :1].expand(1, 70, 2), save_intermediates=s)[0] for s in (False, True)]
    assert torch.equal(*calls)


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
def test_recurrent_kda_gives_the_same_bits_on_every_backend_of_a_cpu(backend):
    q = torch.randn(1, 5, 2, 8)
    want, _ = recurrent_kda(q, q, q, -q.abs(), BETA)
    assert torch.equal(recurrent_kda(q, q, q, -q.abs(), BETA, backend=backend)[0], want)
