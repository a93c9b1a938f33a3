"""One row of `openkda bench op`: openkda and a peer on the same inputs, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openkda import testing
from openkda.bench import measure
from openkda.bench.peers import FLAGS, PEERS, Case, Implementation, OpenKDA, load, one_line
from openkda.kda import eager

#: Tokens x heads that are compared with fp64, on a GPU and on a CPU: what takes a second or two there.
COMPARED = {"cuda": 65536, "cpu": 2048}

#: Called with the name of the stage that comes next; keeps what a row has found so far.
Save = Callable[[str], None]


def draw(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of one call: raw q, k, v, g `[B, T, H, K]`, beta `[B, T, H]`, A_log `[H]`, dt_bias `[H, K]`.

    benchmark   A_log = log U(1, 16), dt_bias = N(-2, 0.1), gate logits N(0, 1): what published benchmarks draw
    fla_init    as fla's layer starts: dt_bias the inverse softplus of a log-uniform step in [1e-3, 0.1], A_log = log
                U(1, 16) with the softplus gate and 0 with the bounded one, logits of two fresh linear layers on N(0, 1)
    """
    rng = torch.Generator(case.device).manual_seed(seed)
    B, T, H, K = case.B, case.T, case.H, case.K

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=case.device, generator=rng)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=case.device, generator=rng)

    dtype = getattr(torch, case.dtype)
    x = {name: normal(B, T, H, K).to(dtype) for name in ("q", "k", "v", "g")}
    x |= {"beta": normal(B, T, H).to(dtype), "A_log": torch.log(1 + 15 * uniform(H))}
    if case.gates_drawn == "benchmark":
        return x | {"dt_bias": 0.1 * normal(H, K) - 2.0}
    step = torch.exp(math.log(1e-3) + math.log(100.0) * uniform(H, K))
    x["g"] = x["g"] / 3  # a fresh nn.Linear divides the variance by 3; there are two
    if case.gate == "bounded":
        x["A_log"] = torch.zeros_like(x["A_log"])
    return x | {"dt_bias": step + torch.log(-torch.expm1(-step))}


