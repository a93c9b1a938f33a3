r"""One training step of a Kimi Linear model in transformers: openkda's kernels against fla's, time and memory.

    python benchmarks/train_step.py                                    # openkda, fla, and transformers' own use of fla
    python benchmarks/train_step.py --variants openkda --profile       # one, with the time of every kernel
    python benchmarks/train_step.py --device cpu --layers 5 --hidden 64 --heads 2 --head-dim 16 --mlp 96 --vocab 128 \
        --tokens 64

The model: 16 KDA and 4 MLA layers (every fifth is MLA), hidden 2304, 32 heads of 128, dense MLP 9216, vocabulary 32768,
bf16, one sequence of 8192 tokens; forward, loss, backward, AdamW. Each variant is a process of its own:

    openkda   `openkda.integrations.transformers`
    fla       the same layers, calling fla's chunk_kda (everything in its kernels), causal_conv1d and gated norm
    stock     transformers as it is: fla's chunk_kda where fla is installed, the gate and the convolution in PyTorch

Times are medians over the steps after the first two; memory is the peak of a step, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import openkda

VARIANTS = ("openkda", "fla", "stock")
WARM_UP = 2


def model(o: argparse.Namespace) -> torch.nn.Module:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    kinds = ["full_attention" if (i + 1) % 5 == 0 else "linear_attention" for i in range(o.layers)]
    config = KimiLinearConfig(
        vocab_size=o.vocab,
        hidden_size=o.hidden,
        intermediate_size=o.mlp,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        num_key_value_heads=o.heads,
        kv_lora_rank=min(512, o.hidden),
        qk_nope_head_dim=o.head_dim,
        qk_rope_head_dim=o.head_dim // 2,
        v_head_dim=o.head_dim,
        linear_head_dim=o.head_dim,
        linear_num_heads=o.heads,
        layer_types=kinds,
        mlp_layer_types=["dense"] * o.layers,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(o.device):
        made = KimiLinearForCausalLM(config).to(torch.bfloat16).train()
    if o.checkpoint == "layers":
        made.gradient_checkpointing_enable({"use_reentrant": False})
    return made


def fla_operators() -> SimpleNamespace:
    """What the integration calls, from fla."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import chunk_kda

    def conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, initial_state: None, **options: Any) -> Any:
        return causal_conv1d(x, weight, bias, **options)

    def norm(x: Tensor, gate: Tensor, weight: Tensor, *, activation: str, eps: float) -> Tensor:
        return rms_norm_gated(x, gate, weight, None, activation=activation, eps=eps)

    def kda(*tokens: Tensor, dt_bias: Tensor, lower_bound: float | None, **options: Any) -> Any:
        safe = lower_bound is not None
        return chunk_kda(*tokens, dt_bias=dt_bias.flatten(), lower_bound=lower_bound, safe_gate=safe, **options)

    return SimpleNamespace(chunk_kda=kda, causal_conv1d=conv, rms_norm_gated=norm)


def openkda_operators(backend: str) -> SimpleNamespace:
    """What the integration calls, from openkda with a backend of our choice."""
    names = ("chunk_kda", "causal_conv1d", "rms_norm_gated")
    return SimpleNamespace(**{name: functools.partial(getattr(openkda, name), backend=backend) for name in names})


@contextlib.contextmanager
def kernels_of(variant: str, backend: str) -> Iterator[None]:
    """transformers' layers on the kernels of a variant."""
    if variant == "stock":
        yield
        return
    from openkda.integrations import transformers as integration
    from openkda.integrations.transformers import forwards

    ours = forwards.openkda
    with integration.enabled():
        try:
            operators = fla_operators() if variant == "fla" else openkda_operators(backend)
            forwards.openkda = operators  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:
            forwards.openkda = ours


def steps(o: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Train for a few steps; medians, peak memory, losses."""
    device = torch.device(o.device)
    gpu = device.type == "cuda"
    net = model(o)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=gpu)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, o.vocab, (1, o.tokens), generator=rng).to(device)
    seconds, losses, first = [], [], time.perf_counter()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    def synchronize() -> None:
        if gpu:
            torch.cuda.synchronize()

    with kernels_of(variant, o.backend):
        for i in range(WARM_UP + o.steps):
            if i == WARM_UP and gpu:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step()
            synchronize()
            seconds.append(time.perf_counter() - start)
            if i == 0:
                first = time.perf_counter() - first
        result = {
            "variant": variant,
            "step_ms": round(1e3 * statistics.median(seconds[WARM_UP:]), 2),
            "steps_ms": [round(1e3 * s, 2) for s in seconds[WARM_UP:]],
            "first_step_s": round(first, 1),
            "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if gpu else None,
            "losses": [round(loss.item(), 4) for loss in losses],
            "parameters": sum(p.numel() for p in net.parameters()),
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "torch": torch.__version__,
        }
        if o.profile and gpu:
            from openkda.bench import measure

            result["kernels"] = measure.kernels(step, 2)
    return result


#: Group of a kernel: the first whose pattern its name has.
GROUPS = {
    "convolution": "conv",
    "KDA": "kda|gated_delta|chunk_gla|l2norm|beta_sigmoid|recompute|cumsum|scan|_prepare_|_keys_|_values_|over_chunks",
    "norm": "norm",
    "attention": "flash|fmha|attention|sdpa",
    "matmul": "gemm|nvjet|cutlass|xmma",
    "optimizer": "adam|multi_tensor",
}


def by_group(result: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step's kernels, by what they do."""
    total = dict.fromkeys([*GROUPS, "other"], 0.0)
    for kernel in result.get("kernels", []):
        name = kernel["name"].lower()
        total[next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "other")] += (
            kernel["us"] / 1e3
        )
    return {group: round(ms, 2) for group, ms in total.items()}


