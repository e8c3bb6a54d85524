"""Rules for linear operators: the weight of a matmul is 2-D and the second operand, vectors
become matrices, and a bias directly follows its product.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.expressions import same_extents, shape_of
from relayquant.ir.rewrite.graph import constant_value, tensor_shape
from relayquant.ir.rewrite.moves import find_repeated_matrix, list_permutation
from relayquant.ir.rewrite.rule import Skip, decline
from relayquant.stages.preparation.rules.tensors import is_constant, make_const

MATMUL = "relax.matmul"

#: products and convolutions that take a bias
LINEAR = (
    MATMUL,
    "relax.nn.conv1d",
    "relax.nn.conv2d",
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
)


def vectors_to_matrices(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """matmul(x, v (K,)) -> squeeze(matmul(x, v (K, 1))), matmul(v (K,), x) -> squeeze(matmul(v (1,
    K), x)).

    A computed vector times a constant matrix stays, because a dense layer takes data of any rank.
    """
    call = editor.call_of(var)
    left, right = call.args
    ranks = left.ty.ndim, right.ty.ndim
    is_dense = ranks[1] == 2 and is_constant(editor, right) and not is_constant(editor, left)
    if 1 not in ranks or min(ranks) < 1 or is_dense:
        return decline("no vector is multiplied by a matrix")

    def widen(vector: relax.Expr, axis: int) -> relax.Expr:
        if vector.ty.ndim > 1:
            return vector
        name = f"{editor.names[var]}.matrix"
        return editor.define(var, relax.op.expand_dims(vector, axis), name)

    factors = widen(left, 0), widen(right, 1)
    product = relax.op.matmul(*factors, call.attrs.out_dtype)
    matrix = editor.define(var, product, f"{editor.names[var]}.product")
    rank = max(*ranks, 2)
    axes = [axis for axis, size in zip((rank - 2, rank - 1), ranks, strict=True) if size == 1]
    return relax.op.squeeze(matrix, axes)


def put_weight_second(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """matmul(w, x) -> permute_dims(matmul(permute_dims(x), permute_dims(w))), with the last two
    axes swapped. w is a constant (M, K), x is computed (..., K, N).
    """
    call = editor.call_of(var)
    weight, data = call.args
    if not is_constant(editor, weight) or is_constant(editor, data):
        return decline("not a constant times a value")
    if weight.ty.ndim != 2 or data.ty.ndim < 2:
        return decline("a factor is not a matrix")
    rank = data.ty.ndim
    order = [*range(rank - 2), rank - 1, rank - 2]
    name = editor.names[var]
    turned = editor.define(var, relax.op.permute_dims(data, order), f"{name}.data")
    second = editor.define(var, relax.op.permute_dims(weight, [1, 0]), f"{name}.weight")
    product = relax.op.matmul(turned, second, call.attrs.out_dtype)
    product = editor.define(var, product, f"{name}.product")
    return relax.op.permute_dims(product, order)


def squeeze_weight(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """matmul(x, w[..., K, N]) -> matmul(x, w[K, N]) if all matrices of w are equal and x has at
    least as many dimensions; the same for matmul(w[..., M, K], x).

    PyTorch repeats the weight of a linear layer for each sample. A transposed weight, matmul(x,
    permute_dims(w)), is left to `fold_constants`.
    """
    call = editor.call_of(var)
    for at in (1, 0):
        weight, data = constant_value(call.args[at]), call.args[1 - at]
        if weight is None or weight.ndim < 3 or data.ty.ndim < weight.ndim:
            continue
        matrices = weight.reshape(-1, *weight.shape[-2:])
        sizes = tensor_shape(data)
        if len(matrices) == 0 or (matrices != matrices[0]).any() or sizes is None:
            continue
        stacks = (1,) * (len(sizes) - weight.ndim) + weight.shape[:-2]
        if any(size not in (1, own) for size, own in zip(stacks, sizes[:-2], strict=True)):
            continue  # the weight decides how many products there are
        squeezed = relax.const(matrices[0], str(weight.dtype))
        factors = (data, squeezed) if at else (squeezed, data)
        return relax.op.matmul(*factors, call.attrs.out_dtype)
    return decline("no constant operand repeats one matrix for each product")


def read_matrix_once(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """matmul(x (..., M, K), repeated(w (K, N))) -> matmul(x, w), where broadcast_to and reshapes
    repeat the constant w for each matrix of x; the same for matmul(repeated(w (M, K)), x).

    The number of matrices may be known only at run time, or be too large for a constant.
    """
    call = editor.call_of(var)
    for at in (1, 0):
        data, factor = call.args[1 - at], call.args[at]
        matrix = find_repeated_matrix(factor, editor.call_of)
        if matrix is None or not is_constant(editor, matrix):
            continue
        if same_extents(shape_of(data)[:-2], shape_of(factor)[:-2]):
            factors = (data, matrix) if at else (matrix, data)
            return relax.op.matmul(*factors, call.attrs.out_dtype)
    return decline("no operand repeats one constant matrix for each product")


def split_stack(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """matmul(x (..., E, M, K), w (E, K, N)) -> concat(matmul(x[..., i:i+1, :, :], w[i]) for all i).

    w is a constant, as in mixture-of-experts models. An x of shape (..., 1, M, K) or (M, K) is used
    by all matrices as a whole.
    """
    call = editor.call_of(var)
    stack, data = constant_value(call.args[1]), call.args[0]
    sizes = tensor_shape(data)
    if stack is None or stack.ndim != 3 or len(stack) < 2 or sizes is None or len(sizes) < 2:
        return decline("no matrices by a constant stack of them")
    name, axis = editor.names[var], max(len(sizes) - 3, 0)
    if len(sizes) == 2:
        data = editor.define(var, relax.op.expand_dims(data, 0), f"{name}.data")
    elif sizes[axis] not in (1, len(stack)):
        return decline("the data has another number of matrices, or one known only at run time")
    products = []
    for i, matrix in enumerate(stack):
        part = data
        if len(sizes) > 2 and sizes[axis] != 1:
            own = relax.op.strided_slice(data, [axis], [i], [i + 1])
            part = editor.define(var, own, f"{name}.data{i}")
        weight = relax.const(matrix, str(stack.dtype))
        product = relax.op.matmul(part, weight, call.attrs.out_dtype)
        products.append(editor.define(var, product, f"{name}.expert{i}"))
    return relax.op.concat(products, axis)


def unflatten_dense(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """reshape(matmul(reshape(x, (M, K)), w) + b?, (..., N)) -> matmul(x, w) + b?, x (..., K). Torch
    writes a linear layer in this form.

    The values between have no other reader. w is a constant (K, N), b a constant (N,).
    """
    result = editor.call_of(var).args[0]
    bias = bias_var = None
    if editor.op_name(result) == "relax.add":
        bias_var, call = result, editor.call_of(result)
        bias, result = call.args[1], call.args[0]
        array = constant_value(bias)
        if array is None or array.ndim != 1 or not editor.has_one_use(bias_var):
            return decline("no constant bias, or others read the biased product")
    if editor.op_name(result) != "relax.matmul" or not editor.has_one_use(result):
        return decline("no product before it, or others read it")
    matmul = editor.call_of(result)
    flat, weight = matmul.args
    array = constant_value(weight)
    if editor.op_name(flat) != "relax.reshape" or array is None or array.ndim != 2:
        return decline("the data is not flattened, or the weight is not a constant matrix")
    data = editor.call_of(flat).args[0]
    shapes = [expr.ty.shape for expr in (data, flat, var)]
    if not all(isinstance(shape, relax.ShapeExpr) and len(shape.values) for shape in shapes):
        return decline("a shape is unknown")
    before, rows, after = (list(shape.values) for shape in shapes)
    # The rows of the flat matrix are the rows of x, in the same order, if they have the same
    # length.
    if len(rows) != 2 or len(before) != len(after):
        return decline("the result has other dimensions than the data")
    if not same_extents(before[-1:], rows[-1:]) or not same_extents(before[:-1], after[:-1]):
        return decline("the rows are not those of the data")
    product = relax.op.matmul(data, weight, matmul.attrs.out_dtype)
    if bias is None:
        return product
    name = f"{editor.names[result]}.unflattened"
    return relax.op.add(editor.define(var, product, name, origin=result), bias)


def move_bias_inside(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """squeeze(conv(x, w)) + b -> squeeze(conv(x, w) + b'), permute_dims(matmul(x, w)) + b ->
    permute_dims(matmul(x, w) + b'), if neither operator has another reader.

    So the bias follows its product when a 1-D convolution is written as a 2-D one, or when the
    weight was the left factor. b' has the squeezed axes again, or its axes transposed back. Behind
    permute_dims, b must have one value per unit.
    """
    moved, bias = editor.call_of(var).args
    array, op = constant_value(bias), editor.op_name(moved)
    if op not in ("relax.squeeze", "relax.permute_dims") or array is None:
        return decline("no constant is added behind a squeeze or a transpose")
    call = editor.call_of(moved)
    linear, rank = call.args[0], call.args[0].ty.ndim
    if editor.op_name(linear) not in LINEAR:
        return decline("no product before it")
    if not (editor.has_one_use(linear) and editor.has_one_use(moved)):
        return decline("others read a value between")
    if array.ndim > moved.ty.ndim:
        return decline("the constant has more dimensions")
    padded = array.reshape((1,) * (moved.ty.ndim - array.ndim) + array.shape)
    if op == "relax.squeeze":
        if call.attrs.axis is None:
            return decline("the squeezed axes are not named")
        axes = sorted(int(axis) % rank for axis in call.attrs.axis)
        back = np.expand_dims(padded, tuple(axes))
    else:
        axes = list_permutation(call)
        back = np.transpose(padded, np.argsort(axes))
        units = rank - 1 if editor.op_name(linear) == MATMUL else 1
        if any(size != 1 for axis, size in enumerate(back.shape) if axis != units):
            return decline("the constant is not one number per unit")
    name = f"{editor.names[moved]}.biased"
    biased = relax.op.add(linear, make_const(back, str(array.dtype)))
    inner = editor.define(var, biased, name, origin=var)
    make = relax.op.squeeze if op == "relax.squeeze" else relax.op.permute_dims
    return make(inner, axes)


def merge_reshapes(editor: Editor, var: relax.Var) -> relax.Expr | Skip:
    """reshape(reshape(x, s), t) -> reshape(x, t) if the inner reshape has no other reader."""
    inner = editor.call_of(var).args[0]
    shape = var.ty.shape
    if editor.op_name(inner) != "relax.reshape" or not editor.has_one_use(inner):
        return decline("no reshape before it, or others read it")
    if not isinstance(shape, relax.ShapeExpr):
        return decline("the shape is unknown")
    return relax.op.reshape(editor.call_of(inner).args[0], shape)
