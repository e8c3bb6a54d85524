"""PyTorch reader: products of matrices and convolutions, with the type of the operands. TVM's
frontend computes products of all types as float32.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import Call

from relayquant.formats.readers.torch.arguments import read_arguments
from relayquant.ir.rewrite.expressions import op_name, same_extents, shape_of
from relayquant.ir.rewrite.graph import constant_value, tensor_dtype
from relayquant.ir.rewrite.moves import MOVES, find_repeated_matrix

#: (is transposed, number of axes in space) -> convolution
CONVOLUTIONS = {
    (False, 1): relax.op.nn.conv1d,
    (False, 2): relax.op.nn.conv2d,
    (False, 3): relax.op.nn.conv3d,
    (True, 1): relax.op.nn.conv1d_transpose,
    (True, 2): relax.op.nn.conv2d_transpose,
    (True, 3): relax.op.nn.conv3d_transpose,
}


def emit_matmul(importer: Any, first: Any, second: Any) -> relax.Expr:
    """Emit the product of two tensors of the same type, in this type.

    A constant matrix that is repeated for each matrix of the data is not.
    """
    data, factor = importer.env[first], importer.env[second]
    matrix = find_repeated_matrix(factor, importer.lookup_call)
    is_alike = same_extents(shape_of(data)[:-2], shape_of(factor)[:-2])
    if matrix is not None and is_alike and is_stored(importer, matrix):
        factor = matrix
    return importer.block_builder.emit(relax.op.matmul(data, factor, tensor_dtype(data)))


def is_stored(importer: Any, value: relax.Expr) -> bool:
    """Whether a value is a weight or a constant, or a part of one, perhaps transposed."""
    builder, found = importer.block_builder, value
    while isinstance(found, relax.Var | relax.TupleGetItem | Call):
        if isinstance(found, relax.Var):
            value, found = found, builder.lookup_binding(found)
        elif isinstance(found, relax.TupleGetItem):
            found = found.tuple_value
        elif op_name(found) in (*MOVES, "relax.split", "relax.strided_slice"):
            found = found.args[0]
        else:
            return False
    is_weight = isinstance(value, relax.Var) and value.name in importer.constants
    return is_weight or (found is not None and constant_value(found) is not None)


def convert_matmul(node: Any, importer: Any) -> relax.Expr:
    """Convert mm(a, b) and bmm(a, b) to R.matmul."""
    return emit_matmul(importer, *node.args[:2])


def convert_addmm(node: Any, importer: Any) -> relax.Expr:
    """Convert addmm(x, a, b) and baddbmm(x, a, b) to beta * x + alpha * (a @ b).

    For integers, PyTorch cuts off the fractions of beta and alpha. A factor 0 leaves its term out,
    also where the term is NaN.
    """
    operand, first, second = node.args[:3]
    beta, alpha = read_arguments(node, "beta", "alpha")
    data, emit = importer.env[operand], importer.block_builder.emit
    dtype = tensor_dtype(data)
    if not dtype.startswith(("float", "bfloat")):
        beta, alpha = int(beta), int(alpha)
    product = emit_matmul(importer, first, second)
    terms = [
        value if factor == 1 else emit(relax.op.multiply(value, relax.const(factor, dtype)))
        for value, factor in ((data, beta), (product, alpha))
        if factor != 0
    ]
    if len(terms) == 2:
        return emit(relax.op.add(*terms))
    if not terms:
        return emit(relax.op.zeros(product.ty.shape, dtype))
    return emit(relax.op.broadcast_to(terms[0], product.ty.shape))


def convert_convolution(node: Any, importer: Any) -> relax.Expr:
    """Convert a convolution in 1 to 3 dimensions, also a transposed one. One number given for all
    axes is repeated.
    """
    data, weight, bias, transposed, groups = read_arguments(
        node, "input", "weight", "bias", "transposed", "groups"
    )
    data, emit = importer.env[data], importer.block_builder.emit
    rank = data.ty.ndim - 2
    sizes = {
        name: [*values] * (rank if len(values) == 1 else 1)
        for name, values in zip(
            ("strides", "padding", "dilation", "output_padding"),
            read_arguments(node, "stride", "padding", "dilation", "output_padding"),
            strict=True,
        )
    }
    if not transposed:
        del sizes["output_padding"]
    convolve = CONVOLUTIONS[bool(transposed), rank]
    value = emit(
        convolve(
            data, importer.env[weight], **sizes, groups=int(groups), out_dtype=tensor_dtype(data)
        )
    )
    if bias is None:
        return value
    bias = emit(relax.op.reshape(importer.env[bias], (1, -1, *[1] * rank)))
    return emit(relax.op.add(value, bias))
