"""First stage, TensorFlow Lite: a flatbuffer becomes a Relax module; layout stays NHWC, tensor
names are kept.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant import _tvm
from relayquant.arguments import check_arguments
from relayquant.errors import MissingDependencyError, ModelError, format_count
from relayquant.importers.files import DEFAULT_MAX_BYTES, PathLike, check_file
from relayquant.importers.names import MARK, SourceNode, name_values
from relayquant.rewrite.graph import constant_value
from relayquant.storage.files import reading

#: Bytes 4 to 8 of every TFLite file.
FILE_IDENTIFIER = b"TFL3"

#: Largest constant that FILL makes, in elements.
MAX_FILLED = 2**28

#: Operators that TVM's frontend converts for floats only, and that do on integers what they do on
#: floats: they move or select values.
MOVE_INTEGERS = frozenset(
    {"EXPAND_DIMS", "PAD", "PADV2", "SLICE", "SPLIT", "SQUEEZE", "STRIDED_SLICE", "TRANSPOSE"}
)


@check_arguments
def import_tflite(
    path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import a .tflite file, weights bound as constants.

    Parameters of main and values are named as the tensors of the first subgraph. Attribute
    `relayquant.sources` maps a value's name to its operator; TFLite operators have no names, so
    the node is called after its first output tensor.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file cannot be read, or an operator is not supported.
        MissingDependencyError: package tflite is not installed.
    """
    try:
        import tflite
    except ImportError:
        raise MissingDependencyError(
            "Reading a .tflite file needs the package tflite. Run: pip install 'relayquant[tflite]'"
        ) from None
    with reading(path, "TensorFlow Lite model", ModelError):
        return _import_file(check_file(path, max_bytes), tflite)


def _import_file(path: Path, tflite: Any) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    data = path.read_bytes()
    if data[4:8] != FILE_IDENTIFIER:
        raise ModelError(f"{str(path)!r} is not a TensorFlow Lite model (no identifier TFL3).")
    frontend = _tvm.load_tflite_frontend()
    sources: dict[str, SourceNode] = {}
    model = tflite.Model.GetRootAs(data, 0)
    custom = list_custom_operators(model)
    if custom:
        raise ModelError(
            f"Not supported, {format_count(len(custom), 'custom operator')} of the model: "
            f"{', '.join(custom)}. Replace them before the conversion to TFLite."
        )
    converter = functools.partial(_converter_class(frontend), sources=sources)
    with _tvm.FRONTEND_LOCK:
        mod = frontend.from_tflite(model, op_converter=converter)
    # The frontend attaches the weights that it has bound already.
    mod["main"] = mod["main"].without_attr("params")
    return name_values(mod, sources), {}


def list_custom_operators(model: Any) -> list[str]:
    """Names of the operators that are none of TFLite's own, with how often each is called."""
    names: dict[int, str] = {}
    for index in range(model.OperatorCodesLength()):
        custom = model.OperatorCodes(index).CustomCode()
        if custom is not None:
            names[index] = custom.decode("utf-8", "replace")
    calls: Counter[str] = Counter()
    for index in range(model.SubgraphsLength()):
        subgraph = model.Subgraphs(index)
        for at in range(subgraph.OperatorsLength()):
            code = subgraph.Operators(at).OpcodeIndex()
            calls.update(names[code] for _ in range(code in names))
    return [f"{name!r} ({format_count(count, 'call')})" for name, count in calls.items()]


