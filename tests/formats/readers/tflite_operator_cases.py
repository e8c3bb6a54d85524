"""Calls of TFLite's operators with what numpy makes of them, attribute by attribute.

Each case is run with every operand computed at run time, with each of them constant, with all but
one constant and with all constant: which of them TFLite allows is up to its kernels, and what it
allows is converted right or refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tflite_models import Operator, Tensor, write_model

Array = np.ndarray
NONE, RELU, RELU_N1, RELU6, TANH = 0, 1, 2, 3, 4
SAME, VALID = 0, 1


@dataclass(frozen=True)
class Case:
    """A call. `expected` makes the outputs of the operands; `scales` are (scale, zero point) of
    the operands and, last, of all outputs; operands that are left out are None. `is_stored`:
    it is the same for the integers as they are stored, whatever the scales are.
    """

    kind: str
    operands: Sequence[Array | None]
    expected: Callable[..., Any]
    options: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    scales: Sequence[tuple[float, int] | None] = ()
    atol: float = 1e-5
    dims: Sequence[int] | None = None
    is_stored: bool = False

    def __str__(self) -> str:
        """What tells it from others of the table."""
        fields = ",".join(f"{name}={value}" for name, value in self.fields.items())
        kinds = ",".join("-" if each is None else str(each.dtype) for each in self.operands)
        return f"{self.kind}({kinds}){fields}"

    def results(self) -> list[Array]:
        """What the outputs are."""
        if self.is_stored:
            made = self.expected(*self.operands)
            return [
                np.asarray(each) for each in (made if isinstance(made, tuple | list) else [made])
            ]
        values = [
            each
            if scale is None or each is None
            else (each.astype("float32") - scale[1]) * scale[0]
            for each, scale in itertools.zip_longest(self.operands, self.scales[:-1])
        ]
        made = self.expected(*values)
        made = [np.asarray(each) for each in (made if isinstance(made, tuple | list) else [made])]
        if self.scales and self.scales[-1] is not None:
            scale, zero = self.scales[-1]
            dtypes = [str(each.dtype) for each in self.operands if each is not None]
            dtype = "int16" if "int16" in dtypes else dtypes[0]
            dtype = np.dtype(dtype if dtype in ("int8", "uint8", "int16") else "int8")
            limits = np.iinfo(dtype)
            made = [
                np.clip(np.rint(each / scale) + zero, limits.min, limits.max).astype(dtype)
                for each in made
            ]
        return made

    def choices(self) -> Iterator[frozenset[int]]:
        """Operands that are constant, as sets of their places."""
        places = [at for at, each in enumerate(self.operands) if each is not None]
        every = frozenset(places)
        singles = [frozenset([at]) for at in places]
        yield from dict.fromkeys(
            [frozenset(), *singles, *(every - each for each in singles), every]
        )

    def write(self, path: Path, constant: frozenset[int]) -> dict[str, Array]:
        """Write the model; the values of its inputs."""
        scales = dict(enumerate(self.scales[:-1]))
        tensors, names, inputs = [], [], {}
        for at, each in enumerate(self.operands):
            names.append("" if each is None else f"x{at}")
            if each is None:
                continue
            values = each if at in constant else None
            tensors.append(
                Tensor(f"x{at}", each.shape, str(each.dtype), values, None, scales.get(at))
            )
            if values is None:
                inputs[f"x{at}"] = each
        results = self.results()
        outputs = [f"y{at}" for at in range(len(results))]
        for name, each in zip(outputs, results, strict=True):
            scale = self.scales[-1] if self.scales and each.dtype != "int32" else None
            tensors.append(Tensor(name, each.shape, str(each.dtype), None, None, scale))
        call = Operator(self.kind, names, outputs, self.options, self.fields)
        write_model(path, tensors, [call], list(inputs), outputs)
        return inputs


def numbers(*shape: int, low: float = -2, high: float = 2, dtype: str = "float32") -> Array:
    """Values that stay the same for the same shape."""
    rng = np.random.default_rng([*shape, 7])
    if dtype.startswith("float"):
        return rng.uniform(low, high, shape).astype(dtype)
    return rng.integers(int(low), int(high) + 1, shape).astype(dtype)


def ints(*values: Any, dtype: str = "int32") -> Array:
    return np.array(values[0] if len(values) == 1 else values, dtype)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def erf(x):
    return np.vectorize(math.erf)(x).astype(x.dtype)


def activate(x, kind):
    return {
        NONE: lambda: x,
        RELU: lambda: np.maximum(x, 0),
        RELU_N1: lambda: np.clip(x, -1, 1),
        RELU6: lambda: np.clip(x, 0, 6),
        TANH: lambda: np.tanh(x),
    }[kind]()


X = numbers(2, 3, 4)
IMAGE = numbers(1, 5, 7, 3)
POSITIVE = numbers(2, 3, 4, low=0.1, high=3)
INTS = numbers(2, 3, 4, low=-9, high=9, dtype="int32")
NONZERO = np.where(INTS == 0, 3, INTS[::-1]).astype("int32")
NONZERO = np.where(NONZERO == 0, 2, NONZERO).astype("int32")
BOOL = numbers(2, 3, 4) > 0
TIES = np.array([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.0, 1.2]], "float32")

UNARY = {
    "ABS": np.abs, "CEIL": np.ceil, "COS": np.cos, "EXP": np.exp, "FLOOR": np.floor,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "HARD_SWISH": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "LOG_SOFTMAX": lambda x: np.log(softmax(x)), "LOGISTIC": sigmoid, "NEG": np.negative,
    "RELU": lambda x: np.maximum(x, 0), "RELU6": lambda x: np.clip(x, 0, 6),
    "RELU_N1_TO_1": lambda x: np.clip(x, -1, 1), "RELU_0_TO_1": lambda x: np.clip(x, 0, 1),
    "ROUND": np.rint, "SIGN": np.sign, "SIN": np.sin, "SQUARE": np.square, "TANH": np.tanh,
    "ZEROS_LIKE": np.zeros_like,
}  # fmt: skip
POSITIVE_UNARY = {"LOG": np.log, "RSQRT": lambda x: 1 / np.sqrt(x), "SQRT": np.sqrt}
BINARY = {
    "ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum, "SQUARED_DIFFERENCE": lambda a, b: (a - b) ** 2,
    "EQUAL": np.equal, "NOT_EQUAL": np.not_equal, "GREATER": np.greater,
    "GREATER_EQUAL": np.greater_equal, "LESS": np.less, "LESS_EQUAL": np.less_equal,
    "FLOOR_DIV": np.floor_divide, "FLOOR_MOD": np.mod,
}  # fmt: skip


def truncate_division(a, b):
    return np.trunc(a / b).astype(a.dtype)


def unary_cases() -> Iterator[Case]:
    for kind, f in UNARY.items():
        yield Case(kind, [X], f)
    yield Case("ROUND", [TIES], np.rint)
    for kind, f in POSITIVE_UNARY.items():
        yield Case(kind, [POSITIVE], f)
    for kind in ("ABS", "NEG", "SQUARE", "ZEROS_LIKE", "SIGN"):
        yield Case(kind, [INTS], UNARY[kind])
    for beta in (1.0, 2.0):
        yield Case(
            "SOFTMAX", [X], lambda x, b=beta: softmax(x * b), "SoftmaxOptions", {"Beta": beta}
        )

    def tanh_form(x):
        return 0.5 * x * (1 + np.tanh(0.7978846 * (x + 0.044715 * x**3)))

    yield Case(
        "GELU",
        [X],
        lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
        "GeluOptions",
        {"Approximate": False},
    )
    yield Case("GELU", [X], tanh_form, "GeluOptions", {"Approximate": True}, atol=1e-4)
    yield Case(
        "LEAKY_RELU", [X], lambda x: np.where(x > 0, x, x * 0.2), "LeakyReluOptions", {"Alpha": 0.2}
    )
    yield Case(
        "L2_NORMALIZATION",
        [X],
        lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True)),
        "L2NormOptions",
        {"FusedActivationFunction": NONE},
    )
    yield Case("LOGICAL_NOT", [BOOL], np.logical_not)
    for dtype in ("float32", "int32", "int64", "uint8", "int8", "bool"):
        source = POSITIVE if dtype == "uint8" else X * 2
        yield Case("CAST", [source], lambda x, t=dtype: x.astype(t))
    for source in ("float32", "float16"):
        for dtype in ("int8", "uint8", "int16", "int32", "uint32", "int64"):
            edges = [300, -1.5, 255.9, np.nan, np.inf, -np.inf, 6e4, -6e4, 127.9, -128.9]
            wide = [] if source == "float16" else [1e10, -1e10, 2.0**31, -(2.0**31), 2.0**63, 3e38]
            edges = np.array([*edges, *wide], source)
            yield Case("CAST", [edges], lambda x, t=dtype: saturate(x, t))
    yield Case("CAST", [INTS], lambda x: x.astype("float32"))
    yield Case("CAST", [BOOL], lambda x: x.astype("float32"))
    yield Case("SHAPE", [X], lambda x: np.array(x.shape, "int32"), "ShapeOptions", {"OutType": 2})
    yield Case("SHAPE", [X], lambda x: np.array(x.shape, "int64"), "ShapeOptions", {"OutType": 4})
    yield Case("RANK", [X], lambda x: np.array(x.ndim, "int32"))
    yield Case("BITCAST", [X], lambda x: x.view("int32"))
    yield Case("BITCAST", [INTS], lambda x: x.view("uint8").reshape(*x.shape, 4))
    bounds = np.array([-1, 0, 1.5], "float32")
    yield Case(
        "BUCKETIZE",
        [X],
        lambda x: np.digitize(x, bounds).astype("int32"),
        "BucketizeOptions",
        {"Boundaries": bounds},
    )
    edges = np.array([[-1, 0, 1.5, 2, -3]], "float32")
    yield Case(
        "BUCKETIZE",
        [edges],
        lambda x: np.digitize(x, bounds).astype("int32"),
        "BucketizeOptions",
        {"Boundaries": bounds},
    )
    for bits, narrow in ((8, False), (4, True), (16, False)):
        yield Case(
            "FAKE_QUANT",
            [X],
            lambda x, b=bits, n=narrow: fake_quant(x, -1.3, 1.7, b, n),
            "FakeQuantOptions",
            {"Min": -1.3, "Max": 1.7, "NumBits": bits, "NarrowRange": narrow},
        )
    yield Case("QUANTIZE", [X], lambda x: x, scales=[None, (0.02, 3)])
    yield Case(
        "QUANTIZE",
        [numbers(2, 3, low=-128, high=127, dtype="int8")],
        lambda x: x,
        scales=[(0.02, 3), (0.03, -5)],
    )
    yield Case(
        "DEQUANTIZE",
        [numbers(2, 3, low=-128, high=127, dtype="int8")],
        lambda x: x,
        scales=[(0.02, 3), None],
    )
    yield Case("DEQUANTIZE", [numbers(2, 3).astype("float16")], lambda x: x.astype("float32"))


def saturate(x, dtype):
    """Truncated floats of exact integers, the nearest that the type has; the largest for NaN."""
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    made = [
        high if math.isnan(each) or each >= high else low if each <= low else int(each)
        for each in x.ravel().tolist()
    ]
    return np.array(made, dtype).reshape(x.shape)


def fake_quant(x, low, high, bits, narrow):
    first, last = int(narrow), 2**bits - 1
    scale = (high - low) / (last - first)
    zero = round(min(max(first - low / scale, first), last))
    low, high = (first - zero) * scale, (last - zero) * scale
    return (np.floor((np.clip(x, low, high) - low) / scale + 0.5) * scale + low).astype("float32")


def binary_cases() -> Iterator[Case]:
    row = numbers(4)
    for kind, f in BINARY.items():
        options = {"ADD": "AddOptions", "SUB": "SubOptions", "MUL": "MulOptions"}.get(kind, "")
        yield Case(kind, [X, X[::-1].copy()], f, options)
        yield Case(kind, [INTS, NONZERO], f, options)
        yield Case(kind, [X, row], f, options)
    for kind, options, f in (
        ("ADD", "AddOptions", np.add),
        ("SUB", "SubOptions", np.subtract),
        ("MUL", "MulOptions", np.multiply),
        ("DIV", "DivOptions", np.divide),
    ):
        for function in (NONE, RELU, RELU_N1, RELU6):
            yield Case(
                kind,
                [X, POSITIVE * 3],
                lambda a, b, f=f, k=function: activate(f(a, b), k),
                options,
                {"FusedActivationFunction": function},
            )
    yield Case("DIV", [INTS, NONZERO], truncate_division, "DivOptions")
    yield Case("POW", [POSITIVE, X], np.power)
    yield Case("POW", [INTS, np.abs(NONZERO) % 4], np.power)
    yield Case("ATAN2", [X, X[::-1].copy()], np.arctan2)
    for kind, f in (("LOGICAL_AND", np.logical_and), ("LOGICAL_OR", np.logical_or)):
        yield Case(kind, [BOOL, ~BOOL[::-1]], f)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        a = numbers(3, 4, low=0 if dtype[0] == "u" else -100, high=100, dtype=dtype)
        b = numbers(4, 3, low=0, high=6, dtype=dtype).T.copy()
        yield Case("BITWISE_XOR", [a, b], np.bitwise_xor)
        yield Case("RIGHT_SHIFT", [a, b], np.right_shift)
        most = 8 * np.dtype(dtype).itemsize - 1
        far = np.resize(
            np.array([most + 40, most + 1, 0 if dtype[0] == "u" else -3], dtype), (3, 4)
        )
        yield Case(
            "RIGHT_SHIFT", [a, far], lambda a, b, m=most: a >> np.clip(b, 0, m).astype(a.dtype)
        )
    yield Case("ADD_N", [X, X * 2, X - 1], lambda a, b, c: a + b + c)
    for a, b in (([3, 1, 4], [2, 1]), ([4], [2, 3, 1])):
        yield Case(
            "BROADCAST_ARGS",
            [ints(a), ints(b)],
            lambda a, b: np.array(np.broadcast_shapes(tuple(a), tuple(b)), "int32"),
        )
    yield Case("BROADCAST_TO", [numbers(3, 1), ints(2, 3, 4)], lambda x, s: np.broadcast_to(x, s))


def reductions() -> Iterator[Case]:
    table = {
        "MEAN": np.mean,
        "SUM": np.sum,
        "REDUCE_MAX": np.max,
        "REDUCE_MIN": np.min,
        "REDUCE_PROD": np.prod,
    }
    for kind, f in table.items():
        for axes, keep in (
            (ints(1), True),
            (ints([0, -1]), False),
            (ints([1]), False),
            (ints([], dtype="int32"), False),
        ):
            yield Case(
                kind,
                [X, axes],
                lambda x, a, f=f, k=keep: reduce(f, x, a, k),
                "ReducerOptions",
                {"KeepDims": keep},
            )
        yield Case(
            kind,
            [X, ints([1, -2, 1])],
            lambda x, a, f=f: reduce(f, x, a[:1], False),
            "ReducerOptions",
        )
        if kind != "MEAN":
            yield Case(
                kind, [INTS, ints([2])], lambda x, a, f=f: reduce(f, x, a, False), "ReducerOptions"
            )
    for kind, f in (("REDUCE_ANY", np.any), ("REDUCE_ALL", np.all)):
        yield Case(
            kind,
            [BOOL, ints([-1, 1])],
            lambda x, a, f=f: reduce(f, x, a, True),
            "ReducerOptions",
            {"KeepDims": True},
        )
    for kind, f in (("ARG_MAX", np.argmax), ("ARG_MIN", np.argmin)):
        for axis, code, dtype in ((-1, 2, "int32"), (1, 4, "int64")):
            yield Case(
                kind,
                [X, ints(axis)],
                lambda x, a, f=f, t=dtype: f(x, int(a)).astype(t),
                "ArgMaxOptions" if kind == "ARG_MAX" else "ArgMinOptions",
                {"OutputType": code},
            )
    for exclusive, reverse in itertools.product((False, True), repeat=2):
        yield Case(
            "CUMSUM",
            [X, ints(1)],
            lambda x, a, e=exclusive, r=reverse: cumsum(x, int(a), e, r),
            "CumsumOptions",
            {"Exclusive": exclusive, "Reverse": reverse},
        )


def reduce(f, x, axes, keep):
    made = f(x, axis=tuple(int(a) for a in np.atleast_1d(axes)), keepdims=keep)
    return np.asarray(made, x.dtype)


def cumsum(x, axis, exclusive, reverse):
    x = np.flip(x, axis) if reverse else x
    y = np.cumsum(x, axis)
    y = y - x if exclusive else y
    return np.flip(y, axis) if reverse else y


def shape_cases() -> Iterator[Case]:
    yield Case("RESHAPE", [X, ints(4, -1)], lambda x, s: x.reshape(4, -1))
    yield Case("RESHAPE", [X], lambda x: x.reshape(6, 4), "ReshapeOptions", {"NewShape": [6, 4]})
    thin = numbers(1, 3, 1, 2)
    yield Case("SQUEEZE", [thin], np.squeeze, "SqueezeOptions", {"SqueezeDims": []})
    yield Case("SQUEEZE", [thin], np.squeeze, "SqueezeOptions")
    yield Case("SQUEEZE", [thin], lambda x: x[:, :, 0], "SqueezeOptions", {"SqueezeDims": [-2]})
    yield Case("EXPAND_DIMS", [X, ints(-1)], lambda x, a: x[..., None])
    yield Case("EXPAND_DIMS", [X, ints([1])], lambda x, a: x[:, None])
    yield Case("TRANSPOSE", [X, ints(2, 0, 1)], lambda x, p: x.transpose(p))
    yield Case("TRANSPOSE", [X, ints(0, -1, 1)], lambda x, p: x.transpose(p))
    for axis in (0, -1, 1):
        yield Case(
            "PACK",
            [X, X * 2],
            lambda a, b, k=axis: np.stack([a, b], k),
            "PackOptions",
            {"ValuesCount": 2, "Axis": axis},
        )
        yield Case(
            "UNPACK",
            [X],
            lambda x, k=axis: [np.take(x, i, k) for i in range(x.shape[k])],
            "UnpackOptions",
            {"Num": X.shape[axis], "Axis": axis},
        )
        yield Case(
            "CONCATENATION",
            [X, X * 2, X],
            lambda *v, k=axis: np.concatenate(v, k),
            "ConcatenationOptions",
            {"Axis": axis},
        )
    yield Case(
        "PACK",
        [ints(3), ints(4)],
        lambda a, b: np.stack([a, b]),
        "PackOptions",
        {"ValuesCount": 2, "Axis": 0},
    )
    yield Case("UNPACK", [thin], lambda x: [x[0]], "UnpackOptions", {"Num": 1, "Axis": 0})
    yield Case(
        "CONCATENATION",
        [X, X * 2],
        lambda a, b: np.maximum(np.concatenate([a, b], 1), 0),
        "ConcatenationOptions",
        {"Axis": 1, "FusedActivationFunction": RELU},
    )
    yield Case(
        "SPLIT", [ints(-1), X], lambda a, x: np.split(x, 2, -1), "SplitOptions", {"NumSplits": 2}
    )
    yield Case("SPLIT", [ints(1), X], lambda a, x: [x], "SplitOptions", {"NumSplits": 1})
    yield Case(
        "SPLIT_V",
        [X, ints(1, 3), ints(2)],
        lambda x, s, a: np.split(x, [1], 2),
        "SplitVOptions",
        {"NumSplits": 2},
    )
    yield Case(
        "SPLIT_V",
        [X, ints(1, -1, 2), ints(-1)],
        lambda x, s, a: np.split(x, [1, 2], 2),
        "SplitVOptions",
        {"NumSplits": 3},
    )
    yield Case(
        "SPLIT_V", [X, ints([3]), ints(1)], lambda x, s, a: [x], "SplitVOptions", {"NumSplits": 1}
    )
    yield Case(
        "SPLIT_V",
        [X, ints([-1], dtype="int64"), ints(1)],
        lambda x, s, a: [x],
        "SplitVOptions",
        {"NumSplits": 1},
    )
    yield Case("TILE", [X, ints(1, 2, 3)], np.tile)
    yield Case("SLICE", [X, ints(0, 1, 1), ints(2, -1, 2)], lambda x, b, s: x[:2, 1:, 1:3])
    yield Case(
        "SLICE",
        [X, ints(0, 1, 1, dtype="int64"), ints(2, -1, 2, dtype="int64")],
        lambda x, b, s: x[:2, 1:, 1:3],
    )
    for fields, begin, end, stride, pick in (
        ({}, [0, 0, 3], [2, 3, 0], [1, 2, -1], lambda x: x[0:2, 0:3:2, 3:0:-1]),
        ({"BeginMask": 5, "EndMask": 3}, [1, 1, 1], [1, 1, 3], [1, 1, 1], lambda x: x[:, 1:, :3]),
        ({"ShrinkAxisMask": 2}, [0, -1, 0], [2, 0, 4], [1, 1, 1], lambda x: x[:, -1]),
        ({"ShrinkAxisMask": 7}, [0, 1, 2], [1, 2, 3], [1, 1, 1], lambda x: x[0, 1, 2]),
        ({"NewAxisMask": 1}, [0, 0, 0, 0], [1, 2, 3, 2], [1, 1, 1, 1], lambda x: x[None, :, :, :2]),
        ({"EllipsisMask": 1}, [0, 1], [0, 3], [1, 1], lambda x: x[..., 1:3]),
        ({"EndMask": 1}, [1], [0], [1], lambda x: x[1:]),
        ({"BeginMask": 4, "EndMask": 4}, [0, 0, 0], [2, 3, 0], [1, 1, -1], lambda x: x[:, :, ::-1]),
        ({}, [-2, -2, -3], [9, 9, -1], [1, 1, 1], lambda x: x[-2:9, -2:9, -3:-1]),
        ({"BeginMask": 2, "ShrinkAxisMask": 2}, [1, 2], [2, 3], [1, 1], lambda x: x[1:2, 0]),
        ({"ShrinkAxisMask": 1}, [-9], [0], [1], lambda x: x[0]),
        ({"Offset": True}, [0, 1, 2], [2, 2, 1], [1, 1, 1], lambda x: x[:2, 1:3, 2:3]),
        ({}, [0, 2, 3], [2, 1, 1], [1, 1, 1], lambda x: x[:2, 2:1, 3:1]),
        ({}, [0, 0, 0], [2, 2, 3], [1, 1, -1], lambda x: x[:2, :2, 0:3:-1]),
        ({"EllipsisMask": 1, "NewAxisMask": 6}, [0] * 4, [0, 0, 0, 2], [1] * 4,
         lambda x: x[..., None, None, :2]),
        ({"EllipsisMask": 8}, [1, 0, 0, 0], [2, 2, 3, 0], [1] * 4, lambda x: x[1:2, :2, :3, ...]),
        ({"BeginMask": 2, "EndMask": 3, "ShrinkAxisMask": 4}, [-1, 0, 1], [0, 0, 0], [1, -1, 1],
         lambda x: x[-1:, ::-1, 1]),
    ):  # fmt: skip
        yield Case(
            "STRIDED_SLICE",
            [X, ints(begin), ints(end), ints(stride)],
            lambda x, *_, f=pick: f(x),
            "StridedSliceOptions",
            fields,
        )
    for axis, indices in ((0, [1, 0, 1]), (-1, [[0, 3], [2, 2]]), (1, 2)):
        yield Case(
            "GATHER",
            [X, ints(indices)],
            lambda x, i, k=axis: np.take(x, i, k),
            "GatherOptions",
            {"Axis": axis},
        )
    yield Case(
        "GATHER",
        [X, ints([[0, 2], [1, 1]])],
        lambda x, i: np.stack([x[b][i[b]] for b in range(2)]),
        "GatherOptions",
        {"Axis": 1, "BatchDims": 1},
    )
    yield Case("GATHER_ND", [X, ints([[0, 1], [1, 2]])], lambda x, i: x[i[:, 0], i[:, 1]])
    yield Case("GATHER_ND", [X, ints([[[1]], [[0]]])], lambda x, i: x[i[..., 0]])
    yield Case("SCATTER_ND", [ints([[1], [3]]), numbers(2, 4), ints(5, 4)], scatter_nd)
    yield Case("SCATTER_ND", [ints([[1], [1]]), numbers(2, 4), ints(5, 4)], scatter_nd)
    yield Case("SELECT", [BOOL, X, X * 2], np.where)
    yield Case(
        "SELECT", [BOOL[:, 0, 0], X, X * 2], lambda c, a, b: np.where(c[:, None, None], a, b)
    )
    yield Case("SELECT_V2", [BOOL[:, :, :1], X, numbers(4)], np.where)
    yield Case("WHERE", [BOOL], lambda c: np.argwhere(c))
    for axis, dims in ((-1, ints([0, 2, 1])), (0, ints([[0, 2], [1, 5]]))):
        yield Case(
            "ONE_HOT",
            [dims, ints(4), np.float32(2), np.float32(-1)],
            lambda i, d, on, off, k=axis: np.moveaxis(
                np.where(i[..., None] == np.arange(4), on, off), -1, k
            ),
            "OneHotOptions",
            {"Axis": axis},
        )
    yield Case("REVERSE_V2", [X, ints([1])], lambda x, a: x[:, ::-1])
    yield Case("REVERSE_V2", [X, ints([1, 2])], lambda x, a: x[:, ::-1, ::-1])
    yield Case(
        "REVERSE_SEQUENCE",
        [X, ints(2, 3, 1, dtype="int64")],
        lambda x, n: np.stack(
            [
                np.concatenate([x[:, b, :0], x[:, b, : n[b]][:, ::-1], x[:, b, n[b] :]], 1)
                for b in range(3)
            ],
            1,
        ),
        "ReverseSequenceOptions",
        {"SeqDim": 2, "BatchDim": 1},
    )
    pads = ints([[0, 1], [2, 0], [1, 1]])
    yield Case("PAD", [X, pads], lambda x, p: np.pad(x, p))
    yield Case(
        "PADV2",
        [X, pads, np.array([2.5], "float32")],
        lambda x, p, v: np.pad(x, p, constant_values=v[0]),
    )
    yield Case(
        "PADV2",
        [X, pads, np.array(2.5, "float32")],
        lambda x, p, v: np.pad(x, p, constant_values=float(v)),
    )
    for mode, name in ((0, "reflect"), (1, "symmetric")):
        yield Case(
            "MIRROR_PAD",
            [X, ints([[0, 1], [2, 0], [1, 1]])],
            lambda x, p, m=name: np.pad(x, p, m),
            "MirrorPadOptions",
            {"Mode": mode},
        )
    yield Case(
        "SPACE_TO_BATCH_ND",
        [numbers(1, 3, 4, 2), ints(2, 2), ints([[0, 1], [0, 0]])],
        space_to_batch,
    )
    yield Case(
        "BATCH_TO_SPACE_ND",
        [numbers(4, 2, 3, 2), ints(2, 2), ints([[0, 1], [1, 0]])],
        batch_to_space,
    )
    yield Case(
        "SPACE_TO_DEPTH",
        [numbers(2, 4, 6, 3)],
        lambda x: x.reshape(2, 2, 2, 3, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 2, 3, 12),
        "SpaceToDepthOptions",
        {"BlockSize": 2},
    )
    yield Case(
        "DEPTH_TO_SPACE",
        [numbers(2, 2, 3, 12)],
        lambda x: x.reshape(2, 2, 3, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 6, 3),
        "DepthToSpaceOptions",
        {"BlockSize": 2},
    )
    for count in (2, 0):
        yield Case(
            "TOPK_V2",
            [X, ints(count)],
            lambda x, k, count=count: (
                -np.sort(-x, -1)[..., :count],
                np.argsort(-x, -1, kind="stable")[..., :count].astype("int32"),
            ),
        )
    yield Case(
        "UNIQUE",
        [ints(3, 1, 3, 2, 1)],
        lambda x: (ints(3, 1, 2), ints(0, 1, 0, 2, 1)),
        "UniqueOptions",
        {"IdxOutType": 2},
    )
    yield Case("RANGE", [ints(2), ints(9), ints(3)], lambda a, b, c: np.arange(a, b, c, "int32"))
    yield Case(
        "RANGE",
        [np.float32(5), np.float32(0.5), np.float32(-1.5)],
        lambda a, b, c: np.arange(a, b, c, "float32"),
    )
    yield Case("FILL", [ints(2, 3), np.float32(1.5)], lambda s, v: np.full(s, v))
    yield Case("FILL", [ints(2, 3, dtype="int64"), ints(4)], lambda s, v: np.full(s, v))
    yield Case(
        "SPARSE_TO_DENSE",
        [ints([[0, 1], [2, 3]]), ints(3, 4), numbers(2), np.float32(-1)],
        sparse_to_dense,
    )
    yield Case(
        "SPARSE_TO_DENSE", [ints(1, 3), ints([5]), np.float32(2), np.float32(0)], sparse_to_dense
    )
    yield Case("MATRIX_DIAG", [numbers(2, 3)], lambda x: x[..., None] * np.eye(3, dtype=x.dtype))
    yield Case("MATRIX_SET_DIAG", [numbers(2, 3, 4), numbers(2, 3)], set_diagonal)
    yield Case("EMBEDDING_LOOKUP", [ints(2, 0, 1), numbers(3, 4)], lambda i, w: w[i])
    for combiner in (0, 1, 2):
        yield Case(
            "EMBEDDING_LOOKUP_SPARSE",
            [
                ints(1, 3, 0),
                ints([[0, 0], [2, 0], [2, 1]]),
                ints(3, 2),
                np.array([1, 2, 4], "float32"),
                numbers(4, 3),
            ],
            lambda *v, c=combiner: embedding_sparse(*v, c),
            "EmbeddingLookupSparseOptions",
            {"Combiner": combiner},
        )
    yield Case(
        "SEGMENT_SUM", [numbers(4, 3), ints(0, 0, 1, 2)], lambda x, i: segments(x, i, 3, np.add, 0)
    )
    for kind, f, first in (
        ("SUM", np.add, 0),
        ("PROD", np.multiply, 1),
        ("MAX", np.maximum, np.finfo("float32").min),
        ("MIN", np.minimum, np.finfo("float32").max),
    ):
        yield Case(
            f"UNSORTED_SEGMENT_{kind}",
            [numbers(4, 3), ints(2, 0, 2, 0), ints(4)],
            lambda x, i, n, f=f, v=first: segments(x, i, 4, f, v),
        )
        left_out = ints(2, -1, 2, -7)
        yield Case(
            f"UNSORTED_SEGMENT_{kind}",
            [numbers(4, 3), left_out, ints(4)],
            lambda x, i, n, f=f, v=first: segments(x[::2], i[::2], 4, f, v),
        )
    yield Case(
        "HASHTABLE_LOOKUP",
        [ints(3, 9, 1), ints(1, 3, 7), numbers(3, 2)],
        lambda q, k, v: (np.stack([v[1], v[0] * 0, v[0]]), np.array([1, 0, 1], "uint8")),
    )
    yield Case("DILATE", [numbers(2, 3), ints(2, 3), np.float32(-1)], dilate)
    yield Case("DYNAMIC_UPDATE_SLICE", [X, numbers(1, 2, 2), ints(1, 1, 2)], update_slice)
    yield Case("DYNAMIC_UPDATE_SLICE", [X, numbers(1, 2, 2), ints(1, 9, -2)], update_slice)


def stablehlo_cases() -> Iterator[Case]:
    table = {
        "ABS": np.abs, "COSINE": np.cos, "EXPONENTIAL": np.exp, "FLOOR": np.floor,
        "LOGISTIC": sigmoid, "NEGATE": np.negative, "TANH": np.tanh, "CBRT": np.cbrt,
    }  # fmt: skip
    for kind, f in table.items():
        yield Case(f"STABLEHLO_{kind}", [X], f)
    yield Case("STABLEHLO_LOG", [POSITIVE], np.log)
    yield Case("STABLEHLO_RSQRT", [POSITIVE], lambda x: 1 / np.sqrt(x))
    binary = {
        "ADD": np.add, "SUBTRACT": np.subtract, "MULTIPLY": np.multiply, "DIVIDE": np.divide,
        "MAXIMUM": np.maximum, "MINIMUM": np.minimum, "REMAINDER": np.fmod,
    }  # fmt: skip
    for kind, f in binary.items():
        yield Case(f"STABLEHLO_{kind}", [X, POSITIVE], f)
    yield Case("STABLEHLO_POWER", [POSITIVE, X], np.power)
    yield Case("STABLEHLO_DIVIDE", [INTS, NONZERO], truncate_division)
    yield Case("STABLEHLO_AND", [BOOL, ~BOOL[::-1]], np.logical_and)
    yield Case("STABLEHLO_OR", [BOOL, ~BOOL[::-1]], np.logical_or)
    yield Case("STABLEHLO_SHIFT_LEFT", [INTS, np.abs(NONZERO) % 5], np.left_shift)
    yield Case("STABLEHLO_SELECT", [BOOL, X, X * 2], np.where)
    low, high = np.float32(-0.5), np.float32(1)
    yield Case("STABLEHLO_CLAMP", [low, X, high], lambda a, x, b: np.clip(x, a, b))
    yield Case("STABLEHLO_CONVERT", [X * 3], lambda x: x.astype("int32"))
    wide = {"dtype": "int64"}
    options = "StablehloConcatenateOptions"
    yield Case(
        "STABLEHLO_CONCATENATE",
        [X, X * 2],
        lambda a, b: np.concatenate([a, b], 1),
        options,
        {"Dimension": 1},
    )
    yield Case(
        "STABLEHLO_TRANSPOSE",
        [X],
        lambda x: x.transpose(2, 0, 1),
        "StablehloTransposeOptions",
        {"Permutation": ints(2, 0, 1, **wide)},
    )
    yield Case("STABLEHLO_RESHAPE", [X], lambda x: x.reshape(6, 4))
    yield Case(
        "STABLEHLO_BROADCAST_IN_DIM",
        [numbers(3, 1)],
        lambda x: np.broadcast_to(x.reshape(1, 3, 1), (2, 3, 4)),
        "StablehloBroadcastInDimOptions",
        {"BroadcastDimensions": ints(1, 2, **wide)},
    )
    yield Case(
        "STABLEHLO_SLICE",
        [X],
        lambda x: x[0:2, 1:3, 0:4:2],
        "StablehloSliceOptions",
        {
            "StartIndices": ints(0, 1, 0, **wide),
            "LimitIndices": ints(2, 3, 4, **wide),
            "Strides": ints(1, 1, 2, **wide),
        },
    )
    pads = {
        "EdgePaddingLow": ints(0, 1, 2, **wide),
        "EdgePaddingHigh": ints(1, 0, 0, **wide),
        "InteriorPadding": ints(0, 0, 0, **wide),
    }
    yield Case(
        "STABLEHLO_PAD",
        [X, np.float32(2)],
        lambda x, v: np.pad(x, [(0, 1), (1, 0), (2, 0)], constant_values=v),
        "StablehloPadOptions",
        pads,
    )
    yield Case(
        "STABLEHLO_IOTA",
        [],
        lambda: np.broadcast_to(np.arange(3, dtype="float32")[:, None], (3, 4)),
        "StablehloIotaOptions",
        {"IotaDimension": 0},
    )
    for direction, f in enumerate(
        (np.equal, np.not_equal, np.greater_equal, np.greater, np.less_equal, np.less)
    ):
        yield Case(
            "STABLEHLO_COMPARE",
            [INTS, NONZERO],
            f,
            "StablehloCompareOptions",
            {"ComparisonDirection": direction},
        )
    yield Case(
        "STABLEHLO_GATHER",
        [X, ints([[1], [5], [0], [-2]])],
        lambda x, i: x[:, np.clip(i[:, 0], 0, 2)],
        "StablehloGatherOptions",
        {
            "OffsetDims": ints([0, 2], **wide),
            "CollapsedSliceDims": ints([1], **wide),
            "StartIndexMap": ints([1], **wide),
            "IndexVectorDim": 1,
            "SliceSizes": ints([2, 1, 4], **wide),
        },
    )
    begin = [ints(1), ints(1), ints(2)]
    yield Case(
        "STABLEHLO_DYNAMIC_SLICE",
        [X, *begin],
        lambda x, *_: x[1:2, 1:3, 2:4],
        "StablehloDynamicSliceOptions",
        {"SliceSizes": ints(1, 2, 2, **wide)},
    )
    yield Case(
        "STABLEHLO_DYNAMIC_UPDATE_SLICE",
        [X, numbers(1, 2, 2), *begin],
        lambda x, u, *b: update_slice(x, u, np.array(b).ravel()),
    )
    dims = {
        "LhsContractingDimensions": ints([1], **wide),
        "RhsContractingDimensions": ints([0], **wide),
    }
    yield Case(
        "STABLEHLO_DOT_GENERAL",
        [numbers(3, 4), numbers(4, 5)],
        np.matmul,
        "StablehloDotGeneralOptions",
        dims,
    )


def suppression_cases() -> Iterator[Case]:
    boxes = np.array([[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, 0.9, 1, 1.9], [3, 3, 4, 4]], "float32")
    scores = np.array([0.5, 0.9, 0.8, 0.2], "float32")
    for count, low in ((2, 0.3), (4, 0.1), (4, 0.3)):
        fixed = [ints(count), np.float32(0.5), np.float32(low)]
        yield Case("NON_MAX_SUPPRESSION_V4", [boxes, scores, *fixed], suppress)
        yield Case("NON_MAX_SUPPRESSION_V5", [boxes, scores, *fixed, np.float32(0)], suppress)


def suppress(boxes, scores, count, overlap, low, sigma=None):
    def area(a, b, c, d):
        return max(c - a, 0) * max(d - b, 0)

    kept: list[int] = []
    for at in np.argsort(-scores):
        box = boxes[at]
        shared = [
            area(*np.maximum(box[:2], boxes[k][:2]), *np.minimum(box[2:], boxes[k][2:]))
            for k in kept
        ]
        share = [s / (area(*box) + area(*boxes[k]) - s) for s, k in zip(shared, kept, strict=True)]
        if scores[at] > low and len(kept) < count and all(each <= overlap for each in share):
            kept.append(at)
    index, score = np.zeros(count, "int32"), np.zeros(count, "float32")
    index[: len(kept)], score[: len(kept)] = kept, scores[kept]
    number = np.array(len(kept), "int32")
    return (index, number) if sigma is None else (index, score, number)


def update_slice(x, update, start):
    x = x.copy()
    start = [
        min(max(int(s), 0), n - m) for s, n, m in zip(start, x.shape, update.shape, strict=True)
    ]
    x[tuple(slice(s, s + n) for s, n in zip(start, update.shape, strict=True))] = update
    return x


def scatter_nd(indices, updates, shape):
    y = np.zeros(shape, updates.dtype)
    np.add.at(y, tuple(np.moveaxis(indices, -1, 0)), updates)
    return y


def space_to_batch(x, block, pads):
    x = np.pad(x, [(0, 0), *map(tuple, pads), (0, 0)])
    n, h, w, c = x.shape
    a, b = block
    x = x.reshape(n, h // a, a, w // b, b, c).transpose(2, 4, 0, 1, 3, 5)
    return x.reshape(n * a * b, h // a, w // b, c)


def batch_to_space(x, block, crops):
    (a, b), (n, h, w, c) = block, x.shape
    x = x.reshape(a, b, n // (a * b), h, w, c).transpose(2, 3, 0, 4, 1, 5)
    x = x.reshape(n // (a * b), h * a, w * b, c)
    (t, d), (l, r) = crops
    return x[:, t : x.shape[1] - d, l : x.shape[2] - r]


def sparse_to_dense(indices, shape, values, default):
    y = np.full(shape, default)
    indices = indices if indices.ndim == 2 else indices[:, None]
    y[tuple(indices.T)] = values
    return y


def set_diagonal(x, diagonal):
    x = x.copy()
    n = diagonal.shape[-1]
    x[..., range(n), range(n)] = diagonal
    return x


def embedding_sparse(ids, indices, shape, weights, table, combiner):
    y = np.zeros((shape[0], table.shape[1]), "float32")
    total = np.zeros(shape[0], "float32")
    for i, at, w in zip(ids, indices[:, 0], weights, strict=True):
        y[at] += table[i] * w
        total[at] += w * w if combiner == 2 else w
    total = np.sqrt(total) if combiner == 2 else total
    return (
        y
        if combiner == 0
        else np.where(total[:, None] > 0, y / np.maximum(total, 1e-9)[:, None], 0)
    )


def segments(x, indices, count, f, first):
    y = np.full((count, *x.shape[1:]), first, x.dtype)
    for row, at in zip(x, indices, strict=True):
        y[at] = f(y[at], row)
    return y


def dilate(x, steps, value):
    shape = [(n - 1) * s + 1 for n, s in zip(x.shape, steps, strict=True)]
    y = np.full(shape, value, x.dtype)
    y[tuple(slice(None, None, int(s)) for s in steps)] = x
    return y


# -- networks --------------------------------------------------------------------------------------


def same_pads(size, kernel, stride, dilation, padding):
    if padding == VALID:
        return 0, 0
    span = (kernel - 1) * dilation + 1
    total = max(0, (-(-size // stride) - 1) * stride + span - size)
    return total // 2, total - total // 2


def windows(x, kernel, stride, dilation, padding, fill=0.0):
    """[N, out..., kernel..., C] of an NHWC or NDHWC value."""
    rank = len(kernel)
    pads = [
        same_pads(*each, padding)
        for each in zip(x.shape[1:-1], kernel, stride, dilation, strict=True)
    ]
    x = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, span, tuple(range(1, rank + 1)))
    view = view[(slice(None), *(slice(None, None, s) for s in stride))]
    view = view[(..., *(slice(None, None, d) for d in dilation))]
    return np.moveaxis(view, rank + 1, -1)


def conv(x, w, b, stride, dilation, padding):
    """Weights O...I; a group for each block of I channels."""
    rank = w.ndim - 2
    view = windows(x.astype("float64"), w.shape[1:-1], stride, dilation, padding)
    groups = x.shape[-1] // w.shape[-1]
    parts = [
        np.tensordot(part, kernel, (range(-rank - 1, 0), range(1, rank + 2)))
        for part, kernel in zip(np.split(view, groups, -1), np.split(w, groups), strict=True)
    ]
    y = np.concatenate(parts, -1)
    return (y if b is None else y + b).astype("float32")


def depthwise(x, w, b, stride, dilation, padding):
    view = windows(x.astype("float64"), w.shape[1:3], stride, dilation, padding)
    many = w.shape[3] // x.shape[3]
    view = np.repeat(view, many, -1)
    y = np.einsum("nhwijc,ijc->nhwc", view, w[0])
    return (y if b is None else y + b).astype("float32")


def conv_transpose(x, w, b, shape, stride, padding):
    """Weights O...I: the gradient of a convolution that gives x of a value of `shape`."""
    rank = w.ndim - 2
    kernel = w.shape[1:-1]
    pads = [
        same_pads(n, k, s, 1, padding) for n, k, s in zip(shape[1:-1], kernel, stride, strict=True)
    ]
    full = [(n - 1) * s + k for n, k, s in zip(x.shape[1:-1], kernel, stride, strict=True)]
    full = [max(f, n + sum(p)) for f, n, p in zip(full, shape[1:-1], pads, strict=True)]
    y = np.zeros((x.shape[0], *full, w.shape[0]))
    for at in np.ndindex(*x.shape[1:-1]):
        place = tuple(slice(i * s, i * s + k) for i, s, k in zip(at, stride, kernel, strict=True))
        y[(slice(None), *place)] += np.tensordot(
            x[(slice(None), *at)], np.moveaxis(w, 0, -1), (-1, rank)
        )
    y = y[(slice(None), *(slice(p[0], p[0] + n) for p, n in zip(pads, shape[1:-1], strict=True)))]
    return (y if b is None else y + b).astype("float32")


def pool(x, f, size, stride, padding, fill=np.nan):
    view = windows(x.astype("float64"), size, stride, (1, 1), padding, fill)
    return f(view, axis=(3, 4)).astype("float32")


def network_cases() -> Iterator[Case]:
    w, b = numbers(4, 3, 2, 3), numbers(4)
    for stride, dilation, padding, function in (
        ((1, 1), (1, 1), SAME, NONE),
        ((2, 1), (1, 1), SAME, RELU6),
        ((1, 1), (2, 2), VALID, RELU),
        ((2, 2), (1, 1), VALID, NONE),
        ((1, 1), (1, 3), SAME, RELU_N1),
    ):
        fields = {
            "Padding": padding,
            "StrideH": stride[0],
            "StrideW": stride[1],
            "DilationHFactor": dilation[0],
            "DilationWFactor": dilation[1],
            "FusedActivationFunction": function,
        }
        yield Case(
            "CONV_2D",
            [IMAGE, w, b],
            lambda x, w, b, s=stride, d=dilation, p=padding, f=function: activate(
                conv(x, w, b, s, d, p), f
            ),
            "Conv2DOptions",
            fields,
        )
        for many in (1, 2):
            k = numbers(1, 3, 2, 3 * many)
            yield Case(
                "DEPTHWISE_CONV_2D",
                [IMAGE, k, numbers(3 * many)],
                lambda x, w, b, s=stride, d=dilation, p=padding, f=function: activate(
                    depthwise(x, w, b, s, d, p), f
                ),
                "DepthwiseConv2DOptions",
                fields | {"DepthMultiplier": many},
            )
    plain = {
        "Padding": SAME,
        "StrideH": 1,
        "StrideW": 1,
        "DilationHFactor": 1,
        "DilationWFactor": 1,
    }
    yield Case(
        "CONV_2D",
        [IMAGE, w],
        lambda x, w: conv(x, w, None, (1, 1), (1, 1), SAME),
        "Conv2DOptions",
        plain,
    )
    yield Case(
        "CONV_2D",
        [numbers(1, 4, 4, 4), numbers(6, 3, 3, 2), numbers(6)],
        lambda x, w, b: conv(x, w, b, (1, 1), (1, 1), SAME),
        "Conv2DOptions",
        plain,
    )
    one = numbers(1, 5, 4, 1)
    yield Case(
        "DEPTHWISE_CONV_2D",
        [one, numbers(1, 3, 3, 4), numbers(4)],
        lambda x, w, b: depthwise(x, w, b, (1, 1), (1, 1), SAME),
        "DepthwiseConv2DOptions",
        plain | {"DepthMultiplier": 4},
    )
    for stride, padding, shape in (
        ((2, 2), SAME, (1, 6, 7, 4)),
        ((2, 1), VALID, (1, 7, 5, 4)),
        ((1, 1), SAME, (1, 3, 4, 4)),
        ((2, 3), VALID, (1, 7, 11, 4)),
        ((5, 4), VALID, (1, 15, 15, 4)),
        ((4, 3), SAME, (1, 10, 11, 4)),
    ):
        x = numbers(1, 3, 4, 2)

        def y(s, w, x, b=None, t=stride, p=padding):
            return np.maximum(conv_transpose(x, w, b, s, t, p), 0)

        fields = {
            "Padding": padding,
            "StrideH": stride[0],
            "StrideW": stride[1],
            "FusedActivationFunction": RELU,
        }
        yield Case(
            "TRANSPOSE_CONV",
            [ints(shape), numbers(4, 3, 2, 2), x],
            y,
            "TransposeConvOptions",
            fields,
        )
        yield Case(
            "TRANSPOSE_CONV",
            [ints(shape), numbers(4, 3, 2, 2), x, numbers(4)],
            y,
            "TransposeConvOptions",
            fields,
        )
    volume, k = numbers(1, 3, 4, 5, 2), numbers(2, 2, 3, 2, 4)
    for padding, function in ((SAME, RELU), (VALID, NONE)):
        fields = {
            "Padding": padding,
            "StrideD": 1,
            "StrideH": 2,
            "StrideW": 1,
            "DilationDFactor": 1,
            "DilationHFactor": 1,
            "DilationWFactor": 1,
            "FusedActivationFunction": function,
        }
        yield Case(
            "CONV_3D",
            [volume, k, numbers(4)],
            lambda x, w, b, p=padding, f=function: activate(
                conv(x, np.moveaxis(w, -1, 0), b, (1, 2, 1), (1, 1, 1), p), f
            ),
            "Conv3DOptions",
            fields,
        )
        for height, stride in ((8, 2), (12, 3)):
            shape = (1, 3, height, 5, 4) if padding == SAME else (1, 4, height, 7, 4)
            yield Case(
                "CONV_3D_TRANSPOSE",
                [ints(shape), numbers(2, 2, 3, 4, 2), volume, numbers(4)],
                lambda s, w, x, b, p=padding, f=function, h=stride: activate(
                    conv_transpose(x, np.moveaxis(w, 3, 0), b, s, (1, h, 1), p), f
                ),
                "Conv3DOptions",
                fields | {"StrideH": stride},
            )
    for shape, keep in (((3, 5), False), ((2, 3, 5), True), ((2, 3, 5), False)):
        for bias in (None, numbers(4)):
            yield Case(
                "FULLY_CONNECTED",
                [numbers(*shape), numbers(4, 5), bias],
                lambda x, w, b=None, k=keep: np.maximum(
                    (x if k else x.reshape(-1, 5)) @ w.T + (0 if b is None else b), 0
                ),
                "FullyConnectedOptions",
                {"KeepNumDims": keep, "FusedActivationFunction": RELU},
            )
    for a, c, x, y in (
        ((2, 3, 4), (2, 4, 5), False, False),
        ((2, 4, 3), (2, 5, 4), True, True),
        ((3, 4), (2, 4, 5), False, False),
        ((2, 1, 3, 4), (3, 4, 5), False, False),
        ((3, 4), (4, 5), False, False),
        ((2, 3, 4), (5, 4), False, True),
        ((1, 3, 4), (3, 4, 5), False, False),
    ):
        yield Case(
            "BATCH_MATMUL",
            [numbers(*a), numbers(*c)],
            lambda p, q, x=x, y=y: (
                (p.swapaxes(-1, -2) if x else p) @ (q.swapaxes(-1, -2) if y else q)
            ),
            "BatchMatMulOptions",
            {"AdjX": x, "AdjY": y},
        )
    for kind, f, fill in (
        ("AVERAGE_POOL_2D", np.nanmean, np.nan),
        ("MAX_POOL_2D", np.nanmax, np.nan),
        ("L2_POOL_2D", lambda v, axis: np.sqrt(np.nanmean(v**2, axis=axis)), np.nan),
    ):
        for size, stride, padding, function in (
            ((2, 3), (1, 2), SAME, NONE),
            ((3, 2), (2, 1), VALID, RELU),
            ((4, 4), (1, 1), SAME, RELU6),
        ):
            yield Case(
                kind,
                [IMAGE],
                lambda x, f=f, z=size, s=stride, p=padding, k=function, v=fill: activate(
                    pool(x, f, z, s, p, v), k
                ),
                "Pool2DOptions",
                {
                    "FilterHeight": size[0],
                    "FilterWidth": size[1],
                    "StrideH": stride[0],
                    "StrideW": stride[1],
                    "Padding": padding,
                    "FusedActivationFunction": function,
                },
            )
    yield Case(
        "LOCAL_RESPONSE_NORMALIZATION",
        [numbers(2, 2, 3, 6)],
        lambda x: lrn(x, 2, 1.5, 0.3, 0.7),
        "LocalResponseNormalizationOptions",
        {"Radius": 2, "Bias": 1.5, "Alpha": 0.3, "Beta": 0.7},
    )
    for slopes in ((3,), (1, 1, 3), (5, 7, 3), (1,), (1, 7, 1)):
        yield Case("PRELU", [IMAGE, numbers(*slopes)], lambda x, a: np.where(x < 0, x * a, x))
    for align, half in ((False, False), (True, False), (False, True)):
        for size in ((10, 7), (3, 4), (5, 13), (1, 9), (1, 1)):
            fields = {"AlignCorners": align, "HalfPixelCenters": half}
            yield Case(
                "RESIZE_BILINEAR",
                [IMAGE, ints(size)],
                lambda x, s, a=align, h=half: bilinear(x, s, a, h),
                "ResizeBilinearOptions",
                fields,
            )
            yield Case(
                "RESIZE_NEAREST_NEIGHBOR",
                [IMAGE, ints(size)],
                lambda x, s, a=align, h=half: nearest(x, s, a, h),
                "ResizeNearestNeighborOptions",
                fields,
            )
    pair = (numbers(2, 3) + 1j * numbers(2, 3)[::-1]).astype("complex64")
    yield Case("REAL", [pair], np.real)
    yield Case("IMAG", [pair], np.imag)
    yield Case("COMPLEX_ABS", [pair], np.abs)
    yield Case("CAST", [pair], np.real)
    wide = numbers(2, 5, 6)
    for data, height, width in (
        (numbers(2, 4, 8), 4, 8), (numbers(2, 3, 6), 3, 6), (wide[:, :1], 1, 6),
        (wide, 5, 6), (wide, 8, 4), (wide, 4, 9),
    ):  # fmt: skip
        yield Case(
            "RFFT2D",
            [data, ints(height, width)],
            lambda x, n: np.fft.rfft2(x, n).astype("complex64"),
            "Rfft2dOptions",
            atol=1e-4,
        )
    thin = pair[:, None, :, None]
    for axes, kept in (([-1], thin[..., 0]), ([1], thin[:, 0]), ([-3, -1], pair), ([], pair)):
        yield Case("SQUEEZE", [thin], lambda x, y=kept: y, "SqueezeOptions", {"SqueezeDims": axes})


def lrn(x, radius, bias, alpha, beta):
    squares = np.pad(x**2, [(0, 0)] * 3 + [(radius, radius)])
    total = np.lib.stride_tricks.sliding_window_view(squares, 2 * radius + 1, 3).sum(-1)
    return x / (bias + alpha * total) ** beta


def places(size, n, align, half):
    scale = (n - 1) / (size - 1) if align and size > 1 else n / size
    at = np.arange(size)
    return (at + 0.5) * scale - 0.5 if half else at * scale


def bilinear(x, size, align, half):
    for axis, n in ((1, int(size[0])), (2, int(size[1]))):
        at = places(n, x.shape[axis], align, half)
        low = np.floor(at).astype(int)
        part = (at - low).reshape([-1 if i == axis else 1 for i in range(4)])
        last = x.shape[axis] - 1
        a, b = (np.take(x, np.clip(i, 0, last), axis) for i in (low, low + 1))
        inside = np.clip(part, 0, 1)
        x = a * (1 - inside) + b * inside
    return x.astype("float32")


def nearest(x, size, align, half):
    for axis, n in ((1, int(size[0])), (2, int(size[1]))):
        scale = np.float32((x.shape[axis] - 1) / (n - 1) if align and n > 1 else x.shape[axis] / n)
        at = (np.arange(n, dtype="float32") + np.float32(0.5 if half else 0)) * scale
        at = np.floor(at + np.float32(0.5)) if align else np.floor(at)
        x = np.take(x, np.clip(at.astype(int), 0, x.shape[axis] - 1), axis)
    return x


# -- integers --------------------------------------------------------------------------------------


def integers(*shape: int, low: int = -128, high: int = 127, dtype: str = "int8") -> Array:
    return numbers(*shape, low=low, high=high, dtype=dtype)


def quantized_cases() -> Iterator[Case]:
    a, b, c = (0.05, 3), (0.04, -7), (0.09, 11)
    x = integers(2, 3, 4)
    for kind in (
        "ABS",
        "ELU",
        "HARD_SWISH",
        "LEAKY_RELU",
        "RELU",
        "RELU6",
        "RELU_N1_TO_1",
        "RELU_0_TO_1",
        "SQUARE",
    ):
        f = UNARY.get(kind, lambda x: np.where(x > 0, x, x * 0.5))
        options = {"LEAKY_RELU": "LeakyReluOptions"}.get(kind, "")
        yield Case(kind, [x], f, options, {"Alpha": 0.5} if options else {}, [a, c])
    for kind in ("LOGISTIC", "TANH"):
        yield Case(
            kind,
            [x],
            UNARY[kind],
            scales=[a, (1 / 256, -128) if kind == "LOGISTIC" else (1 / 128, 0)],
        )
    yield Case("SOFTMAX", [x], softmax, "SoftmaxOptions", {"Beta": 1.0}, [a, (1 / 256, -128)])
    yield Case(
        "GELU",
        [x],
        lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
        "GeluOptions",
        {"Approximate": False},
        [a, c],
    )

    def unit(x):
        return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6)

    yield Case(
        "L2_NORMALIZATION",
        [integers(2, 3, 4)],
        unit,
        "L2NormOptions",
        {"FusedActivationFunction": NONE},
        [(0.05, 0), (1 / 128, 0)],
    )
    for kind, options in (
        ("ADD", "AddOptions"),
        ("SUB", "SubOptions"),
        ("MUL", "MulOptions"),
        ("MAXIMUM", ""),
        ("MINIMUM", ""),
        ("SQUARED_DIFFERENCE", ""),
    ):
        same = (a, a, a) if kind[:2] in ("MA", "MI") else (a, b, c)
        yield Case(kind, [x, x[::-1].copy()], BINARY[kind], options, scales=same)
    yield Case(
        "ADD",
        [x, x[::-1].copy()],
        lambda p, q: np.maximum(p + q, 0),
        "AddOptions",
        {"FusedActivationFunction": RELU},
        [a, b, c],
    )
    byte = integers(2, 3, 4, low=0, high=255, dtype="uint8")
    yield Case(
        "ADD", [byte, byte[::-1].copy()], np.add, "AddOptions", scales=[a, (0.04, 120), (0.09, 130)]
    )
    yield Case(
        "CONV_2D",
        [
            integers(1, 4, 4, 2, low=0, high=255, dtype="uint8"),
            integers(3, 3, 3, 2, low=0, high=255, dtype="uint8"),
            ints(100, -2000, 3),
        ],
        lambda x, w, b: conv(x, w, b, (1, 1), (1, 1), SAME),
        "Conv2DOptions",
        {"Padding": SAME, "StrideH": 1, "StrideW": 1},
        [(0.05, 120), (0.01, 131), (0.05 * 0.01, 0), (0.15, 128)],
    )
    for kind in ("EQUAL", "GREATER", "LESS_EQUAL"):
        yield Case(kind, [x, x[::-1].copy()], BINARY[kind], scales=[a, a, None])
    for kind, f in (
        ("MEAN", np.mean),
        ("SUM", np.sum),
        ("REDUCE_MAX", np.max),
        ("REDUCE_MIN", np.min),
    ):
        out = a if "_" in kind else c
        yield Case(
            kind,
            [x, ints([1])],
            lambda x, i, f=f: reduce(f, x, i, False),
            "ReducerOptions",
            scales=[a, None, out],
        )
    for kind, f in (("ARG_MAX", np.argmax), ("ARG_MIN", np.argmin)):
        yield Case(
            kind,
            [x, ints(-1)],
            lambda x, i, f=f: f(x, -1).astype("int32"),
            "ArgMaxOptions" if kind == "ARG_MAX" else "ArgMinOptions",
            {"OutputType": 2},
            [a, None, None],
        )
    for case in shape_cases():
        if case.kind not in MOVED or all(each.dtype != "float32" for each in case.operands):
            continue
        moved = [
            each if each.dtype != "float32" else integers(*each.shape) for each in case.operands
        ]
        scales = [a if each.dtype == "float32" else None for each in case.operands]
        yield Case(case.kind, moved, case.expected, case.options, case.fields, [*scales, a])
    for case in network_cases():
        if (
            case.kind in WEIGHTED
            and len(case.operands) == 3
            and all(each is not None for each in case.operands)
        ):
            weight = integers(*case.operands[1].shape, low=-127)
            bias = numbers(*case.operands[2].shape, low=-3000, high=3000, dtype="int32")
            yield Case(
                case.kind,
                [integers(*case.operands[0].shape), weight, bias],
                case.expected,
                case.options,
                case.fields,
                [a, (0.01, 0), (0.05 * 0.01, 0), (0.15, -20)],
            )
        elif case.kind == "BATCH_MATMUL":
            yield Case(
                case.kind,
                [integers(*each.shape) for each in case.operands],
                case.expected,
                case.options,
                case.fields,
                [a, (0.04, 0), c],
            )
        elif case.kind in ("AVERAGE_POOL_2D", "MAX_POOL_2D", "RESIZE_NEAREST_NEIGHBOR"):
            moved = [integers(*case.operands[0].shape), *case.operands[1:]]
            yield Case(
                case.kind,
                moved,
                case.expected,
                case.options,
                case.fields,
                [a, *[None] * (len(moved) - 1), a],
            )
        elif case.kind == "PRELU":
            yield Case(
                case.kind,
                [integers(*each.shape) for each in case.operands],
                case.expected,
                case.options,
                case.fields,
                [a, (0.01, 5), c],
            )


def product_cases() -> Iterator[Case]:
    """Products of int16 by int8 with a bias of int64; transposed convolutions of integers."""
    for case in network_cases():
        is_spread = case.kind == "TRANSPOSE_CONV"
        data, weight, bias = (2, 1, 3) if is_spread else (0, 1, 2)
        shapes = [None if each is None else each.shape for each in case.operands]
        if case.kind not in (*WEIGHTED, "TRANSPOSE_CONV") or not shapes[bias:] or not shapes[bias]:
            continue
        for dtype in ("int16", "int8") if is_spread else ("int16",):
            is_wide = dtype == "int16"
            first, last = ((1e-4, 0), (1e-3, 0)) if is_wide else ((0.05, 3), (0.15, -20))
            low, limit = np.iinfo(dtype).min, np.iinfo(dtype).max
            operands, scales = list(case.operands), [None] * len(shapes)
            operands[data] = integers(*shapes[data], low=low, high=limit, dtype=dtype)
            operands[weight] = integers(*shapes[weight], low=-127)
            given = [-900_000, 70_000, 2**32 + 5] if is_wide else [100, -2000, 3]
            sums = np.array(given, "int64" if is_wide else "int32")
            operands[bias] = np.resize(sums, shapes[bias])
            scales[data], scales[weight], scales[bias] = first, (0.01, 0), (first[0] * 0.01, 0)
            has_type = is_wide and case.kind != "DEPTHWISE_CONV_2D"
            fields = {**case.fields, **({"QuantizedBiasType": 4} if has_type else {})}
            yield replace(case, operands=operands, scales=[*scales, last], fields=fields)


WEIGHTED = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"})
MOVED = frozenset(
    {
        "BATCH_TO_SPACE_ND", "CONCATENATION", "DEPTH_TO_SPACE", "EXPAND_DIMS", "GATHER",
        "GATHER_ND", "MIRROR_PAD", "PACK", "PAD", "RESHAPE", "REVERSE_SEQUENCE", "REVERSE_V2",
        "SELECT", "SELECT_V2",
        "SLICE", "SPACE_TO_BATCH_ND", "SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQUEEZE",
        "STRIDED_SLICE", "TILE", "TRANSPOSE", "UNPACK",
    }
)  # fmt: skip


#: Operators whose kernels read integers as they are stored, whatever their scales are.
STORED = frozenset(
    {
        "DEPTH_TO_SPACE", "DILATE", "DYNAMIC_UPDATE_SLICE", "EMBEDDING_LOOKUP", "FLOOR_DIV",
        "FLOOR_MOD", "GATHER", "GATHER_ND", "MATRIX_DIAG", "MATRIX_SET_DIAG", "MAXIMUM", "MINIMUM",
        "NEG", "ONE_HOT", "RESHAPE", "REVERSE_SEQUENCE", "REVERSE_V2", "SCATTER_ND", "SELECT",
        "SELECT_V2", "SLICE", "SPACE_TO_DEPTH", "SPARSE_TO_DENSE", "SPLIT", "SPLIT_V", "SQUEEZE",
        "STRIDED_SLICE", "TILE", "TOPK_V2", "TRANSPOSE", "RESIZE_NEAREST_NEIGHBOR",
    }
)  # fmt: skip

#: Two scales that differ by less than 1e-5, as those of int16 may, and two that do not.
SCALES = {"int16": ((2e-6, 0), (8e-6, 0), (5e-6, 0)), "int8": ((0.05, 3), (0.02, -9), (0.11, 40))}


def stored_cases() -> Iterator[Case]:
    """Calls of integers with another scale for each tensor."""
    cases = [*unary_cases(), *binary_cases(), *shape_cases(), *network_cases()]
    for case in cases:
        floats = [each is not None and each.dtype == "float32" for each in case.operands]
        if case.kind not in STORED or not any(floats):
            continue
        for dtype, (*scales, last) in SCALES.items():
            if dtype == "int16" and case.kind in ("DEPTH_TO_SPACE", "ONE_HOT", "SPACE_TO_DEPTH"):
                continue  # have no kernel
            low = np.iinfo(dtype).min + 1
            operands = [
                integers(*each.shape, low=low, high=-low, dtype=dtype) if is_float else each
                for each, is_float in zip(case.operands, floats, strict=True)
            ]
            if case.kind.startswith("FLOOR"):
                operands[1] = np.where(operands[1] == 0, 3, operands[1]).astype(dtype)
            given = [scales[at % 2] if is_float else None for at, is_float in enumerate(floats)]
            yield replace(case, operands=operands, scales=[*given, last], is_stored=True)
    for dtype, kind, fill in (("int8", "PAD", 40), ("int16", "PAD", 0)):
        data = integers(2, 3, 4, dtype=dtype)
        first, _, last = SCALES[dtype]
        yield Case(
            kind,
            [data, ints([[0, 1], [2, 0], [1, 1]])],
            lambda x, p, v=fill: np.pad(x, p, constant_values=v),
            scales=[first, None, last],
            is_stored=True,
        )
    short = integers(2, 3, 4, low=-30000, high=30000, dtype="int16")
    for kind in ("EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"):
        # (small enough scales: LiteRT's kernel of EQUAL multiplies them)
        scales = [(5e-5, 0), (1e-4, 0), None]
        halves = np.where(short % 2 == 0, short // 2, short + 1).astype("int16")
        is_stored = kind != "EQUAL"
        yield Case(kind, [short, halves], BINARY[kind], scales=scales, is_stored=is_stored)
    first, second, last = SCALES["int16"]
    yield Case(
        "CONCATENATION",
        [integers(2, 3, low=-32768, high=32767, dtype="int16")] * 2,
        lambda a, b: np.concatenate([a, b], 1),
        "ConcatenationOptions",
        {"Axis": 1},
        [first, second, last],
        is_stored=True,
    )
    pair = [integers(2, 3), integers(2, 3)[::-1].copy()]
    for kind, f in (("ADD", np.add), ("MULTIPLY", np.multiply), ("MAXIMUM", np.maximum)):
        yield Case(f"STABLEHLO_{kind}", pair, f, scales=SCALES["int8"], is_stored=True)


def all_cases() -> list[Case]:
    return [
        *unary_cases(), *binary_cases(), *reductions(), *shape_cases(), *network_cases(),
        *stablehlo_cases(), *suppression_cases(), *quantized_cases(), *product_cases(),
        *stored_cases(),
    ]  # fmt: skip
