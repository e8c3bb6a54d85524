"""ONNX reader: checks and shape inference of the onnx package for a node, before the node is
converted.

The package's checker and its type and shape inference reject invalid nodes. The inferred shapes
show how much memory the outputs need. They also replace shapes that Relax loses: in Relax, a
broadcast of a symbolic and a constant size has no shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import tvm
import tvm_ffi
from onnx import helper, numpy_helper
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError
from tvm import relax, tirx
from tvm.ir import GenericConst

from relayquant.formats.readers.onnx.graph.narrow import WIDENED
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.ir.rewrite.graph import constant_value, static_size

#: Largest result of an operator, in elements: 16 GiB of float32.
MAX_VALUE = 2**32

#: Largest constant operand that the inference reads: sizes, axes, scales.
MAX_READ = 64

#: Names of the domain of ONNX's standard operators.
STANDARD = ("", "ai.onnx")

#: Advice for an invalid node.
REPAIR = "Fix the model, or export it again with the current release of its exporter"

#: An operand of a node: a tensor, or sizes as TVM's frontend represents them. None if it is left
#: out.
Operand = Any


def find_schema(node: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    """Return the definition of an ONNX operator. None for another domain or an unknown operator."""
    if node.domain not in STANDARD:
        return None
    try:
        return onnx.defs.get_schema(node.op_type, min(opset, onnx.defs.onnx_opset_version()), "")
    except onnx.defs.SchemaError:
        return None


class SizeNames:
    """Unique names for symbolic sizes. Two sizes of a module may have the same name."""

    def __init__(self) -> None:
        self._sizes: list[tirx.Expr] = []

    def name(self, size: tirx.Expr) -> str:
        """Return the unique name of a symbolic size."""
        for at, known in enumerate(self._sizes):
            if tvm_ffi.structural_equal(known, size):
                return f"size{at}"
        self._sizes.append(size)
        return f"size{len(self._sizes) - 1}"

    def find(self, name: str) -> tirx.Expr | None:
        """Return the size for a name that `name` returned."""
        number = name.removeprefix("size")
        return self._sizes[int(number)] if name.startswith("size") and number.isdigit() else None


def describe_type(operand: Operand, names: SizeNames) -> onnx.TypeProto | None:
    """Return type and shape of an operand in ONNX's form. Empty for an operand that is left out,
    None if it is not a tensor.
    """
    if operand is None:
        return onnx.TypeProto()
    if isinstance(operand, relax.ShapeExpr):
        return helper.make_tensor_type_proto(onnx.TensorProto.INT64, [len(operand.values)])
    if tvm.ir.is_prim_expr(operand):
        return helper.make_tensor_type_proto(onnx.TensorProto.INT64, [])
    ty = getattr(operand, "ty", None)
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        return None
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(str(ty.dtype)))
    values = getattr(ty.shape, "values", None)
    if values is None:
        return helper.make_tensor_type_proto(dtype, None if ty.ndim < 0 else [None] * ty.ndim)
    sizes = [static_size(size) for size in values]
    shape = [
        names.name(size) if known is None else known
        for size, known in zip(values, sizes, strict=True)
    ]
    return helper.make_tensor_type_proto(dtype, shape)


@functools.cache
def make_context(opset: int) -> Any:
    """Make the model properties that the checker needs."""
    context = type(onnx.checker.DEFAULT_CONTEXT)()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": opset}
    return context


def check_node(node: onnx.NodeProto, opset: int) -> None:
    """Check a node against the definition of its operator.

    Raises:
        Refusal: this version of the operator lacks an attribute or expects another attribute type,
            the number of inputs or outputs is wrong, one of any number of inputs is left out, or
            this version of ONNX lacks the operator.
    """
    try:
        onnx.checker.check_node(node, make_context(min(opset, onnx.defs.onnx_opset_version())))
    except ValidationError as error:
        raise refuse(error) from error
    schema = find_schema(node, opset) if "" in node.input else None
    if schema is None:
        return
    formal = schema.inputs
    if formal[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        for number, name in enumerate(node.input[len(formal) - 1 :], len(formal) - 1):
            if not name:
                raise Refusal(f"its operand {number} is left out; allowed: names of values", REPAIR)


def infer_outputs(
    node: onnx.NodeProto,
    schema: onnx.defs.OpSchema,
    operands: Mapping[str, Operand],
    opset: int,
    names: SizeNames,
) -> Mapping[str, onnx.TypeProto]:
    """Infer the outputs of a node with ONNX: name -> type and shape, as far as ONNX knows them.

    Args:
        node: A node without graphs as attributes.
        schema: The definition of its operator.
        operands: Its inputs by name.
        opset: Opset of the model.
        names: Names of the symbolic sizes.

    Raises:
        Refusal: types or shapes of the operands do not fit, or an output needs too much memory.
    """
    types: dict[str, onnx.TypeProto] = {}
    for name in filter(None, node.input):
        found = describe_type(operands.get(name), names)
        if found is None:
            return {}  # a sequence or an optional
        types[name] = found
    arrays = {name: constant_value(value) for name, value in operands.items() if is_small(value)}
    data = {
        name: numpy_helper.from_array(array, name)
        for name, array in arrays.items()
        if array is not None
    }
    version = helper.make_opsetid("", min(opset, onnx.defs.onnx_opset_version()))
    try:
        found = onnx.shape_inference.infer_node_outputs(
            schema, _as_held(node), types, data, opset_imports=[version]
        )
    except (InferenceError, ValidationError, RuntimeError, ValueError) as error:
        raise refuse(error) from error
    for inferred in found.values():
        check_memory([dim.dim_value or 1 for dim in inferred.tensor_type.shape.dim])
    return found


def is_small(value: Operand) -> bool:
    """Return whether an operand is a constant that the inference reads. Weights are not read."""
    if not isinstance(value, GenericConst):
        return False
    return value.ty.ndim < 2 and all(int(size) <= MAX_READ for size in value.ty.shape.values)


def _as_held(node: onnx.NodeProto) -> onnx.NodeProto:
    """Fix a QuantizeLinear to 4 bits or fewer without its type: its zero point is stored in 8 bits
    (`narrow.widen_tensor`), which contradicts the type.
    """
    is_wide = node.op_type != "QuantizeLinear" or not any(
        each.name == "output_dtype" and each.i in WIDENED for each in node.attribute
    )
    if is_wide:
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    copy.attribute.extend(each for each in node.attribute if each.name != "output_dtype")
    return copy


def refuse(error: Exception) -> Refusal:
    """Turn ONNX's complaint about a node into a refusal."""
    text = " ".join(str(error).split()).rstrip(".")
    for prefix in ("[ShapeInferenceError] ", "[TypeInferenceError] "):
        text = text.removeprefix(prefix)
    return Refusal(f"the onnx package says: {text}; expected: a valid node", REPAIR)