def _converter_class(frontend: Any) -> type[Any]:
    """TVM's converter, naming values and errors after the tensors and operators of the model."""

    class Converter(frontend.OperatorConverter):
        _SUPPORTED_QUANTIZED_OPS = (
            frontend.OperatorConverter._SUPPORTED_QUANTIZED_OPS | MOVE_INTEGERS
        )

        def __init__(
            self,
            model: Any,
            subgraph: Any,
            table: Any,
            bb: Any,
            *args: Any,
            sources: dict[str, SourceNode],
            **kwargs: Any,
        ) -> None:
            super().__init__(model, subgraph, table, bb, *args, **kwargs)
            self.sources = sources
            self.in_float = False

        def get_input_tensors(self, op: Any) -> list[Any]:
            return self._hide_parameters(super().get_input_tensors(op))

        def get_output_tensors(self, op: Any) -> list[Any]:
            return self._hide_parameters(super().get_output_tensors(op))

        def _hide_parameters(self, tensors: list[Any]) -> list[Any]:
            for tensor in tensors if self.in_float else ():
                tensor.qnn_params = None
            return tensors

        def convert_pool2d(self, op: Any, pool_type: str) -> relax.Expr:
            """An average as quantize(avg_pool2d(dequantize(x))): TVM divides integers, which
            truncates instead of rounding.
            """
            convert = functools.partial(super().convert_pool2d, pool_type=pool_type)
            (data,), (result,) = self.get_input_tensors(op), self.get_output_tensors(op)
            is_quantized = data.qnn_params is not None and result.qnn_params is not None
            if pool_type != "average" or not is_quantized:
                return convert(op)
            name = frontend.get_tensor_name(self.subgraph, data.tensor_idx)
            integers = self.exp_tab.get_expr(name)
            real = self.bb.emit(self.dequantize(integers, data))
            self.exp_tab.set_expr(name, real, force_override=True)
            self.in_float = True
            try:
                pooled = convert(op)
            finally:
                self.in_float = False
                self.exp_tab.set_expr(name, integers, force_override=True)
            return self.quantize(self.bb.emit(pooled), result)

        def convert_expand_dims(self, op: Any) -> relax.Expr:
            """R.expand_dims; TVM calls it with an argument too many."""
            data, axis = self.get_input_tensors(op)
            at = int(self.get_tensor_value(axis).item())
            return relax.op.expand_dims(self.get_tensor_expr(data), at)

        def convert_fill(self, op: Any) -> relax.Expr:
            """A constant where size and value are known, which TVM looks up among the values of
            the run time.
            """
            sizes, value = self.get_input_tensors(op)
            if self.has_expr(sizes.tensor_idx):
                return super().convert_fill(op)
            shape = [int(size) for size in self.get_tensor_value(sizes)]
            if self.has_expr(value.tensor_idx):
                return relax.op.broadcast_to(self.get_tensor_expr(value), shape)
            if math.prod(shape) > MAX_FILLED:
                raise ValueError(
                    f"its result has the shape {shape}; supported: {MAX_FILLED:,} elements"
                )
            filled = np.full(shape, self.get_tensor_value(value).item())
            dtype = self.get_tensor_type_str(value.tensor.Type())
            return relax.const(filled.astype(dtype), dtype)

        def convert_dequantize(self, op: Any) -> relax.Expr:
            """float16 -> float32, of a constant a constant, and of one that DENSIFY made; integers
            -> dequantize, of a constant too. TVM takes float16 for a plain constant always, and
            integers for a value of the run time.
            """
            (data,) = self.get_input_tensors(op)
            value = self.get_tensor_expr(data)
            if self.get_tensor_type_str(data.tensor.Type()) != "float16":
                return self.dequantize(value, data)
            array = constant_value(value)
            if array is None:
                return relax.op.astype(value, "float32")
            return relax.const(array.astype("float32"), "float32")

        def convert_prelu(self, op: Any) -> relax.Expr:
            """One slope for each channel -> R.nn.prelu(x, slopes) along its axis, where TVM makes
            a vector of all values; one slope -> R.nn.leakyrelu; else max(x, 0) + a * min(x, 0).
            """
            data, slopes = (self.get_tensor_expr(tensor) for tensor in self.get_input_tensors(op))
            array = constant_value(slopes)
            wide = [] if array is None else [at for at, n in enumerate(array.shape[::-1]) if n > 1]
            if array is not None and not wide:
                return relax.op.nn.leakyrelu(data, float(array.item()))
            if array is not None and len(wide) == 1:
                row = relax.const(array.ravel(), str(array.dtype))
                return relax.op.nn.prelu(data, row, data.ty.ndim - 1 - wide[0])
            zero = relax.const(0.0, str(data.ty.dtype))
            below = self.bb.emit(
                relax.op.multiply(self.bb.emit(relax.op.minimum(data, zero)), slopes)
            )
            return relax.op.add(self.bb.emit(relax.op.nn.relu(data)), below)

        def convert_op_to_relax(self) -> None:
            for index in range(self.subgraph.OperatorsLength()):
                op = self.subgraph.Operators(index)
                kind = self.get_op_code_str(op)
                outputs = [
                    frontend.get_tensor_name(self.subgraph, tensor.tensor_idx)
                    for tensor in self.get_output_tensors(op)
                ]
                try:
                    value = self.convert_map[kind](op=op)
                    if value is None:
                        continue
                    value = self.bb.normalize(value)
                    fields = (
                        [value] if len(outputs) == 1 else [value[i] for i in range(len(outputs))]
                    )
                    for name, field in zip(outputs, fields, strict=True):
                        self.exp_tab.set_expr(name, self._name(name, field, outputs[0], kind))
                except Exception as error:
                    raise ModelError(
                        f"Operator {kind} (number {index}, output "
                        f"{outputs[0] if outputs else ''!r}) cannot "
                        f"be converted: {' '.join(str(error).split())}"
                    ) from error

        def _name(self, name: str, value: relax.Expr, node: str, kind: str) -> relax.Expr:
            value = self.bb.normalize(value)
            if isinstance(value, tvm.ir.GenericConst) or not isinstance(value.ty, relax.TensorType):
                return value
            self.sources[name] = SourceNode(node, kind)
            var = relax.DataflowVar(MARK + name, value.ty)
            self.bb.emit_normalized(relax.VarBinding(var, value))
            return var

    return Converter