def page(results: Sequence[dict[str, Any]], command: str) -> str:
    """The results as Markdown: times and memory, kernels by group, the longest kernels."""
    done = [r for r in results if "step_ms" in r]
    ours = next((r for r in done if r["variant"] == "openkda"), None)
    lines = ["# One training step of a Kimi Linear", "", f"    {command}", ""]
    if done:
        lines += [f"{done[0]['device']}, torch {done[0]['torch']}, {done[0]['parameters'] / 1e9:.2f}e9 parameters.", ""]
    lines += [
        "| kernels of | step, ms | over openkda's | peak, MiB | over openkda's | losses |",
        "|---|---|---|---|---|---|",
    ]
    for r in done:
        ratios = [f"{r[key] / ours[key]:.3f}" if ours and r[key] else "-" for key in ("step_ms", "peak_mib")]
        losses = ", ".join(f"{loss:.4f}" for loss in r["losses"])
        lines.append(
            f"| {r['variant']} | {r['step_ms']:.1f} | {ratios[0]} | {r['peak_mib']} | {ratios[1]} | {losses} |"
        )
    lines += [f"\n{r['variant']}: {r['reason']}" for r in results if "reason" in r]
    profiled = [r for r in done if r.get("kernels")]
    if profiled:
        lines += [
            "",
            f"| kernels of a step, ms | {' | '.join(r['variant'] for r in profiled)} |",
            "|---|" + "---|" * len(profiled),
        ]
        groups = [by_group(r) for r in profiled]
        lines += [f"| {name} | {' | '.join(f'{g[name]:.2f}' for g in groups)} |" for name in groups[0]]
        for r in profiled:
            lines += ["", f"Longest kernels, {r['variant']}:", "", "| us a step | launches | kernel |", "|---|---|---|"]
            lines += [f"| {k['us']:.0f} | {k['launches']:g} | `{k['name'][:90]}` |" for k in r["kernels"][:20]]
    return "\n".join(lines) + "\n"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Kernel time of a step by group, one bar for each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 0.7 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    profiled = [r for r in results if r.get("kernels")]
    left = [0.0] * len(profiled)
    for group in [*GROUPS, "other"]:
        values = [by_group(r)[group] for r in profiled]
        axes.barh([r["variant"] for r in profiled], values, left=left, label=group)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("kernel time of one training step, ms")
    axes.invert_yaxis()
    axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.savefig(path, dpi=130, bbox_inches="tight")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add(
        "--checkpoint",
        choices=("none", "layers"),
        default="none",
        help="recompute every layer in the backward, or none",
    )
    add("--steps", type=int, default=5, help="timed steps (default: 5)")
    add("--tokens", type=int, default=8192)
    for name, size in (("layers", 20), ("hidden", 2304), ("heads", 32), ("mlp", 9216), ("vocab", 32768)):
        add(f"--{name}", type=int, default=size)
    add("--head-dim", type=int, default=128)
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--backend", default="auto", choices=("auto", "triton", "eager"), help="of openkda (default: auto)")
    add("--timeout", type=float, default=900, help="seconds for one variant (default: 900)")
    add("--profile", action="store_true", help="list the kernels of a step")
    add("--json", type=Path, help="write every figure here")
    add("--markdown", type=Path, help="write a page with the table and the kernels here")
    add("--plot", type=Path, help="draw the kernels of a step here; needs --profile")
    add("--one", choices=VARIANTS, help=argparse.SUPPRESS)  # the process of one variant
    return parser.parse_args(argv)


def run_variant(variant: str, argv: Sequence[str], timeout: float) -> dict[str, Any]:
    """A variant in its own process: its result, or the reason why there is none."""
    command = [sys.executable, __file__, *argv, "--one", variant]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"variant": variant, "reason": f"stopped after {timeout:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return {"variant": variant, "reason": f"exit code {done.returncode}: {last[:200]}"}
    return json.loads(done.stdout.splitlines()[-1])


def show(result: dict[str, Any], fastest: dict[str, Any] | None) -> None:
    """One line of the table, then its kernels."""
    if "reason" in result:
        print(f"{result['variant']:8s} {result['reason']}")
        return
    times = result["step_ms"] / fastest["step_ms"] if fastest else 1.0
    memory = f"{result['peak_mib']:9d}" if result["peak_mib"] else f"{'-':>9s}"
    print(
        f"{result['variant']:8s} {result['step_ms']:10.1f} {times:13.2f} {memory} {result['losses'][-1]:10.4f}",
        flush=True,
    )
    for k in result.get("kernels", [])[:25]:
        print(f"    {k['us']:11.1f} us  x{k['launches']:<6g} {k['name'][:80]}")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    o = parse(argv)
    if o.one:
        print(json.dumps(steps(o, o.one)))
        return 0
    results: list[dict[str, Any]] = []
    print(f"{'variant':8s} {'step ms':>10s} {'times openkda':>13s} {'peak MiB':>9s} {'last loss':>10s}")
    for variant in o.variants:
        results.append(run_variant(variant, argv, o.timeout))
        ours = next((r for r in results if r["variant"] == "openkda" and "step_ms" in r), None)
        show(results[-1], ours)
        command = " ".join(["python benchmarks/train_step.py", *argv])
        if o.json:
            o.json.write_text(
                json.dumps({"benchmark": "train_step", "command": command, "rows": results}, indent=1) + "\n"
            )
        if o.markdown:
            o.markdown.write_text(page(results, command))
    if o.plot and any(r.get("kernels") for r in results):
        draw(results, o.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
