"""Draws small float models with branches, residuals, shared weights and several outputs, and
configurations for them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.isa.select import has_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.kernels.isa.x86 import AVX2, SSE2, VNNI512

#: this machine, and those of other CPUs that it can run too
TARGETS = (
    None,
    *(
        f"llvm -mcpu={cpu}"
        for cpu, isa in (("x86-64", SSE2), ("haswell", AVX2), ("cascadelake", VNNI512))
        if has_isa(isa, resolve_target())
    ),
)

#: operators that keep a feature map's shape or take it whole; drawn by name
MAP_OPS = (
    "conv", "conv_bias", "conv_relu", "conv_clip", "depthwise", "grouped", "strided", "shared_conv",
    "add", "add_relu", "subtract", "multiply", "scale", "shift", "concat", "concat_self", "relu",
    "clip", "max_pool", "avg_pool", "pad", "slice", "transpose_back", "sigmoid", "leaky_relu",
    "residual", "residual_swapped",
)  # fmt: skip
#: more of them, with attributes, ranks and dtypes that those above do not draw
WIDE_OPS = (
    "conv_any", "conv_any", "conv_transpose", "conv1d", "pool_any", "attention", "softmax", "gelu",
    "exp", "prelu", "mean_channels", "half", "abs", "concat_three", "divide",
)  # fmt: skip
VECTOR_OPS = ("dense", "dense_bias", "dense_relu", "add", "relu", "tanh", "concat", "shared_dense")


class GraphBuilder:
    """Emits named operators into one dataflow block and remembers every value."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = relax.BlockBuilder()
        self.count = 0
        self.shared: dict[tuple[int, ...], relax.Expr] = {}

    def constant(self, *shape: int, scale: float = 0.5) -> relax.Expr:
        return relax.const((self.rng.standard_normal(shape) * scale).astype("float32"))

    def shared_constant(self, *shape: int) -> relax.Expr:
        if shape not in self.shared:
            self.shared[shape] = self.constant(*shape)
        return self.shared[shape]

    def emit(self, expr: relax.Expr, hint: str) -> relax.Var:
        value = self.builder.normalize(expr)
        var = relax.DataflowVar(f"{hint}{self.count}", value.ty)
        self.count += 1
        self.builder.emit_normalized(relax.VarBinding(var, value))
        return var


def shape_of(value: relax.Expr) -> tuple[int | tvm.tirx.Var, ...]:
    """Sizes; a symbolic dimension is its variable."""
    dims = value.ty.shape.values
    return tuple(dim if isinstance(dim, tvm.tirx.Var) else int(dim) for dim in dims)


