"""Relay: modules of TVM 0.7 to 0.19, read as Relax and written back.

Reading: text or JSON -> `syntax` -> Relax; the operators are rows in `operators`.
Writing: Relax -> `syntax` -> text; the operators are rows in `export`.
Quantizing: the options of `relay.quantize` are those of ours (`qconfig`), and a script of Relay's
runs as it was (`quantize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tvm

from relayquant.base import lazy
from relayquant.base.arguments import check_arguments
from relayquant.relay.attributes import Attrs
from relayquant.relay.builder import build_module
from relayquant.relay.export import to_text
from relayquant.relay.json_reader import is_relay_json, parse_json
from relayquant.relay.operators import OPERATORS
from relayquant.relay.qconfig import RelayQConfig, current_qconfig, qconfig
from relayquant.relay.release import WrittenBy
from relayquant.relay.tensors import decode_params, encode_params, save_params
from relayquant.relay.text_reader import parse_text

__all__ = [
    "RelayQConfig",
    "current_qconfig",
    "decode_params",
    "encode_params",
    "from_json",
    "from_text",
    "is_relay_json",
    "qconfig",
    "quantize",
    "save_params",
    "to_text",
]

if TYPE_CHECKING:
    quantize: Any

# It stands above this room, where the whole data flow is known.
__getattr__, __dir__ = lazy.gather(__name__, {"relayquant.flow.relay_scripts": "quantize"})


@check_arguments
def from_text(
    text: str,
    params: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Any] | None = None,
    release: str | None = None,
) -> tvm.IRModule:
    """The Relax module of a Relay module in text form (`mod.astext()`).

    Values are named as in the text: `%conv1` is "conv1", `%12` is "12".

    Args:
        params: {name: array} for parameters of main that are to become constants.
        shapes: {parameter: shape}, for dimensions that the text leaves open (`?`).
        release: The TVM that wrote the text, "0.7" to "0.19"; the text does not say it. It counts
            where defaults changed and shapes do not tell: for a transposed convolution without
            kernel_layout and with as many channels before as behind (it is asked for then), and
            for a batch_matmul of square matrices (None: as 0.9 and later).

    Raises:
        ModelError: the text is no Relay (line and column are named), operators are not supported
            (all of them are), types do not fit, or `release` is needed.
    """
    written_by = None if release is None else WrittenBy.parse(release)
    return build_module(parse_text(text, _list_attributes()), params, shapes, written_by)


@check_arguments
def from_json(
    text: str,
    params: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Any] | None = None,
    release: str | None = None,
) -> tvm.IRModule:
    """The same for what `tvm.ir.save_json` of TVM 0.7 to 0.19 wrote; lossless, unlike text. The
    file says its `release`, if it is not that of a fork.

    Raises:
        ModelError: as for `from_text`; the node is named.
    """
    module, version = parse_json(text, _list_attributes())
    written_by = WrittenBy.find(version) if release is None else WrittenBy.parse(release)
    return build_module(module, params, shapes, written_by)


def _list_attributes() -> dict[str, Attrs]:
    return {name: row.attrs for name, row in OPERATORS.items()}
