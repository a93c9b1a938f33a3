"""Same inputs, same bits: run to run and process to process."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from openkda import chunk_kda, recurrent_kda, testing

PROGRAM = """
import sys
import torch
torch.set_num_threads({threads})
sys.path[:0] = {path!r}
from test_determinism import digest, result
print(digest(result()))
"""


def result(backend: str = "eager") -> dict[str, Tensor]:
    inputs = testing.make_inputs(T=130, H=2, HV=4, K=24, V=40, dtype="bfloat16", cu_seqlens=[0, 15, 15, 128])
    return testing.run(chunk_kda, inputs, backend=backend)


def digest(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return sha.hexdigest()


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_chunk_kda_repeats_bit_for_bit(backend):
    assert digest(result(backend)) == digest(result(backend))


def test_recurrent_kda_repeats_bit_for_bit():
    inputs = testing.make_inputs(T=20, dtype="bfloat16")
    (o, final), (again, same) = (recurrent_kda(*inputs.args, **inputs.kwargs) for _ in range(2))
    assert torch.equal(o, again)
    assert torch.equal(final, same)


def test_chunk_kda_repeats_bit_for_bit_in_another_process():
    here = os.path.dirname(os.path.abspath(__file__))
    program = PROGRAM.format(path=[here, *filter(None, sys.path)], threads=torch.get_num_threads())
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert there.strip() == digest(result())
