"""TensorFlow Lite reader: operators that TVM's frontend does not convert, or not as TFLite computes
them.

Each function takes the converter and the operator, and returns the value. "TFLite" here means the
kernels of its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax

from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.tflite.operators.arithmetic import (
    convert_arg,
    convert_bucketize,
    convert_cast,
    convert_cumsum,
    convert_dequantize,
    convert_gelu,
    convert_prelu,
    convert_reduce,
    convert_rfft2d,
    convert_shift,
    convert_softmax,
    convert_topk,
)
from relayquant.formats.readers.tflite.operators.images import (
    convert_resize_bilinear,
    convert_resize_nearest,
    convert_suppression,
)
from relayquant.formats.readers.tflite.operators.indexing import (
    SEGMENTS,
    convert_embedding_lookup,
    convert_gather,
    convert_gather_nd,
    convert_matrix_diag,
    convert_matrix_set_diag,
    convert_scatter_nd,
    convert_segments,
    convert_sparse_to_dense,
    convert_stablehlo_gather,
    convert_update,
)
from relayquant.formats.readers.tflite.operators.products import (
    convert_batch_matmul,
    convert_fully_connected,
)
from relayquant.formats.readers.tflite.operators.shapes import (
    convert_batch_to_space,
    convert_broadcast_to,
    convert_expand_dims,
    convert_fill,
    convert_mirror_pad,
    convert_pad,
    convert_reshape,
    convert_reverse,
    convert_select,
    convert_shape,
    convert_space_to_batch,
    convert_split,
    convert_split_v,
    convert_squeeze,
    convert_unpack,
)
from relayquant.formats.readers.tflite.operators.strided import convert_strided_slice
from relayquant.formats.readers.tflite.operators.transposed import (
    convert_conv3d_transpose,
    convert_transpose_conv,
    convert_transpose_conv_bias,
)


def refuse_where(converter: Any, op: Any) -> relax.Expr:
    """Raise Refusal: WHERE(c) lists the positions that are true."""
    raise Refusal("its result has as many rows as the run time finds; supported: fixed shapes")


def refuse_random(converter: Any, op: Any) -> relax.Expr:
    """Raise Refusal: no two runs would have the same result."""
    raise Refusal("it draws random numbers", "Make them an input of the model")


#: Converts an operator, given the converter and the operator.
CUSTOM_OPERATORS: dict[str, Callable[[Any, Any], relax.Expr | None]] = {
    "Convolution2DTransposeBias": convert_transpose_conv_bias,
}


OPERATORS: dict[str, Callable[[Any, Any], relax.Expr | None]] = {
    "ARG_MAX": partial(convert_arg, relax.op.argmax),
    "ARG_MIN": partial(convert_arg, relax.op.argmin),
    "BATCH_MATMUL": convert_batch_matmul,
    "BATCH_TO_SPACE_ND": convert_batch_to_space,
    "BROADCAST_TO": convert_broadcast_to,
    "BUCKETIZE": convert_bucketize,
    "CAST": convert_cast,
    "CONV_3D_TRANSPOSE": convert_conv3d_transpose,
    "CUMSUM": convert_cumsum,
    "DEQUANTIZE": convert_dequantize,
    "DYNAMIC_UPDATE_SLICE": convert_update,
    "EMBEDDING_LOOKUP": convert_embedding_lookup,
    "EXPAND_DIMS": convert_expand_dims,
    "FILL": convert_fill,
    "FULLY_CONNECTED": convert_fully_connected,
    "GATHER": convert_gather,
    "GATHER_ND": convert_gather_nd,
    "GELU": convert_gelu,
    **{
        kind: partial(convert_reduce, reduce)
        for kind, reduce in {
            "MEAN": relax.op.mean,
            "REDUCE_ALL": relax.op.min,
            "REDUCE_ANY": relax.op.max,
            "REDUCE_MAX": relax.op.max,
            "REDUCE_MIN": relax.op.min,
            "REDUCE_PROD": relax.op.prod,
            "SUM": relax.op.sum,
        }.items()
    },
    **dict.fromkeys(SEGMENTS, convert_segments),
    "MATRIX_DIAG": convert_matrix_diag,
    "MATRIX_SET_DIAG": convert_matrix_set_diag,
    "MIRROR_PAD": convert_mirror_pad,
    "MULTINOMIAL": refuse_random,
    "NON_MAX_SUPPRESSION_V4": convert_suppression,
    "NON_MAX_SUPPRESSION_V5": convert_suppression,
    "PAD": convert_pad,
    "PADV2": convert_pad,
    "PRELU": convert_prelu,
    "RANDOM_STANDARD_NORMAL": refuse_random,
    "RANDOM_UNIFORM": refuse_random,
    "RESHAPE": convert_reshape,
    "RESIZE_BILINEAR": convert_resize_bilinear,
    "RESIZE_NEAREST_NEIGHBOR": convert_resize_nearest,
    "REVERSE_V2": convert_reverse,
    "RFFT2D": convert_rfft2d,
    "RIGHT_SHIFT": convert_shift,
    "SCATTER_ND": convert_scatter_nd,
    "SELECT": convert_select,
    "SELECT_V2": convert_select,
    "SHAPE": convert_shape,
    "SOFTMAX": convert_softmax,
    "SPACE_TO_BATCH_ND": convert_space_to_batch,
    "SPARSE_TO_DENSE": convert_sparse_to_dense,
    "SPLIT": convert_split,
    "SPLIT_V": convert_split_v,
    "SQUEEZE": convert_squeeze,
    "STABLEHLO_GATHER": convert_stablehlo_gather,
    "STRIDED_SLICE": convert_strided_slice,
    "TOPK_V2": convert_topk,
    "TRANSPOSE_CONV": convert_transpose_conv,
    "UNPACK": convert_unpack,
    "WHERE": refuse_where,
    **CUSTOM_OPERATORS,
}
