"""ONNX reader: the signature of a conversion.

convert(bb, inputs, attrs, opset) -> the value, or None to leave the node to TVM's frontend
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax

Builder = relax.BlockBuilder
#: Inputs of a node: constants where known, None where absent.
Operands = Sequence[Any]
#: Attributes of a node by name.
Attrs = dict[str, Any]
Convert = Callable[[Builder, Operands, Attrs, int], "relax.Expr | None"]
