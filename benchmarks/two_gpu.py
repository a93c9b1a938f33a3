"""Two GPUs of one host: `python benchmarks/two_gpu.py [--out FILE]`.

A dry run takes two CPU processes (`--device cpu`), or two ranks on one GPU that talk by way of the host (`--device
shared`, with `--tokens 8192`).

Each section is tried alone, so that one that fails leaves the others standing; all go to one JSON file.

    exact    chunk_kda and causal_conv1d over two ranks against one: results, and every gradient on both ranks
    speed    milliseconds of forward and backward over two ranks, of one, and of fla's context parallelism
    overlap  a profiler trace: how much of the communication has computation beside it
    graph    forward and backward with their exchanges captured in a CUDA graph, replayed
    train    kimi_linear_debug for 20 steps with FSDP2 and with TP2, losses against one rank (needs torchtitan)

NVLink multicast stays off: NCCL, symmetric memory and NVSHMEM are told so before they are loaded.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before torch is imported, here and in the ranks.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import torch
import torch.distributed as dist
from torch import Tensor

import openkda
from openkda import testing
from openkda.bench import measure
from openkda.testing.processes import run_processes

RANKS = 2
TOKENS = int(os.environ.get("TWO_GPU_TOKENS", "65536"))
#: Relative RMS between two ranks and one. Both are rounded to 16 bits on the way, in different places: what fla's own
#: tests of context parallelism allow. fp32 for the dry run.
LIMIT = {torch.bfloat16: 8e-3, torch.float32: testing.FP32_LIMIT}


@dataclass(frozen=True)
class Case:
    T: int
    H: int
    HV: int
    D: int
    gate: str
    packed: bool
    order: str

    def offsets(self) -> list[int]:
        if not self.packed:
            return [0, self.T]
        return [0, self.T // 5, self.T // 5, self.T // 3 + 1, 7 * self.T // 8 + 3, self.T]


def cases(small: bool) -> list[Case]:
    T, D, heads = (256, 16, (1, 2)) if small else (TOKENS, 128, (16, 32))
    choices = itertools.product(heads, ("softplus", "bounded"), (False, True))
    plain = [Case(T, H, H, D, gate, packed, "contiguous") for H, gate, packed in choices]
    return [*plain, Case(T, heads[0], heads[1], D, "softplus", True, "zigzag")]


class Inputs:
    """All tokens, the same on every rank, and those of this one."""

    def __init__(self, case: Case, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rng = torch.Generator(device).manual_seed(0)

        def normal(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, generator=rng, device=device, dtype=torch.float32).to(dtype)

        c, (T, D) = case, (case.T, case.D)
        self.tokens = {"q": normal(1, T, c.H, D), "k": normal(1, T, c.H, D), "v": normal(1, T, c.HV, D)}
        self.tokens |= {"g": normal(1, T, c.HV, D), "beta": normal(1, T, c.HV), "do": normal(1, T, c.HV, D)}
        self.tokens["x"], self.tokens["dy"] = normal(1, T, c.H * D), normal(1, T, c.H * D)
        wide = torch.float32  # dt_bias: slow decay, so that what comes from the other rank counts
        self.shared = {"A_log": 0.5 * normal(c.HV, dtype=wide), "dt_bias": 0.3 * normal(c.HV, D, dtype=wide) - 7.0}
        self.shared["initial_state"] = 0.3 * normal(len(c.offsets()) - 1, c.HV, D, D, dtype=wide)
        self.shared["weight"] = normal(c.H * D, 4)
        self.lower_bound = -5.0 if c.gate == "bounded" else None
        self.offsets = torch.tensor(c.offsets(), dtype=torch.int32, device=device)
        self.cp = openkda.build_cp_context(self.offsets, None, order=c.order, conv_width=4)

    def of(self, *, cp: bool) -> dict[str, Tensor]:
        tokens = {n: self.cp.local_tokens(t).contiguous() if cp else t for n, t in self.tokens.items()}
        leaves = {n: t.detach().clone().requires_grad_(not n.startswith("d")) for n, t in tokens.items()}
        return leaves | {n: t.detach().clone().requires_grad_() for n, t in self.shared.items()}

    def where(self, *, cp: bool) -> dict[str, Any]:
        return {"cp_context": self.cp} if cp else {"cu_seqlens": self.offsets}

    def kda(self, x: dict[str, Tensor], *, cp: bool) -> Tensor:
        gate = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": self.lower_bound}
        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        tokens = (x[name] for name in ("q", "k", "v", "g", "beta"))
        options = {**gate, **dict.fromkeys(flags, True), "initial_state": x["initial_state"], **self.where(cp=cp)}
        backend = "triton" if x["q"].is_cuda else "auto"
        return openkda.chunk_kda(*tokens, **options, backend=backend)[0]

    def conv(self, x: dict[str, Tensor], *, cp: bool) -> Tensor:
        return openkda.causal_conv1d(x["x"], x["weight"], activation="silu", **self.where(cp=cp))[0]

    def run(self, *, cp: bool) -> dict[str, Tensor]:
        x = self.of(cp=cp)
        o, y = self.kda(x, cp=cp), self.conv(x, cp=cp)
        torch.autograd.backward((o, y), (x["do"], x["dy"]))
        return {"o": o.detach(), "y": y.detach()} | {f"d{n}": t.grad for n, t in x.items() if t.grad is not None}


# ---------------------------------------------------------------- sections
def exact(device: torch.device, small: bool) -> list[dict[str, Any]]:
    rows = []
    for case in cases(small):
        inputs = Inputs(case, device)
        one, got, errors = inputs.run(cp=False), inputs.run(cp=True), {}
        for name, want in one.items():
            if name[1:] in inputs.shared:  # every rank has its share
                dist.all_reduce(got[name])
            else:
                want = inputs.cp.local_tokens(want)
                errors[name + " at the ends"] = testing.relative_rms(_ends(got[name]), _ends(want))
            errors[name] = testing.relative_rms(got[name], want)
        worst = torch.tensor(max(errors.values()), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        limit = LIMIT[inputs.tokens["q"].dtype]
        rows.append({**asdict(case), "errors": errors, "worst_of_ranks": worst.item(), "ok": worst.item() <= limit})
        del inputs, one, got
    return rows


def _ends(x: Tensor) -> Tensor:
    """The tokens next to a cut, where the other rank's state has not decayed."""
    n = min(512, x.shape[1] // 4)
    return torch.cat([x[:, :n], x[:, -n:]], 1)


def speed(device: torch.device, small: bool) -> list[dict[str, Any]]:
    rows = []
    for case in (c for c in cases(small) if c.gate == "softplus" and c.order == "contiguous"):
        inputs = Inputs(case, device)
        calls: dict[str, Callable[[], object]] = {}
        for name, cp in (("two ranks", True), ("one rank", False)):
            x = inputs.of(cp=cp)
            calls[name] = functools.partial(_both, inputs, x, cp)
        try:
            calls["fla, two ranks"] = _fla(inputs)
            calls["fla, two ranks"]()
        except Exception as error:
            calls.pop("fla, two ranks", None)
            rows.append({**asdict(case), "fla": f"not run: {type(error).__name__}: {str(error)[:200]}"})
        dist.barrier()
        ms = measure.alternate(calls, 3 if small else 10, device)
        rows.append({**asdict(case), "ms": {name: measure.percentiles(times) for name, times in ms.items()}})
    return rows


WANTED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def _both(inputs: Inputs, x: dict[str, Tensor], cp: bool) -> None:
    torch.autograd.grad(inputs.kda(x, cp=cp), [x[n] for n in WANTED], x["do"])


def _fla(inputs: Inputs) -> Callable[[], object]:
    from fla.ops.cp import build_cp_context  # type: ignore[import-not-found]
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]

    context = build_cp_context(inputs.offsets, dist.group.WORLD)
    x = inputs.of(cp=True)
    options = {"A_log": x["A_log"], "dt_bias": x["dt_bias"].flatten(), "use_gate_in_kernel": True}
    options |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "cp_context": context}

    def call() -> None:
        o = chunk_kda(*(x[n] for n in WANTED[:5]), cu_seqlens=context.cu_seqlens, **options)[0]
        torch.autograd.grad(o, [x[n] for n in WANTED], x["do"])

    return call