class Run:
    """One implementation on its leaves: the calls that are timed."""

    def __init__(self, made: Implementation, x: dict[str, Tensor], do: Tensor) -> None:
        self.made, self.leaves, self.do = made, made.inputs(x), do

    def forward(self) -> Tensor:
        return self.made.forward(self.leaves)

    def inference(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def backward(self, o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, list(self.leaves.values()), self.do)

    def both(self) -> object:
        return self.backward(self.forward())

    def calls(self) -> dict[str, measure.Call]:
        return {"forward": self.inference} | ({"forward_backward": self.both} if self.made.has_backward else {})


def run(spec: dict[str, Any], result: dict[str, Any], save: Save) -> None:
    """Fill `result`, saving it after each stage, so that a row that is stopped keeps what it had.

    Args:
        spec: `case`, the fields of `Case`; `peer`, a name or None; `repeats`; `kernels`, whether to list them.
    """
    case = Case(**spec["case"])
    device = torch.device(case.device)
    save("inputs")
    result["machine"] = measure.machine(device)
    x = draw(case)
    do = torch.randn(x["v"].shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(x["v"].dtype)
    makers = [OpenKDA, *([PEERS[spec["peer"]]] if spec["peer"] else [])]
    found = result["implementations"] = {cls.name: {"note": cls.note, "reason": None} for cls in makers}
    runs: dict[str, Run] = {}
    for cls in makers:
        save(f"import of {cls.name}")
        made = load(cls, case)
        if isinstance(made, str):
            found[cls.name]["reason"] = f"cannot be used here: {made}"
        else:
            found[cls.name]["versions"] = cls.versions()
            runs[cls.name] = Run(made, x, do)
    first_results = first_calls(runs, found, save)
    result["allowed"] = compare(case, x, do, first_results, found, save)
    del first_results
    times(runs, found, spec["repeats"], device, save)
    if device.type == "cuda":
        on_gpu(runs, found, spec, device, save)
    save("done")


def first_calls(runs: dict[str, Run], found: dict[str, Any], save: Save) -> dict[str, dict[str, Tensor]]:
    """Results of each one's first call, and its seconds: compilation and tuning are in there. Failures leave `runs`."""
    results = {}
    for name in list(runs):
        save(f"first call of {name}")
        start = time.perf_counter()
        try:
            run = runs[name]
            o = run.forward() if run.made.has_backward else run.inference()
            grads = run.backward(o) if run.made.has_backward else ()
            results[name] = {"o": o.detach()} | dict(zip(["d" + n for n in run.leaves], grads, strict=False))
            if o.is_cuda:
                torch.cuda.synchronize()
        except Exception as error:  # whatever a peer does wrong belongs in its line of the table
            found[name]["reason"] = f"failed: {one_line(error)}"
            del runs[name]
            continue
        found[name]["first_call_s"] = round(time.perf_counter() - start, 2)
    return results


def compare(
    case: Case,
    x: dict[str, Tensor],
    do: Tensor,
    results: dict[str, dict[str, Tensor]],
    found: dict[str, Any],
    save: Save,
) -> dict[str, float | None] | None:
    """Relative RMS error against fp64 of o and the gradients of raw inputs, over all tokens of a few heads.

    fp64 is the eager operator there, which the tests hold to 1e-12 of the recurrence.

    Returns: the errors that the project's budget allows for 16-bit inputs, or None for fp32.
    """
    save("fp64")
    rows = max(1, min(case.B, COMPARED[x["q"].device.type] // case.T))
    heads = list(range(max(1, min(case.H, 2, COMPARED[x["q"].device.type] // (rows * case.T)))))

    def part(name: str, tensor: Tensor) -> Tensor:
        if name in ("A_log", "dt_bias", "dA_log", "ddt_bias"):
            return tensor[heads]
        return tensor[:rows][:, :, heads]

    y = {name: part(name, tensor) for name, tensor in x.items()}
    state = torch.zeros(rows, len(heads), case.K, case.K, device=do.device)
    inputs = testing.KDAInputs(
        **y,
        initial_state=None,
        cu_seqlens=None,
        options=FLAGS | {"lower_bound": case.lower_bound},
        grad_o=part("o", do),
        grad_final_state=state,
    )
    try:
        exact = testing.run(eager.chunk_kda, inputs.to(torch.float64))
        rounded = None if case.dtype == "float32" else testing.rounded(inputs, case.dtype)
    except torch.OutOfMemoryError:
        return None
    names = ["o", *(f"d{name}" for name in x)]
    if rows < case.B:  # these sum over the whole batch
        names = [name for name in names if name not in ("dA_log", "ddt_bias")]
    for implementation, result in results.items():
        comparable = [n for n in names if n in result and (n in ("o", "dv") or "dA_log" in result)]
        found[implementation]["errors"] = {n: error(part(n, result[n]), exact[n]) for n in comparable}
    if rounded is None:
        return None
    return {n: error(rounded[n], exact[n], testing.BUDGET_FACTOR) for n in names}


def error(got: Tensor, exact: Tensor, factor: float = 1.0) -> float | None:
    """Relative RMS error, times factor, to 4 digits; None if it is not finite, as JSON has no NaN."""
    value = factor * testing.relative_rms(got, exact)
    return float(f"{value:.3e}") if math.isfinite(value) else None


def times(runs: dict[str, Run], found: dict[str, Any], repeats: int, device: torch.device, save: Save) -> None:
    """Eager calls, forward and forward + backward, the implementations in turns."""
    for kind in ("forward", "forward_backward"):
        save(f"{kind} calls")
        calls = {name: run.calls()[kind] for name, run in runs.items() if kind in run.calls()}
        for name, ms in measure.alternate(calls, repeats, device).items():
            found[name][f"{kind}_ms"] = measure.percentiles(ms)


def on_gpu(runs: dict[str, Run], found: dict[str, Any], spec: dict[str, Any], device: torch.device, save: Save) -> None:
    """Memory, CUDA graphs, launch overhead and kernels."""
    for name, run in runs.items():
        save(f"memory of {name}")
        found[name] |= measure.memory(
            run.forward if run.made.has_backward else run.inference, run.backward if run.made.has_backward else None
        )
        if spec["kernels"]:
            save(f"kernels of {name}")
            found[name]["kernels"] = measure.kernels(run.calls()[next(reversed(run.calls()))])
    for kind in ("forward", "forward_backward"):
        graphs = {}
        for name, run in runs.items():
            if kind in run.calls():
                save(f"CUDA graph of {name}")
                try:
                    graphs[name] = measure.graph_of(run.calls()[kind])
                except Exception as error:  # waits for the device, or allocates what a graph must not
                    found[name]["graph_reason"] = one_line(error)
        save("CUDA graphs")
        for name, ms in measure.alternate(graphs, spec["repeats"], device).items():
            row = found[name]
            row[f"{kind}_graph_ms"] = measure.percentiles(ms)
            overhead = row[f"{kind}_ms"]["p50"] - row[f"{kind}_graph_ms"]["p50"]
            row[f"{kind}_launch_ms"] = round(overhead, 4)
        graphs.clear()
