"""Measure the operator or the layer beside other implementations: time, memory, error.

Each row, one shape and one peer, is a process of its own in which openkda and the peer take turns. A peer that cannot
be imported or fails has its reason in the table. The last line is JSON: how many times openkda's time each peer takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from openkda.cli.errors import UserError

FAILED = 1  # exit code: openkda itself could not be measured somewhere
EPILOG = """\
examples:
  openkda bench op
  openkda bench op --peers fla,cudnn --shape 1x8192x32 8x2048x32 --json out.json --plot out.png
  openkda bench op --peers none --shape 1x8192x32 --kernels
  openkda bench layer --gate softplus

Peers of op: fla, attn_gym, cudnn, cudnn_core (cudnn without what comes before its call), flash_kda; of layer: fla.
exit code: 0 measured (a peer may be missing), 1 openkda could not be measured somewhere, 2 a wrong request.
"""
#: Names of the adapters in `openkda.bench.peers`, which imports torch.
PEERS = {"op": ("fla", "attn_gym", "cudnn", "cudnn_core", "flash_kda"), "layer": ("fla",)}
#: What a row may import before it is its turn.
IMPORTS = {"fla": "fla.ops.kda", "attn_gym": "attn_gym.linear", "flash_kda": "flash_kda"}
IMPORTS |= dict.fromkeys(("cudnn", "cudnn_core"), "cudnn.linear_attention")
SHAPES = {
    ("op", "cuda"): ["1x8192x32", "1x8192x96", "8x2048x32", "1x65536x16", "1x4096x16"],
    ("op", "cpu"): ["1x256x2", "1x512x2", "1x1024x2"],
    ("layer", "cuda"): ["1x8192x32"],
    ("layer", "cpu"): ["1x256x2"],
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", choices=("op", "layer"), help="op: chunk_kda; layer: the whole KimiDeltaAttention layer")
    add("--peers", metavar="LIST", help="implementations to measure beside openkda, with commas, or none; default: all")
    add("--shape", nargs="+", metavar="BxTxH", help="batch x tokens x heads; default: a few, 1x4096x16 to 8x2048x32")
    add(
        "--gate",
        choices=("bounded", "softplus"),
        default="bounded",
        help="bounded at -5, or softplus; default: bounded",
    )
    add(
        "--gates-drawn",
        choices=("benchmark", "fla_init"),
        default="benchmark",
        help="op: as published benchmarks draw gates, or as fla's layer starts; default: benchmark",
    )
    add("--head-dim", type=int, default=128, metavar="K", help="K = V; default: 128")
    add("--hidden", type=int, default=2304, metavar="D", help="layer: width of the hidden states; default: 2304")
    add("--dtype", choices=DTYPES, default="bf16", help="of all token tensors; default: bf16")
    add("--backend", choices=("auto", "triton", "eager"), default="auto", help="of openkda; default: auto")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--repeats", type=int, default=20, metavar="N", help="timed calls of each kind, at least 2; default: 20")
    add("--timeout", type=float, default=900.0, metavar="SECONDS", help="longest time for one row; default: 900")
    add("--kernels", action="store_true", help="list the time of every GPU kernel of a forward + backward")
    add("--plot", type=Path, metavar="FILE", help="draw time and memory against T (png, svg, pdf)")
    add("--json", type=Path, metavar="FILE", help="write every figure, after each row")
    add("--markdown", type=Path, metavar="FILE", help="write the table as a page")


def run(args: argparse.Namespace) -> int:
    peers = _peers(args)
    for path in (args.plot, args.json, args.markdown):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist")
    try:
        import rich  # noqa: F401
        import torch

        if args.plot is not None:
            import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error}; install the extra: pip install 'openkda[bench]'") from error
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device")
    missing = _missing(args.what, peers)
    specs = [
        _spec(args, shape, peer, device)
        for shape in _shapes(args.shape or SHAPES[args.what, device])
        for peer in ([peer for peer in peers if peer not in missing] or [None])
    ]
    return _measure(args, specs, device, list(missing.values()))


def _missing(what: str, peers: list[str]) -> dict[str, str]:
    """{peer that is not installed: a line that says so}."""
    from openkda.bench.peers import PEERS as ADAPTERS

    install = {name: cls.install for name, cls in ADAPTERS.items()}
    if what == "layer":
        install["fla"] = "pip install flash-linear-attention"
    modules = {name: cls.module for name, cls in ADAPTERS.items()}
    return {
        name: f"{name}: not measured, as it is not installed ({install[name]})"
        for name in peers
        if importlib.util.find_spec(modules[name]) is None
    }


def _measure(args: argparse.Namespace, specs: list[dict[str, Any]], device: str, missing: list[str]) -> int:
    from openkda.bench import plot, report
    from openkda.bench.peers import PEERS as ADAPTERS
    from openkda.bench.row import measure_all

    command = shlex.join(["openkda", "bench", *_given(args)])
    options = _options(args, device)
    rows: list[dict[str, Any]] = []
    environments = [ADAPTERS[spec["peer"]].environment if spec["peer"] else {} for spec in specs]
    stopped = False
    try:
        for row in measure_all(specs, environments, args.timeout, ahead=device == "cuda"):
            rows.append(row)
            print(f"{row['shape']} {row['peer'] or 'openkda'}: {row['seconds']} s", file=sys.stderr, flush=True)
            if args.json is not None:
                _write(
                    args.json,
                    json.dumps({"benchmark": args.what, "command": command, "missing": missing, "rows": rows}, indent=1)
                    + "\n",
                )
    except KeyboardInterrupt:  # what was measured is shown all the same
        stopped = True
    print(report.heading(args.what, rows, options))
    report.print_table(args.what, rows, missing)
    print("\n".join([report.LEGEND[args.what], *report.kernel_lines(rows)]))
    if args.markdown is not None:
        _write(args.markdown, report.markdown(args.what, rows, options, command, missing))
    if args.plot is not None:
        title = report.heading(args.what, rows, options)
        try:
            plot.draw(rows, title, args.plot)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise UserError(f"{args.plot}: {' '.join(str(error).split())}") from error
    print(report.summary(args.what, rows), flush=True)
    if stopped:
        raise KeyboardInterrupt
    ours = [row["implementations"].get("openkda", {}) for row in rows]
    return FAILED if any("forward_ms" not in result for result in ours) else 0


def _peers(args: argparse.Namespace) -> list[str]:
    known = PEERS[args.what]
    if args.peers is None:
        return list(known)
    names = [] if args.peers == "none" else [name.strip() for name in args.peers.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"--peers: bench {args.what} knows {', '.join(known)} and none, got {name!r}")
    return list(dict.fromkeys(names))


def _shapes(texts: list[str]) -> list[tuple[int, int, int]]:
    found = []
    for text in texts:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise UserError(f"--shape: must be BxTxH, as in 1x8192x32, got {text!r}")
        B, T, H = (int(n) for n in match.groups())
        found.append((B, T, H))
    return found


def _spec(args: argparse.Namespace, shape: tuple[int, int, int], peer: str | None, device: str) -> dict[str, Any]:
    if args.repeats < 2:
        raise UserError(f"--repeats: must be at least 2, got {args.repeats}")
    case = {"B": shape[0], "T": shape[1], "H": shape[2], "K": args.head_dim, "gate": args.gate}
    case |= {"dtype": DTYPES[args.dtype], "device": device, "backend": args.backend}
    case |= {"gates_drawn": args.gates_drawn} if args.what == "op" else {"hidden": args.hidden}
    name = "x".join(str(n) for n in shape)
    return {
        "what": args.what,
        "shape": name,
        "peer": peer,
        "imports": IMPORTS.get(peer or ""),
        "case": case,
        "repeats": args.repeats,
        "kernels": args.kernels and device == "cuda",
    }


def _options(args: argparse.Namespace, device: str) -> str:
    gate = f"{args.gate} gate" + (f" drawn as {args.gates_drawn}" if args.what == "op" else "")
    sizes = f"K = V = {args.head_dim}" + (f", hidden {args.hidden}" if args.what == "layer" else "")
    return f"{device}, {args.dtype}, {sizes}, {gate}, openkda backend {args.backend}, {args.repeats} repeats"


def _given(args: argparse.Namespace) -> list[str]:
    """The options that differ from their defaults, as they were typed or could have been."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [args.what]
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if not action.option_strings or value == action.default or value is None:
            continue
        words = value if isinstance(value, list) else [] if value is True else [value]
        given += [action.option_strings[0], *(str(word) for word in words)]
    return given


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
