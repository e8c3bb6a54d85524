"""Command line words -> a command and its options.

TVM is not imported here, so help, completion and mistyped commands answer at once. The module of
the same name in `relayquant.cli.commands` runs a command.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from relayquant.base.version import __version__
from relayquant.cli.command import Parser, add_switches
from relayquant.cli.grammar import COMMANDS
from relayquant.cli.output import printing
from relayquant.cli.verbs import ALIASES, OTHER_VERBS
from relayquant.errors import ConfigError, DataError, ModelError

SHELLS = ("bash", "zsh", "tcsh")

HELP = """\
usage: relayquant MODEL
       relayquant COMMAND MODEL [QMODEL] [--data DATA] [-o FILE]

Quantize neural networks after training, for Apache TVM.

{commands}

MODEL is a float model, QMODEL what `quantize` made of it (.rqm). DATA is an
.npz with an array for each input, or a folder of pictures, with --preprocess.
The ending of FILE says what is written.

Every command: --json  --quiet  --all  --debug  --help
relayquant --version, relayquant --completion {shells}
Exit code: 0 done, 1 done and something found, 2 wrong input, 70 our fault.
"""


class MainParser(Parser):
    """The parser of the words before a command."""

    def format_help(self) -> str:
        width = max(len(command.name) for command in COMMANDS)
        lines = (f"  {command.name:{width}}  {command.what}" for command in COMMANDS)
        return HELP.format(commands="\n".join(lines), shells="|".join(SHELLS))


class ShowVersion(argparse.Action):
    """Prints the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        with printing():
            print(f"relayquant {__version__}")
        parser.exit()


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. `command` of the result names the module that runs it.

    Raises:
        ConfigError: the words cannot be parsed.
        ModelError: there is neither a command nor a file of that name.
        SystemExit: a help text or the version was printed.
    """
    parser = build_main_parser()
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.completion is not None:
        options.command = "completion"
        return options
    if not options.words:
        parser.print_help()
        parser.exit()
    first, *rest = options.words
    del options.words, options.completion
    known = {command.name: command for command in COMMANDS}
    first = ALIASES.get(first, first)
    # A language model of transformers is a folder.
    if first not in known and (Path(first).is_file() or (Path(first) / "config.json").is_file()):
        first, rest = "inspect", [first, *rest]
    if first not in known:
        refuse_command(first)
    return known[first].parse(rest, options)


def check_files(options: argparse.Namespace) -> None:
    """Raise DataError or ModelError if there is no file of the data or of a model. A word without
    an ending may also name a backend.
    """
    data = getattr(options, "data", None)
    if data is not None and not (data.is_file() or data.is_dir()):
        raise DataError(f"There is no data file or folder {data}.", code="RQ301")
    for name in ("model", "qmodel"):
        path = getattr(options, name, None)
        if path is not None and Path(path).suffix and not Path(path).exists():
            raise ModelError(f"There is no model file {path}.", code="RQ201")


def refuse_command(word: str) -> NoReturn:
    """Raise an error that suggests what to type instead of an unknown command."""
    if word in OTHER_VERBS:
        raise ConfigError(f"There is no command {word!r}. Use: {OTHER_VERBS[word]}", code="RQ102")
    if Path(word).exists():
        raise ModelError(
            f"{word} is no model file, and no folder with config.json, as language models have.",
            code="RQ201",
        )
    if Path(word).suffix:
        raise ModelError(f"There is no file or command {word}.", code="RQ201")
    names = [command.name for command in COMMANDS]
    near = difflib.get_close_matches(word, [*names, *OTHER_VERBS], n=1)
    advice = f"Commands: {', '.join(names)}."
    if near:
        meant = OTHER_VERBS.get(near[0], f"relayquant {near[0]}")
        advice = f"Did you mean {near[0]!r}? Use: {meant}"
    raise ConfigError(f"There is no command or file {word!r}. {advice}", code="RQ102")


def build_main_parser() -> argparse.ArgumentParser:
    """Build the parser of the words before a command."""
    parser = MainParser(prog="relayquant")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    parser.add_argument(
        "--completion", choices=SHELLS, help="print what completes commands in a shell"
    )
    add_switches(parser)
    return parser


def build_whole_parser() -> argparse.ArgumentParser:
    """Build one parser with all commands, for tools that write completions."""
    parser = build_main_parser()
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.what, **command.describe())
        command.add_arguments(subparser)
        add_switches(subparser)
    return parser


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """List the arguments of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from list_actions(subparser)
