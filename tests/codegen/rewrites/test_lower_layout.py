"""Convolutions in the layout of the kernels, with any operator between them: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.integer.lower import lower_integer
from relayquant.codegen.rewrites.layout import convert_layout, has_constants
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value
from relayquant.stages.preparation import prepare_module

#: What stands between two convolutions of 4 channels; TVM's ConvertLayout has a form of its own
#: for each, not always a right one.
BETWEEN = {
    "conv2d_transpose": lambda emit, x: op.nn.conv2d_transpose(
        x, emit.constant(4, 4, 2, 2), strides=2
    ),
    "normalization of all axes": lambda emit, x: op.nn.layer_norm(
        x, emit.constant(4, 6, 6), emit.constant(4, 6, 6), [1, 2, 3]
    ),
    "normalization of one axis": lambda emit, x: op.nn.layer_norm(
        x, emit.constant(6), emit.constant(6), [-1]
    ),
    "rms_norm": lambda emit, x: op.nn.rms_norm(x, emit.constant(6), [-1]),
    "prelu": lambda emit, x: op.nn.prelu(x, emit.constant(4), 1),
    "stack": lambda emit, x: op.reshape(op.stack([x, x], -1), (1, 4, 6, 12)),
    "dropout": lambda emit, x: relax.TupleGetItem(emit("pair", op.nn.dropout(x)), 0),
    "topk": lambda emit, x: op.topk(x, 4, axis=1, ret_type="values"),
    "sort": lambda emit, x: op.sort(x, 1),
    "cumsum": lambda emit, x: op.cumsum(x, 1),
    "repeat": lambda emit, x: op.strided_slice(op.repeat(x, 2, 1), [1], [1], [5]),
    "repeat without an axis": lambda emit, x: op.reshape(op.repeat(x, 2), (1, 4, 12, 6)),
    "take": lambda emit, x: op.take(x, relax.const(np.array([3, -3, 0, 1], "int64")), 1),
    "updates of the rank of the data": lambda emit, x: op.scatter_nd(
        x, relax.const(np.zeros((2, 3, 1, 1, 4), "int64")), emit.constant(2, 3, 1, 1), "max"
    ),
    "ones_like": lambda emit, x: op.ones_like(x),
    "reflected pad": lambda emit, x: op.nn.pad(x, [0, 0, 0, 0, 2, 1, 1, 3], "reflect"),
    "a number of rank 1": lambda emit, x: op.divide(
        emit("scaled", op.multiply(emit.constant(1), x)), emit.constant(1, 1)
    ),
    "broadcast from the right": lambda emit, x: op.multiply(x, op.mean(x, [0])),
}


def scale_at_run_time(emit, x):
    """x over its largest magnitude: operators on scalars alone, and on a scalar and a map."""
    most, least = emit("most", op.max(x)), emit("least", op.min(x))
    span = emit("span", op.subtract(most, least))
    return emit("scaled", op.divide(x, emit("bounded", op.maximum(span, op.abs(least)))))


#: What computes scalars beside a convolution, and takes them back into its map or not.
SCALARS = {
    "a scale of the run time": scale_at_run_time,
    "mean of all": lambda emit, x: op.add(x, op.mean(x)),
    "a scalar returned": lambda emit, x: op.sqrt(op.variance(x)),
    "a choice": lambda emit, x: op.where(
        op.greater(op.max(x), relax.const(0.0, "float32")), x, op.negative(x)
    ),
}

#: The same between two convolutions of sequences of 4 channels.
SEQUENCE = (2, 4, 12)
BETWEEN_1D = {
    "conv1d_transpose": lambda emit, x: op.nn.conv1d_transpose(
        x, emit.constant(4, 4, 2), strides=2
    ),
    "image of one row": lambda emit, x: op.squeeze(
        op.image.resize2d(op.expand_dims(x, 2), (1, 24), layout="NCHW", method="nearest_neighbor"),
        [2],
    ),
    "gate": lambda emit, x: op.multiply(
        op.strided_slice(x, [1], [0], [2]), op.sigmoid(op.strided_slice(x, [1], [2], [4]))
    ),
    "normalization of channels": lambda emit, x: op.permute_dims(
        op.nn.layer_norm(op.permute_dims(x, [0, 2, 1]), emit.constant(4), emit.constant(4), [-1]),
        [0, 2, 1],
    ),
    "normalization of one axis": lambda emit, x: op.nn.layer_norm(
        x, emit.constant(12), emit.constant(12), [-1]
    ),
}


def conv1d_bias(emit, name: str, x: relax.Expr) -> relax.Var:
    """A convolution of sequences, 3 wide, with 4 results and a bias."""
    weight = emit.constant(4, int(x.ty.shape.values[1]), 3)
    conv = emit(f"{name}.conv", op.nn.conv1d(x, weight, padding=1))
    return emit(name, op.add(conv, emit.constant(1, 4, 1)))


@pytest.mark.slow
@pytest.mark.sample(20)
@pytest.mark.parametrize("between", BETWEEN)
def test_convert_layout__same_numbers(between):
    def body(emit, x):
        middle = emit("middle", BETWEEN[between](emit, emit.conv_bias("first", x)))
        return emit.conv_bias("last", middle)

    check_same_numbers(build_model(body, MAP), MAP)


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("between", BETWEEN_1D)
def test_convert_layout__same_numbers_of_sequences(between):
    def body(emit, x):
        middle = emit("middle", BETWEEN_1D[between](emit, conv1d_bias(emit, "first", x)))
        return conv1d_bias(emit, "last", middle)

    check_same_numbers(build_model(body, SEQUENCE), SEQUENCE)


def test_convert_layout__sequences_stay_in_the_layout_of_the_kernels():
    def body(emit, x):
        first = conv1d_bias(emit, "first", x)
        second = emit("rectified", op.nn.relu(conv1d_bias(emit, "second", first)))
        middle = emit("sum", op.add(second, first))
        return conv1d_bias(emit, "last", middle)

    mod = build_model(body, SEQUENCE)
    data = {"x": np.random.default_rng(1).standard_normal(SEQUENCE).astype("float32")}
    qmod = rq.quantize(mod, None, [data], effort="fast", guard=rq.config.Guard.OFF)
    lowered = lower_integer(convert_layout(qmod), resolve_target(None))
    text = str(lowered["main"])
    assert text.count("R.call_tir(qnn_conv1d") == 3
    # One of the input, one of the result.
    assert text.count("R.permute_dims") == 2


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("batch", [2, "n"])
@pytest.mark.parametrize("scalars", SCALARS)
def test_convert_layout__scalars_beside_a_convolution(scalars, batch):
    def body(emit, x):
        return SCALARS[scalars](emit, emit.conv_bias("first", x))

    mod = build_model(body, (batch, *MAP[1:]))
    (data,) = draw_batches(mod, 1, n=2)
    (found,) = Executor(rq.compile(mod)).run("main", [*data.values()])
    (expected,) = Executor(tvm.compile(mod, "llvm")).run("main", [*data.values()])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_convert_layout__parameters_of_the_run_time_beside_a_convolution():
    mod = build_model(lambda emit, x: emit.dense("last", emit.conv_bias("first", x), 5), MAP)
    weight = rq.TensorConfig(rq.QSpec("int8"), rq.observers.MinMax())
    static = rq.QConfig(rq.TensorConfig(rq.QSpec("uint8"), rq.observers.MinMax()), weight)
    dynamic = rq.QConfig(rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True)), weight)
    mapping = rq.QConfigMapping().set_global(static).set_object_type("relax.matmul", dynamic)
    data = draw_batches(mod, 2)
    qmod = rq.quantize(
        mod, None, data, qconfig_mapping=mapping, effort="fast", guard=rq.config.Guard.OFF
    )
    assert rq.verify(qmod, data[0]).is_equal


#: Operators on (2, 1, 4, 1) that name an axis, which may be counted from the end.
ON_AXIS = {
    "argmax": lambda emit, x, axis: op.astype(op.argmax(x, axis), "float32"),
    "concat": lambda emit, x, axis: op.concat([x, x], axis),
    "cumsum": lambda emit, x, axis: op.cumsum(x, axis),
    "expand_dims": lambda emit, x, axis: op.expand_dims(x, axis),
    "flip": lambda emit, x, axis: op.flip(x, axis),
    "layer_norm": lambda emit, x, axis: op.nn.layer_norm(
        x, *[emit.constant(int(x.ty.shape[axis]))] * 2, [axis]
    ),
    "max": lambda emit, x, axis: op.max(x, [axis]),
    "mean": lambda emit, x, axis: op.mean(x, [axis], True),
    "repeat": lambda emit, x, axis: op.repeat(x, 2, axis),
    "softmax": lambda emit, x, axis: op.nn.softmax(x, axis),
    "sort": lambda emit, x, axis: op.sort(x, axis),
    "split": lambda emit, x, axis: relax.TupleGetItem(emit("parts", op.split(x, [1], axis)), 0),
    "squeeze": lambda emit, x, axis: op.squeeze(x, [axis]) if axis % 2 else x,
    "stack": lambda emit, x, axis: op.stack([x, x], axis),
    "strided_slice": lambda emit, x, axis: op.strided_slice(x, [axis], [0], [1]),
    "take": lambda emit, x, axis: op.take(x, relax.const(np.array([0, 0], "int64")), axis),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("axis", [-4, -3, -2, -1])
@pytest.mark.parametrize("name", ON_AXIS)
def test_convert_layout__axes_counted_from_the_end(name, axis):
    """On an input beside a convolution, and on the map, which the pass gives another layout. TVM
    alone gives the same numbers for the axis counted from the start.
    """

    def build(axis):
        def body(emit, x):
            pixels = emit("pixels", op.nn.conv2d(x, emit.constant(1, 1, 1, 1)))
            results = [ON_AXIS[name](emit, each, axis) for each in (x, pixels)]
            return relax.Tuple([emit(f"result{k}", each) for k, each in enumerate(results)])

        return build_model(body, (2, 1, 4, 1))

    (data,) = draw_batches(build(axis), 1)
    found = rq.reference.run(convert_layout(build(axis)), data)
    first = axis + (5 if name in ("expand_dims", "stack") else 4)
    expected = Executor(tvm.compile(build(first), "llvm")).run("main", [*data.values()])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def check_same_numbers(mod, shape: tuple[int, ...]) -> None:
    """Compiled, and quantized, `mod` agrees with the reference."""
    data = {"x": np.random.default_rng(1).standard_normal(shape).astype("float32")}
    (expected,) = rq.reference.run(mod, data)
    (found,) = Executor(rq.compile(mod)).run("main", [*data.values()])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    qmod = rq.quantize(mod, None, [data], effort="fast", guard=rq.config.Guard.OFF)
    assert rq.verify(qmod, data).is_equal
    (integer,) = rq.reference.run(qmod, data)
    assert np.abs(integer - expected).max() < 0.1 * np.abs(expected).max()


def test_convert_layout__kernels_of_constants_are_not_evaluated():
    """TVM would evaluate them for a plain x86, and LLVM end the process."""

    def body(emit, x):
        constant = emit("constant", op.nn.relu(emit.constant(*MAP)))
        return emit("sum", op.add(emit.conv("first", x), emit.conv("last", constant)))

    mod = build_model(body, MAP)
    data = {"x": np.random.default_rng(1).standard_normal(MAP).astype("float32")}
    qmod = rq.quantize(mod, None, [data], effort="fast", guard=rq.config.Guard.OFF)
    assert rq.verify(qmod, data).is_equal


def test_convert_layout__transposes_weights_without_compiling_anything():
    """FoldConstant would build a kernel for each of them, and has nothing else to do here."""
    names = []

    @tvm.instrument.pass_instrument
    class Names:
        def run_before_pass(self, _mod, info):
            names.append(info.name)

    mod = prepare_module(build_model(lambda emit, x: emit.conv_bias("y", x), MAP), None)
    with tvm.transform.PassContext(instruments=[Names()]):
        found = Graph(convert_layout(mod))
    assert "ConvertLayout" in names
    assert "FoldConstant" not in names
    assert not [name for name in names if name.startswith(("tirx.", "s_tir."))]
    call = found.call_of(found.vars["y.conv"])
    assert call.attrs.kernel_layout == "OHWI"
    before = constant_value(Graph(mod).call_of(Graph(mod).vars["y.conv"]).args[1])
    np.testing.assert_array_equal(constant_value(call.args[1]), before.transpose(0, 2, 3, 1))


#: what does not depend on the numbers of x, of shape (1, 4, 6, 6)
FOLDABLE = {
    "zeros": lambda emit, x: op.zeros((1, 4, 6, 6), "float32"),
    "full_like": lambda emit, x: op.full_like(x, relax.const(2.0, "float32")),
    "ones_like": lambda emit, x: op.ones_like(x),
    "zeros_like": lambda emit, x: op.zeros_like(x),
    "sum of constants": lambda emit, x: op.add(emit.constant(1, 4), emit.constant(4, 1)),
    "quantized constant": lambda emit, x: qnn.quantize(
        emit.constant(6, 6), relax.const(0.1, "float32"), relax.const(0, "int32"), out_dtype="int8"
    ),
}


@pytest.mark.parametrize("name", [*BETWEEN, *FOLDABLE])
def test_has_constants__where_there_are_none_fold_constant_changes_nothing(name):
    make = {**BETWEEN, **FOLDABLE}[name]
    mod = relax.transform.Normalize()(build_model(lambda emit, x: emit("y", make(emit, x)), MAP))
    folded = relax.transform.FoldConstant()(mod)
    is_same = tvm_ffi.structural_equal(folded["main"], mod["main"])
    assert is_same == (name not in FOLDABLE)
    assert has_constants(mod) == (name in FOLDABLE)


def slice_rows(emit, x):
    """The first five rows of a batch of any size: (min(5, n), 4, 6, 6)."""
    rows = emit("rows", op.strided_slice(x, [0], [0], [5]))
    return relax.Tuple([rows, emit.conv("c", rows)])


def cast_rows(emit, x):
    """A shape that is asserted of a value that the pass turns."""
    rows = emit("rows", op.strided_slice(x, [0], [0], [5]))
    turned = emit("turned", op.permute_dims(emit.conv("a", rows), [0, 1, 3, 2]))
    cast = relax.DataflowVar("cast", turned.ty)
    emit.builder.emit_normalized(relax.MatchCast(cast, turned, turned.ty))
    return emit.conv("b", emit("r", op.nn.relu(cast)))


@pytest.mark.parametrize("body", [slice_rows, cast_rows])
@pytest.mark.parametrize("rows", [3, 7])
def test_convert_layout__sizes_of_the_run_time(body, rows):
    mod = build_model(body, ("n", *MAP[1:]))
    x = draw_batches(mod, 1, n=rows)[0]
    found = Executor(rq.compile(mod)).run("main", [*x.values()])
    for got, want in zip(found, rq.reference.run(mod, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


#: Operator -> the layouts of data and weights in which TVM compiles it.
FIRST = {
    "conv3d": ("NCDHW", "OIDHW"),
    "conv1d_transpose": ("NCW", "IOW"),
    "conv2d_transpose": ("NCHW", "IOHW"),
    "conv3d_transpose": ("NCDHW", "IODHW"),
}
SIZES = {"N": 1, "D": 4, "H": 5, "W": 6}
KERNEL = {"D": 2, "H": 2, "W": 3}


def convolve(name, channels, dtype, layouts, operands):
    """main(x[, w]) with one convolution; without `w` among the operands its weights are constant.

    Args:
        layouts: Of data, weights and result.
    """
    inputs, outputs = channels
    data, kernel, result = layouts
    sizes = {**SIZES, "C": inputs}, {**KERNEL, "I": inputs, "O": outputs}
    params = [
        relax.Var(each, relax.TensorType([size[c] for c in layout], dtype))
        for each, size, layout in zip("xw", sizes, layouts, strict=False)
    ]
    params = params[: 2 - len(operands)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        weight = relax.const(operands[0], dtype) if operands else params[1]
        layout = {"data_layout": data, "kernel_layout": kernel, "out_layout": result}
        with builder.dataflow():
            rank = len(data) - 2
            padding = [1, 0, 1, 0, 0, 1][: 2 * rank]  # before each axis, then behind each
            more = {"output_padding": 1} if "transpose" in name else {}
            value = getattr(op.nn, name)(
                params[0], weight, strides=2, padding=padding, **more, **layout
            )
            out = builder.emit_output(builder.normalize(value))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.parametrize("channels", [(3, 1), (4, 16)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("name", FIRST)
def test_compile__convolutions_in_any_layout(name, is_constant, dtype, channels):
    """Equal to TVM's own code of the layout that it compiles."""
    rng = np.random.default_rng(0)
    first = (*FIRST[name], FIRST[name][0])
    inputs, outputs = channels
    sizes = {**SIZES, "C": inputs}, {**KERNEL, "I": inputs, "O": outputs}
    x, weight = (
        rng.standard_normal([size[c] for c in layout]).astype(dtype)
        for size, layout in zip(sizes, first[:2], strict=True)
    )
    known = tvm.compile(convolve(name, channels, dtype, first, []), "llvm")
    args = [tvm.runtime.tensor(each) for each in (x, weight)]
    expected = relax.VirtualMachine(known, tvm.cpu())["main"](*args).numpy()
    last = first[0][0] + first[0][2:] + "C"
    weights_last = first[1][2:] + first[1][:2]
    for layouts in [
        (last, weights_last, last),
        (first[0], first[1], last),
        (last, first[1], first[0]),
    ]:
        data, kernel = (
            np.ascontiguousarray(each.transpose([old.index(c) for c in new]))
            for each, old, new in zip((x, weight), first, layouts, strict=False)
        )
        mod = convolve(name, channels, dtype, layouts, [kernel] if is_constant else [])
        (got,) = Executor(rq.compile(mod)).run("main", [data] if is_constant else [data, kernel])
        back = got.transpose([layouts[2].index(c) for c in first[2]])
        np.testing.assert_allclose(back, expected, rtol=1e-4, atol=1e-4)
