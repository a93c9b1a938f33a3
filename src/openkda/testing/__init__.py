"""What it takes to judge a KDA implementation: inputs that hurt, an fp64 oracle, and an error budget.

    inputs.py   make_inputs: every gate family at any strength, packed sequences with NaN in the tail, strided views,
                keys that are alike
    oracles.py  run: outputs and all gradients of any chunk_kda-like function; oracle: the same in fp64
    budget.py   relative RMS, the fp32 limit and the 16-bit budget, with a table of every tensor in the failure message

A complete check of an implementation `mine` with the signature of `openkda.chunk_kda`:

    from openkda import testing

    inputs = testing.make_inputs(T=129, gate="beside", dtype="bfloat16")
    got, want, rounded = testing.run(mine, inputs), testing.oracle(inputs), testing.rounded(inputs)
    testing.assert_within_budget(got, want, rounded)

Nothing here needs pytest or a GPU; tensors are PyTorch's, on the device that is asked for.
"""

from openkda.testing.budget import (
    BUDGET_FACTOR,
    FP32_LIMIT,
    FP64_LIMIT,
    ErrorPool,
    assert_close,
    assert_within_budget,
    error_table,
    relative_rms,
)
from openkda.testing.inputs import GATES, KDAInputs, make_inputs, packed_offsets, strided, unit
from openkda.testing.oracles import TENSORS, oracle, rounded, run

__all__ = [
    "BUDGET_FACTOR",
    "FP32_LIMIT",
    "FP64_LIMIT",
    "GATES",
    "TENSORS",
    "ErrorPool",
    "KDAInputs",
    "assert_close",
    "assert_within_budget",
    "error_table",
    "make_inputs",
    "oracle",
    "packed_offsets",
    "relative_rms",
    "rounded",
    "run",
    "strided",
    "unit",
]
