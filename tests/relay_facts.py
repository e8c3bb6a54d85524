"""What each release of Relay accepts, read off the sources of TVM: a file beside the real models.

An independent source for the calls that `relayquant.relay.to_text` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayquant.relay import syntax
from relayquant.relay.operators import OPERATORS
from relayquant.relay.text_reader import parse_text

#: operators that the file has no releases for (registered by a macro), and what it has no
#: attributes of
UNKNOWN_OPERATORS = ("qnn.add", "qnn.subtract", "qnn.mul")
UNKNOWN_ATTRIBUTES = ("take",)


@dataclass(frozen=True)
class ReleaseFacts:
    """Operators -> {"operator": releases, "attributes": {name: {releases: default or required}}}"""

    releases: list[str]
    operators: dict[str, Any]

    def covers(self, span: str, release: str) -> bool:
        """Whether "0.8-0.11" or "0.7" holds a release."""
        first, _, last = span.partition("-")
        order = self.releases.index
        return order(first) <= order(release) <= order(last or first)

    def find_faults(self, text: str, release: str) -> list[str]:
        """What the release would not accept, or understand otherwise, in a text."""
        return [
            f"{call.op}: {fault}"
            for call in iterate_calls(parse_text(text))
            for fault in self.find_faults_of_call(call, release)
        ]

    def find_faults_of_call(self, call: syntax.OpCall, release: str) -> Iterator[str]:
        row = self.operators[call.op]
        if call.op in UNKNOWN_OPERATORS:
            if call.attrs:
                yield f"attributes {list(call.attrs)} of which nothing is known"
            return
        if not self.covers(row["operator"], release):
            yield "unknown"
            return
        known = {
            name: state
            for name, spans in row["attributes"].items()
            for span, state in spans.items()
            if self.covers(span, release)
        }
        if call.op == "nn.batch_matmul" and "transpose_b" not in known:
            yield "which operand is transposed cannot be said"
        if call.op in UNKNOWN_ATTRIBUTES:
            return
        for name in call.attrs:
            if name not in known:
                yield f"unknown attribute {name}"
        for name, state in known.items():
            if name in call.attrs:
                continue
            if state == "required":
                yield f"attribute {name} is missing"
            elif name in OPERATORS[call.op].attrs:
                default = read_default(state)
                meant = flatten_default(OPERATORS[call.op].attrs[name].default)
                if default != meant:
                    yield f"attribute {name} is left to the default {default}, not {meant}"


def load_facts(path: Path) -> ReleaseFacts:
    return ReleaseFacts(**json.loads(path.read_text()))


def iterate_calls(module: syntax.Module) -> Iterator[syntax.OpCall]:
    """All calls of operators in main."""
    waiting: list[syntax.Expr] = [module.functions["main"].body]
    while waiting:
        expr = waiting.pop()
        if isinstance(expr, syntax.OpCall):
            yield expr
        waiting += syntax.children(expr)


def read_default(state: str) -> set[str]:
    """The words of a default of C++: `Array<IndexExpr>({1, 1})` is {"1"}."""
    value = state.removeprefix("default ")
    if value.startswith("NullValue"):
        return set()
    inner = re.search(r"\{(.*)\}", value) or re.search(r"\((.*)\)", value)
    value = inner.group(1) if inner is not None else value
    words = {word.strip().strip('"') for word in value.split(",")} - {""}
    return {plain_number(word) for word in words}


def flatten_default(value: Any) -> set[str]:
    """The same of a default in the table of operators that are read."""
    values = value if isinstance(value, tuple) else (value,)
    words = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    return {plain_number(word) for word in words if word not in ("None", "")}


def plain_number(word: str) -> str:
    """1e-05 and 1e-5 are one number."""
    try:
        return str(float(word))
    except ValueError:
        return word
