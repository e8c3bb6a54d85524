"""Rules that compute known values: operators on constants, and shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.errors import ModelError
from relayquant.ir.reference import run
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.graph import constant_value, static_size, tensor_dtype, tensor_shape
from relayquant.ir.rewrite.moves import RESHAPES
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.tensors import make_const

#: A result with more elements than this and than its operands stays an operator.
MAX_GROWTH = 2**20

#: Computed in numpy with the same bits as the compiled operator. All other operators are compiled
#: and run.
NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.where": np.where,
}

#: Operators that only choose and repeat values: the reference has the same bits, and compiles
#: nothing.
COPYING = frozenset(
    f"relax.{name}"
    for name in ("broadcast_to", "concat", "flip", "repeat", "stack", "strided_slice", "tile")
)

#: prefixes of operators that are never folded: a quantized weight must stay quantized
KEPT = ("relax.qnn.", "relax.quantize", "relax.dequantize", "relax.call_", "relax.random")


def fold_constants(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """f(constants) -> constant. `quantize`, `dequantize` and `qnn` operators are never folded."""
    call = editor.call_of(var)
    name = editor.op_name(var)
    shape = tensor_shape(var)
    if not name or name.startswith(KEPT) or shape is None or any(isinstance(d, str) for d in shape):
        return decline("an operator that is never folded, or a symbolic shape")
    arrays = []
    for arg in call.args:
        fields = arg.fields if isinstance(arg, relax.Tuple) else [arg]
        for field in fields:
            if isinstance(field, relax.Var):
                return decline("an operand is computed")
            array = constant_value(field)
            if array is not None:
                arrays.append(array)
    size = int(np.prod(shape, dtype="int64"))
    if size > MAX_GROWTH and size > sum(array.size for array in arrays):
        return decline("the constant would be large")
    dtype = tensor_dtype(var)
    if name in RESHAPES:
        result = arrays[0].reshape(shape)
    elif name == "relax.permute_dims":
        axes = call.attrs.axes
        result = np.transpose(arrays[0], None if axes is None else [int(axis) for axis in axes])
    elif name in NUMPY or (name == "relax.divide" and arrays[0].dtype.kind == "f"):
        with np.errstate(all="ignore"):
            result = NUMPY.get(name, np.divide)(*arrays)
    elif name == "relax.astype" and (arrays[0].dtype.kind in "bui" or dtype.startswith("float")):
        # FoldConstant leaves scalars. A float that no integer can represent is left to the target.
        with np.errstate(all="ignore"):
            result = arrays[0].astype(dtype)
    else:
        kinds = {np.dtype(dtype).kind, *(array.dtype.kind for array in arrays)}
        # Integers have the same values in the reference, which compiles nothing.
        is_exact = name in COPYING or kinds <= set("bui")
        result = _run_in_numpy(call) if is_exact else None
        result = _run_call(call) if result is None else result
    if result is None or result.shape != shape or str(result.dtype) != dtype:
        return decline("neither TVM nor the reference computes it")
    return make_const(result, dtype)


def _run_call(call: Call) -> np.ndarray | None:
    """Compute one call on constants, compiled and run by TVM or by the reference. None if
    neither can compute it.
    """
    alone = _make_alone(call)
    # FoldConstant runs loops. It does not run operators that legalization turns into a constant
    # (arange).
    for fold in (relax.transform.FoldConstant(), relax.transform.LegalizeOps()):
        array = _find_result(fold(alone))
        if array is not None:
            return array
    # FoldConstant does not run operators that legalization turns into library calls (cumsum, sort).
    return _run_in_numpy(call)


def _run_in_numpy(call: Call) -> np.ndarray | None:
    """Compute one call on constants by the reference. None if it cannot."""
    if not isinstance(call.ty, relax.TensorType):
        return None
    try:
        (array,) = run(_make_alone(call), [])
    except ModelError:
        return None  # it has no numpy form and does not compile; compilation reports it later
    return array


def _make_alone(call: Call) -> tvm.IRModule:
    """Return a module that computes one call."""
    return make_main([], lambda _: Call(call.op, call.args, call.attrs, call.ty_args))


def _find_result(mod: tvm.IRModule) -> np.ndarray | None:
    """Return the result of main if it is a constant."""
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            array = constant_value(binding.value)
            if array is not None:
                return array
    return constant_value(mod["main"].body.body)


def fold_shapes(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """shape_of(x) -> R.shape([...]); shape_to_tensor of static dimensions -> constant;
    tensor_to_shape(constant) -> R.shape; take(shape_to_tensor(R.shape([n, 3])), 1) -> 3."""
    call, name = editor.call_of(var), editor.op_name(var)
    operand = call.args[0]
    if name == "relax.shape_of":
        shape = operand.ty.shape
        return shape if isinstance(shape, relax.ShapeExpr) else decline("the shape is unknown")
    if name == "relax.tensor_to_shape":
        array = constant_value(operand)
        if array is None or array.ndim != 1:
            return decline("the sizes are computed")
        return relax.ShapeExpr([int(size) for size in array])
    if name == "relax.shape_to_tensor":
        sizes = _static_sizes(operand)
        if sizes is None or any(size is None for size in sizes):
            return decline("a size is symbolic")
        return make_const(np.array(sizes), "int64")
    inner = editor.call_of(operand)
    if inner is None or editor.op_name(operand) != "relax.shape_to_tensor":
        return decline("no sizes of a shape are taken")
    sizes, indices = _static_sizes(inner.args[0]), constant_value(call.args[1])
    if (
        sizes is None
        or indices is None
        or ((indices < -len(sizes)) | (indices >= len(sizes))).any()
    ):
        return decline("the sizes or the indices are unknown")
    picked = [sizes[int(at)] for at in indices.ravel()]
    if any(size is None for size in picked) or editor.is_output(var):
        return decline("a size is symbolic, or main returns it")
    return make_const(np.array(picked).reshape(indices.shape), "int64")


def _static_sizes(shape: relax.Expr) -> list[int | None] | None:
    if not isinstance(shape, relax.ShapeExpr):
        return None
    return [static_size(dim) for dim in shape.values]


def merge_constant_adds(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """(x + c1) + c2 -> x + (c1 + c2) if x + c1 has no other reader and the sum is no larger than
    c1 or c2.
    """
    call = editor.call_of(var)
    inner = editor.call_of(call.args[0])
    if inner is None or editor.op_name(call.args[0]) != "relax.add":
        return decline("no sum before it")
    first, second = constant_value(inner.args[1]), constant_value(call.args[1])
    if first is None or second is None or not editor.has_one_use(call.args[0]):
        return decline("an operand is not constant, or others read the sum before it")
    wide = "float64" if first.dtype.kind == "f" else str(first.dtype)
    try:
        total = first.astype(wide) + second.astype(wide)
    except ValueError:
        return decline("the constants do not broadcast to one another")
    if total.size > max(first.size, second.size):
        return decline("the sum of the constants is larger than both")
    return relax.op.add(inner.args[0], make_const(total, str(first.dtype)))
