"""Relay: modules of TVM 0.7 to 0.19, read as Relax and written back.

Reading: text or JSON -> `syntax` -> Relax; the operators are rows in `operators`.
Writing: Relax -> `syntax` -> text; the operators are rows in `export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.arguments import check_arguments
from relayquant.relay.builder import build_module
from relayquant.relay.export import to_text
from relayquant.relay.json_reader import is_relay_json, parse_json
from relayquant.relay.operators import OPERATORS
from relayquant.relay.tensors import decode_params, encode_params, save_params
from relayquant.relay.text_reader import parse_text

__all__ = [
    "decode_params",
    "encode_params",
    "from_json",
    "from_text",
    "is_relay_json",
    "save_params",
    "to_text",
]


@check_arguments
def from_text(
    text: str, params: Mapping[str, Any] | None = None, *, shapes: Mapping[str, Any] | None = None
) -> tvm.IRModule:
    """The Relax module of a Relay module in text form (`mod.astext()`).

    Values are named as in the text: `%conv1` is "conv1", `%12` is "12".

    Args:
        params: {name: array} for parameters of main that are to become constants.
        shapes: {parameter: shape}, for dimensions that the text leaves open (`?`).

    Raises:
        ModelError: the text is no Relay (line and column are named), operators are not supported
            (all of them are), or types do not fit.
    """
    return build_module(parse_text(text), params, shapes)


@check_arguments
def from_json(
    text: str, params: Mapping[str, Any] | None = None, *, shapes: Mapping[str, Any] | None = None
) -> tvm.IRModule:
    """The same for what `tvm.ir.save_json` of TVM 0.7 to 0.19 wrote; lossless, unlike text.

    Raises:
        ModelError: as for `from_text`; the node is named.
    """
    attributes = {name: row.attrs for name, row in OPERATORS.items()}
    return build_module(parse_json(text, attributes), params, shapes)
