"""Continue a prompt with a trained model.

Decoding is cached: after the prompt each token costs one step of `recurrent_kda` and one row of attention, whatever the
length so far. With --batch-invariant the model runs the last, unfinished block of 64 tokens again for every token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openkda.cli.errors import UserError
from openkda.cli.record import find_checkpoint

MAX_NEW_TOKENS = 1 << 20  # room is made for all of them before the first one
EPILOG = """\
examples:
  openkda generate --checkpoint outputs/kimi_linear_tiny-20260101-120000 --prompt "The yield statement"
  openkda generate --checkpoint outputs/run1/checkpoint/step-200 --prompt "Once" --temperature 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="output folder of a run (its last checkpoint), or one of its step-N folders",
    )
    add("--prompt", required=True, metavar="TEXT", help="text to continue")
    add(
        "--max-new-tokens",
        type=int,
        default=200,
        metavar="N",
        help="stop after so many tokens, or at the end of the document; default: 200",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token; higher is more varied; default: 0.8",
    )
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens only; default: all")
    add(
        "--batch-invariant",
        action="store_true",
        help="give every token the very probabilities, to the bit, that a model with batch_invariant trains on; slower",
    )
    add("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text; default: 0")


def run(args: argparse.Namespace) -> int:
    for name, value, valid, rule in (
        ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens <= MAX_NEW_TOKENS, f"at most {MAX_NEW_TOKENS}"),
        ("--seed", args.seed, 0 <= args.seed < 1 << 64, "from 0 to 2**64 - 1"),
        ("--temperature", args.temperature, args.temperature >= 0, "0 or more"),
        ("--top-k", args.top_k, args.top_k is None or args.top_k >= 1, "at least 1"),
    ):
        if not valid:
            raise UserError(f"{name} must be {rule}, got {value}")
    if any("\ud800" <= c <= "\udfff" for c in args.prompt):  # how Python passes on bytes that are not UTF-8
        raise UserError("--prompt must be UTF-8 text")
    checkpoint = find_checkpoint(args.checkpoint)
    try:
        from openkda.integrations.torchtitan import require_torchtitan

        require_torchtitan()
        from openkda.cli import decoding
    except ImportError as error:
        raise UserError(str(error)) from error
    model, tokenizer = decoding.load(checkpoint, batch_invariant=args.batch_invariant)
    pieces = decoding.continue_text(
        model,
        tokenizer,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
