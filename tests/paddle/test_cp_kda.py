"""Context parallelism on Paddle: not implemented, and said so in one line before anything is computed."""

import paddle
import pytest

import openkda
from openkda.paddle.nn import KimiDeltaAttention

Q = paddle.zeros([1, 4, 1, 8])
MESSAGE = "cp_context must be None, got str; context parallelism is not implemented yet"


def test_chunk_kda_refuses_a_context():
    with pytest.raises(NotImplementedError, match=f"^chunk_kda: {MESSAGE}"):
        openkda.chunk_kda(Q, Q, Q, Q, Q[..., 0], cp_context="context")


def test_causal_conv1d_refuses_a_context():
    with pytest.raises(NotImplementedError, match=f"^causal_conv1d: {MESSAGE}"):
        openkda.causal_conv1d(Q[:, :, 0], paddle.zeros([8, 4]), cp_context="context")


def test_the_layer_refuses_a_context():
    with pytest.raises(NotImplementedError, match=MESSAGE):
        KimiDeltaAttention(8, 1, 8)(paddle.zeros([1, 4, 8]), cp_context="context")