def apply_map_op(g: GraphBuilder, op: str, x: relax.Var, other: relax.Var | None) -> relax.Var:
    """One operator on a feature map NCHW; `other` is a value of the same shape."""
    _, c, h, w = shape_of(x)
    conv = relax.op.nn.conv2d
    if op.startswith("conv") and not op.startswith("concat"):
        kernel = 3 if min(h, w) > 1 else 1
        out = int(g.rng.integers(1, 6))
        weight = g.constant(out, c, kernel, kernel)
        y = g.emit(conv(x, weight, padding=kernel // 2), "conv")
        if op == "conv":
            return y
        y = g.emit(relax.op.add(y, g.constant(1, out, 1, 1)), "bias")
        if op == "conv_relu":
            return g.emit(relax.op.nn.relu(y), "relu")
        if op == "conv_clip":
            return g.emit(relax.op.clip(y, 0.0, float(g.rng.uniform(0.3, 6))), "clip")
        return y
    if op == "depthwise":
        return g.emit(conv(x, g.constant(c, 1, 3, 3), padding=1, groups=c), "depthwise")
    if op == "grouped" and c % 2 == 0:
        return g.emit(conv(x, g.constant(4, c // 2, 1, 1), groups=2), "grouped")
    if op == "strided":
        return g.emit(conv(x, g.constant(3, c, 2, 2), strides=2, padding=1), "strided")
    if op == "shared_conv":
        return g.emit(conv(x, g.shared_constant(c, c, 3, 3), padding=1), "shared")
    if op in ("residual", "residual_swapped") and other is not None:
        y = g.emit(conv(x, g.constant(c, c, 3, 3), padding=1), "conv")
        y = g.emit(relax.op.add(y, g.constant(1, c, 1, 1)), "bias")
        pair = (y, other) if op == "residual" else (other, y)
        return g.emit(relax.op.nn.relu(g.emit(relax.op.add(*pair), "sum")), "relu")
    if op in ("add", "add_relu", "subtract", "multiply") and other is not None:
        call = {"subtract": relax.op.subtract, "multiply": relax.op.multiply}.get(op, relax.op.add)
        y = g.emit(call(x, other), op)
        return g.emit(relax.op.nn.relu(y), "relu") if op == "add_relu" else y
    if op == "scale":
        return g.emit(relax.op.multiply(x, g.constant(1, c, 1, 1)), "scale")
    if op == "shift":
        return g.emit(relax.op.subtract(g.constant(1, c, 1, 1), x), "shift")
    if op == "concat" and other is not None and c <= 6:
        return g.emit(relax.op.concat([x, other], axis=1), "concat")
    if op == "concat_self" and h <= 9:
        return g.emit(relax.op.concat([x, x], axis=2), "concat")
    if op == "clip":
        return g.emit(relax.op.clip(x, -0.7, float(g.rng.uniform(0.1, 3))), "clip")
    if op == "max_pool" and min(h, w) >= 2:
        return g.emit(relax.op.nn.max_pool2d(x, (2, 2), strides=(2, 2), padding=(1, 1)), "pool")
    if op == "avg_pool" and min(h, w) >= 2:
        return g.emit(relax.op.nn.avg_pool2d(x, (2, 2), padding=(1, 1)), "pool")
    if op == "pad" and h <= 9:
        value = float(g.rng.choice([0.0, 0.3]))
        return g.emit(relax.op.nn.pad(x, [0, 0, 0, 0, 1, 0, 0, 1], "constant", value), "pad")
    if op == "slice" and min(h, w) >= 3:
        return g.emit(relax.op.strided_slice(x, [2, 3], [0, 1], [h, w], [2, 1]), "slice")
    if op == "transpose_back":
        y = g.emit(relax.op.permute_dims(x, [0, 2, 3, 1]), "nhwc")
        return g.emit(relax.op.permute_dims(y, [0, 3, 1, 2]), "nchw")
    if op == "sigmoid":
        return g.emit(relax.op.sigmoid(x), "sigmoid")
    if op == "leaky_relu":
        return g.emit(relax.op.nn.leakyrelu(x, 0.1), "leaky")
    return g.emit(relax.op.nn.relu(x), "relu")


def apply_wide_op(g: GraphBuilder, op: str, x: relax.Var) -> relax.Var:
    """One of WIDE_OPS on a feature map NCHW; relu where the map is too small for it."""
    n, c, h, w = shape_of(x)
    nn, draw = relax.op.nn, lambda low, high: int(g.rng.integers(low, high + 1))
    if op == "conv_any":
        kernel = [draw(1, min(4, h + 1)), draw(1, min(4, w + 1))]
        groups = int(g.rng.choice([k for k in range(1, c + 1) if c % k == 0]))
        y = nn.conv2d(
            x,
            g.constant(groups * draw(1, 9), c // groups, *kernel),
            strides=[draw(1, 3), draw(1, 3)],
            padding=[draw(0, 2), draw(0, 2), draw(1, 2), draw(1, 2)],
            dilation=[draw(1, 2) if kernel[0] * 2 <= h else 1, 1],
            groups=groups,
        )
        return g.emit(y, "any")
    if op == "conv_transpose" and h <= 9:
        strides = [draw(1, 2), draw(1, 2)]
        weight = g.constant(c, draw(1, 4), 2, 3)
        y = nn.conv2d_transpose(
            x, weight, strides=strides, padding=[0, draw(0, 1)], output_padding=[strides[0] - 1, 0]
        )
        return g.emit(y, "transposed")
    if op == "conv1d" and h * w >= 3:
        rows = g.emit(relax.op.reshape(x, (n, c, h * w)), "rows")
        y = nn.conv1d(rows, g.constant(c, c, 3), padding=[draw(0, 2), 2], dilation=2, strides=1)
        y = g.emit(y, "conv1d")
        return g.emit(relax.op.expand_dims(y, [2]), "map")
    if op == "pool_any" and min(h, w) >= 3:
        call = nn.max_pool2d if draw(0, 1) else nn.avg_pool2d
        window = (draw(2, 3), draw(1, 3))
        more = {} if call is nn.max_pool2d else {"count_include_pad": bool(draw(0, 1))}
        y = call(
            x,
            window,
            strides=(draw(1, 3), draw(1, 2)),
            # A window of padding alone has no value: -inf or 0/0, and PyTorch and ONNX refuse it.
            padding=(0, draw(0, min(1, window[1] - 1)), draw(0, 1), 0),
            ceil_mode=bool(draw(0, 1)),
            **more,
        )
        return g.emit(y, "pool")
    if op == "attention":
        rows = g.emit(relax.op.reshape(x, (n, c, h * w)), "rows")
        turned = g.emit(relax.op.permute_dims(rows, [0, 2, 1]), "turned")
        y = g.emit(relax.op.matmul(g.emit(relax.op.matmul(rows, turned), "scores"), rows), "mixed")
        return g.emit(relax.op.reshape(y, (n, c, h, w)), "map")
    if op == "mean_channels":
        y = g.emit(relax.op.mean(x, [1], keepdims=True), "mean")
        return g.emit(relax.op.subtract(x, y), "centred")
    if op == "half":
        # An operator that rounds nothing: numpy and LLVM need not round every float16 alike.
        y = g.emit(relax.op.nn.relu(g.emit(relax.op.astype(x, "float16"), "half")), "relu")
        return g.emit(relax.op.astype(y, "float32"), "whole")
    if op == "prelu":
        return g.emit(nn.prelu(x, g.constant(c), axis=1), "prelu")
    if op == "softmax":
        return g.emit(nn.softmax(x, axis=draw(1, 3)), "softmax")
    if op == "exp":
        return g.emit(relax.op.exp(g.emit(relax.op.clip(x, -4, 2), "clip")), "exp")
    if op == "divide":
        return g.emit(relax.op.divide(x, relax.const(np.float32(g.rng.uniform(0.5, 7)))), "divide")
    if op == "concat_three" and c <= 4:
        return g.emit(relax.op.concat([x, g.emit(nn.relu(x), "relu"), x], axis=1), "concat")
    unary = {"gelu": nn.gelu, "abs": relax.op.abs}.get(op, nn.relu)
    return g.emit(unary(x), op if op in ("gelu", "abs") else "relu")


def apply_vector_op(g: GraphBuilder, op: str, x: relax.Var, other: relax.Var | None) -> relax.Var:
    """One operator on a matrix (batch, features)."""
    _, k = shape_of(x)
    if op.startswith("dense"):
        units = int(g.rng.integers(1, 8))
        y = g.emit(relax.op.matmul(x, g.constant(k, units)), "dense")
        if op == "dense":
            return y
        y = g.emit(relax.op.add(y, g.constant(units)), "bias")
        return g.emit(relax.op.nn.relu(y), "relu") if op == "dense_relu" else y
    if op == "shared_dense":
        return g.emit(relax.op.matmul(x, g.shared_constant(k, k)), "shared")
    if op == "add" and other is not None:
        return g.emit(relax.op.add(other, x), "add")
    if op == "concat" and other is not None and k < 30:
        return g.emit(relax.op.concat([x, other], axis=1), "concat")
    if op == "tanh":
        return g.emit(relax.op.tanh(x), "tanh")
    return g.emit(relax.op.nn.relu(x), "relu")


def close_map(g: GraphBuilder, how: str, x: relax.Var) -> relax.Var:
    """Feature map -> matrix."""
    n, c, h, w = shape_of(x)
    if how == "mean":
        x = g.emit(relax.op.mean(x, [2, 3], keepdims=True), "mean")
        return g.emit(relax.op.squeeze(x, [2, 3]), "flat")
    return g.emit(relax.op.reshape(x, (n, c * h * w)), "flat")


@st.composite
def draw_models(draw: st.DrawFn, *, wide: bool = False, symbolic: bool = False) -> tvm.IRModule:
    """A float module main(x) or main(x, y) -> one value or a tuple; maps NCHW of odd sizes.

    With `wide` of more operators and up to 40 channels, with `symbolic` for every batch "n".
    """
    g = GraphBuilder(draw(st.integers(0, 2**16)))
    n, c = draw(st.integers(1, 2)), draw(st.integers(1, 40 if wide else 5))
    n = tvm.tirx.Var("n", "int64") if symbolic else n
    h, w = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    inputs = draw(st.integers(1, 2))
    params = [
        relax.Var(name, relax.TensorType((n, c, h, w), "float32")) for name in ("x", "y")[:inputs]
    ]
    with g.builder.function("main", params):
        with g.builder.dataflow():
            maps, vectors = list(params), []
            for _ in range(draw(st.integers(2, 9))):
                x = draw(st.sampled_from(maps[-3:]))
                if wide and draw(st.booleans()):
                    maps.append(apply_wide_op(g, draw(st.sampled_from(WIDE_OPS)), x))
                    continue
                same = [v for v in maps if shape_of(v) == shape_of(x)]
                maps.append(
                    apply_map_op(g, draw(st.sampled_from(MAP_OPS)), x, draw(st.sampled_from(same)))
                )
            for _ in range(draw(st.integers(0, 5))):
                if not vectors or draw(st.integers(0, 3)) == 0:
                    how = draw(st.sampled_from(("mean", "flatten")))
                    vectors.append(close_map(g, how, draw(st.sampled_from(maps[-2:]))))
                    continue
                x = draw(st.sampled_from(vectors[-3:]))
                same = [v for v in vectors if shape_of(v) == shape_of(x)]
                vectors.append(
                    apply_vector_op(
                        g, draw(st.sampled_from(VECTOR_OPS)), x, draw(st.sampled_from(same))
                    )
                )
            last = (vectors or maps)[-1]
            more = draw(st.lists(st.sampled_from([*maps, *vectors]), max_size=2))
            result = last if not more else relax.Tuple([last, *more])
            out = g.builder.emit_output(result)
        g.builder.emit_func_output(out)
    mod = g.builder.finalize()
    relax.analysis.well_formed(mod)
    return mod


def draw_inputs(mod: tvm.IRModule, count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """`count` batches of normal values for the inputs of main."""
    rng = np.random.default_rng(seed)
    return [
        {
            param.name: rng.standard_normal(shape_of(param)).astype("float32")
            for param in mod["main"].params
        }
        for _ in range(count)
    ]


#: backend -> dtypes of its activations
ACTIVATIONS = {
    "x86": ("uint8", "int16"),
    "arm": ("int8", "int16"),
    "generic": ("uint8", "int8", "int16"),
}


@st.composite
def draw_specs(draw: st.DrawFn, dtypes: tuple[str, ...]) -> rq.QSpec:
    """How an activation is quantized: dtype, scheme, and sometimes a part of its range or powers of
    two.
    """
    spec = rq.QSpec(draw(st.sampled_from(dtypes)), draw(st.sampled_from(rq.config.Scheme)))
    if draw(st.integers(0, 4)) == 0:
        spec = spec.with_reduced_range()
    return replace(spec, power_of_two=draw(st.integers(0, 4)) == 0)


@st.composite
def draw_qconfigs(draw: st.DrawFn, dtypes: tuple[str, ...]) -> rq.QConfig:
    """A QConfig that the CPU backends serve: 8 or 16 bits, weights of 8 or 4, per tensor or per
    channel; sometimes an output of its own.
    """
    low, high = draw(st.sampled_from(((-127, 127), (-128, 127), (-8, 7), (-7, 7))))
    granularity = draw(
        st.sampled_from([rq.config.Granularity.PER_TENSOR, rq.config.Granularity.PER_CHANNEL])
    )
    weight = rq.QSpec(
        "int8", rq.config.Scheme.SYMMETRIC, granularity, quant_min=low, quant_max=high
    )
    output = None
    if draw(st.booleans()):
        output = rq.TensorConfig(draw(draw_specs(dtypes)), rq.observers.MinMax())
    activation = rq.TensorConfig(draw(draw_specs(dtypes)), rq.observers.MinMax())
    return rq.QConfig(activation, rq.TensorConfig(weight, rq.observers.MinMax()), output)


@st.composite
def draw_configurations(draw: st.DrawFn, mod: tvm.IRModule) -> tuple[str, rq.QConfigMapping | None]:
    """(backend, mapping): the default, or QConfigs for all, for a type, for a name; or floats."""
    backend = draw(st.sampled_from(tuple(ACTIVATIONS)))
    if draw(st.integers(0, 3)) == 0:
        return backend, None
    qconfigs = draw_qconfigs(ACTIVATIONS[backend])
    some = st.one_of(qconfigs, qconfigs, st.none(), st.just(rq.config.FLOAT16))
    mapping = rq.QConfigMapping().set_global(draw(st.one_of(qconfigs, st.none())))
    # The operators that the prepared model has are those that a line may select.
    operators = rq.prepare(
        mod, None, qconfig_mapping=rq.QConfigMapping().set_global(None)
    ).plan.operators
    if operators:
        for op in draw(st.lists(st.sampled_from(operators), max_size=3)):
            mapping = mapping.set_module_name(op.name, draw(some))
        if draw(st.booleans()):
            mapping = mapping.set_object_type(draw(st.sampled_from(operators)).op, draw(some))
    return backend, mapping
