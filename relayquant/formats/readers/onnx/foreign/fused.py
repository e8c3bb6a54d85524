"""ONNX reader: float operators of which ONNX Runtime writes one for several into models that it
optimizes.

Each function is a `Convert` as described in `relayquant.formats.readers.onnx.operators.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relayquant.formats.readers.elu import scalar
from relayquant.formats.readers.onnx.graph.outputs import NOT_COMPUTED
from relayquant.formats.readers.onnx.operators.activations import find_activation
from relayquant.formats.readers.onnx.operators.frontend import sum_in_float32
from relayquant.formats.readers.onnx.operators.normalization import convert_rms_normalization
from relayquant.formats.readers.onnx.operators.sizes import known_shape
from relayquant.ir.rewrite.graph import tensor_dtype


def convert_fused_matmul(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert FusedMatMul(a, b) -> alpha * a @ b. transA and transB swap the last two axes."""
    factors = []
    for data, is_swapped in zip(inputs, (attrs.get("transA"), attrs.get("transB")), strict=True):
        axes = list(range(len(known_shape(data))))
        if is_swapped and len(axes) > 1:
            axes[-2:] = axes[:-3:-1]
            data = bb.emit(relax.op.permute_dims(data, axes))
        factors.append(data)
    product = bb.emit(sum_in_float32("MatMul", bb, factors, {}, opset))
    return relax.op.multiply(product, scalar(float(attrs.get("alpha", 1.0)), product))


def convert_fused_gemm(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert FusedGemm(a, b, c) -> activation(Gemm(a, b, c)).

    Raises:
        Refusal: the activation is unknown.
    """
    given = {
        key: [float(attrs[f"activation_{key}"])] if f"activation_{key}" in attrs else []
        for key in ("alpha", "beta")
    }
    activation = find_activation(attrs.get("activation", b"").decode())
    plain = {name: value for name, value in attrs.items() if not name.startswith("activation")}
    value = bb.emit(sum_in_float32("Gemm", bb, inputs, plain, opset))
    return activation.apply(bb, value, *activation.choose_parameters(given))


def convert_quick_gelu(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert QuickGelu(x) -> x * sigmoid(alpha * x)."""
    (data,) = inputs
    steep = bb.emit(relax.op.multiply(data, scalar(float(attrs.get("alpha", 1.702)), data)))
    return relax.op.multiply(data, bb.emit(relax.op.sigmoid(steep)))


def convert_simplified_layer_normalization(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert SimplifiedLayerNormalization(x, scale), which ONNX has as RMSNormalization.

    The result has the type of the scale. If that is not the type of x, float32 is computed between.
    """
    dtype = tensor_dtype(inputs[1])
    if tensor_dtype(inputs[0]) != dtype:
        wide = [bb.emit(relax.op.astype(value, "float32")) for value in inputs]
        value = convert_simplified_layer_normalization(bb, wide, attrs, opset)
        return relax.op.astype(bb.emit(value), dtype)
    found = convert_rms_normalization(bb, inputs, attrs, opset)
    if found is not None:
        return found
    data, scale = inputs
    rank, epsilon = len(known_shape(data)), float(attrs.get("epsilon", 1e-5))
    axes = list(range(int(attrs.get("axis", -1)) % rank, rank))
    return relax.op.nn.rms_norm(data, scale, axes, epsilon)


def convert_skip_simplified_layer_normalization(
    bb: relax.BlockBuilder, inputs: Sequence[Any], attrs: dict[str, Any], opset: int
) -> relax.Expr:
    """Convert SkipSimplifiedLayerNormalization(x, skip, scale, bias) -> (y, -, -, sum).

    y is SimplifiedLayerNormalization over the last axis of sum = x + skip + bias. The second and
    third output are not computed. ONNX Runtime leaves them out, too.
    """
    data, skip, scale, bias = (*inputs, None)[:4]
    total = bb.emit(relax.op.add(data, skip))
    if bias is not None:
        total = bb.emit(relax.op.add(total, bias))
    form = {"epsilon": attrs.get("epsilon", 1e-12), "axis": -1}
    value = convert_simplified_layer_normalization(bb, [total, scale], form, opset)
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return value
    return relax.Tuple([bb.emit(value), NOT_COMPUTED, NOT_COMPUTED, total])