def check_memory(sizes: Sequence[int]) -> None:
    """Check that a result is not too large.

    Raises:
        Refusal: it has more than `MAX_VALUE` elements.
    """
    count = math.prod(sizes)
    if count > MAX_VALUE:
        raise Refusal(
            f"its result has the shape {tuple(sizes)}, {count:.3g} "
            f"elements; supported: {MAX_VALUE}",
            "Check the operand that the size is computed from",
        )


def settle_shape(
    bb: relax.BlockBuilder,
    value: relax.Expr,
    inferred: onnx.TypeProto | None,
    names: SizeNames,
    label: str,
) -> relax.Expr:
    """Return the value with a known shape: unchanged if Relax knows its shape, else with the
    inferred shape.

    Sizes that ONNX does not know either become symbolic sizes that are read at run time: y =
    R.match_cast(lv, R.Tensor((y_size0, 4), "float32"))

    Args:
        bb: The builder.
        value: A result of a node.
        inferred: Type and shape inferred by ONNX.
        names: Names of the symbolic sizes in it.
        label: Name of the value.

    Raises:
        Refusal: the rank is not known.
    """
    ty = value.ty
    if not isinstance(ty, relax.TensorType) or isinstance(ty.shape, relax.ShapeExpr):
        return value
    has_shape = inferred is not None and inferred.tensor_type.HasField("shape")
    dims = inferred.tensor_type.shape.dim if has_shape else []
    if ty.ndim < 0 and not has_shape:
        raise Refusal(
            f"the rank of its result {label!r} is not known; supported: known ranks",
            FIX_SIZES,
        )
    sizes = []
    for at in range(len(dims) if has_shape else ty.ndim):
        known = _find_size(dims[at], names) if has_shape else None
        sizes.append(tirx.Var(f"{label}_size{at}", "int64") if known is None else known)
    return bb.match_cast(value, relax.TensorType(sizes, ty.dtype))


def _find_size(dim: onnx.TensorShapeProto.Dimension, names: SizeNames) -> int | tirx.Expr | None:
    return dim.dim_value if dim.HasField("dim_value") else names.find(dim.dim_param)
