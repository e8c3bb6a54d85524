"""ONNX reader: operators that are known, but not ONNX's, and their attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from tvm import relax

from relayquant.formats.readers.onnx.foreign.contrib import (
    convert_attention,
    convert_dynamic_quantize_lstm,
    convert_dynamic_quantize_matmul,
    convert_matmul_integer_to_float,
    convert_qattention,
    convert_qembed_layer_normalization,
    convert_qlinear_where,
)
from relayquant.formats.readers.onnx.foreign.estimators import (
    convert_feature_extractor,
    convert_imputer,
    convert_linear_classifier,
    convert_linear_regressor,
    convert_normalizer,
    convert_scaler,
    refuse_zip_map,
)
from relayquant.formats.readers.onnx.foreign.fused import (
    convert_fused_gemm,
    convert_fused_matmul,
    convert_quick_gelu,
    convert_simplified_layer_normalization,
    convert_skip_simplified_layer_normalization,
)
from relayquant.formats.readers.onnx.operators.conversion import Convert, Operands
from relayquant.formats.readers.onnx.operators.convolutions import convert_fused_conv
from relayquant.formats.readers.onnx.operators.grouped import convert_matmul_nbits
from relayquant.formats.readers.onnx.operators.normalization import (
    convert_embed_layer_normalization,
    convert_skip_layer_normalization,
)
from relayquant.formats.readers.onnx.operators.quantized import (
    convert_dequantize_linear,
    convert_quantize_linear,
)
from relayquant.formats.readers.refusal import Refusal
from relayquant.ir.rewrite.graph import tensor_dtype

#: Key that TVM's frontend adds to the attributes of every node.
OF_FRONTEND = "tvm_custom"


@dataclass(frozen=True)
class ForeignOperator:
    """An operator that is not ONNX's, so that `onnx.checker` does not check it.

    Attributes:
        convert: Its conversion here. None if TVM converts it.
        known: Attributes that the conversion reads, and hints that change no result.
        required: Attributes in `known` that a node must have.
        neutral: Attributes that are not read -> the only value with which they change nothing.
        mixes_floats: Whether its operands may be of several float types.
    """

    convert: Convert | None = None
    known: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    mixes_floats: bool = False

    def check_types(self, inputs: Operands) -> None:
        """Check that operands of float types have one type, as ONNX Runtime does.

        Raises:
            Refusal: they have several.
        """
        given = [each for each in inputs if isinstance(each, relax.Expr)]
        tensors = (each for each in given if isinstance(each.ty, relax.TensorType))
        floats = sorted({dtype for dtype in map(tensor_dtype, tensors) if "float" in dtype})
        if len(floats) > 1 and not self.mixes_floats:
            raise Refusal(
                f"its operands are {' and '.join(floats)}; allowed: one float type",
                "Cast the operands to one type",
            )

    def select_attributes(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes that the conversion may read.

        Raises:
            Refusal: a required attribute is missing, or an unknown attribute is set.
        """
        missing = [name for name in self.required if name not in attrs]
        if missing:
            raise Refusal(f"it has no attribute {', '.join(missing)}; required: all of them")
        for name, value in attrs.items():
            is_neutral = name in self.neutral and value == self.neutral[name]
            if is_neutral or name in self.known or name == OF_FRONTEND:
                continue
            allowed = f"{self.neutral[name]}" if name in self.neutral else "none of that name"
            raise Refusal(f"its attribute {name} is {value!r}; supported: {allowed}")
        return {name: value for name, value in attrs.items() if name not in self.neutral}


_ATTENTION = dict.fromkeys(
    ("do_rotary", "past_present_share_buffer", "rotary_embedding_dim", "unidirectional"), 0
)
_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_RECURRENT = (
    *("activation_alpha", "activation_beta", "activations"),
    *("clip", "direction", "hidden_size", "input_forget"),
)
_QUANTIZED = ("axis", "block_size", "output_dtype", "precision", "saturate")
#: Domain of ONNX, in which ONNX Runtime also writes a few operators that ONNX does not have.
RUNTIME = ""

