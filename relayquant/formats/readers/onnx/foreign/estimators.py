"""ONNX reader: operators of scikit-learn pipelines (domain ai.onnx.ml) on tensors of numbers.

Each function is a `Convert`, as `conversion` says. Results are float32, as in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from relayquant.errors import format_count
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import tensor_dtype


def convert_scaler(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Scaler to (x - offset) * scale."""
    data = emit_float(bb, inputs[0])
    if "offset" in attrs:
        data = bb.emit(relax.op.subtract(data, make_row(attrs["offset"], data)))
    if "scale" in attrs:
        data = bb.emit(relax.op.multiply(data, make_row(attrs["scale"], data)))
    return relax.op.astype(data, "float32")


def convert_imputer(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Imputer to where(x is the replaced value, imputed value, x)."""
    (data,) = inputs
    dtype = tensor_dtype(data)
    kind = "float" if "float" in dtype else "int64"
    if f"imputed_value_{kind}s" not in attrs:
        raise Refusal(f"its data is {dtype}, without imputed_value_{kind}s; supported: with them")
    old = attrs.get(f"replaced_value_{kind}", 0)
    if old != old:
        is_missing = relax.op.isnan(data)
    else:
        is_missing = relax.op.equal(data, relax.const(old, dtype))
    new = make_row(attrs[f"imputed_value_{kind}s"], data)
    return relax.op.where(bb.emit(is_missing), new, data)


def convert_normalizer(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Normalizer to the rows divided by their largest value, sum of magnitudes or length.
    A row whose divisor would be 0 stays.
    """
    data, norm = emit_float(bb, inputs[0]), attrs.get("norm", b"MAX").decode()
    if norm == "MAX":
        size = relax.op.max(data, -1, keepdims=True)
    elif norm == "L1":
        size = relax.op.sum(bb.emit(relax.op.abs(data)), -1, keepdims=True)
    elif norm == "L2":
        square = bb.emit(relax.op.multiply(data, data))
        size = relax.op.sqrt(bb.emit(relax.op.sum(square, -1, keepdims=True)))
    else:
        raise Refusal(f"its norm is {norm}; allowed: MAX, L1, L2")
    size, dtype = bb.emit(size), tensor_dtype(data)
    is_empty = bb.emit(relax.op.equal(size, relax.const(0, dtype)))
    size = bb.emit(relax.op.where(is_empty, relax.const(1, dtype), size))
    return relax.op.astype(bb.emit(relax.op.divide(data, size)), "float32")


def convert_feature_extractor(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert ArrayFeatureExtractor to R.take along the last axis. A vector gives one row."""
    data, index = inputs
    index = bb.emit(relax.op.reshape(index, [-1]))
    if len(known_shape(data)) == 1:
        data = bb.emit(relax.op.expand_dims(data, 0))
    return relax.op.take(data, index, len(known_shape(data)) - 1)


def convert_linear_regressor(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert LinearRegressor to x @ coefficients + intercepts."""
    score = emit_scores(bb, inputs[0], attrs, int(attrs.get("targets", 1)))
    return emit_post_transform(bb, score, attrs)


def convert_linear_classifier(
    bb: Builder, inputs: Operands, attrs: Attrs, opset: int
) -> relax.Expr:
    """Convert LinearClassifier to the label of the largest score, and the scores.

    Raises:
        Refusal: labels are texts, or there are not as many intercepts as labels.
    """
    labels = attrs.get("classlabels_ints")
    if not labels:
        raise Refusal(
            "its labels are texts; supported: integers (classlabels_ints)",
            "Train the classifier with integer labels, which scikit-learn's LabelEncoder makes",
        )
    count = len(attrs["intercepts"]) if "intercepts" in attrs else len(labels)
    if count != len(labels):
        rows, given = format_count(count, "intercept"), format_count(len(labels), "label")
        raise Refusal(f"it has {rows} for {given}; supported: as many")
    score = bb.emit(emit_scores(bb, inputs[0], attrs, count))
    best = bb.emit(relax.op.argmax(score, -1))
    label = relax.op.take(relax.const(np.array(labels, "int64"), "int64"), best, 0)
    return relax.Tuple([bb.emit(label), bb.emit(emit_post_transform(bb, score, attrs))])


def refuse_zip_map(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Refuse ZipMap, which makes a dictionary for each row."""
    raise Refusal(
        "it makes dictionaries; supported: tensors",
        "Export the pipeline without it: options={'zipmap': False} of skl2onnx",
    )


def emit_scores(bb: Builder, data: relax.Expr, attrs: Attrs, count: int) -> relax.Expr:
    """Emit x @ coefficients + intercepts, (N, count), in float32."""
    shape, weights = known_shape(data), np.array(attrs["coefficients"], "float32")
    if len(shape) != 2 or weights.size != count * shape[1]:
        raise Refusal(
            f"its data has shape {tuple(shape)}, and it has "
            f"{format_count(weights.size, 'coefficient')} for {format_count(count, 'result')}; "
            "supported: (N, features), and a coefficient of each feature for each result"
        )
    data = bb.emit(relax.op.astype(data, "float32"))
    matrix = relax.const(np.ascontiguousarray(weights.reshape(count, -1).T), "float32")
    score = relax.op.matmul(data, matrix)
    if not attrs.get("intercepts"):
        return score
    score = bb.emit(score)
    return relax.op.add(score, make_row(attrs["intercepts"], score))


def emit_post_transform(bb: Builder, score: relax.Expr, attrs: Attrs) -> relax.Expr:
    """Emit the post_transform of scores."""
    name = attrs.get("post_transform", b"NONE").decode()
    if name == "NONE":
        return score
    if name == "SOFTMAX":
        return relax.op.nn.softmax(bb.emit(score), -1)
    if name == "LOGISTIC":
        return relax.op.sigmoid(bb.emit(score))
    raise Refusal(f"its post_transform is {name}; supported: NONE, SOFTMAX, LOGISTIC")


def emit_float(bb: Builder, data: relax.Expr) -> relax.Expr:
    """Emit data of a float type: float64 stays, others become float32."""
    dtype = "float64" if tensor_dtype(data) == "float64" else "float32"
    return bb.emit(relax.op.astype(data, dtype))


def make_row(values: Sequence[float], data: relax.Expr) -> relax.Expr:
    """Return an attribute as a constant that is broadcast along the last axis of the data.

    Raises:
        Refusal: it has neither one value nor as many as the axis.
    """
    array, dtype, size = np.array(values), tensor_dtype(data), known_shape(data)[-1]
    if array.size not in (1, size):
        have = format_count(array.size, "value")
        raise Refusal(f"it has {have} for an axis of size {size}; supported: 1 or as many")
    return relax.const(array.astype(dtype), dtype)
