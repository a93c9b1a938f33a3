"""The packed contract: sequences on one token axis are what each of them is alone; the tail is nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from openkda import chunk_kda, recurrent_kda, testing

BACKENDS = ["eager", "reference"]
TOKENWISE = ("q", "k", "v", "g", "beta", "grad_o")


def alone(inputs: testing.KDAInputs, n: int) -> testing.KDAInputs:
    """Sequence n of packed inputs as a dense call of its own."""
    start, end = inputs.cu_seqlens[n : n + 2].tolist()
    fields = {name: getattr(inputs, name)[:, start:end] for name in TOKENWISE}
    state = None if inputs.initial_state is None else inputs.initial_state[n : n + 1]
    return replace(
        inputs, **fields, initial_state=state, grad_final_state=inputs.grad_final_state[n : n + 1], cu_seqlens=None
    )


def joined(results: list[dict[str, torch.Tensor]], T: int) -> dict[str, torch.Tensor]:
    """Results of single sequences as those of the packed call: zeros in the tail, parameters' gradients summed."""
    out = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name in ("dA_log", "ddt_bias"):
            out[name] = torch.stack(parts).sum(0)
        elif name in ("final_state", "dinitial_state"):
            out[name] = torch.cat(parts)
        else:
            whole = torch.cat(parts, 1)
            out[name] = torch.cat([whole, whole.new_zeros(1, T - whole.shape[1], *whole.shape[2:])], 1)
    return out


