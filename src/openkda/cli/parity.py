"""Compare our Kimi Linear with that of transformers, and say where the two first differ.

Both get the same weights and read the same prompts, on the CPU. The last two lines are figures of the predictions: of
the last token of each prompt, and of all tokens (largest KL divergence in nats, smallest cosine, largest difference).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from openkda.cli.errors import UserError

OVER_THRESHOLD = 1  # exit code: compared, and a limit is not kept
EPILOG = """\
examples:
  openkda parity --hf tiny --grad --packed --report parity.html
  openkda parity --hf tiny --dtype bf16 --routing forced --rounding reference --max-kl 2e-4 --min-cos 0.9997
  openkda parity --hf my_model/ --prompts prompts.txt --max-kl 1e-9

exit code: 0 within the thresholds given (or none given), 1 over one of them, 2 a wrong request.
docs/parity.md tells how to read the report.
"""
# Option -> (field of Thresholds, help).
LIMITS = {
    "--max-kl": "KL of any token",
    "--max-mean-kl": "mean KL of all tokens",
    "--max-last-kl": "KL of any prompt's last token",
    "--min-cos": "cosine of any token's logits",
    "--max-diff": "difference of any logit",
    "--min-top1": "percent of tokens with the same likeliest token",
    "--min-top5": "percent of the five likeliest tokens that are the same",
    "--max-grad-error": "relative error of any parameter's gradient; needs --grad",
    "--max-packed-error": "relative error of packed against separate; needs --packed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hf",
        required=True,
        metavar="DIR_OR_CONFIG",
        help="folder with config.json and safetensors files; a folder or file with config.json only, for random "
        "weights; or tiny or tiny-bounded, a small random model with the softplus or the bounded gate",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, blank lines between them; default: eight passages of text",
    )
    add(
        "--routing",
        choices=("natural", "forced"),
        default="natural",
        help="each model chooses its experts, or ours is given those of transformers; default: natural",
    )
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights and activations; default: fp32")
    add(
        "--rounding",
        choices=("own", "reference"),
        default="own",
        help="in bf16, round to 16 bits where ours does or where transformers does; default: own",
    )
    add("--grad", action="store_true", help="compare the gradient of every parameter, too")
    add("--packed", action="store_true", help="run ours on all prompts in one packed row, too, and compare")
    add("--seed", type=int, default=0, metavar="N", help="of random weights; default: 0")
    add("--report", type=Path, metavar="FILE", help="write a page to read in a browser")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    for option, what in LIMITS.items():
        add(option, type=float, metavar="X", help=f"limit: {what}")


def run(args: argparse.Namespace) -> int:
    for path in (args.report, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: its folder does not exist")
    try:
        from openkda.integrations.torchtitan import require_torchtitan

        require_torchtitan()
        from openkda.parity import Thresholds, compare, load, write_page
    except ImportError as error:
        raise UserError(_missing(error)) from error
    fields = [option[2:].replace("-", "_") for option in LIMITS]
    thresholds = Thresholds(**{name: getattr(args, name) for name in fields})
    try:
        pair = load(args.hf, dtype=args.dtype, rounding=args.rounding, prompts=args.prompts, seed=args.seed)
    except (ValueError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from error
    comparison = compare(pair, routing=args.routing, grad=args.grad, packed=args.packed)
    comparison.judge(thresholds)
    if args.json is not None:
        args.json.write_text(json.dumps(comparison.to_dict(), indent=1) + "\n")
    if args.report is not None:
        write_page(comparison, args.report)
    print(comparison.text())
    return OVER_THRESHOLD if comparison.broken else 0


def _missing(error: ImportError) -> str:
    if error.name and error.name.split(".")[0] == "transformers":
        return f"{error}; install the extra: pip install 'openkda[transformers]'"
    return str(error)
