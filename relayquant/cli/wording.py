"""Messages of Python calls -> the same messages with the options of the command line."""

from __future__ import annotations

import re

#: argument in Python -> option of the command line
OPTIONS = {
    "backend": "--backend",
    "bits": "--bits",
    "budget": "--time-limit",
    "checkpoint": "--checkpoint",
    "dataset": "--data",
    "effort": "--effort",
    "embedding_bits": "--embedding-bits",
    "group_size": "--group-size",
    "guard": "--guard",
    "inputs": "--input",
    "max_drop": "--max-drop",
    "max_length": "--max-length",
    "max_size": "--max-size",
    "model_type": "--model-type",
    "observer": "--observer",
    "precision": "--precision",
    "shapes": "--shape",
    "workers": "--workers",
}
#: An argument, and its value if it is a dict, a text or a number. Not an argument within a call,
#: such as `QSpec('int4', group_size=32)`, except where the call is only there to name it.
ARGUMENT = re.compile(
    rf"""(?P<call>relayquant\.load\(path,\ |CausalLMOptions\()?
    (?(call)|(?<![-\w(.])(?<!,\ ))
    (?P<name>{"|".join(OPTIONS)})=
    (?P<value>\{{[^{{}}]*\}}|'[^']*'|"[^"]*"|\w+(?:\.\w+)?|\.\.\.|)(?(call)\))""",
    re.VERBOSE,
)
QUOTES = "'\""
#: an entry of a dict
ENTRY = re.compile(
    r"""(?P<quote>['"])(?P<name>.*?)(?P=quote): (?P<value>\([^()]*\)|\[.*?\]|[^,{}]+)"""
)


def name_options(message: str) -> str:
    """Return a message in which options stand for arguments of Python: `--shape x=1,3` for
    `shapes={'x': (1, 3)}`.
    """
    return ARGUMENT.sub(lambda found: write_option(found["name"], found["value"]), message)


def write_option(name: str, value: str) -> str:
    """Write an argument as an option. An option that takes one entry is repeated."""
    option = OPTIONS[name]
    if not value.startswith("{"):
        return f"{option} {value.strip('.' + QUOTES)}".rstrip()
    entries = [(each["name"], write_value(each["value"])) for each in ENTRY.finditer(value)]
    return " ".join(f"{option} {key}={text}" for key, text in entries) or option


def write_value(text: str) -> str:
    """Write a shape as an option takes it: "(1, 'n', 3)" -> "1,n,3". Other values stay."""
    if not text.startswith("("):
        return text
    return ",".join(size.strip(QUOTES + " ") for size in text[1:-1].split(",") if size.strip())