def overlap(device: torch.device, small: bool) -> dict[str, Any]:
    """Time of communication kernels, and how much of it had another kernel beside it on the device."""
    inputs = Inputs(cases(small)[0], device)
    x = inputs.of(cp=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    for _ in range(2):
        _both(inputs, x, True)
    with torch.profiler.profile(activities=activities) as profile:
        _both(inputs, x, True)
        if device.type == "cuda":
            torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end, "nccl" in e.name.lower() or "gather" in e.name.lower())
        for e in profile.events()
        if device.type == "cpu" or e.device_type == torch.autograd.DeviceType.CUDA
    ]
    talk = [(a, b) for a, b, is_talk in spans if is_talk]
    work = [(a, b) for a, b, is_talk in spans if not is_talk]
    beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in talk for c, d in work)
    return {"communication_us": sum(b - a for a, b in talk), "beside_us": beside, "collectives": len(talk)}


def graph(device: torch.device, small: bool) -> dict[str, Any]:
    if device.type != "cuda":
        return {"skipped": "CUDA graphs need a GPU"}
    inputs = Inputs(cases(small)[0], device)
    x = inputs.of(cp=True)
    wanted = [x[n] for n in ("q", "k", "v", "g", "beta")]
    found: list[Tensor] = []

    def call() -> None:
        o = inputs.kda(x, cp=True)
        found[:] = [o.detach(), *torch.autograd.grad(o, wanted, x["do"])]

    call()
    eager = [t.clone() for t in found]
    replay = measure.graph_of(call)
    for t in found:
        t.zero_()
    replay()
    torch.cuda.synchronize()
    return {"equal_to_eager": all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))}


