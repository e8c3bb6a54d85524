"""Rules for linear operators: the weight of a matmul is 2-D, its data as the model has it; a bias
is beside its product.
"""

from __future__ import annotations

import numpy as np
import tvm_ffi
from tvm import relax

from relayquant.rewrite.editor import Editor
from relayquant.rewrite.graph import constant_value, tensor_shape

#: products and convolutions, which take a bias
LINEAR = (
    "relax.matmul",
    "relax.nn.conv1d",
    "relax.nn.conv2d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
)


def squeeze_weight(editor: Editor, var: relax.Var) -> bool:
    """matmul(x, w[..., K, N]) -> matmul(x, w[K, N]), x of at least as many dimensions and all
    matrices of w the same.

    PyTorch repeats the weight of a linear layer for each sample. A transposed weight,
    matmul(x, permute_dims(w)), is left to `fold_constants`.
    """
    call = editor.call_of(var)
    weight = constant_value(call.args[1])
    data = call.args[0]
    if weight is None or weight.ndim < 3 or data.ty.ndim < weight.ndim:
        return False
    matrices = weight.reshape(-1, *weight.shape[-2:])
    sizes = tensor_shape(data)
    if len(matrices) == 0 or (matrices != matrices[0]).any() or sizes is None:
        return False
    stacks = (1,) * (len(sizes) - weight.ndim) + weight.shape[:-2]
    if any(size not in (1, own) for size, own in zip(stacks, sizes[:-2], strict=True)):
        return False  # the weight decides how many products there are
    squeezed = relax.const(matrices[0], str(weight.dtype))
    editor.redefine(var, relax.op.matmul(data, squeezed, call.attrs.out_dtype))
    return True


def unflatten_dense(editor: Editor, var: relax.Var) -> bool:
    """reshape(matmul(reshape(x, (M, K)), w) + b?, (..., N)) -> matmul(x, w) + b?, x (..., K), as
    torch writes a linear layer.

    The values between are used nowhere else; w is a constant (K, N), b a constant (N,).
    """
    result = editor.call_of(var).args[0]
    bias = bias_var = None
    if editor.op_name(result) == "relax.add":
        bias_var, call = result, editor.call_of(result)
        bias, result = call.args[1], call.args[0]
        array = constant_value(bias)
        if array is None or array.ndim != 1 or not editor.has_one_use(bias_var):
            return False
    if editor.op_name(result) != "relax.matmul" or not editor.has_one_use(result):
        return False
    matmul = editor.call_of(result)
    flat, weight = matmul.args
    array = constant_value(weight)
    if editor.op_name(flat) != "relax.reshape" or array is None or array.ndim != 2:
        return False
    data = editor.call_of(flat).args[0]
    shapes = [expr.ty.shape for expr in (data, flat, var)]
    if not all(isinstance(shape, relax.ShapeExpr) and len(shape.values) for shape in shapes):
        return False
    before, rows, after = (list(shape.values) for shape in shapes)
    # The rows of the flat matrix are those of x, in the same order, when they are as long.
    if len(rows) != 2 or len(before) != len(after):
        return False
    if not _same(before[-1:], rows[-1:]) or not _same(before[:-1], after[:-1]):
        return False
    product = relax.op.matmul(data, weight, matmul.attrs.out_dtype)
    if bias is None:
        editor.redefine(var, product)
        return True
    name = f"{editor.names[result]}.unflattened"
    editor.redefine(var, relax.op.add(editor.define(var, product, name, origin=result), bias))
    return True


def move_bias_inside(editor: Editor, var: relax.Var) -> bool:
    """squeeze(conv(x, w)) + b -> squeeze(conv(x, w) + b'), where conv and squeeze have no other
    use.

    So a 1-D convolution written as a 2-D one keeps its bias beside it. b' has the squeezed axes
    again.
    """
    squeezed, bias = editor.call_of(var).args
    array = constant_value(bias)
    if editor.op_name(squeezed) != "relax.squeeze" or array is None:
        return False
    call = editor.call_of(squeezed)
    linear = call.args[0]
    if editor.op_name(linear) not in LINEAR or call.attrs.axis is None:
        return False
    if not (editor.has_one_use(linear) and editor.has_one_use(squeezed)):
        return False
    if array.ndim > squeezed.ty.ndim:
        return False
    rank = linear.ty.ndim
    padded = array.reshape((1,) * (squeezed.ty.ndim - array.ndim) + array.shape)
    axes = sorted(int(axis) % rank for axis in call.attrs.axis)
    expanded = relax.const(np.expand_dims(padded, tuple(axes)), str(array.dtype))
    name = f"{editor.names[squeezed]}.biased"
    inner = editor.define(var, relax.op.add(linear, expanded), name, origin=var)
    editor.redefine(var, relax.op.squeeze(inner, axes))
    return True


def _same(left: list[relax.Expr], right: list[relax.Expr]) -> bool:
    return all(tvm_ffi.structural_equal(a, b) for a, b in zip(left, right, strict=True))


def merge_reshapes(editor: Editor, var: relax.Var) -> bool:
    """reshape(reshape(x, s), t) -> reshape(x, t), the inner one used nowhere else."""
    inner = editor.call_of(var).args[0]
    shape = var.ty.shape
    if editor.op_name(inner) != "relax.reshape" or not editor.has_one_use(inner):
        return False
    if not isinstance(shape, relax.ShapeExpr):
        return False
    editor.redefine(var, relax.op.reshape(editor.call_of(inner).args[0], shape))
    return True
