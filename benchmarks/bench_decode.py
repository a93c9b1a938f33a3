"""Time of one decode step of recurrent_kda on a GPU, under CUDA graphs, beside the byte floor, and fla where it is.

    python benchmarks/bench_decode.py
    PYTHONPATH=/path/to/fla python benchmarks/bench_decode.py --csv results.csv

One token for each of `batch` sequences, H = HV = 32, K = V = 128, bf16 inputs with raw gate, beta, q and k, fp32 states
in a pool, slots shuffled. Steps of a graph rotate among pools of 2 GiB in all, so that no state waits in L2. The floor
is the fastest way to copy as many bytes on this device in the same run: cudaMemcpy or an elementwise kernel, in a
graph or outside (in a graph a cudaMemcpy may run on a copy engine). A step must read and write every state once.

    idle         a step whose slots are all padding: the price of a launch in a graph
    invariant    a step with batch_invariant=True, which runs the unfinished chunk of 64 tokens again
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from openkda import recurrent_kda

H, K, V = 32, 128, 128
BATCHES = (1, 32, 256)
FLAGS = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}


def graph_us(steps: list[Callable[[], object]], repeat: int = 15) -> float:
    """Median time of a step, in microseconds: one graph of all steps, replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steps[0]()
        steps[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times = []
    for _ in range(repeat + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(steps))
    return statistics.median(times[3:])


def eager_us(step: Callable[[], object], calls: int = 200) -> float:
    """Host and device time of a call that is not recorded."""
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def draw(batch: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=rng)

    x = {name: normal(batch, 1, H, 128).bfloat16() for name in ("q", "k", "v", "g")}
    x |= {"beta": normal(batch, 1, H).bfloat16(), "dt_bias": 0.1 * normal(H, K) - 2.0}
    return x | {"A_log": torch.log(1 + 15 * torch.rand(H, device="cuda", generator=rng))}


def fla_steps(x: dict[str, torch.Tensor], pools: list[torch.Tensor], slots: torch.Tensor) -> dict:
    """fla's two forms: new states, and a pool written in place (into an output that exists)."""
    try:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda, fused_recurrent_kda_fwd
    except ImportError:
        return {}
    out = torch.empty_like(x["v"])
    paged = {"inplace_final_state": True, "ssm_state_indices": slots, "out": out}
    return {
        "fla": [lambda p=p: fused_recurrent_kda(**x, initial_state=p, output_final_state=True, **FLAGS) for p in pools],
        "fla pool": [lambda p=p: fused_recurrent_kda_fwd(**x, initial_state=p, **paged, **FLAGS) for p in pools],
    }


def bench(batch: int) -> list[dict]:
    x = draw(batch)
    size = (batch, H, K, V)
    step_bytes = 2 * 4 * batch * H * K * V
    count = max(2, min(256, 2**31 // step_bytes))
    pools = [0.1 * torch.randn(size, device="cuda") for _ in range(count)]
    slots = torch.randperm(batch, device="cuda").int()
    padding = torch.full_like(slots, -1)
    target = torch.empty(size, device="cuda")

    def ours(p: Any, **options: object) -> Any:
        return recurrent_kda(**x, initial_state=p, backend="triton", **FLAGS, **options)

    steps = {
        "copy": [lambda p=p: target.copy_(p) for p in pools],
        "copy by a kernel": [lambda p=p: torch.mul(p, 1.0, out=target) for p in pools],
        "openkda pool": [lambda p=p: ours(p, state_indices=slots) for p in pools],
        "openkda": [lambda p=p: ours(p, output_final_state=True) for p in pools],
        "openkda idle": [lambda p=p: ours(p, state_indices=padding) for p in pools],
    } | fla_steps(x, pools, slots)
    rows = []
    with torch.no_grad():
        for provider, runs in steps.items():
            row = {"batch": batch, "provider": provider, "us": graph_us(runs), "bytes": step_bytes}
            rows.append(row | {"eager_us": eager_us(runs[0])})
    if batch > 1:  # a pool of bf16 states: half the bytes
        narrow = [p.bfloat16() for p in pools]
        runs = [lambda p=p: ours(p, state_indices=slots) for p in narrow]
        row = {"batch": batch, "provider": "openkda bf16 pool", "us": graph_us(runs), "bytes": step_bytes // 2}
        rows.append(row | {"eager_us": eager_us(runs[0])})
    if batch > 1:  # states with V first, as some engines keep them: the same pools, read the other way
        runs = [lambda p=p: ours(p, state_indices=slots, state_v_first=True) for p in pools]
        row = {"batch": batch, "provider": "openkda V-first pool", "us": graph_us(runs), "bytes": step_bytes}
        rows.append(row | {"eager_us": eager_us(runs[0])})
    states = [ours(p, output_final_state=True, batch_invariant=True)[1] for p in pools[:4]]
    runs = [lambda s=s: ours(s, output_final_state=True, batch_invariant=True) for s in states]
    row = {"batch": batch, "provider": "openkda invariant", "us": graph_us(runs), "bytes": step_bytes}
    rows.append(row | {"eager_us": eager_us(runs[0], 20)})
    copies = [time for row in rows[:2] for time in (row["us"], row["eager_us"])]
    for row in rows:
        row["share_of_floor"] = min(copies) * row["bytes"] / step_bytes / row["us"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, H{H} K{K} V{V}")
    print(f"{'batch':>5s} {'provider':20s} {'us':>8s} {'TB/s':>6s} {'floor':>6s} {'eager us':>9s}")
    rows = []
    for batch in options.batch:
        for row in bench(batch):
            rows.append(row)
            rate, share = row["bytes"] / row["us"] / 1e6, row["share_of_floor"]
            line = f"{batch:5d} {row['provider']:20s} {row['us']:8.2f} {rate:6.2f} {share:6.1%} {row['eager_us']:9.1f}"
            print(line, flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
