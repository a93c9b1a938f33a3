"""batch_invariant=True: a sequence has one and the same bits alone, in a batch, packed, and decoded in any pieces."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from openkda import BackendUnavailable, chunk_kda, recurrent_kda, testing
from openkda.kda.replay import ReplayState

GATES = ["softplus", "bounded"]
FUSED = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
# Sizes that leave every vector unit a remainder, one head beside several, and 16-bit inputs.
SIZES = [
    {"H": 1, "HV": 2, "K": 12, "V": 20, "dtype": "float32"},
    {"H": 3, "HV": 3, "K": 7, "V": 5, "dtype": "float32"},
    {"H": 2, "HV": 2, "K": 16, "V": 16, "dtype": "bfloat16"},
    {"H": 1, "HV": 1, "K": 8, "V": 8, "dtype": "float64"},
]


def draw(T: int, B: int = 1, gate: str = "softplus", **shape: object) -> testing.KDAInputs:
    return testing.make_inputs(B=B, T=T, gate=gate, **(SIZES[0] | FUSED | shape))


def whole(inputs: testing.KDAInputs) -> tuple[Tensor, Tensor]:
    return chunk_kda(*inputs.args, **inputs.kwargs, batch_invariant=True)


def decode(inputs: testing.KDAInputs, sizes: list[int]) -> tuple[Tensor, ReplayState]:
    """The sequences in pieces of these numbers of tokens."""
    state, outputs, kwargs = inputs.initial_state, [], inputs.kwargs
    for pieces in zip(*(x.split(sizes, 1) for x in inputs.args), strict=True):
        o, state = recurrent_kda(*pieces, **kwargs | {"initial_state": state}, batch_invariant=True)
        outputs.append(o)
    assert isinstance(state, ReplayState)
    return torch.cat(outputs, 1), state


# ---- alone = in a batch = packed
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sequence_has_the_same_bits_alone_in_a_batch_and_packed(shape, gate):
    inputs = draw(130, B=3, gate=gate, **shape)
    o, final = whole(inputs)
    for n in range(3):
        alone = inputs.kwargs | {"initial_state": inputs.initial_state[n : n + 1]}
        own, state = chunk_kda(*(x[n : n + 1] for x in inputs.args), **alone, batch_invariant=True)
        assert torch.equal(own[0], o[n])
        assert torch.equal(state[0], final[n])
    packed = [x.flatten(0, 1)[None] for x in inputs.args]
    cu_seqlens = torch.tensor([0, 130, 260, 390])
    own, state = chunk_kda(*packed, **inputs.kwargs, cu_seqlens=cu_seqlens, batch_invariant=True)
    assert torch.equal(own[0], o.flatten(0, 1))
    assert torch.equal(state, final)


def test_prefix_has_the_same_bits_at_any_length():
    inputs = draw(130)
    o, _ = whole(inputs)
    for length in (1, 2, 63, 64, 65, 127, 128, 129):
        own, _ = chunk_kda(*(x[:, :length] for x in inputs.args), **inputs.kwargs, batch_invariant=True)
        assert torch.equal(own, o[:, :length]), length


@pytest.mark.parametrize(
    "offsets, T", [(None, 70), ([0, 0, 64, 64, 65], 80), ([0, 15, 100], 100)], ids=["dense", "slots", "packed"]
)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_invariant_operator_and_its_gradients_meet_the_fp32_limit(v_first, offsets, T):
    inputs = draw(T, B=1 if offsets else 2, cu_seqlens=offsets, state_v_first=v_first)
    got = testing.run(chunk_kda, inputs, batch_invariant=True)
    testing.assert_close(got, testing.oracle(inputs), testing.FP32_LIMIT)


def test_gradients_are_those_of_the_sequence_alone_bitwise():
    # Everything but the shared gate parameters, whose gradients are sums over sequences.
    inputs = draw(70, B=2)
    got = testing.run(chunk_kda, inputs, batch_invariant=True)
    names = [n for n in got if n not in ("dA_log", "ddt_bias")]
    for n in range(2):
        one = {name: x[n : n + 1] for name, x in vars(inputs).items() if isinstance(x, Tensor) and x.dim() > 2}
        one |= {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias}
        alone = testing.run(chunk_kda, testing.KDAInputs(**vars(inputs) | one), batch_invariant=True)
        for name in names:
            assert torch.equal(alone[name][0], got[name][n]), name


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)], ids=["no row", "no token"])
def test_invariant_operators_take_empty_inputs(shape):
    x = torch.randn(*shape, 2, 8)
    call = {"initial_state": torch.randn(shape[0], 2, 8, 8), "output_final_state": True, "batch_invariant": True}
    for operator in (chunk_kda, recurrent_kda):
        o, final = operator(x, x, x, -x.abs(), x[..., 0], **call)
        state = final.state if isinstance(final, ReplayState) else final
        assert o.shape == x.shape
        assert torch.equal(state, call["initial_state"])


# ---- decoded = whole
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_decoding_token_by_token_gives_the_bits_of_the_whole_sequence(shape, gate):
    inputs = draw(66, B=2, gate=gate, **shape)
    o, _ = whole(inputs)
    got, state = decode(inputs, [1] * 66)
    assert torch.equal(got, o)
    assert torch.equal(state.state, whole(draw_prefix(inputs, 64))[1])
    assert state.length.tolist() == [2, 2]


@pytest.mark.parametrize(
    "sizes",
    [[130], [64, 66], [63, 1, 1, 65], [0, 1, 2, 60, 5, 62], [10, 120], [129, 1], [65, 0, 65]],
    ids=str,
)
@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
def test_decoding_in_pieces_gives_the_bits_of_the_whole_sequence(v_first, sizes):
    inputs = draw(130, B=2, state_v_first=v_first)
    got, state = decode(inputs, sizes)
    assert torch.equal(got, whole(inputs)[0])
    assert torch.equal(state.state, whole(draw_prefix(inputs, 128))[1])


def draw_prefix(inputs: testing.KDAInputs, length: int) -> testing.KDAInputs:
    tokens = {n: getattr(inputs, n)[:, :length] for n in ("q", "k", "v", "g", "beta")}
    return testing.KDAInputs(**vars(inputs) | tokens)


def test_sequences_at_different_places_decode_together():
    # Lengths 3, 58 and 120 to begin with, packed; then single tokens, packed, with a pause for one of them; then dense.
    prompts, steps = [3, 58, 120], 12
    sequences = [draw(n + steps, seed=n) for n in prompts]
    for s in sequences:  # one gate for all of them
        s.A_log.copy_(sequences[0].A_log)
        s.dt_bias.copy_(sequences[0].dt_bias)
    want = [whole(s)[0] for s in sequences]
    options = sequences[0].kwargs | {"batch_invariant": True}
    done = [0, 0, 0]

    def feed(lengths: list[int], state: object, packed: bool) -> object:
        parts = [[x[:, a : a + n] for x in s.args] for s, a, n in zip(sequences, done, lengths, strict=True)]
        tokens = [torch.cat(x, 1 if packed else 0) for x in zip(*parts, strict=True)]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)]) if packed else None
        o, state = recurrent_kda(*tokens, **options | {"initial_state": state, "cu_seqlens": offsets})
        for i, own in enumerate(o.split(lengths, 1) if packed else o.split(1)):
            assert torch.equal(own, want[i][:, done[i] : done[i] + lengths[i]]), (i, done)
            done[i] += lengths[i]
        return state

    state = feed(prompts, torch.cat([s.initial_state for s in sequences]), packed=True)
    for _ in range(2):
        state = feed([1, 0, 1], state, packed=True)
    for _ in range(6):
        state = feed([1, 1, 1], state, packed=False)
    assert isinstance(state, ReplayState)
    state = state.select(torch.tensor([2, 0, 1]))
    sequences, want, done = ([x[i] for i in (2, 0, 1)] for x in (sequences, want, done))
    feed([2, 3, 4], state, packed=True)


def test_a_tail_of_packed_tokens_is_padding_for_decoding():
    inputs = draw(90, cu_seqlens=[0, 0, 30, 66])
    want, _ = whole(inputs)
    for x in inputs.args:
        x[:, 66:] = float("nan")
    o, state = recurrent_kda(*inputs.args, **inputs.kwargs, batch_invariant=True)
    assert torch.equal(o, want)
    assert not o[:, 66:].any()
    assert state.length.tolist() == [0, 30, 36]
    assert torch.equal(state.state, inputs.initial_state)
    assert all(x.isfinite().all() for x in state)


def test_a_call_leaves_its_initial_state_alone():
    inputs = draw(1)
    _, first = recurrent_kda(*inputs.args, **inputs.kwargs, batch_invariant=True)
    kept = [x.clone() for x in first]
    recurrent_kda(*inputs.args, **inputs.kwargs | {"initial_state": first}, batch_invariant=True)
    assert all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))


def test_plain_recurrence_agrees_with_the_whole_sequence_to_rounding_only():
    # What batch_invariant buys: without it decoding differs from training in the last digits.
    inputs = draw(130)
    o, _ = recurrent_kda(*inputs.args, **inputs.kwargs)
    want, _ = whole(inputs)
    assert not torch.equal(o, want)
    testing.assert_close({"o": o}, {"o": want.double()}, testing.FP32_LIMIT)


# ---- wrong calls
@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"state_indices": torch.tensor([0])},
            ValueError,
            r"state_indices must be None with batch_invariant, got \[1\]",
        ),
        ({"batch_invariant": 1}, TypeError, "batch_invariant must be a bool, got int"),
        (
            {"initial_state": torch.zeros(2, 2, 8, 8)},
            ValueError,
            "initial_state must have shape",
        ),
        ({"backend": "reference"}, BackendUnavailable, 'batch_invariant=True needs backend "triton" or "eager"'),
    ],
    ids=["pool", "flag", "state of two sequences", "reference"],
)
def test_invariant_decoding_refuses_what_it_cannot_do(change, error, message):
    x = torch.randn(1, 1, 2, 8)
    with pytest.raises(error, match=f"^recurrent_kda: {message}"):
        recurrent_kda(x, x, x, -x.abs(), x[..., 0], **{"batch_invariant": True} | change)


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("state", torch.zeros(1, 2, 8, 8).double(), TypeError, "state must have dtype float32, got float64"),
        ("k", torch.zeros(1, 64, 2, 8).bfloat16(), TypeError, "k must have dtype float32, got bfloat16"),
        ("v", torch.zeros(1, 63, 2, 8), ValueError, r"v must have shape \[N, 64, ..\] = \[1, 64, 2, 8\], got"),
        ("length", torch.zeros(1), TypeError, "length must have dtype int64, got float32"),
        ("length", torch.zeros(2).long(), ValueError, r"length must have shape \[N\] = \[1\], got \[2\]"),
    ],
    ids=["state dtype", "row dtype", "row shape", "length dtype", "length shape"],
)
def test_invariant_decoding_refuses_a_bad_replay_state(name, value, error, message):
    x = torch.randn(1, 1, 2, 8)
    _, state = recurrent_kda(x, x, x, -x.abs(), x[..., 0], output_final_state=True, batch_invariant=True)
    state = state._replace(**{name: value})
    with pytest.raises(error, match=rf"^recurrent_kda: initial_state\.{message}"):
        recurrent_kda(x, x, x, -x.abs(), x[..., 0], initial_state=state, batch_invariant=True)
