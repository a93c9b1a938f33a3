"""Parse the command line and hand over to a command. No tensor library is imported here, so `--help` is immediate.

A command is a module with `add_arguments(parser)` and `run(args) -> exit code`; what it needs it imports when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from openkda import __version__
from openkda.cli import bench, convert, doctor, generate, output, parity, train
from openkda.cli.errors import INTERRUPTED, READER_LEFT, USER_ERROR, UserError

COMMANDS = {
    "train": train,
    "generate": generate,
    "convert": convert,
    "parity": parity,
    "bench": bench,
    "doctor": doctor,
}


class _Parser(argparse.ArgumentParser):
    """argparse, except that a bad option is a UserError: one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="openkda",
        description="Train, try and inspect Kimi Delta Attention models.",
        epilog="openkda COMMAND --help tells more about a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"openkda {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=getattr(module, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 a wrong request (one line on stderr), 130 interrupted, 141
    when the reader of its output has gone.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Read when torch is imported. By default idle threads spin, which costs dearly beside other work: on two cores with
    # one other busy process kimi_linear_tiny made 0.03 steps a second, with this 2.5.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prefix = " ".join(["openkda", *(argv[:1] if argv[:1] and argv[0] in COMMANDS else [])])
    try:
        if not argv:
            build_parser().print_help()
            return 0
        args, extra = build_parser().parse_known_args(argv)
        if extra and args.command != "train":
            raise UserError(f"unknown option {extra[0]}; see {prefix} --help")
        args.extra = extra  # train passes these on to torchtitan
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{prefix}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"{prefix}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        output.discard()
        return READER_LEFT
    except SystemExit as done:  # argparse after --help or --version
        return done.code if isinstance(done.code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