#: Known operators, by domain and type.
FOREIGN: dict[str, dict[str, ForeignOperator]] = {
    RUNTIME: {
        "SimplifiedLayerNormalization": ForeignOperator(
            convert_simplified_layer_normalization,
            ("axis", "epsilon", "stash_type"),
            mixes_floats=True,
        ),
    },
    "ai.onnx.ml": {
        "ArrayFeatureExtractor": ForeignOperator(convert_feature_extractor),
        "Imputer": ForeignOperator(
            convert_imputer,
            (
                *("imputed_value_floats", "imputed_value_int64s"),
                *("replaced_value_float", "replaced_value_int64"),
            ),
        ),
        "LinearClassifier": ForeignOperator(
            convert_linear_classifier,
            # what computes the scores does not depend on multi_class
            (
                *("classlabels_ints", "classlabels_strings", "coefficients", "intercepts"),
                *("multi_class", "post_transform"),
            ),
            required=("coefficients",),
        ),
        "LinearRegressor": ForeignOperator(
            convert_linear_regressor,
            ("coefficients", "intercepts", "post_transform", "targets"),
            required=("coefficients",),
        ),
        "Normalizer": ForeignOperator(convert_normalizer, ("norm",)),
        "Scaler": ForeignOperator(convert_scaler, ("offset", "scale")),
        "ZipMap": ForeignOperator(refuse_zip_map, ("classlabels_int64s", "classlabels_strings")),
    },
    "com.microsoft": {
        "Attention": ForeignOperator(
            convert_attention,
            ("mask_filter_value", "num_heads", "qkv_hidden_sizes"),
            required=("num_heads",),
            neutral=_ATTENTION,
        ),
        "BiasGelu": ForeignOperator(),
        "DequantizeLinear": ForeignOperator(convert_dequantize_linear, _QUANTIZED),
        "DynamicQuantizeLSTM": ForeignOperator(convert_dynamic_quantize_lstm, _RECURRENT),
        "DynamicQuantizeMatMul": ForeignOperator(convert_dynamic_quantize_matmul),
        "EmbedLayerNormalization": ForeignOperator(
            convert_embed_layer_normalization, ("epsilon", "mask_index_type")
        ),
        "FastGelu": ForeignOperator(),
        "FusedConv": ForeignOperator(
            convert_fused_conv, ("activation", "activation_params", *_CONV)
        ),
        "FusedGemm": ForeignOperator(
            convert_fused_gemm,
            (
                *("activation", "activation_alpha", "activation_beta"),
                *("alpha", "beta", "transA", "transB"),
            ),
        ),
        "FusedMatMul": ForeignOperator(
            convert_fused_matmul,
            ("alpha", "transA", "transB"),
            neutral={"transBatchA": 0, "transBatchB": 0},
        ),
        "Gelu": ForeignOperator(),
        "MatMulInteger16": ForeignOperator(),
        "MatMulIntegerToFloat": ForeignOperator(convert_matmul_integer_to_float),
        "MatMulNBits": ForeignOperator(
            convert_matmul_nbits,
            ("K", "N", "accuracy_level", "bits", "block_size"),
            required=("K", "N", "block_size"),
            # Any other value means a byte layout for one kind of GPU.
            neutral={"weight_prepacked": 0},
            # Scales stay float16 where the model is computed in float32.
            mixes_floats=True,
        ),
        "QAttention": ForeignOperator(
            convert_qattention,
            ("mask_filter_value", "num_heads", "scale", "unidirectional"),
            required=("num_heads",),
            neutral={"do_rotary": 0, "past_present_share_buffer": 0},
        ),
        "QEmbedLayerNormalization": ForeignOperator(
            convert_qembed_layer_normalization, ("epsilon",)
        ),
        "QLinearWhere": ForeignOperator(convert_qlinear_where),
        "QuickGelu": ForeignOperator(convert_quick_gelu, ("alpha",)),
        "QuantizeLinear": ForeignOperator(convert_quantize_linear, _QUANTIZED),
        "SkipLayerNormalization": ForeignOperator(convert_skip_layer_normalization, ("epsilon",)),
        "SkipSimplifiedLayerNormalization": ForeignOperator(
            convert_skip_simplified_layer_normalization, ("epsilon",)
        ),
    },
}


def find_foreign(node: onnx.NodeProto) -> ForeignOperator | None:
    """Return the operator of a node, or None if it is ONNX's or not known."""
    return FOREIGN.get(node.domain, {}).get(node.op_type)
