"""Times, memory and kernels of calls, on a GPU or a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], object]

WARM_UP = 3
#: More than the 60 MB of an H200's second-level cache: written between two timed calls, so that each finds it cold.
CACHE_BYTES = 2**28
MIB = 2**20


def alternate(calls: Mapping[str, Call], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of `repeats` calls each, taking turns, the order reversed every other time.

    On a GPU between two events, without waiting in between: a call is as long as its kernels, or as the host takes to
    launch them where that is longer. On a CPU by the clock.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    timed = _on_gpu if device.type == "cuda" else _on_cpu
    turns = [list(calls)[:: 1 if i % 2 == 0 else -1] for i in range(repeats)]
    return timed(calls, turns, device)


def _on_gpu(calls: Mapping[str, Call], turns: list[list[str]], device: torch.device) -> dict[str, list[float]]:
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    torch.cuda.synchronize(device)
    for turn in turns:
        for name in turn:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _on_cpu(calls: Mapping[str, Call], turns: list[list[str]], device: torch.device) -> dict[str, list[float]]:
    ms: dict[str, list[float]] = {name: [] for name in calls}
    for turn in turns:
        for name in turn:
            start = time.perf_counter()
            calls[name]()
            ms[name].append(1e3 * (time.perf_counter() - start))
    return ms


def percentiles(ms: list[float]) -> dict[str, float]:
    """Median, and the 20th and 80th percentile beside it."""
    p20, p50, p80 = (statistics.quantiles(ms, n=10, method="inclusive")[i] for i in (1, 4, 7))
    return {"p20": round(p20, 4), "p50": round(p50, 4), "p80": round(p80, 4)}


def graph_of(call: Call) -> Call:
    """The call captured in a CUDA graph: what it costs without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def memory(forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object] | None) -> dict[str, float]:
    """MiB above what is allocated now (the inputs), of one call that ran before.

    forward_peak_mib and peak_mib count the result, and peak_mib also the incoming gradient, which is allocated already;
    kept_mib is what the forward leaves for the backward, without inputs and result.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    with torch.set_grad_enabled(backward is not None):
        o = forward()
    found = {"forward_peak_mib": (torch.cuda.max_memory_allocated() - base) / MIB}
    if backward is not None:
        found["kept_mib"] = (torch.cuda.memory_allocated() - base - o.nbytes) / MIB
        grads = backward(o)
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - base + o.nbytes) / MIB
        del grads
    return {name: round(mib, 1) for name, mib in found.items()}


def kernels(call: Call, calls: int = 5) -> list[dict[str, Any]]:
    """Every kernel of a call, the longest first: name, how often it runs and how many us it takes in one call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = [
        {"us": round(event.device_time_total / calls, 2), "launches": event.count / calls, "name": event.key}
        for event in profile.key_averages()
    ]
    return sorted((row for row in found if row["us"] > 0), key=lambda row: -row["us"])


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on: the device, and versions."""
    import platform

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return {"device": f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}", **found}
    import triton

    return {
        "device": torch.cuda.get_device_name(device),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        **found,
    }
