"""Time and memory of chunk_kda on a GPU: forward, forward + backward, eager calls and CUDA graphs, and its kernels.

    python benchmarks/bench_op.py                                  # the shapes of the project's targets
    python benchmarks/bench_op.py --shape 1x8192x32 --kernels      # one shape, with the time of every kernel

Raw gate, beta, q and k go in (bf16, K = V = 128), all activations inside. Times are medians, in ms; eager calls count
the host, graphs do not. Memory is the peak above the inputs, o and its gradient included, in MiB.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from openkda import chunk_kda

SHAPES = ["1x8192x32", "1x8192x96", "8x2048x32", "1x65536x16", "1x4096x16"]
GATES = {"bounded": -5.0, "softplus": None}


def draw(B: int, T: int, H: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=rng)

    tensors = {name: normal(B, T, H, 128).bfloat16() for name in ("q", "k", "v", "g")}
    tensors |= {"beta": normal(B, T, H).bfloat16(), "dt_bias": 0.1 * normal(H, 128) - 2.0}
    tensors["A_log"] = torch.log(1 + 15 * torch.rand(H, device="cuda", generator=rng))
    return {name: t.requires_grad_() for name, t in tensors.items()}


def median_ms(run: Callable[[], object], repeat: int = 15) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernel_times(run: Callable[[], object]) -> list[tuple[float, str]]:
    """(us a call, kernel), the longest first."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = [(event.device_time_total / 5, event.key[:60]) for event in profile.key_averages()]
    return sorted((row for row in rows if row[0] > 1), reverse=True)


def bench(shape: str, gate: str, kernels: bool) -> None:
    B, T, H = map(int, shape.split("x"))
    x = draw(B, T, H)
    do = torch.randn(B, T, H, 128, device="cuda").bfloat16()
    flags = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}

    def forward() -> torch.Tensor:
        return chunk_kda(**x, lower_bound=GATES[gate], backend="triton", **flags)[0]

    def inference() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    def both() -> object:
        return torch.autograd.grad(forward(), list(x.values()), do)

    base = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - base + do.nbytes) / 2**20
    eager = [median_ms(run) for run in (inference, both)]
    graph = [median_ms(graph_of(run)) for run in (inference, both)]
    columns = [f"{ms:8.3f}" for ms in (eager[0], graph[0], eager[1], graph[1])]
    print(f"{shape:12s} {gate:9s} {' '.join(columns)} {peak:8.0f}", flush=True)
    for us, name in kernel_times(both) if kernels else []:
        print(f"    {us:9.1f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="BxTxH")
    parser.add_argument("--gate", nargs="+", choices=GATES, default=["bounded"])
    parser.add_argument("--kernels", action="store_true", help="list the time of every kernel")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'shape':12s} {'gate':9s} {'fwd':>8s} {'(graph)':>8s} {'fwd+bwd':>8s} {'(graph)':>8s} {'peak':>8s}")
    for shape in options.shape:
        for gate in options.gate:
            bench(shape, gate, options.kernels)


if __name__ == "__main__":
    main()
