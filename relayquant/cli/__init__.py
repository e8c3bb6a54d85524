"""The command line: each subcommand is one file and one call of the public functions.

A mistake of the user's is one line on standard error and exit code 2; `--debug` shows where it
was found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from relayquant.cli import bench, compare, compile_, demo, inspect_, lint, quantize, sensitivity
from relayquant.errors import RelayQuantError

#: Exit code of a mistake in what the user gave, as argparse has it.
USER_ERROR = 2
#: Exit code after Ctrl-C, as shells have it: 128 + SIGINT.
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets `run`, a function of the parsed options."""
    parser = argparse.ArgumentParser(
        prog="relayquant", description="Quantize neural networks after training, for Apache TVM."
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error, not only its message"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, lint, quantize, compile_, compare, sensitivity, inspect_, bench):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: that of the process) and return its exit code."""
    options = build_parser().parse_args(argv)
    try:
        return options.run(options)
    except (RelayQuantError, OSError) as error:
        if options.debug:
            raise
        print(f"relayquant: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