def run(inputs: testing.KDAInputs, backend: str = "eager") -> dict[str, torch.Tensor]:
    return testing.run(chunk_kda, inputs, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("initial_state", [True, False], ids=["initial state", "no initial state"])
@pytest.mark.parametrize(
    "offsets, T",
    [([0, 0, 64, 64, 65], 65), ([0, 15, 100, 130], 130), ([0, 1, 2, 3], 3), ([0, 20, 50], 70)],
    ids=["empty slots", "ragged", "one token each", "tail"],
)
def test_packed_sequences_are_what_each_is_alone(offsets, T, initial_state, backend):
    inputs = testing.make_inputs(T=T, H=1, HV=2, K=8, V=12, cu_seqlens=offsets, initial_state=initial_state)
    each = [run(alone(inputs, n), backend) for n in range(len(offsets) - 1)]
    testing.assert_close(run(inputs, backend), joined(each, T), testing.FP64_LIMIT)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 20), st.integers(60, 70)), min_size=1, max_size=5),
    tail=st.integers(0, 70),
    gate=st.sampled_from(["softplus", "beside", "log_uniform"]),
)
def test_packed_sequences_are_what_each_is_alone_for_any_lengths(lengths, tail, gate):
    offsets = testing.packed_offsets(lengths)
    T = sum(lengths) + tail
    inputs = testing.make_inputs(T=T, H=1, HV=2, K=4, V=6, cu_seqlens=offsets, gate=gate)
    each = [run(alone(inputs, n)) for n in range(len(lengths))]
    testing.assert_close(run(inputs), joined(each, T), testing.FP64_LIMIT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_kda_passes_state_through_empty_slots_bitwise(backend):
    inputs = testing.make_inputs(T=70, dtype="float32", cu_seqlens=[0, 0, 70, 70, 70])
    result = run(inputs, backend)
    for n in (0, 2, 3):
        assert torch.equal(result["final_state"][n], inputs.initial_state[n])
        assert torch.equal(result["dinitial_state"][n], inputs.grad_final_state[n])


def test_recurrent_kda_passes_state_through_empty_slots_bitwise():
    inputs = testing.make_inputs(T=10, dtype="float32", cu_seqlens=[0, 0, 10, 10])
    _, final = recurrent_kda(*inputs.args, **inputs.kwargs)
    assert torch.equal(final[::2], inputs.initial_state[::2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_kda_gives_empty_slots_zeros_without_an_initial_state(backend):
    inputs = testing.make_inputs(T=70, dtype="float32", cu_seqlens=[0, 0, 70, 70], initial_state=False)
    _, final = chunk_kda(*inputs.args, **inputs.kwargs, backend=backend)
    assert not final[0].any()
    assert not final[2].any()
    assert final[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("end", [0, 1, 63, 64, 65, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_in_the_tail_matters(dtype, end, backend):
    # NaN, then infinity, then numbers: the same bits everywhere, exact zeros in the tail.
    inputs = testing.make_inputs(
        T=100, dtype=dtype, cu_seqlens=[0, end // 2, end], use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True
    )
    results = []
    for junk in (float("nan"), float("inf"), 3.0):
        fields = {name: getattr(inputs, name).clone() for name in TOKENWISE}
        for x in fields.values():
            x[:, end:] = junk
        results.append(run(replace(inputs, **fields), backend))
    for name, value in results[0].items():
        assert value.isfinite().all(), name
        assert all(torch.equal(value, other[name]) for other in results[1:]), name
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not results[0][name][:, end:].any(), name


def test_recurrent_kda_ignores_the_tail():
    inputs = testing.make_inputs(T=30, dtype="float32", cu_seqlens=[0, 12, 20])
    o, final = recurrent_kda(*inputs.args, **inputs.kwargs)
    assert final.isfinite().all()
    assert o[:, :20].isfinite().all()
    assert not o[:, 20:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_may_be_int32_or_int64(backend):
    inputs = testing.make_inputs(T=80, dtype="float32", cu_seqlens=[0, 15, 80])
    long = replace(inputs, cu_seqlens=inputs.cu_seqlens.long())
    assert inputs.cu_seqlens.dtype == torch.int32
    want, got = run(inputs, backend), run(long, backend)
    assert all(torch.equal(value, got[name]) for name, value in want.items())


def test_offsets_edited_in_place_count_at_the_next_call():
    # A cache of chunk tables by identity would still hold the old boundaries.
    inputs = testing.make_inputs(T=80, dtype="float32", cu_seqlens=[0, 15, 80])
    first = run(inputs)
    inputs.cu_seqlens[1] = 40
    fresh = run(replace(inputs, cu_seqlens=inputs.cu_seqlens.clone()))
    again = run(inputs)
    assert not torch.equal(first["o"], again["o"])
    assert all(torch.equal(value, again[name]) for name, value in fresh.items())


def test_a_dense_batch_is_its_sequences_packed():
    inputs = testing.make_inputs(B=3, T=70, H=1, HV=2, K=8, V=12)
    folded = {name: getattr(inputs, name).reshape(1, 210, *getattr(inputs, name).shape[2:]) for name in TOKENWISE}
    packed = replace(inputs, **folded, cu_seqlens=testing.packed_offsets([70, 70, 70]))
    want, got = run(inputs), run(packed)
    same_shape = {name: x.reshape(want[name].shape) for name, x in got.items()}
    testing.assert_close(same_shape, want, testing.FP64_LIMIT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "offsets, message",
    [
        ([1, 5], "cu_seqlens must start at 0, got 1"),
        ([0, 12, 8, 16], "cu_seqlens must never decrease, got 12 then 8"),
        ([0, 21], "cu_seqlens must end at or below T = 20, got 21"),
    ],
    ids=["starts late", "decreases", "ends beyond T"],
)
def test_offset_values_are_checked_on_request(offsets, message, backend, monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs = testing.make_inputs(T=20)
    with pytest.raises(ValueError, match=f"^chunk_kda: {message}"):
        chunk_kda(
            *inputs.args, A_log=inputs.A_log, use_gate_in_kernel=True, cu_seqlens=torch.tensor(offsets), backend=backend
        )


def test_a_positive_gate_is_refused_on_request(monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs = testing.make_inputs(T=20, gate="none")
    with pytest.raises(ValueError, match=r"^chunk_kda: g must be <= 0 everywhere, got a value above 0"):
        chunk_kda(*inputs.args[:3], inputs.g + 5, inputs.beta)


def test_checking_values_takes_nan_in_the_tail(monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs = testing.make_inputs(T=20, gate="given", cu_seqlens=[0, 10])
    o, _ = chunk_kda(*inputs.args, **inputs.kwargs)
    assert o.isfinite().all()


@pytest.mark.parametrize("op", [chunk_kda, recurrent_kda], ids=lambda op: op.__name__)
def test_checking_values_takes_a_positive_gate_in_the_tail(op, monkeypatch):
    monkeypatch.setenv("OPENKDA_CHECK", "1")
    inputs, cu_seqlens = testing.make_inputs(T=20, gate="none"), torch.tensor([0, 10])
    g = inputs.g.clone()
    g[:, 10:] = 1.0
    op(inputs.q, inputs.k, inputs.v, g, inputs.beta, cu_seqlens=cu_seqlens)
    g[:, 9] = 1.0
    with pytest.raises(ValueError, match="g must be <= 0 everywhere"):
        op(inputs.q, inputs.k, inputs.v, g, inputs.beta, cu_seqlens=cu_seqlens)


# ---- no host synchronisation
@pytest.mark.parametrize("gate", ["softplus", "bounded", "given"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_chunk_kda_reads_no_value_on_the_host(packed, gate):
    # Tensors on the meta device have no values: whoever asks for one raises. Shapes alone carry the call, both ways.
    inputs = testing.make_inputs(
        T=150,
        H=1,
        HV=2,
        K=8,
        V=12,
        gate=gate,
        cu_seqlens=[0, 0, 70, 130] if packed else None,
        use_qk_l2norm_in_kernel=True,
    )
    meta = inputs.to(torch.float32, "meta")
    result = testing.run(chunk_kda, meta, backend="eager")
    want = run(inputs)
    assert {name: x.shape for name, x in result.items()} == {name: x.shape for name, x in want.items()}


@pytest.mark.parametrize("end", [150, 100])
def test_one_call_fits_every_boundary(end):
    # What a recorded graph relies on: the same operations on the same shapes, whatever the offsets hold.
    names: list[list[str]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names[-1].append(str(func))
            return func(*args, **kwargs or {})

    for offsets in ([0, 0, 70, 150], [0, 10, 11, end], [0, 0, 0, 0]):
        inputs = testing.make_inputs(T=150, H=1, K=8, cu_seqlens=offsets)
        names.append([])
        with Record():
            run(inputs)
    assert names[0] == names[1] == names[2]
