"""The corrected interpreter agrees with torch, and each correction is still needed by the installed Triton."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from openkda.testing import interpreter

KERNEL = """
import sys, torch, triton, triton.language as tl
from openkda.testing import interpreter

@triton.jit
def kernel(a, b, product, total, tf32, narrow, steps, N: tl.constexpr, PRECISION: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(product + at, tl.dot(x, y, input_precision=PRECISION))
    tl.store(tf32 + at, tl.dot(x.to(tl.float32) * 1.0009765625, y.to(tl.float32), input_precision="tf32"))
    acc = tl.zeros((N, N), tl.bfloat16)
    for _ in range(steps):
        acc += x * y
    tl.store(total + at, acc)
    tl.store(narrow + at, (x.to(tl.float32) / 3.0).to(tl.bfloat16))

if sys.argv[1] == "corrected":
    interpreter.install()
draw = torch.Generator().manual_seed(0)
a, b = (torch.randn(16, 16, generator=draw).bfloat16() for _ in range(2))
product, tf32 = torch.empty(2, 16, 16)
total, narrow = torch.empty(2, 16, 16).bfloat16()
kernel[(1,)](a, b, product, total, tf32, narrow, 3, N=16, PRECISION=sys.argv[2])
x = a.float() * 1.0009765625
error = (tf32 - x @ b.float()).norm() / (x @ b.float()).norm()
print(int(torch.allclose(product, a.float() @ b.float(), atol=1e-5)),
      int(torch.equal(total, a * b + a * b + a * b)),
      int(torch.equal(narrow, (a.float() / 3).bfloat16())),
      int(2e-5 < error < 1e-3))  # half an ulp of tf32 is 2**-11
"""


def run_kernel(tmp_path, *arguments):
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True)


def test_corrected_interpreter_agrees_with_torch(tmp_path):
    done = run_kernel(tmp_path, "corrected", "bf16x3")
    assert done.stdout.split() == ["1", "1", "1", "1"], done.stderr


def test_shipped_interpreter_still_needs_the_corrections(tmp_path):
    done = run_kernel(tmp_path, "shipped", "ieee")
    assert done.returncode != 0 or done.stdout.split() == ["0", "0", "0", "0"], "a correction may go: " + done.stdout
    assert run_kernel(tmp_path, "shipped", "bf16x3").returncode != 0, "bf16x3 is accepted now: that correction may go"


def test_rounding_matches_torch_to_the_bit():
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 1 << 16)
    x[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1 + 2**-8])
    bits = interpreter.fp32_to_bf16(x.numpy())
    want = x.bfloat16()
    same = torch.from_numpy(bits.view(np.int16)) == want.view(torch.int16)
    assert bool((same | want.isnan()).all())
    assert np.array_equal(interpreter.bf16_to_fp32(bits), want.float().numpy(), equal_nan=True)


def test_tf32_rounds_to_ten_mantissa_bits():
    x = np.array([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, np.inf, -3.0], np.float32)
    assert interpreter.fp32_to_tf32(x).tolist() == [1 + 2**-10, 1.0, 1 + 2**-9, np.inf, -3.0]


def test_install_raises_without_the_environment_variable(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET must be 1 when the process starts"):
        interpreter.install()
