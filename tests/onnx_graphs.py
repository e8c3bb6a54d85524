"""Draws valid ONNX graphs by seed. ONNX Runtime decides what is valid: it runs each node as it is
added, and a node that it refuses is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx_runtime import run_onnxruntime

#: ONNX Runtime's own version of the file format
IR_VERSION = 10
#: opsets at which the meaning or the form of an operator changed
OPSETS = (7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21)
#: what is added to the seed of a graph that ONNX Runtime refuses as a whole
AGAIN = 1_000_000
#: values beyond this are not drawn further: differences of rounding would be all that is compared
LIMIT = 1e3

#: what ONNX Runtime raises for a node that is not valid, or that it does not have
REFUSALS = tuple(
    getattr(ort.capi.onnxruntime_pybind11_state, name)
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "NotImplemented", "RuntimeException")
)

Draw = Callable[["GraphDrawer"], "Node | None"]


@dataclass(frozen=True)
class Node:
    """An operator, its inputs (names of values, or arrays, which become constants; None is left
    out), the number of its outputs.
    """

    op: str
    inputs: tuple[str | np.ndarray | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


def make_model(nodes, inputs, outputs, constants, opset: int) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "drawn", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def describe(name: str, array: np.ndarray, batch: str | None = None) -> onnx.ValueInfoProto:
    """A value of the array's dtype and shape; the first dimension has the name `batch` if given."""
    shape = list(array.shape)
    if batch and shape:
        shape[0] = batch
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


class GraphDrawer:
    """A graph that grows by one node at a time, with the value of each tensor for one sample."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice(OPSETS))
        self.values: dict[str, np.ndarray] = {}
        self.inputs: dict[str, np.ndarray] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.read: set[str] = set()

    # -- draws -----------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        """From low to high, both of them."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def weights(self, *shape: int, scale: float = 0.5) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale).astype("float32")

    def value(self, *ranks: int, dtype: str = "float32") -> str | None:
        """A value of such a rank (any without ranks), rather a late one; None without any."""
        fits = [
            name
            for name, array in self.values.items()
            if array.dtype == dtype and (not ranks or array.ndim in ranks)
        ]
        if not fits:
            return None
        late = fits[-4:] if self.chance(0.7) else fits
        return self.pick(*late)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def axis(self, name: str) -> int:
        """An axis, counted from either end where the opset allows that."""
        rank = len(self.shape(name))
        axis = self.integer(0, rank - 1)
        return axis - rank if self.opset >= 11 and self.chance(0.5) else axis

    def like(self, name: str) -> str | np.ndarray:
        """A second operand: a value that has been computed and fits, or a constant that is
        repeated over some of the axes.
        """
        shape = self.shape(name)
        same = [n for n, a in self.values.items() if a.shape == shape and a.dtype == "float32"]
        if self.chance(0.6):
            return self.pick(*same)
        kept = [size if self.chance(0.5) else 1 for size in shape]
        return self.weights(*kept[self.integer(0, len(kept)) :], scale=1.0)

    # -- growth ----------------------------------------------------------------------------------

    def add_input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.values[name] = self.rng.standard_normal(shape).astype("float32")
        return name

    def add(self, node: Node | None) -> bool:
        """Whether ONNX Runtime takes the node and its results can be compared."""
        if node is None or any(
            i is not None and not isinstance(i, str | np.ndarray) for i in node.inputs
        ):
            return False
        number, arrays, names = len(self.nodes), {}, []
        for index, value in enumerate(node.inputs):
            name = value if isinstance(value, str) else f"c{number}_{index}"
            if isinstance(value, np.ndarray):
                arrays[name] = value
            names.append("" if value is None else name)
        outs = [f"v{number}" + (f"_{i}" if node.outputs > 1 else "") for i in range(node.outputs)]
        proto = helper.make_node(
            node.op, names, outs, name=f"{node.op.lower()}{number}", **node.attrs
        )
        feeds = {name: self.values[name] for name in names if name in self.values}
        constants = {name: numpy_helper.from_array(array, name) for name, array in arrays.items()}
        results = self.evaluate(proto, feeds, constants, outs)
        if results is None or self.is_unsteady(proto, feeds, constants, results):
            return False
        self.nodes.append(proto)
        self.constants |= constants
        self.values |= dict(zip(outs, results, strict=True))
        self.read.update(feeds)
        return True

    def evaluate(self, proto, feeds, constants, outs) -> list[np.ndarray] | None:
        unknown = [helper.make_empty_tensor_value_info(name) for name in outs]
        inputs = [describe(name, array) for name, array in feeds.items()]
        try:
            model = make_model([proto], inputs, unknown, constants.values(), self.opset)
            results = run_onnxruntime(model, feeds, rewrites=False)
        except REFUSALS:
            return None
        usable = all(
            isinstance(r, np.ndarray)
            and r.size
            and r.size < 20_000
            and (r.dtype.kind != "f" or (np.isfinite(r).all() and np.abs(r).max() < LIMIT))
            for r in results
        )
        return results if usable else None

    def is_unsteady(self, proto, feeds, constants, results) -> bool:
        """Whether rounding decides about the results: small changes of the inputs change them."""
        noise = np.random.default_rng(0)
        moved = {
            name: np.asarray(array + 1e-4 * noise.standard_normal(array.shape), "float32")
            if array.dtype == "float32"
            else array
            for name, array in feeds.items()
        }
        again = self.evaluate(proto, moved, constants, list(proto.output))
        return again is None or not all(
            np.allclose(a, b, rtol=1e-2, atol=1e-2) if a.dtype.kind == "f" else np.array_equal(a, b)
            for a, b in zip(results, again, strict=True)
        )

    def draw_larger(self) -> dict[str, np.ndarray]:
        """Other inputs: what `finish` gives a symbolic dimension has one row more."""
        size = self.values["x0"].shape[0]
        return {
            name: self.weights(
                array.shape[0] + (array.shape[0] == size), *array.shape[1:], scale=1.0
            )
            for name, array in self.inputs.items()
        }

    def finish(self, batch: str | None) -> onnx.ModelProto:
        """The model: what nothing reads are its outputs, and now and then what something reads."""
        size = self.values["x0"].shape[0]
        ends = [n for n in self.values if n not in self.read and n not in self.inputs]
        inner = [n for n in self.values if n in self.read and n not in self.inputs]
        if inner and self.chance(0.3):
            ends.append(self.pick(*inner))
        return make_model(
            self.nodes,
            [
                describe(name, array, batch if array.shape[0] == size else None)
                for name, array in self.inputs.items()
            ],
            [
                helper.make_tensor_value_info(
                    name,
                    helper.np_dtype_to_tensor_dtype(self.values[name].dtype),
                    [None] * self.values[name].ndim,
                )
                for name in ends
            ],
            self.constants.values(),
            self.opset,
        )


