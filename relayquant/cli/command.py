"""One command of the command line: its help, and the parser of its words."""

from __future__ import annotations

import argparse
import difflib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

from relayquant.cli.output import printing
from relayquant.errors import ConfigError

#: options that every command takes, before or after its name
SWITCHES = {
    "--json": "print one JSON document in place of text",
    "--quiet": "print only errors and warnings",
    "--all": "print every row, not only the notable ones",
    "--debug": "show the traceback of an error",
}
#: columns of a help text, on terminals that are not narrower
HELP_WIDTH = 80


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of at most `HELP_WIDTH` columns. Paragraphs are filled. Examples and tables, which have
    several spaces in a row, stay as they are.
    """

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, HELP_WIDTH)
        super().__init__(prog, max_help_position=26, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = (
            block if "  " in block else textwrap.fill(block, width, initial_indent=indent)
            for block in text.split("\n\n")
        )
        return "\n\n".join(blocks)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are errors of this package."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)", code="RQ102")

    def check_words(self, words: Sequence[str]) -> None:
        """Raise ConfigError at an option that is spelled wrong. argparse would first ask for the
        required option that was meant. What follows "--" is no option.
        """
        known = [option for action in self._actions for option in action.option_strings]
        for word in takewhile(lambda each: each != "--", words):
            name = word.partition("=")[0]
            if not name.startswith("--") or any(option.startswith(name) for option in known):
                continue
            near = difflib.get_close_matches(name, known, 1)
            if near:
                self.error(f"There is no option {name}. Did you mean {near[0]}?")

    def print_help(self, file: object = None) -> None:
        """Print the help on standard output. On a full disk argparse itself would not fail."""
        with printing():
            sys.stdout.write(self.format_help())


@dataclass(frozen=True)
class Command:
    """A command: its name, its purpose, the words that it is usually called with, and the function
    that adds its arguments to a parser.
    """

    name: str
    what: str
    words: str
    add_arguments: Callable[[argparse.ArgumentParser], None]

    @property
    def usage(self) -> str:
        """How it is called, without the options that are rarely needed."""
        return " ".join(filter(None, ("relayquant", self.name, self.words, "[OPTIONS]")))

    def describe(self) -> dict[str, Any]:
        """Return the parser arguments that describe the command."""
        return {
            "description": inspect.cleandoc(self.add_arguments.__doc__ or self.what),
            "formatter_class": HelpFormatter,
            "usage": self.usage,
        }

    def parse(self, words: Sequence[str], options: argparse.Namespace) -> argparse.Namespace:
        """Parse the words after the command."""
        parser = Parser(prog=f"relayquant {self.name}", **self.describe())
        self.add_arguments(parser)
        add_switches(parser)
        options.command = self.name
        parser.check_words(words)
        # The optional QMODEL may follow an option.
        return parser.parse_intermixed_args(words, options)


def add_switches(parser: argparse.ArgumentParser) -> None:
    """Add `SWITCHES`. If absent after a command, they do not undo those before it."""
    group = parser.add_argument_group("every command")
    for switch, text in SWITCHES.items():
        group.add_argument(switch, action="store_true", default=argparse.SUPPRESS, help=text)
