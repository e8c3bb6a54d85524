"""Operator types of ONNX and OpenVINO as operator types of a QConfigMapping."""

from __future__ import annotations

from collections.abc import Mapping

#: Type in ONNX -> Relax operators, as `relayquant.load` reads it. Types that become several Relax
#: operators are not listed.
ONNX_NAMES: Mapping[str, tuple[str, ...]] = {
    name: tuple(f"relax.{op}" for op in ops.split())
    for name, ops in {
        "Add": "add",
        "AveragePool": "nn.avg_pool1d nn.avg_pool2d",
        "Clip": "clip",
        "Concat": "concat",
        "Conv": "nn.conv1d nn.conv2d nn.conv3d",
        "ConvTranspose": "nn.conv1d_transpose nn.conv2d_transpose",
        "Div": "divide",
        "Exp": "exp",
        "Flatten": "reshape",
        "Gather": "take",
        "Gemm": "matmul",
        "GlobalAveragePool": "mean",
        "LayerNormalization": "nn.layer_norm",
        "LeakyRelu": "nn.leakyrelu",
        "MatMul": "matmul",
        "MaxPool": "nn.max_pool1d nn.max_pool2d",
        "Mul": "multiply",
        "Pad": "nn.pad",
        "ReduceMean": "mean",
        "Relu": "nn.relu",
        "Reshape": "reshape",
        "Sigmoid": "sigmoid",
        "Slice": "strided_slice",
        "Softmax": "nn.softmax",
        "Sub": "subtract",
        "Tanh": "tanh",
        "Transpose": "permute_dims",
    }.items()
}
#: Type in OpenVINO, as NNCF's IgnoredScope names it -> the same in ONNX, where they differ.
OPENVINO_NAMES: Mapping[str, str] = {
    "AvgPool": "AveragePool",
    "Convolution": "Conv",
    "ConvolutionBackpropData": "ConvTranspose",
    "Divide": "Div",
    "GroupConvolution": "Conv",
    "Multiply": "Mul",
    "StridedSlice": "Slice",
    "Subtract": "Sub",
}


def find_operators(name: str) -> tuple[str, ...]:
    """Return the Relax operators for a type. () if it is not known."""
    return ONNX_NAMES.get(OPENVINO_NAMES.get(name, name), ())