# -- what is drawn: a function for each kind of operator, of a drawer to a node or None ----------


def reads(*ranks: int) -> Callable[[Callable[[GraphDrawer, str], Node | None]], Draw]:
    """Decorator: draw the value of such a rank that the node reads first; no node without any."""

    def decorate(draw: Callable[[GraphDrawer, str], Node | None]) -> Draw:
        def draw_with_value(g: GraphDrawer) -> Node | None:
            x = g.value(*ranks)
            return None if x is None else draw(g, x)

        return draw_with_value

    return decorate


def draw_window(g: GraphDrawer, x: str, *, kernel: bool = True) -> dict[str, Any]:
    """Kernel, strides, dilations and padding of a convolution or pool over the axes from 2 on."""
    sizes = g.shape(x)[2:]
    window = [g.integer(1, min(4, size)) for size in sizes]
    attrs: dict[str, Any] = {"kernel_shape": window} if kernel else {}
    if g.chance(0.6):
        attrs["strides"] = [g.integer(1, 3) for _ in sizes]
    if g.chance(0.2):
        attrs["auto_pad"] = g.pick("SAME_UPPER", "SAME_LOWER", "VALID")
    elif g.chance(0.6):
        attrs["pads"] = [g.integer(0, max(0, k - 1)) for k in window * 2]
    return attrs


