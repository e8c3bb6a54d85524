"""Builds small float models for tests of the stages, with exact names and constants by seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax

import relayquant as rq

MAP = (1, 4, 6, 6)


class Chain:
    """Emits operators under exact names into the model that is being built."""

    def __init__(self, seed: int = 0) -> None:
        self.builder = relax.BlockBuilder()
        self.rng = np.random.default_rng(seed)

    def __call__(self, name: str, expr: relax.Expr) -> relax.Var:
        value = self.builder.normalize(expr)
        var = relax.DataflowVar(name, value.ty)
        self.builder.emit_normalized(relax.VarBinding(var, value))
        return var

    def constant(self, *shape: int, scale: float = 0.5) -> relax.Expr:
        return relax.const((self.rng.standard_normal(shape) * scale).astype("float32"))

    def conv(self, name: str, x: relax.Expr, channels: int = 4, **attrs) -> relax.Var:
        """A 3x3 convolution that keeps the map's size."""
        inputs = int(x.ty.shape.values[1]) // attrs.get("groups", 1)
        weight = self.constant(channels, inputs, 3, 3)
        return self(name, relax.op.nn.conv2d(x, weight, padding=1, **attrs))

    def conv_bias(self, name: str, x: relax.Expr, channels: int = 4, **attrs) -> relax.Var:
        """A convolution "<name>.conv" and its bias."""
        conv = self.conv(f"{name}.conv", x, channels, **attrs)
        return self(name, relax.op.add(conv, self.constant(1, channels, 1, 1)))

    def dense(self, name: str, x: relax.Expr, units: int) -> relax.Var:
        return self(name, relax.op.matmul(x, self.constant(int(x.ty.shape.values[-1]), units)))


def as_main(body: Callable[..., relax.Expr | tuple[relax.Expr, ...]]) -> tvm.IRModule:
    """Decorator: the module whose main is `body`, one dataflow block; annotations are its types.
    A body may return a tuple of results.
    """
    types = inspect.get_annotations(body, eval_str=True)
    sizes = {
        size: tvm.tirx.Var(size, "int64")
        for of in types.values()
        for size in of.get_symbolic_vars()
    }
    params = [relax.Var(name, of.as_ty(sizes)) for name, of in types.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            found = body(*params)
            results = found if isinstance(found, tuple) else (found,)
            outputs = [builder.emit_output(each) for each in results]
        builder.emit_func_output(relax.Tuple(outputs) if isinstance(found, tuple) else outputs[0])
    return builder.finalize()


def build_model(
    body: Callable[..., relax.Expr],
    *shapes: tuple[int | str, ...],
    dtype: str = "float32",
    seed: int = 0,
) -> tvm.IRModule:
    """main(x, y, z) with what `body(emit, x, y, z)` emits; a dimension "n" is symbolic."""
    emit = Chain(seed)
    symbols: dict[str, tvm.tirx.Var] = {}

    def dim(size: int | str):
        if isinstance(size, int):
            return size
        return symbols.setdefault(size, tvm.tirx.Var(size, "int64"))

    params = [
        relax.Var(name, relax.TensorType([dim(size) for size in shape], dtype))
        for name, shape in zip("xyz", shapes, strict=False)
    ]
    with emit.builder.function("main", params):
        with emit.builder.dataflow():
            out = emit.builder.emit_output(body(emit, *params))
        emit.builder.emit_func_output(out)
    return emit.builder.finalize()


def draw_batches(mod: tvm.IRModule, count: int, *, seed: int = 0, n: int = 1) -> list[dict]:
    """`count` batches of normal values for the inputs of main; symbolic dimensions are `n`."""
    rng = np.random.default_rng(seed)

    def draw(param: relax.Var) -> np.ndarray:
        sizes = [dim.value if hasattr(dim, "value") else n for dim in param.ty.shape.values]
        return rng.standard_normal([int(size) for size in sizes]).astype("float32")

    return [{param.name: draw(param) for param in mod["main"].params} for _ in range(count)]


def residual_model() -> tvm.IRModule:
    """Two residual blocks, a diamond of pools, concat, mean, dense: every kind of operator."""

    def body(emit: Chain, x):
        op = relax.op
        stem = emit("stem", op.nn.relu(emit.conv_bias("stem.b", x)))
        one = emit("one", op.nn.relu(emit("one.s", op.add(emit.conv_bias("one.b", stem), stem))))
        two = emit("two", op.add(one, emit.conv_bias("two.b", one)))
        left = emit("left", op.nn.max_pool2d(two, (2, 2), (2, 2)))
        right = emit("right", op.nn.avg_pool2d(two, (2, 2), (2, 2)))
        both = emit("both", op.concat([left, right], axis=1))
        deep = emit("deep", op.clip(emit.conv("deep.c", both, 8, groups=8), 0, 6))
        mean = emit("mean", op.mean(deep, [2, 3], keepdims=True))
        flat = emit("flat", op.reshape(mean, (1, 8)))
        return emit("out", op.add(emit.dense("out.m", flat, 3), emit.constant(3)))

    return build_model(body, MAP)


def ask_for(*names: str) -> rq.QConfigMapping:
    """A mapping that asks for integers in operators that would leave sums of products exact."""
    qconfig = rq.get_backend_config("generic").default_qconfig
    mapping = rq.QConfigMapping().set_global(qconfig)
    for name in names:
        mapping = mapping.set_object_type(name, qconfig)
    return mapping
