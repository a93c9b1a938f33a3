"""chunk_kda under torch.compile: one graph, forward and backward, with the eager operator's results."""

import pytest
import torch

from openkda import chunk_kda, testing


# Dynamo of torch 2.13 makes an instance of an autograd.Function while tracing one, and torch itself warns of that. The
# filter can go when this test passes without it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("offsets", [None, [0, 5, 5, 60]], ids=["dense", "packed"])
def test_chunk_kda_compiles_without_a_graph_break(offsets):
    # aot_eager traces and differentiates without a C++ compiler; fullgraph turns a graph break into an error.
    inputs = testing.make_inputs(T=70, H=1, HV=2, K=8, V=12, dtype="float32", cu_seqlens=offsets)
    torch._dynamo.reset()
    compiled = torch.compile(chunk_kda, fullgraph=True, backend="aot_eager")
    testing.assert_close(testing.run(compiled, inputs), testing.oracle(inputs), testing.FP32_LIMIT)
