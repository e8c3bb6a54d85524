"""Relay: modules of TVM 0.7 to 0.19 -> Relax modules, and back.

- Reading: text or JSON -> `syntax` -> Relax. Each operator is a row in `operators`.
- Writing: Relax -> `syntax` -> text. Each operator is a row in `export`.
- Quantizing: `qconfig` maps the options of `relay.quantize` to ours, and `quantize` runs a script
  written for Relay unchanged.
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

# `quantize` is in a higher room, because it uses the whole data flow.
_load_name, __dir__ = lazy.gather(__name__, {"relayquant.flow.relay_scripts": "quantize"})

#: name of `tvm.relay` -> what to use instead
SUCCESSORS: Mapping[str, str] = {
    "build": "relayquant.compile(mod, target)",
    "frontend": "relayquant.load(path)",
    "qnn": "relayquant.extend.qnn",
    "save_param_dict": "relayquant.relay.save_params(params)",
    "load_param_dict": "relayquant.relay.decode_params(data)",
    "transform": "tvm.relax.transform",
    "var": "tvm.relax.Var(name, tvm.relax.TensorType(shape, dtype))",
    "const": "tvm.relax.const(value)",
    "Function": "tvm.relax.Function, or tvm.relax.BlockBuilder",
    "TensorType": "tvm.relax.TensorType",
    "op": "tvm.relax.op",
    "nn": "tvm.relax.op.nn",
    "sum": "tvm.relax.op.sum",
    "analysis": "tvm.relax.analysis",
    "testing": "tvm.relax.testing",
    "backend": "relayquant.Executor(relayquant.compile(mod))",
    "vm": "relayquant.Executor(relayquant.compile(mod))",
    "create_executor": "relayquant.Executor(relayquant.compile(mod))",
}


def __getattr__(name: str) -> Any:
    if name in SUCCESSORS:
        raise AttributeError(
            f"module 'relayquant.relay' has no attribute {name!r}. Use {SUCCESSORS[name]}."
        )
    return _load_name(name)


@check_arguments
def from_text(
    text: str,
    params: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, Any] | None = None,
    release: str | None = None,
) -> tvm.IRModule:
    """Read a Relay module in text form (`mod.astext()`) as a Relax module.

    Values are named as in the text: `%conv1` is "conv1", `%12` is "12".

    Args:
        params: {name: array} for parameters of main that become constants.
        shapes: {parameter: shape}, for dimensions that the text leaves open (`?`).
        release: TVM release that wrote the text, "0.7" to "0.19". The text does not contain it. It
            is needed where a default changed between releases and the shapes do not show which one
            is meant: for a transposed convolution without kernel_layout and with as many input as
            output channels (an error asks for it then), and for a batch_matmul of square matrices
            (None: as 0.9 and later).

    Raises:
        ModelError: the text is not Relay (names line and column), operators are not supported (all
            are listed), types do not fit, or `release` is needed.
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
    """Read a Relay module in the JSON form of `tvm.ir.save_json` (TVM 0.7 to 0.19) as a Relax
    module.

    JSON is lossless, unlike text. The file contains its `release`, except for forks of TVM with
    other version numbers. Arguments are those of `from_text`.

    Raises:
        ModelError: as for `from_text`. Names the node.
    """
    module, version = parse_json(text, _list_attributes())
    written_by = WrittenBy.find(version) if release is None else WrittenBy.parse(release)
    return build_module(module, params, shapes, written_by)


def _list_attributes() -> dict[str, Attrs]:
    return {name: row.attrs for name, row in OPERATORS.items()}