SECTIONS: dict[str, Callable[..., Any]] = {"exact": exact, "speed": speed, "overlap": overlap, "graph": graph}


# ---------------------------------------------------------------- training
LAYOUTS = Path(__file__).parents[1] / "tests" / "integrations" / "torchtitan" / "layouts.py"


def train(folder: Path, small: bool) -> dict[str, Any]:
    """kimi_linear_debug on one rank, with FSDP2 and with TP2: the same start, the same batches, the losses."""
    steps = 2 if small else 20
    env = {"OPENKDA_LAYOUTS_CONFIG": "kimi_linear_debug", "OPENKDA_LAYOUTS_STEPS": str(steps)}
    for size, names in ((1, ("seed", "single")), (2, ("fsdp2", "tp2"))):
        run_processes(LAYOUTS, size, str(folder), *names, env=env, timeout_s=600)
    losses = {n: torch.load(folder / f"{n}-0.pt")["losses"] for n in ("single", "fsdp2", "tp2")}
    one = losses["single"]
    return {**losses, **{f"{n} furthest": max(abs(losses[n][s] - one[s]) for s in one) for n in ("fsdp2", "tp2")}}


# ---------------------------------------------------------------- processes
def rank_main(folder: Path, device_type: str, small: bool, name: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device("cuda", rank if device_type == "cuda" else 0)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if device_type == "shared":
        _exchange_on_the_host()
    result = SECTIONS[name](device, small)
    (folder / f"{name}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _exchange_on_the_host() -> None:
    """Two ranks on one GPU, which NCCL refuses: gloo, by way of the host."""
    from openkda.frameworks import torch as fw

    gather, reduce = fw.all_gather, dist.all_reduce
    fw.all_gather = lambda x, group: gather(x.cpu(), group).to(x.device)

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> None:
        host = x.cpu()
        reduce(host, *args, **kwargs)
        x.copy_(host)

    dist.all_reduce = all_reduce


def section(name: str, device: str, small: bool) -> Any:
    """Results of all ranks, in processes of their own: what fails leaves the other sections alone."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        try:
            if name == "train":
                return [train(folder, small)]
            size = "small" if small else "full"
            run_processes(__file__, RANKS, "--rank", str(folder), device, size, name, timeout_s=600)
            return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
        except Exception as error:
            return [{"failed": f"{type(error).__name__}: {str(error)[-3000:]}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "shared", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes; always so on a CPU")
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, "train"], default=[*SECTIONS, "train"])
    parser.add_argument("--out", type=Path, default=Path("two_gpu.json"))
    parser.add_argument("--tokens", default=str(TOKENS), help="of all ranks together")
    args = parser.parse_args()
    os.environ["TWO_GPU_TOKENS"] = args.tokens  # for the ranks
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name(0)
    found = {"device": device, "torch": torch.__version__}
    for name in args.only:
        found[name] = section(name, args.device, args.small or args.device == "cpu")
        show(name, found[name])
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def show(name: str, ranks: list[Any]) -> None:
    for row in ranks[0] if isinstance(ranks[0], list) else [ranks[0]]:
        print(name, json.dumps(row), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "small", sys.argv[5])
    else:
        main()
