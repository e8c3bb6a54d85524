"""Calls of the operators that the interpreter has, with arrays to call them with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.ir.rewrite.function import make_main

op = relax.op


def build(make: Any, *arrays: np.ndarray) -> tvm.IRModule:
    """A module whose main computes make(*parameters)."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, a.dtype.name)) for i, a in enumerate(arrays)
    ]
    return make_main(params, lambda _: make(*params))


def floats(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype("float32")


def integers(*shape: int, dtype: str = "int32", low: int = -100, high: int = 100) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(dtype)


X = floats(2, 3, 4, 5)
POSITIVE = floats(2, 3, low=0.1, high=5)
C3 = [floats(3, low=0.5, high=1.5, seed=i) for i in range(4)]


def c(array: Any) -> relax.Expr:
    array = np.asarray(array)
    return relax.const(array, array.dtype.name)


#: name -> (function of the parameters, arrays)
CASES: dict[str, tuple[Any, ...]] = {
    **{
        name: (getattr(op, name), POSITIVE)
        for name in (
            "log",
            "sqrt",
            "rsqrt",
            "exp",
            "sin",
            "cos",
            "tanh",
            "erf",
            "sigmoid",
            "square",
        )
    },
    **{
        f"{name}_signed": (getattr(op, name), X)
        for name in ("abs", "negative", "floor", "ceil", "round", "trunc", "sign", "isnan", "isinf")
    },
    **{
        f"{name}_activation": (getattr(op.nn, name), X)
        for name in ("relu", "gelu", "gelu_tanh", "silu", "softmax", "log_softmax", "selu")
    },
    **{
        f"{name}_broadcast": (getattr(op, name), X, floats(3, 1, 5, low=0.5, seed=2))
        for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "less", "equal")
    },
    "power": (op.power, POSITIVE, floats(3, seed=3)),
    "round_half_even": (op.round, np.float32([0.5, 1.5, 2.5, -0.5, -1.5])),
    "divide_integers": (op.divide, integers(9), integers(9, low=1)),
    "floor_divide_integers": (op.floor_divide, integers(9), integers(9, low=1)),
    "mod_integers": (op.mod, integers(9), integers(9, low=1)),
    "floor_mod_integers": (op.floor_mod, integers(9), integers(9, low=1)),
    "clip": (lambda x: op.clip(x, -0.5, 1.0), X),
    "clip_integers": (lambda x: op.clip(x, -7, 60), integers(9, dtype="int8")),
    "relu_integers": (op.nn.relu, integers(9, dtype="int8")),
    "maximum_integers": (lambda x: op.maximum(x, c(np.int8(3))), integers(9, dtype="int8")),
    "add_wraps": (op.add, integers(9, dtype="int8"), integers(9, dtype="int8")),
    "where": (op.where, X > 0, X, floats(5, seed=4)),
    "leakyrelu": (lambda x: op.nn.leakyrelu(x, 0.2), X),
    "prelu": (lambda x: op.nn.prelu(x, c(C3[0]), 1), X),
    "softplus": (lambda x: op.nn.softplus(x, 2.0, 1.5), X),
    "softmax_axis": (lambda x: op.nn.softmax(x, 1), X),
    "astype": (lambda x: op.astype(x, "int32"), X * 9),
    "quantize": (lambda x: op.quantize(x, c(C3[0]), c(np.int8([1, 2, 3])), 1, "int8"), X * 50),
    "dequantize": (
        lambda x: op.dequantize(x, c(C3[0]), c(np.int8([1, 2, 3])), 1),
        integers(2, 3, dtype="int8"),
    ),
    "conv1d": (lambda x: op.nn.conv1d(x, c(floats(4, 3, 3)), 2, 1), floats(2, 3, 9)),
    "conv2d_layouts": (
        lambda x: op.nn.conv2d(
            x, c(floats(3, 2, 4, 6)), (1, 2), (1, 0, 2, 1), data_layout="NHWC", kernel_layout="HWIO"
        ),
        floats(2, 5, 6, 4),
    ),
    "conv2d_integers": (
        lambda x: op.nn.conv2d(x, c(integers(4, 3, 2, 2, dtype="int8")), out_dtype="int32"),
        integers(1, 3, 4, 4, dtype="int8"),
    ),
    "conv2d_depthwise": (lambda x: op.nn.conv2d(x, c(floats(6, 1, 3, 3)), groups=3), X),
    "conv2d_grouped": (
        lambda x: op.nn.conv2d(x, c(floats(4, 2, 3, 3)), groups=2),
        floats(1, 4, 5, 5),
    ),
    "conv2d_transpose": (
        lambda x: op.nn.conv2d_transpose(x, c(floats(3, 2, 3, 3)), 2, 1, 1),
        X,
    ),
    "conv3d": (
        lambda x: op.nn.conv3d(x, c(floats(4, 3, 2, 3, 1)), (1, 2, 1), (1, 0, 0, 0, 1, 0)),
        floats(1, 3, 4, 5, 6),
    ),
    "conv3d_transpose": (
        lambda x: op.nn.conv3d_transpose(x, c(floats(3, 2, 3, 2, 1)), (2, 1, 1), 1, (1, 0, 0)),
        floats(1, 3, 4, 5, 6),
    ),
    "conv1d_transpose": (
        lambda x: op.nn.conv1d_transpose(x, c(floats(3, 2, 3)), 2, 1),
        floats(1, 3, 5),
    ),
    "max_pool1d": (lambda x: op.nn.max_pool1d(x, 3, 2, 1), floats(2, 3, 9)),
    "max_pool2d_integers": (
        lambda x: op.nn.max_pool2d(x, 3, 2, 1),
        integers(1, 2, 6, 6, dtype="int8"),
    ),
    "avg_pool1d": (lambda x: op.nn.avg_pool1d(x, 3, 2, 1), floats(2, 3, 9)),
    "adaptive_avg_pool2d": (lambda x: op.nn.adaptive_avg_pool2d(x, (2, 3)), X),
    "adaptive_avg_pool2d_global": (
        lambda x: op.nn.adaptive_avg_pool2d(x, 1, layout="NHWC"),
        X,
    ),
    "adaptive_avg_pool1d": (lambda x: op.nn.adaptive_avg_pool1d(x, 2), floats(2, 3, 5)),
    "pad": (lambda x: op.nn.pad(x, (0, 0, 1, 2, 0, 1, 3, 0), pad_value=1.5), X),
    "pad_reflect": (lambda x: op.nn.pad(x, (0, 0, 0, 0, 1, 2, 1, 1), "reflect"), X),
    "layer_norm": (lambda x: op.nn.layer_norm(x, c(floats(4, 5)), c(floats(4, 5)), [-2, -1]), X),
    "layer_norm_one_axis": (lambda x: op.nn.layer_norm(x, c(C3[0]), c(C3[1]), [1]), X),
    "group_norm": (
        lambda x: op.nn.group_norm(x, c(floats(4)), c(floats(4, seed=9)), 2, 1, [2, 3]),
        floats(2, 4, 3, 3),
    ),
    "instance_norm": (
        lambda x: op.nn.instance_norm(x, c(C3[0]), c(C3[1]), 1, [2, 3]),
        X,
    ),
    "rms_norm": (lambda x: op.nn.rms_norm(x, c(floats(5)), [-1]), X),
    "batch_norm": (lambda x: op.nn.batch_norm(x, *map(c, C3), axis=1, training=False), X),
    "batch_norm_training": (lambda x: op.nn.batch_norm(x, *map(c, C3), axis=1, training=True), X),
    "attention": (op.nn.attention, floats(1, 4, 2, 8), floats(1, 6, 2, 8), floats(1, 6, 2, 8)),
    "matmul": (op.matmul, floats(2, 1, 3, 4), floats(5, 4, 2)),
    "matmul_vector": (op.matmul, floats(2, 3, 4), floats(4)),
    "matmul_integers": (
        lambda x, y: op.matmul(x, y, "int32"),
        integers(3, 9, dtype="int8"),
        integers(9, 2, dtype="int8"),
    ),
    "einsum": (lambda x, y: op.einsum([x, y], "bij,bjk->bik"), floats(2, 3, 4), floats(2, 4, 5)),
    "mean": (lambda x: op.mean(x, [1, -1], True), X),
    "sum_all": (op.sum, X),
    "max": (lambda x: op.max(x, -1), X),
    "min_integers": (lambda x: op.min(x, 0), integers(3, 4, dtype="int8")),
    "prod": (lambda x: op.prod(x, 1), X),
    "variance": (lambda x: op.variance(x, [2, 3], True), X),
    "std": (lambda x: op.std(x, [2, 3]), X),
    "argmax": (lambda x: op.argmax(x, 1), X),
    "argmin_all": (lambda x: op.argmin(x, None, False), X),
    "cumsum": (lambda x: op.cumsum(x, 1), X),
    "cumsum_exclusive": (lambda x: op.cumsum(x, 1, exclusive=True), X),
    "cumsum_exclusive_flat": (lambda x: op.cumsum(x, exclusive=True), X),
    "cumprod_exclusive": (lambda x: op.cumprod(x, -1, exclusive=True), X),
    "reshape": (lambda x: op.reshape(x, (6, 20)), X),
    "flatten": (op.flatten, X),
    "permute_dims": (lambda x: op.permute_dims(x, [0, 3, 1, 2]), X),
    "permute_dims_reversed": (op.permute_dims, X),
    "squeeze": (op.squeeze, floats(1, 3, 1)),
    "squeeze_axis": (lambda x: op.squeeze(x, [-1]), floats(1, 3, 1)),
    "expand_dims": (lambda x: op.expand_dims(x, [0, -1]), floats(2, 3)),
    "concat": (lambda x, y: op.concat([x, y], 1), X, floats(2, 2, 4, 5)),
    "stack": (lambda x: op.stack([x, x], 1), X),
    "split_sections": (lambda x: op.split(x, 2, 3), floats(2, 3, 4, 6)),
    "split_uneven": (lambda x: op.split(x, 2, 3), X),
    "split_indices": (lambda x: op.split(x, [1, 3], 2), X),
    "split_into_one": (lambda x: op.split(x, 1, 3), X),
    "take": (lambda x, i: op.take(x, i, 1), X, np.int64([2, 0, 0])),
    "take_rank_two": (lambda x, i: op.take(x, i, 2), X, np.int32([[2, 0], [1, 3]])),
    "broadcast_to": (lambda x: op.broadcast_to(x, (2, 3, 5)), floats(3, 1)),
    "tile": (lambda x: op.tile(x, (2, 1, 3)), floats(3, 2)),
    "repeat": (lambda x: op.repeat(x, 2, 1), X),
    "flip": (lambda x: op.flip(x, 1), X),
    "gather_elements": (
        lambda x, i: op.gather_elements(x, i, 1),
        floats(2, 3),
        np.int64([[2, 0], [1, 1]]),
    ),
    "gather_nd": (op.gather_nd, floats(4, 3, 2), np.int64([[2, 0], [1, 1]])),
    "one_hot": (
        lambda i: op.one_hot(
            i, tvm.tirx.FloatImm("float32", 2), tvm.tirx.FloatImm("float32", -1), 4, 0
        ),
        np.int64([1, 3]),
    ),
    "tril": (lambda x: op.tril(x, 1), floats(4, 4)),
    "full_like": (lambda x: op.full_like(x, relax.const(3.0)), X),
    "shape_of": (lambda x: op.shape_to_tensor(op.shape_of(x)), X),
    "collapse_sum_to": (lambda x: op.collapse_sum_to(x, (3, 1, 5)), X),
    "topk": (lambda x: op.topk(x, 2, -1), X),
    "topk_values_smallest": (lambda x: op.topk(x, 2, 1, "values", False), X),
    "topk_all_indices": (lambda x: op.topk(x, -1, 0, "indices", dtype="int64"), X),
    "sort": (lambda x: op.sort(x, -1), X),
    "sort_ties_down": (lambda x: op.sort(x, 0, True), np.float32([1, 2, 1, 0])),
    "argsort_ties_down": (lambda x: op.argsort(x, 0, True), np.float32([1, 2, 1, 2, 1])),
    "argsort_ties": (lambda x: op.argsort(x, 0, dtype="int64"), np.float32([1, 2, 1, 2, 1])),
    # no numpy form: compiled alone
    "resize2d": (lambda x: op.image.resize2d(x, (7, 9)), X),
}


