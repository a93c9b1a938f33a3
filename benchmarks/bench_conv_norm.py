"""Time of causal_conv1d, rms_norm_gated and l2norm on a GPU, beside the byte floor and other implementations.

    python benchmarks/bench_conv_norm.py
    PYTHONPATH=/path/to/fla python benchmarks/bench_conv_norm.py --json

Calls take turns, each finding a cold L2, between two events; a kernel that spins keeps the device busy until the host
has launched all of a call, so that figures are device time. Medians with 20th and 80th percentile, in us. A floor is
the time in which this device, in the same run, copies as many bytes as the call must read and write (each input and
result once), by cudaMemcpy or by an elementwise kernel, whichever is faster. Others are measured where they can be
imported: fla (flash-linear-attention) and causal-conv1d, which gets channels-last views of the same tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import openkda
from openkda.bench import measure
from openkda.conv import causal_conv1d_update

DEVICE = torch.device("cuda")
CONVOLUTIONS = [(1, 8192, 12288), (1, 8192, 4096), (8, 2048, 4096), (1, 65536, 2048)]  # B, T, C
NORMS = [(8192, 32, 128), (8192, 96, 128)]  # T, H, D
W = 4
SPIN = 2_000_000  # clocks, about 1 ms: longer than any call takes to launch
Forward = Callable[..., Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def fla_convolution() -> Forward:
    from fla.modules.causal_conv1d import causal_conv1d

    return lambda x, weight: causal_conv1d(x, weight, activation="silu")[0]


def other_convolution() -> Forward:
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight: causal_conv1d_fn(x.mT, weight, activation="silu").mT


def fla_norm() -> Forward:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, activation="sigmoid", eps=1e-5)


def fla_l2norm() -> Forward:
    from fla.modules.norm.l2norm import l2norm

    return l2norm


# Operator -> its implementations, as functions that import theirs.
IMPLEMENTATIONS: dict[str, dict[str, Callable[[], Forward]]] = {
    "causal_conv1d": {
        "openkda": lambda: lambda x, weight: openkda.causal_conv1d(x, weight, activation="silu", backend="triton")[0],
        "fla": fla_convolution,
        "causal-conv1d": other_convolution,
    },
    "rms_norm_gated": {
        "openkda": lambda: lambda *xs: openkda.rms_norm_gated(*xs, activation="sigmoid", backend="triton"),
        "fla": fla_norm,
    },
    "l2norm": {"openkda": lambda: lambda x: openkda.l2norm(x, backend="triton"), "fla": fla_l2norm},
}
#: Tensors of the size of x that a forward and a backward read and write.
PASSES = {"causal_conv1d": (2, 3), "rms_norm_gated": (3, 5), "l2norm": (2, 3)}


def inputs(op: str, shape: tuple[int, ...]) -> list[Tensor]:
    if op == "causal_conv1d":
        return [draw(*shape), draw(shape[-1], W) / 2]
    return [draw(*shape)] if op == "l2norm" else [draw(*shape), draw(*shape), draw(shape[-1])]


def passes_of(run: Forward, leaves: list[Tensor], dy: Tensor) -> dict[str, measure.Call]:
    """The forward without, and the backward after, one that keeps what it needs."""
    y = run(*leaves)

    def forward() -> object:
        with torch.no_grad():
            return run(*leaves)

    return {"forward": forward, "backward": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)}


def rows_of(op: str, shape: tuple[int, ...], repeats: int, by: list[str]) -> Iterator[dict[str, Any]]:
    """One row an implementation and pass."""
    leaves = [t.requires_grad_() for t in inputs(op, shape)]
    dy, exact = draw(*shape), None
    calls: dict[str, measure.Call] = {}
    found: dict[str, float] = {}
    for name, load in IMPLEMENTATIONS[op].items():
        if by and name not in by:
            continue
        try:
            run = load()
            y = run(*leaves).detach().float()
            exact = y if exact is None else exact
            own = passes_of(run, leaves, dy)
            for call in own.values():
                call()
            torch.cuda.synchronize()
            calls |= {f"{name} {what}": call for what, call in own.items()}
            found[name] = ((y - exact).norm() / exact.norm()).item()
        except Exception as error:  # what cannot run here is a row with the reason
            yield {"op": op, "shape": shape, "by": name, "why_not": f"{type(error).__name__}: {error}"[:160]}
    size = leaves[0].numel() * leaves[0].element_size()
    for i, passes in enumerate(PASSES[op]):
        calls |= {f"{how} {i}": call for how, call in copies(passes * size).items()}
    times = measure_all(calls, repeats)
    for name in found:
        for i, what in enumerate(("forward", "backward")):
            us, floor = times[f"{name} {what}"], min(times[f"{how} {i}"]["p50"] for how in ("memcpy", "kernel"))
            row = {"op": op, "shape": shape, "by": name, "pass": what, "us": us, "floor_us": floor}
            row |= {"bytes": PASSES[op][i] * size, "times_floor": us["p50"] / floor, "apart_from_openkda": found[name]}
            yield row


def copies(size: int) -> dict[str, measure.Call]:
    """Two ways to read size / 2 bytes and write as many."""
    a, b = torch.empty(2, size // 8, dtype=torch.int32, device=DEVICE)
    return {"memcpy": lambda: a.copy_(b), "kernel": lambda: torch.neg(b, out=a)}


def measure_all(calls: dict[str, measure.Call], repeats: int) -> dict[str, dict[str, float]]:
    """Device time of every call, us."""
    cache = torch.empty(measure.CACHE_BYTES, dtype=torch.int8, device=DEVICE)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for i in range(measure.WARM_UP + repeats):
        for name, call in list(calls.items())[:: 1 if i % 2 == 0 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            torch.cuda._sleep(SPIN)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if i >= measure.WARM_UP:
                events[name].append((start, end))
    return {n: measure.percentiles([1e3 * a.elapsed_time(b) for a, b in pairs]) for n, pairs in events.items()}


def update_row(repeats: int, N: int, C: int = 12288) -> dict[str, Any]:
    """A decode step of the convolution: N sequences, shuffled slots of a pool."""
    x, weight, pool = draw(N, C), draw(C, W), draw(2 * N, C, W - 1)
    slots = torch.randperm(2 * N, device=DEVICE)[:N]

    def step() -> object:
        return causal_conv1d_update(x, pool, weight, activation="silu", state_indices=slots, backend="triton")

    size = N * C * 2 * (2 + 2 * (W - 1)) + C * W * 2
    times = measure_all({"us": step, **copies(size)}, repeats)
    row: dict[str, Any] = {"op": "causal_conv1d_update", "shape": (N, C), "by": "openkda", "pass": "step"}
    floor = min(times[how]["p50"] for how in ("memcpy", "kernel"))
    return row | {"us": times["us"], "floor_us": floor, "bytes": size, "times_floor": times["us"]["p50"] / floor}


def show(row: dict[str, Any]) -> None:
    head = f"{row['op']:21s} {'x'.join(map(str, row['shape'])):14s} {row['by']:14s}"
    if "why_not" in row:
        print(f"{head} {row['why_not']}", flush=True)
        return
    us = row["us"]
    spread = f"[{us['p20']:.1f}, {us['p80']:.1f}]" if "p20" in us else ""
    floor = f"floor {row['floor_us']:7.1f}  x{row['times_floor']:.2f}"
    print(f"{head} {row['pass']:9s} {us['p50']:9.1f} us {spread:18s} {floor}", flush=True)


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--by", nargs="+", default=[], help="openkda, fla, causal-conv1d; all of them if not given")
    parser.add_argument("--only", default="", help="cases that begin so, as in causal_conv1d:1x8192x12288")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    about = measure.machine(DEVICE) | {"commit": commit(), "repeats": options.repeats}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    cases = [("causal_conv1d", shape) for shape in CONVOLUTIONS]
    cases += [(op, shape) for op in ("rms_norm_gated", "l2norm") for shape in NORMS]
    rows = []
    for op, shape in cases:
        if not f"{op}:{'x'.join(map(str, shape))}".startswith(options.only):
            continue
        for row in rows_of(op, shape, options.repeats, options.by):
            show(row)
            rows.append(row)
        torch.cuda.empty_cache()
    for N in (1, 32, 256) if "causal_conv1d_update".startswith(options.only) else ():
        rows.append(update_row(options.repeats, N))
        show(rows[-1])
    if options.json:
        print(json.dumps({"about": about, "rows": rows}))


if __name__ == "__main__":
    main()