@reads(3, 4, 5)
def draw_conv(g: GraphDrawer, x: str) -> Node | None:
    channels, sizes = g.shape(x)[1], g.shape(x)[2:]
    groups = g.pick(1, 1, *(n for n in (2, 3, channels) if channels % n == 0))
    out = groups * g.integer(1, 4)
    attrs = draw_window(g, x)
    if g.chance(0.2):
        attrs["dilations"] = [g.integer(1, 2) for _ in sizes]
    weight = g.weights(out, channels // groups, *attrs["kernel_shape"])
    bias = g.weights(out) if g.chance(0.6) else None
    return Node("Conv", (x, weight, bias), attrs | {"group": groups})


@reads(3, 4)
def draw_conv_transpose(g: GraphDrawer, x: str) -> Node | None:
    channels = g.shape(x)[1]
    groups = g.pick(1, 1, *(n for n in (2, channels) if channels % n == 0))
    attrs = draw_window(g, x)
    out = g.integer(1, 3)
    if "strides" in attrs and "auto_pad" not in attrs and g.chance(0.4):
        attrs["output_padding"] = [g.integer(0, stride - 1) for stride in attrs["strides"]]
    weight = g.weights(channels, out, *attrs["kernel_shape"])
    bias = g.weights(out * groups) if g.chance(0.5) else None
    return Node("ConvTranspose", (x, weight, bias), attrs | {"group": groups})


@reads(3, 4, 5)
def draw_pool(g: GraphDrawer, x: str) -> Node | None:
    op = g.pick("MaxPool", "AveragePool", "AveragePool", "LpPool")
    attrs = draw_window(g, x)
    if g.opset >= 10 and op != "LpPool" and g.chance(0.4):
        attrs["ceil_mode"] = 1
    if op == "AveragePool" and g.chance(0.5):
        attrs["count_include_pad"] = 1
    if attrs.get("auto_pad", "").startswith("SAME"):
        # What a kernel smaller than the stride reads then is not the same in all tools.
        strides = attrs.get("strides", attrs["kernel_shape"])
        kernel = [max(pair) for pair in zip(attrs["kernel_shape"], strides, strict=True)]
        attrs["kernel_shape"] = kernel
    has_dilations = g.opset >= {"MaxPool": 10, "AveragePool": 19}.get(op, 99)
    # ONNX Runtime does not give the standard's size for dilations with auto_pad.
    if has_dilations and "auto_pad" not in attrs and g.chance(0.2):
        attrs["dilations"] = [g.integer(1, 2) for _ in g.shape(x)[2:]]
    if op == "LpPool" and g.chance(0.5):
        attrs["p"] = g.integer(1, 3)
    return Node(op, (x,), attrs)


def draw_global_pool(g: GraphDrawer) -> Node | None:
    op = g.pick("GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool")
    return Node(op, (g.value(3, 4, 5),))


@reads(3, 4, 2)
def draw_norm(g: GraphDrawer, x: str) -> Node | None:
    channels = g.shape(x)[1]
    op = g.pick("BatchNormalization", "BatchNormalization", "InstanceNormalization", "LRN")
    scale, bias = g.weights(channels, scale=1.0), g.weights(channels)
    if op == "LRN":
        return Node(op, (x,), {"size": g.pick(1, 3, 5), "alpha": 0.1, "beta": 0.5, "bias": 1.5})
    attrs = {"epsilon": g.pick(1e-5, 1e-2)}
    if op == "InstanceNormalization":
        return Node(op, (x, scale, bias), attrs)
    variance = np.abs(g.weights(channels)) + np.float32(0.2)
    return Node(op, (x, scale, bias, g.weights(channels), variance), attrs)


@reads(2, 3, 4)
def draw_layer_norm(g: GraphDrawer, x: str) -> Node | None:
    if g.opset < 17:
        return None
    axis = g.axis(x)
    kept = g.shape(x)[axis if axis >= 0 else len(g.shape(x)) + axis :]
    bias = g.weights(*kept) if g.chance(0.7) else None
    return Node("LayerNormalization", (x, g.weights(*kept, scale=1.0), bias), {"axis": axis})


@reads(2)
def draw_gemm(g: GraphDrawer, a: str) -> Node | None:
    trans_a, trans_b = g.pick(0, 0, 1), g.pick(0, 1)
    rows, depth = g.shape(a)[::-1] if trans_a else g.shape(a)
    columns = g.integer(1, 6)
    b = g.weights(*((columns, depth) if trans_b else (depth, columns)))
    form = g.pick((columns,), (1, columns), (rows, 1), (rows, columns), ())
    attrs: dict[str, Any] = {"transA": trans_a, "transB": trans_b}
    if g.chance(0.4):
        attrs |= {"alpha": g.pick(0.5, 2.0, -1.5), "beta": g.pick(0.5, 1.0, -2.0, 0.0)}
    bias = g.weights(*form) if g.chance(0.7) or g.opset < 11 else None
    return Node("Gemm", (a, b, bias), attrs)


@reads(1, 2, 3, 4)
def draw_matmul(g: GraphDrawer, a: str) -> Node | None:
    shape = g.shape(a)
    columns = g.integer(1, 6)
    form = g.pick("matrix", "matrix", "vector", "left", "values", "stack")
    if form == "vector":
        return Node("MatMul", (a, g.weights(shape[-1])))
    if form == "left" and len(shape) > 1:
        return Node("MatMul", (g.weights(columns, shape[-2]), a))
    if form == "stack" and len(shape) > 2:
        return Node("MatMul", (a, g.weights(*shape[:-2], shape[-1], columns)))
    if form == "values":
        fits = [
            name
            for name, array in g.values.items()
            if array.dtype == "float32" and array.ndim > 1 and array.shape[-2] == shape[-1]
        ]
        return Node("MatMul", (a, g.pick(*fits))) if fits else None
    return Node("MatMul", (a, g.weights(shape[-1], columns)))


@reads(3)
def draw_einsum(g: GraphDrawer, x: str) -> Node | None:
    if g.opset < 12:
        return None
    _, j, k = g.shape(x)
    equation, shape = g.pick(
        ("bjk,kl->bjl", (k, 3)), ("bjk,lj->blk", (2, j)), ("bjk,k->bj", (k,)),
        ("bjk,bkl->blj", (g.shape(x)[0], k, 2)), ("...jk,kl", (k, 2)),
    )  # fmt: skip
    return Node("Einsum", (x, g.weights(*shape)), {"equation": equation})


ARITHMETIC = ("Add", "Sub", "Mul", "Add", "Mul", "Div", "Max", "Min", "Sum", "Mean")


@reads()
def draw_arithmetic(g: GraphDrawer, x: str) -> Node | None:
    op, other = g.pick(*ARITHMETIC), g.like(x)
    if op == "Div" and isinstance(other, np.ndarray):
        other = np.sign(other) * (np.abs(other) + np.float32(0.3))
    if isinstance(other, np.ndarray) and op in ("Add", "Mul", "Sub") and g.chance(0.3):
        return Node(op, (other, x))
    if op in ("Max", "Min", "Sum", "Mean") and g.chance(0.3):
        return Node(op, (x, other, g.like(x)))
    return Node(op, (x, other))


UNARY = (
    "Relu", "Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Softplus", "Softsign", "Erf", "Floor",
    "Ceil", "Sin", "Cos", "Sign", "Identity", "HardSwish", "Mish", "Gelu",
)  # fmt: skip


def draw_unary(g: GraphDrawer) -> Node | None:
    return Node(g.pick(*UNARY), (g.value(),))


def draw_root(g: GraphDrawer) -> Node | None:
    """Of a value that is positive."""
    fits = [n for n, a in g.values.items() if a.dtype == "float32" and a.min() > 0.05]
    if not fits:
        return None
    x = g.pick(*fits)
    op = g.pick("Sqrt", "Log", "Reciprocal", "Pow")
    return Node(op, (x, np.float32(g.pick(0.5, 2.0, -1.0, 3.0))) if op == "Pow" else (x,))


@reads()
def draw_activation(g: GraphDrawer, x: str) -> Node | None:
    late = ("ThresholdedRelu",) if g.opset >= 10 else ()  # ONNX Runtime has it before ONNX does
    op = g.pick("LeakyRelu", "Elu", "Selu", "HardSigmoid", "Celu", "PRelu", *late)
    if op == "PRelu":
        shape = g.shape(x)
        whole = (1,) * min(len(shape), 1)
        slope = (shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 1 and g.chance(0.7) else whole
        return Node(op, (x, g.weights(*slope)))
    if op == "Selu" or g.chance(0.3):
        return Node(op, (x,))
    attrs = {"alpha": g.pick(0.1, 0.3, 1.5)}
    if op == "HardSigmoid":
        attrs["beta"] = g.pick(0.2, 0.5)
    return Node(op, (x,), attrs)


def draw_clip(g: GraphDrawer) -> Node | None:
    low, high = g.pick((0.0, 6.0), (-1.0, 1.0), (-0.5, None), (None, 0.7), (0.2, 0.4))
    if g.opset < 11:
        attrs = {k: v for k, v in (("min", low), ("max", high)) if v is not None}
        return Node("Clip", (g.value(),), attrs)
    bounds = (None if bound is None else np.float32(bound) for bound in (low, high))
    return Node("Clip", (g.value(), *(None if b is None else np.array(b) for b in bounds)))


@reads(1, 2, 3, 4)
def draw_softmax(g: GraphDrawer, x: str) -> Node | None:
    attrs = {"axis": g.axis(x)} if g.chance(0.7) else {}
    return Node(g.pick("Softmax", "Softmax", "LogSoftmax"), (x,), attrs)


REDUCTIONS = (
    "ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSumExp", "ReduceProd",
)  # fmt: skip


@reads(1, 2, 3, 4, 5)
def draw_reduction(g: GraphDrawer, x: str) -> Node | None:
    op, rank = g.pick(*REDUCTIONS), len(g.shape(x))
    axes = sorted(g.rng.choice(rank, g.integer(1, rank), replace=False))
    axes = [int(axis) - (rank if g.opset >= 11 and g.chance(0.3) else 0) for axis in axes]
    attrs: dict[str, Any] = {"keepdims": g.pick(0, 1)}
    as_input = g.opset >= (13 if op == "ReduceSum" else 18)
    if g.chance(0.15):
        return Node(op, (x,), attrs)
    if as_input:
        return Node(op, (x, np.array(axes, "int64")), attrs)
    return Node(op, (x,), attrs | {"axes": axes})


@reads(1, 2, 3, 4)
def draw_arg(g: GraphDrawer, x: str) -> Node | None:
    attrs = {"axis": g.axis(x), "keepdims": g.pick(0, 1)}
    return Node(g.pick("ArgMax", "ArgMin"), (x,), attrs)


@reads(2, 3, 4, 5)
def draw_transpose(g: GraphDrawer, x: str) -> Node | None:
    perm = [int(axis) for axis in g.rng.permutation(len(g.shape(x)))]
    return Node("Transpose", (x,), {"perm": perm} if g.chance(0.8) else {})


@reads(1, 2, 3, 4, 5)
def draw_reshape(g: GraphDrawer, x: str) -> Node | None:
    shape = list(g.shape(x))
    form = g.pick("merge", "split", "flat", "copy", "flatten")
    if form == "flatten":
        return Node("Flatten", (x,), {"axis": g.axis(x)} if g.chance(0.6) else {})
    if form == "merge" and len(shape) > 1:
        at = g.integer(0, len(shape) - 2)
        target = [*shape[:at], -1, *shape[at + 2 :]]
    elif form == "split":
        at = g.integer(0, len(shape) - 1)
        parts = [n for n in (2, 3, 4) if shape[at] % n == 0]
        if not parts:
            return None
        part = g.pick(*parts)
        target = [*shape[:at], part, shape[at] // part, *shape[at + 1 :]]
    elif form == "copy" and len(shape) > 1:
        target = [0, -1]
    else:
        target = [-1]
    return Node("Reshape", (x, np.array(target, "int64")))


@reads(1, 2, 3, 4)
def draw_squeeze(g: GraphDrawer, x: str) -> Node | None:
    ones = [axis for axis, size in enumerate(g.shape(x)) if size == 1]
    if g.chance(0.4) and ones and len(g.shape(x)) > 1:
        op, axes = "Squeeze", [g.pick(*ones)]
    else:
        op, axes = "Unsqueeze", [g.integer(0, len(g.shape(x)))]
    if g.opset >= 11 and g.chance(0.3):
        axes = [axis - len(g.shape(x)) - (op == "Unsqueeze") for axis in axes]
    if g.opset < 13:
        return Node(op, (x,), {"axes": axes})
    return Node(op, (x, np.array(axes, "int64")))


@reads(1, 2, 3, 4)
def draw_concat(g: GraphDrawer, x: str) -> Node | None:
    axis = g.axis(x)
    shape = g.shape(x)
    place = axis % len(shape)
    fits = [
        name
        for name, array in g.values.items()
        if array.dtype == "float32"
        and array.ndim == len(shape)
        and all(
            a == b for i, (a, b) in enumerate(zip(array.shape, shape, strict=True)) if i != place
        )
    ]
    parts: list[str | np.ndarray] = [g.pick(*fits) for _ in range(g.integer(1, 2))]
    if g.chance(0.3):
        size = list(shape)
        size[place] = g.integer(1, 2)
        parts.append(g.weights(*size))
    return Node("Concat", (x, *parts), {"axis": axis})


@reads(1, 2, 3, 4)
def draw_split(g: GraphDrawer, x: str) -> Node | None:
    axis = g.axis(x)
    size = g.shape(x)[axis]
    if size < 2:
        return None
    first = g.integer(1, size - 1)
    if g.opset < 13:
        return Node("Split", (x,), {"axis": axis, "split": [first, size - first]}, outputs=2)
    return Node("Split", (x, np.array([first, size - first], "int64")), {"axis": axis}, outputs=2)


@reads(1, 2, 3, 4)
def draw_slice(g: GraphDrawer, x: str) -> Node | None:
    axis = g.axis(x)
    size = g.shape(x)[axis]
    start = g.integer(-size, size - 1)
    end = g.pick(size, 2**31 - 1, g.integer(-size, size))
    if g.opset < 10:
        axis %= len(g.shape(x))
        return Node("Slice", (x,), {"axes": [axis], "starts": [start], "ends": [end]})
    step = g.pick(1, 1, 2, -1)
    if step < 0:
        start, end = g.pick((-1, -size - 1), (size - 1, 0), (2**31 - 1, -(2**31)))
    return Node("Slice", (x, *(np.array([v], "int64") for v in (start, end, axis, step))))


@reads(2, 3, 4)
def draw_pad(g: GraphDrawer, x: str) -> Node | None:
    mode = g.pick("constant", "constant", "reflect", "edge")
    rank = len(g.shape(x))
    low = -1 if mode == "constant" and g.chance(0.2) else 0
    pads = [g.integer(low, 2) if g.chance(0.5) else 0 for _ in range(rank * 2)]
    value = g.pick(0.0, 0.0, 0.3, -5.0)
    if g.opset < 11:
        return Node("Pad", (x,), {"mode": mode, "pads": pads, "value": value})
    constant = np.array(value, "float32") if mode == "constant" and g.chance(0.7) else None
    return Node("Pad", (x, np.array(pads, "int64"), constant), {"mode": mode})


@reads(1, 2, 3, 4)
def draw_gather(g: GraphDrawer, x: str) -> Node | None:
    axis, shape = g.axis(x), g.shape(x)
    size = shape[axis]
    low = -size if g.opset >= 11 else 0
    if g.chance(0.3) and g.opset >= 11:
        index = g.rng.integers(low, size, shape)
        return Node("GatherElements", (x, index), {"axis": axis})
    form = g.pick((), (2,), (1, 2))
    return Node("Gather", (x, np.asarray(g.rng.integers(low, size, form))), {"axis": axis})


@reads(2, 3)
def draw_gather_nd(g: GraphDrawer, x: str) -> Node | None:
    if g.opset < 11:
        return None
    depth = g.integer(1, len(g.shape(x)))
    index = np.stack([g.rng.integers(0, size, (2,)) for size in g.shape(x)[:depth]], axis=-1)
    return Node("GatherND", (x, index))


@reads(1, 2, 3, 4)
def draw_expand(g: GraphDrawer, x: str) -> Node | None:
    shape = g.shape(x)
    if g.chance(0.5):
        return Node("Tile", (x, np.array([g.integer(1, 2) for _ in shape], "int64")))
    target = [g.integer(1, 3) if size == 1 else g.pick(1, size) for size in shape]
    return Node("Expand", (x, np.array([*([2] if g.chance(0.3) else []), *target], "int64")))


@reads(3, 4)
def draw_resize(g: GraphDrawer, x: str) -> Node | None:
    if g.opset < 11:
        return None
    rank = len(g.shape(x))
    mode = g.pick("nearest", "linear", "cubic" if rank == 4 else "nearest")
    coordinates = g.pick("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        attrs["nearest_mode"] = g.pick("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    if mode == "cubic" and g.chance(0.5):
        attrs["cubic_coeff_a"] = -0.5
    roi = np.zeros(0, "float32") if g.opset < 13 else None
    if g.chance(0.5):
        # ONNX Runtime rounds the length that align_corners divides by, the standard does not.
        factors = (2.0,) if coordinates == "align_corners" else (2.0, 0.5, 1.5)
        scales = np.array([1, 1, *(g.pick(*factors) for _ in range(rank - 2))], "float32")
        return Node("Resize", (x, roi, scales), attrs)
    # One element of pytorch_half_pixel lies at 0 - 0.5 by the standard, at 0 to ONNX Runtime.
    least = 2 if coordinates == "pytorch_half_pixel" else 1
    # ONNX Runtime rounds other quotients of sizes, and takes another element for the nearest one.
    sizes = [
        size * g.integer(1, 2) if mode == "nearest" else g.integer(least, 7)
        for size in g.shape(x)[2:]
    ]
    sizes = [*g.shape(x)[:2], *sizes]
    none = np.zeros(0, "float32") if g.opset < 13 else None
    return Node("Resize", (x, roi, none, np.array(sizes, "int64")), attrs)


@reads(4)
def draw_depth_space(g: GraphDrawer, x: str) -> Node | None:
    if g.chance(0.5) and g.shape(x)[1] % 4 == 0:
        attrs: dict[str, Any] = {"blocksize": 2}
        if g.opset >= 11:
            attrs["mode"] = g.pick("DCR", "CRD")
        return Node("DepthToSpace", (x,), attrs)
    return Node("SpaceToDepth", (x,), {"blocksize": 2})


def draw_where(g: GraphDrawer) -> Node | None:
    """A comparison, or a choice by one that there is."""
    condition = g.value(dtype="bool")
    if condition is None or g.chance(0.4):
        x = g.value()
        if x is None:
            return None
        op = g.pick("Greater", "Less", *(("GreaterOrEqual", "LessOrEqual") if g.opset > 11 else ()))
        return Node(op, (x, g.pick(np.array(0.1, "float32"), g.like(x))))
    if g.chance(0.2):
        return Node("Not", (condition,))
    fits = [
        n for n, a in g.values.items() if a.dtype == "float32" and a.shape == g.shape(condition)
    ]
    if not fits:
        return None
    x = g.pick(*fits)
    other = g.pick(np.array(-1.5, "float32"), g.like(x))
    return Node("Where", (condition, *g.pick((x, other), (other, x))))


def draw_cast(g: GraphDrawer) -> Node | None:
    x = g.value(dtype=g.pick("float32", "int64", "bool", "int32"))
    to = g.pick(TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64)
    return Node("Cast", (x,), {"to": to})


def draw_shape(g: GraphDrawer) -> Node | None:
    """Arithmetic on sizes, as exporters write it."""
    sizes = g.value(1, dtype="int64")
    if sizes is None or g.chance(0.5):
        x = g.value(2, 3, 4)
        attrs = {"start": g.integer(0, 1)} if g.opset >= 15 and g.chance(0.4) else {}
        return Node("Shape", (x,), attrs)
    form = g.pick("gather", "scale", "concat", "float")
    if form == "gather":
        at = np.array([g.integer(0, len(g.values[sizes]) - 1)], "int64")
        return Node("Gather", (sizes, at), {"axis": 0})
    if form == "concat":
        return Node("Concat", (sizes, np.array([g.integer(1, 3)], "int64")), {"axis": 0})
    if form == "float":
        return Node("Cast", (sizes,), {"to": TensorProto.FLOAT})
    return Node(g.pick("Add", "Mul", "Div"), (sizes, np.array([2], "int64")))


def draw_sizes(g: GraphDrawer) -> Node | None:
    """An operator whose result has the shape that sizes computed in the graph say."""
    fits = [
        n
        for n, a in g.values.items()
        if a.dtype == "int64" and a.ndim == 1 and 0 < len(a) < 5 and a.min() > 0 and a.prod() < 9000
    ]
    if not fits:
        return None
    sizes = g.pick(*fits)
    volume = int(g.values[sizes].prod())
    same = [n for n, a in g.values.items() if a.dtype == "float32" and a.size == volume]
    if same and g.chance(0.5):
        return Node("Reshape", (g.pick(*same), sizes))
    if g.chance(0.5):
        return Node("Expand", (g.weights(1), sizes))
    value = numpy_helper.from_array(np.array([0.5], "float32"))
    return Node("ConstantOfShape", (sizes,), {"value": value})


@reads(1, 2, 3)
def draw_sort(g: GraphDrawer, x: str) -> Node | None:
    op, axis = g.pick("TopK", "CumSum", "OneHot"), g.axis(x)
    if op == "TopK":
        count = np.array([g.integer(1, g.shape(x)[axis])], "int64")
        attrs = {"axis": axis} | ({"largest": g.pick(0, 1)} if g.opset >= 11 else {})
        return Node(op, (x, count), attrs, outputs=2)
    if op == "CumSum":
        attrs = {"exclusive": g.pick(0, 1), "reverse": g.pick(0, 1)}
        return Node(op, (x, np.array(axis, "int64")), attrs) if g.opset >= 11 else None
    indices = g.value(1, 2, dtype="int64")
    depth, levels = np.array(4, "int64"), np.array([-1, 2], "float32")
    return Node(op, (indices, depth, levels), {"axis": g.pick(-1, 0)})


@reads(3)
def draw_recurrent(g: GraphDrawer, x: str) -> Node | None:
    if max(g.shape(x)) > 12:
        return None
    op, direction = g.pick("LSTM", "GRU", "RNN"), g.pick("forward", "reverse", "bidirectional")
    _, batch, size = g.shape(x)
    ways, gates, hidden = 1 + (direction == "bidirectional"), GATES[op], g.integer(1, 6)
    weights = [g.weights(ways, gates * hidden, width) for width in (size, hidden)]
    bias = g.weights(ways, 2 * gates * hidden) if g.chance(0.7) else None
    start = (None, g.weights(ways, batch, hidden)) if g.chance(0.4) else ()
    attrs = {"hidden_size": hidden, "direction": direction}
    if op == "GRU" and g.chance(0.5):
        attrs["linear_before_reset"] = 1
    return Node(op, (x, *weights, bias, *start), attrs, outputs=g.pick(1, 2))


#: recurrent operator -> number of its gates
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: kind -> how often it is drawn
DRAWS: dict[Draw, int] = {
    draw_conv: 10, draw_conv_transpose: 2, draw_pool: 5, draw_global_pool: 1, draw_norm: 4,
    draw_layer_norm: 2, draw_gemm: 6, draw_matmul: 6, draw_einsum: 2, draw_arithmetic: 12,
    draw_unary: 8, draw_root: 1, draw_activation: 4, draw_clip: 3, draw_softmax: 2,
    draw_reduction: 4, draw_arg: 1, draw_transpose: 4, draw_reshape: 5, draw_squeeze: 3,
    draw_concat: 4, draw_split: 2, draw_slice: 3, draw_pad: 3, draw_gather: 3, draw_gather_nd: 1,
    draw_expand: 2, draw_resize: 2, draw_depth_space: 1, draw_where: 3, draw_cast: 2,
    draw_shape: 3, draw_sizes: 2, draw_sort: 2, draw_recurrent: 3,
}  # fmt: skip


def draw_graph(seed: int) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A graph of 4 to 14 operators and samples of its inputs; the same for the same seed.

    In a half of the graphs the first dimension of the inputs is symbolic if ONNX Runtime runs the
    graph with another size too, without NaN: the second sample has one row more.
    """
    g = GraphDrawer(seed)
    shapes = [(2, 4, 7, 6), (2, 3, 8), (2, 6), (1, 4, 9, 9), (2, 5, 4), (2, 2, 4, 5, 6), (3, 8)]
    for _ in range(g.integer(1, 2)):
        g.add_input(*g.pick(*shapes))
    kinds = [kind for kind, share in DRAWS.items() for _ in range(share)]
    wanted = g.integer(4, 14)
    for _ in range(wanted * 6):
        if len(g.nodes) == wanted:
            break
        g.add(g.pick(*kinds)(g))
    model = g.finish(None)
    try:
        run_onnxruntime(model, g.inputs, rewrites=False)
    except REFUSALS:  # nodes that are valid alone, not together
        return draw_graph(seed + AGAIN)
    if g.chance(0.5):
        symbolic, larger = g.finish("batch"), g.draw_larger()
        try:
            results = run_onnxruntime(symbolic, larger, rewrites=False)
        except REFUSALS:
            return model, [g.inputs]
        if all(result.size and np.isfinite(result).all() for result in results):
            return symbolic, [g.inputs, larger]
    return model, [g.inputs]