class ReadAttributes:
    """Attributes of a call, and the names of those that were read."""

    def __init__(self, attrs: Any) -> None:
        self.attrs, self.names = attrs, set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.attrs, name)


#: Attributes that the result does not depend on: name -> why.
WITHOUT_EFFECT = {
    "out_dtype": "the result is cast to the type that TVM infers",
    "momentum": "nn.batch_norm: it updates statistics in training only",
    "count_include_pad": "nn.max_pool: nothing is counted",
}


def list_fields(attrs: Any) -> list[str]:
    """Names of the attributes of a call, of TVM's own kind or read into a namespace."""
    if isinstance(attrs, SimpleNamespace):
        return list(vars(attrs))
    return [] if attrs is None else [f.name for f in type(attrs).__tvm_ffi_type_info__.fields]


def find_unread(operators: dict[str, Callable], names: Iterable[str], run: Callable) -> list[str]:
    """The attributes, as "operator.attribute", that the rows of a table read in none of the cases
    `names`, each of which `run` computes with the table.
    """
    asked: dict[str, set[str]] = {}
    read: dict[str, set[str]] = {}

    def watch(operator: str, function: Callable) -> Callable:
        def compute(args, attrs):
            seen = ReadAttributes(attrs)
            result = function(args, seen)
            read.setdefault(operator, set()).update(seen.names)
            asked.setdefault(operator, set()).update(list_fields(attrs))
            return result

        return compute

    table = {name: watch(name, function) for name, function in operators.items()}
    for name in names:
        make, *arrays = CASES[name]
        run(table, build(make, *arrays), arrays)
    assert asked, "no operator of the table was computed: `run` computes with another one"
    return sorted(
        f"{operator}.{name}"
        for operator, fields in asked.items()
        for name in fields - read[operator]
        if name not in WITHOUT_EFFECT
    )
