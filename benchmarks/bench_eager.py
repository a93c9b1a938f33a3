"""Time the eager operators against their references, forward and backward, on this machine's CPU.

    python benchmarks/bench_eager.py                          # a table, then one line of JSON
    python benchmarks/bench_eager.py --ops chunk_kda --repeats 3 --shape cpu-small
    python benchmarks/bench_eager.py --csv benchmarks/results/eager_cpu_202612.csv --machine "2-core x86-64 CPU"

Implementations of an operator take turns within each repetition, so that a machine that is busy for a while slows all
of them down. Medians are compared; the spread beside a median is the range from the 20th to the 80th percentile.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import openkda
from openkda import testing
from shapes import SHAPES, Shape

Case = tuple[list[Tensor], Callable[[str], Tensor]]  # leaves, and a function from backend name to output


def leaf(*size: int) -> Tensor:
    return torch.randn(*size).requires_grad_()


def chunk_kda_case(s: Shape) -> Case:
    """The operator as a layer calls it: normalisation, gate and beta's sigmoid inside, no state asked for.

    The gate is that of a new layer. Gates so strong that decays sink below the least normal fp32 number (88 nats within
    a chunk) make a CPU slower by up to a half: it computes subnormal numbers in microcode.
    """
    size = {"B": s.B, "T": s.T, "H": s.H, "HV": s.HV, "K": s.K, "V": s.V}
    flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    inputs = testing.make_inputs(**size, gate="layer_init", dtype="float32", initial_state=False, **flags)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.tensors.items()}
    tokens = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    options = inputs.options | {name: leaves[name] for name in ("A_log", "dt_bias")}
    return list(leaves.values()), lambda backend: openkda.chunk_kda(*tokens, backend=backend, **options)[0]


def causal_conv1d_case(s: Shape) -> Case:
    """The short convolution over the q channels of the same shape: 4 taps, SiLU."""
    x, weight = leaf(s.B, s.T, s.H * s.K), leaf(s.H * s.K, 4)
    return [x, weight], lambda backend: openkda.causal_conv1d(x, weight, activation="silu", backend=backend)[0]


def rms_norm_gated_case(s: Shape) -> Case:
    """The output norm of the same shape, with Kimi Linear's sigmoid gate."""
    x, gate, weight = leaf(s.B, s.T, s.HV, s.V), leaf(s.B, s.T, s.HV, s.V), leaf(s.V)
    return [x, gate, weight], lambda backend: openkda.rms_norm_gated(
        x, gate, weight, activation="sigmoid", backend=backend
    )


CASES: dict[str, Callable[[Shape], Case]] = {
    "chunk_kda": chunk_kda_case,
    "causal_conv1d": causal_conv1d_case,
    "rms_norm_gated": rms_norm_gated_case,
}


def timed(leaves: Sequence[Tensor], run: Callable[[str], Tensor], backend: str, grad: Tensor | None) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    out = run(backend)
    torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)
    return time.perf_counter() - start


def measure(op: str, shape: Shape, repeats: int) -> dict[str, dict[str, float]]:
    """{backend: {first_call_s, p20_ms, p50_ms, p80_ms}}, from repetitions in which the backends take turns."""
    torch.manual_seed(0)
    leaves, run = CASES[op](shape)
    grad = torch.randn_like(run("eager").detach())
    backends = ("eager", "reference")
    first = {backend: timed(leaves, run, backend, grad) for backend in backends}
    seconds: dict[str, list[float]] = {backend: [] for backend in backends}
    for repetition in range(repeats):
        for backend in backends if repetition % 2 == 0 else backends[::-1]:
            seconds[backend].append(timed(leaves, run, backend, grad))
    return {b: {"first_call_s": round(first[b], 4)} | percentiles(seconds[b]) for b in backends}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    p20, p50, p80 = (statistics.quantiles(seconds, n=10, method="inclusive")[i] for i in (1, 4, 7))
    return {f"p{p}_ms": round(1e3 * s, 3) for p, s in ((20, p20), (50, p50), (80, p80))}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the eager operators against their references on the CPU.")
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES), help="operators to time (default: all)")
    parser.add_argument("--shape", choices=SHAPES, default="cpu", help="a name of benchmarks/shapes.py (default: cpu)")
    parser.add_argument("--repeats", type=int, default=7, help="timed repetitions, at least 2 (default: 7)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--machine", default=f"{platform.machine()} CPU", help="how the machine is named in the results"
    )
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {options.repeats}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    common = {
        "pass": "fwd+bwd",
        "shape": str(shape),
        "dtype": "fp32",
        "repeats": options.repeats,
        "threads": options.threads,
    }
    versions = {
        "machine": options.machine,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    rows: list[dict[str, Any]] = []
    speedup: dict[str, float] = {}
    print(f"{'operator':<16}{'backend':<11}{'median ms':>11}{'20-80% ms':>20}{'times faster':>14}   {shape}")
    for op in options.ops:
        result = measure(op, shape, options.repeats)
        speedup[op] = round(result["reference"]["p50_ms"] / result["eager"]["p50_ms"], 2)
        for backend, times in result.items():
            spread = f"{times['p20_ms']:.1f} - {times['p80_ms']:.1f}"
            faster = speedup[op] if backend == "eager" else 1.0
            print(f"{op:<16}{backend:<11}{times['p50_ms']:>11.1f}{spread:>20}{faster:>13.1f}x")
            rows.append({"op": op, "provider": backend} | common | times | versions)
    if options.csv:
        append_csv(options.csv, rows)
    print(json.dumps({"benchmark": "eager", "speedup": speedup, "rows": rows}))
    return 0


def append_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
