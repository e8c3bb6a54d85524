"""Float modules on packed kernels: the same numbers, few transposes, everything fused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.relax.backend.cpu_generic import get_default_pipeline
from tvm.relax.backend.cpu_generic import pipeline as stages

import relayquant as rq
from relayquant.codegen.kernels.floating.stored import round_elements
from relayquant.codegen.kernels.isa.bf16 import VECTORS_BF16, round_to_bf16
from relayquant.codegen.kernels.isa.select import has_isa, select_bf16
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.library.expanded_weights import EXPAND_WEIGHTS
from relayquant.codegen.lowering.floating import lower
from relayquant.codegen.lowering.floating.lower import lower_float
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.codegen.schedule import fusion
from relayquant.codegen.schedule.schedule_pass import create_schedule_pass
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.function import make_main

TARGET = resolve_target()


def make_module(emit, *shapes: tuple) -> tvm.IRModule:
    """A module whose `main` takes float32 tensors and returns `emit(builder, *vars)`."""
    args = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    return make_main(args, lambda bb: emit(bb, *args))


def const(rng: np.random.Generator, *shape: int) -> relax.Expr:
    return relax.const(rng.standard_normal(shape).astype("float32"))


def list_calls(mod: tvm.IRModule) -> list:
    """Values of main in order."""
    return [binding.value for block in mod["main"].body.blocks for binding in block.bindings]


def list_operators(mod: tvm.IRModule) -> list[str]:
    """Operators of main in order; kernels by their names."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            name = op_name(binding.value)
            if name in ("relax.call_tir", "relax.call_tir_inplace"):
                name = binding.value.args[0].name_hint.rstrip("0123456789")
            if isinstance(binding.value, Call):
                names.append(name)
    return names


def check_same(mod: tvm.IRModule, *arrays: np.ndarray) -> tvm.IRModule:
    """Compare with TVM's own lowering; returns the lowered module."""

    @tvm.transform.module_pass(opt_level=0)
    def pipeline(mod, _):
        with TARGET:
            passes = [
                *stages.legalize_passes(TARGET),
                create_schedule_pass(TARGET),
                *stages.dataflow_lower_passes(TARGET),
                *stages.finalize_passes(TARGET),
                EXPAND_WEIGHTS,
            ]
            return tvm.transform.Sequential(passes)(lower_float(convert_layout(mod), TARGET))

    outputs = []
    for chosen in (pipeline, get_default_pipeline(TARGET)):
        vm = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=chosen), tvm.cpu())
        outputs.append(vm["main"](*[tvm.runtime.tensor(a) for a in arrays]).numpy())
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-4)
    return lower_float(convert_layout(mod), TARGET)


def emit_residual_net(rng):
    """conv + bias + relu -> depthwise + clip -> 1x1 + bias + residual + relu -> mean -> dense."""
    weights = [const(rng, 16, 3, 3, 3), const(rng, 16, 1, 3, 3), const(rng, 16, 16, 1, 1)]
    biases = [const(rng, 1, 16, 1, 1) for _ in range(2)]
    dense, offset = const(rng, 16, 10), const(rng, 10)

    def emit(bb, x):
        y = bb.emit(relax.op.nn.conv2d(x, weights[0], padding=1))
        first = bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(y, biases[0]))))
        y = bb.emit(relax.op.nn.conv2d(first, weights[1], padding=1, groups=16))
        y = bb.emit(relax.op.clip(y, 0, 6))
        y = bb.emit(relax.op.nn.conv2d(y, weights[2]))
        y = bb.emit(relax.op.add(bb.emit(relax.op.add(y, biases[1])), first))
        y = bb.emit(relax.op.mean(bb.emit(relax.op.nn.relu(y)), [2, 3]))
        return bb.emit(relax.op.add(bb.emit(relax.op.matmul(y, dense)), offset))

    return emit


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True])
def test_lower_float__a_network_is_kernels_with_one_transpose(symbolic):
    rng = np.random.default_rng(1)
    batch = tirx.Var("n", "int64") if symbolic else 2
    mod = make_module(emit_residual_net(rng), (batch, 3, 12, 12))
    lowered = check_same(mod, rng.standard_normal((2, 3, 12, 12)).astype("float32"))
    assert list_operators(lowered) == [
        "relax.permute_dims",
        "float_conv2d",
        "float_conv2d",
        "float_conv2d",
        "relax.mean",
        "float_dense",
    ]


BF16 = resolve_target("llvm -mtriple=x86_64-linux-gnu -mcpu=cooperlake")


@pytest.mark.parametrize("symbolic", [False, True])
def test_lower_float__products_of_constant_weights_take_the_precision(symbolic):
    """Depthwise convolutions compute in float32. Values that only kernels read are bfloat16."""
    batch = tirx.Var("n", "int64") if symbolic else 2
    mod = make_module(emit_residual_net(np.random.default_rng(1)), (batch, 3, 12, 12))
    lowered = lower_float(convert_layout(mod), BF16, bf16=select_bf16(BF16))
    assert list_operators(lowered) == [
        "relax.permute_dims",
        "bf16_conv2d",
        "float_conv2d",
        "bf16_conv2d",
        "relax.mean",
        "bf16_conv2d",
    ]
    kernels = [call for call in list_calls(lowered) if op_name(call) == "relax.call_tir"]
    dtypes = [str(call.ty_args[0].dtype) for call in kernels]
    assert dtypes == ["uint16", "uint16", "float32", "float32"]


@pytest.mark.parametrize(
    ("inner", "axes", "moved"),
    [
        (64, (0, 2, 3, 1), 0),  # keys
        (48, (0, 2, 3, 1), 2),  # no whole number of transposed words
        (64, (2, 0, 3, 1), 1),  # a batch that moves
    ],
)
def test_lower_float__products_of_bf16_read_heads_where_they_lie(inner, axes, moved):
    shapes = [(3, 20, 3, inner), tuple(np.array([3, 3, inner, 20])[np.argsort(axes)])]

    def emit(bb, x, w):
        rows = bb.emit(relax.op.permute_dims(x, (0, 2, 1, 3)))
        return bb.emit(relax.op.matmul(rows, bb.emit(relax.op.permute_dims(w, axes))))

    mod = make_module(emit, *shapes)
    lowered = lower_float(mod, BF16, bf16=select_bf16(BF16))
    names = list_operators(lowered)
    assert names == ["relax.permute_dims"] * moved + ["bf16_batch_matmul"]
    if not has_isa(VECTORS_BF16, TARGET):
        return
    x, w = (np.random.default_rng(0).normal(size=shape).astype("float32") for shape in shapes)
    got = rq.Executor(rq.compile(mod, precision="bf16")).run("main", [x, w])[0]
    wanted = x.transpose(0, 2, 1, 3) @ w.transpose(axes)
    assert abs(got - wanted).max() < 2e-2 * abs(wanted).max()


@pytest.mark.slow
def test_compile__bf16_between_products_keeps_the_bits(monkeypatch):
    """Rounding where a value is written is rounding where products read it, also through a pool."""
    if not has_isa(VECTORS_BF16, TARGET):
        pytest.skip("this machine has no products of bfloat16")
    rng = np.random.default_rng(6)
    weights = [const(rng, 16, 3, 3, 3), const(rng, 24, 16, 3, 3), const(rng, 8, 24, 1, 1)]

    def emit(bb, x):
        y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, weights[0], padding=1))))
        y = bb.emit(relax.op.nn.max_pool2d(y, (3, 3), (2, 2), 1))
        y = bb.emit(relax.op.nn.conv2d(y, weights[1], padding=1))
        return bb.emit(relax.op.nn.conv2d(y, weights[2]))

    mod = make_module(emit, (2, 3, 12, 12))
    x = rng.standard_normal((2, 3, 12, 12)).astype("float32")
    narrow = rq.Executor(rq.compile(mod, precision="bf16")).run("main", [x])[0]
    monkeypatch.setattr(lower, "store_narrow", lambda calls, block: calls)
    wide = rq.Executor(rq.compile(mod, precision="bf16")).run("main", [x])[0]
    np.testing.assert_array_equal(narrow, wide)


def emit_dense_block(rng):
    """Concatenations, scaled, shifted and clipped before the products that read them."""
    first = const(rng, 8, 4, 1, 1)
    weights = [const(rng, *shape) for shape in ((8, 8, 1, 1), (16, 16, 1, 1), (4, 32, 3, 3))]

    def emit(bb, x):
        parts = [bb.emit(relax.op.nn.conv2d(x, first))]
        for weight in weights:
            joined = bb.emit(relax.op.concat(parts, 1)) if len(parts) > 1 else parts[0]
            channels = weight.ty.shape.values[1]
            scaled = bb.emit(relax.op.multiply(joined, const(rng, 1, int(channels), 1, 1)))
            shifted = bb.emit(relax.op.add(scaled, const(rng, 1, int(channels), 1, 1)))
            padding = int(weight.ty.shape.values[2]) // 2
            product = relax.op.nn.conv2d(
                bb.emit(relax.op.nn.relu(shifted)), weight, padding=padding
            )
            parts.append(bb.emit(product))
        return parts[-1]

    return emit


@pytest.mark.parametrize("symbolic", [False, True])
def test_compile__bf16_is_written_by_operators_on_single_values(symbolic, monkeypatch):
    """One kernel computes and rounds what only products read, with the bits of the products."""
    batch = tirx.Var("n", "int64") if symbolic else 2
    mod = make_module(emit_dense_block(np.random.default_rng(6)), (batch, 4, 6, 6))
    lowered = lower_float(convert_layout(mod), BF16, bf16=select_bf16(BF16))
    assert list_operators(lowered).count("round_elements") == 3
    if not has_isa(VECTORS_BF16, TARGET):
        pytest.skip("this machine has no products of bfloat16")
    x = np.random.default_rng(7).standard_normal((2, 4, 6, 6)).astype("float32")
    x[0, 0, 0, 0] = np.nan
    narrow = rq.Executor(rq.compile(mod, precision="bf16")).run("main", [x])[0]
    monkeypatch.setattr(lower, "store_narrow", lambda calls, block: calls)
    wide = rq.Executor(rq.compile(mod, precision="bf16")).run("main", [x])[0]
    np.testing.assert_array_equal(narrow, wide)
    assert np.isnan(narrow).any()


@pytest.mark.parametrize("is_apart", [False, True])
def test_compile__bf16_of_sizes_that_are_computed(is_apart, monkeypatch):
    """Rows n * m, in two functions with sizes of the same names; FuseOps may keep a call apart."""
    if not has_isa(VECTORS_BF16, TARGET):
        pytest.skip("this machine has no products of bfloat16")
    rng = np.random.default_rng(8)
    scale, weight = const(rng, 16), const(rng, 16, 32)

    def emit(bb, x):
        rows = bb.emit(relax.op.reshape(x, (x.ty.shape[0] * x.ty.shape[1], 16)))
        return bb.emit(relax.op.matmul(bb.emit(relax.op.multiply(rows, scale)), weight))

    def make():
        return make_module(emit, (*(tirx.Var(name, "int64") for name in "nm"), 16))["main"]

    mod = tvm.IRModule({name: make().with_attr("global_symbol", name) for name in ("main", "last")})
    if is_apart:

        def find_rounding(func):
            return [name for _, name, _ in fusion.list_calls(func) if "round" in name]

        monkeypatch.setattr(fusion, "find_sized", find_rounding)
    executor = rq.Executor(rq.compile(mod, precision="bf16"))
    x = rng.standard_normal((3, 5, 16)).astype("float32")
    wanted = (x.reshape(15, 16) * scale.value.numpy()) @ weight.value.numpy()
    for name in ("main", "last"):
        (got,) = executor.run(name, [x])
        assert abs(got - wanted).max() < 2e-2 * abs(wanted).max()


def test_compile__two_symbolic_sizes_are_two_in_a_kernel():
    """(n, n, 16) and (n, m, 16) take two kernels."""
    rng = np.random.default_rng(9)
    n, m = (tirx.Var(name, "int64") for name in "nm")
    weight = const(rng, 16, 32)

    def emit(bb, *values):
        return relax.Tuple([bb.emit(relax.op.matmul(each, weight)) for each in values])

    mod = make_module(emit, (n, n, 16), (n, m, 16))
    values = [rng.standard_normal((3, size, 16)).astype("float32") for size in (3, 5)]
    for got, value in zip(rq.Executor(rq.compile(mod)).run("main", values), values, strict=True):
        np.testing.assert_allclose(got, value @ weight.value.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", ["sum", "residual"])
def test_lower_float__bf16_is_not_written_where_others_read_float32(other):
    rng = np.random.default_rng(6)
    scale, weight = const(rng, 1, 4, 1, 1), const(rng, 4, 4, 1, 1)

    def emit(bb, x):
        scaled = bb.emit(relax.op.multiply(x, scale))
        product = bb.emit(relax.op.nn.conv2d(scaled, weight))
        return bb.emit(
            relax.op.add(bb.emit(relax.op.sum(scaled)), product)
            if other == "sum"
            else relax.op.add(product, scaled)
        )

    mod = make_module(emit, (2, 4, 6, 6))
    lowered = lower_float(convert_layout(mod), BF16, bf16=select_bf16(BF16))
    names = list_operators(lowered)
    assert "bf16_conv2d" in names
    assert "round_elements" not in names


def test_round_elements__every_kind_of_number():
    """As the rounding of weights: ties to even, denormal numbers, infinities; NaN stays NaN."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 4096, dtype="uint32")
    bits[:8] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
    bits[8:12] = [0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7FFF8000]  # NaN
    numbers = bits.view("float32")
    rounded = np.zeros(len(bits), "uint16")
    data = te.placeholder((len(bits),), "float32")
    kernel = te.create_prim_func([data, round_elements(data)])
    tvm.compile(tvm.IRModule({"main": kernel}), TARGET)["main"](
        *(arrays := [tvm.runtime.tensor(each) for each in (numbers, rounded)])
    )
    found, is_nan = arrays[1].numpy(), np.isnan(numbers)
    np.testing.assert_array_equal(found[~is_nan], round_to_bf16(numbers)[~is_nan])
    assert ((found[is_nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True])
def test_compile__bf16_is_near_float32(symbolic):
    if not has_isa(VECTORS_BF16, TARGET):
        pytest.skip("this machine has no products of bfloat16")
    rng = np.random.default_rng(1)
    batch = tirx.Var("n", "int64") if symbolic else 2
    mod = make_module(emit_residual_net(rng), (batch, 3, 12, 12))
    x = rng.standard_normal((2, 3, 12, 12)).astype("float32")
    outputs = []
    for precision in ("float32", "bf16"):
        executor = rq.Executor(rq.compile(mod, precision=precision))
        outputs.append(executor.run("main", [x])[0])
    exact, rounded = outputs
    error = abs(rounded - exact).max() / abs(exact).max()
    assert 1e-5 < error < 2e-2  # 8 bits, and not 24


def emit_gelu(bb, x):
    """x (erf(x / sqrt 2) + 1) / 2, as exporters write it."""
    bell = bb.emit(relax.op.divide(x, relax.const(2**0.5, "float32")))
    bell = bb.emit(relax.op.erf(bell))
    bell = bb.emit(relax.op.add(bell, relax.const(np.ones(1, "float32"))))
    return bb.emit(relax.op.multiply(bb.emit(relax.op.multiply(x, bell)), relax.const(0.5)))


@pytest.mark.parametrize("is_read", [False, True])
def test_lower_float__functions_of_single_numbers_belong_to_a_product_of_bf16(is_read):
    """A value that another kernel reads too is stored, so what follows is computed apart."""
    rng = np.random.default_rng(3)
    up, down = const(rng, 24, 96), const(rng, 96, 24)

    def emit(bb, x):
        y = bb.emit(relax.op.matmul(x, up))
        y = bb.emit(relax.op.matmul(other := emit_gelu(bb, y), down))
        last = bb.emit(relax.op.multiply(y, relax.const(0.125)))
        if not is_read:
            return last
        other = bb.emit(relax.op.sum(bb.emit(relax.op.add(other, relax.const(1.0))), [2]))
        return bb.emit(relax.Tuple([last, bb.emit(relax.op.sum(y, [2])), other]))

    mod = make_module(emit, (2, 40, 24))
    lowered = lower_float(mod, BF16, bf16=select_bf16(BF16))
    found = list_operators(lowered)
    kernels = ["bf16_conv2d", "bf16_conv2d"]
    others = ["relax.multiply", "relax.add", "relax.sum", "relax.sum"]
    assert found[:2] == kernels
    assert sorted(found[2:]) == sorted(others if is_read else [])
    first = next(call for call in list_calls(lowered) if op_name(call) == "relax.call_tir")
    assert str(first.ty_args[0].dtype) == ("float32" if is_read else "uint16")


def test_compile__bf16_needs_its_instructions():
    mod = make_module(emit_residual_net(np.random.default_rng(1)), (1, 3, 12, 12))
    with pytest.raises(rq.ConfigError, match="Sapphire Rapids"):
        rq.compile(mod, "llvm -mtriple=x86_64-linux-gnu -mcpu=haswell", precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True])
def test_lower_float__transforms_for_whole_vectors_of_channels(symbolic):
    """Those of Winograd, with what follows the convolutions, also into a concatenation."""
    rng = np.random.default_rng(4)
    weights = rng.standard_normal((3, 32, 32, 3, 3)) / 17  # sums stay about as large
    first, second, third = (relax.const(weight.astype("float32")) for weight in weights)
    bias = const(rng, 1, 32, 1, 1)

    def emit(bb, x):
        y = bb.emit(relax.op.add(bb.emit(relax.op.nn.conv2d(x, first, padding=1)), bias))
        y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(y, x))))
        left = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(y, second, padding=1))))
        right = bb.emit(relax.op.nn.conv2d(y, third, padding=1))
        return bb.emit(relax.op.concat([left, right], 1))

    shape = (tirx.Var("n", "int64") if symbolic else 2, 32, 29, 26)
    mod = make_module(emit, shape)
    lowered = check_same(mod, rng.standard_normal((2, 32, 29, 26)).astype("float32"))
    assert list_operators(lowered).count("float_winograd") == 3
    assert "relax.concat" not in list_operators(lowered)


@pytest.mark.parametrize(
    ("starts", "is_read"), [((0, 1, 2), True), ((0, 2, 1), False), ((1, 2, 3), False)]
)
def test_lower_float__depthwise_kernels_read_slices_of_volumes(starts, is_read):
    """In place, if equal steps from the first slice lead to the others."""
    rng = np.random.default_rng(5)
    weight = const(rng, 8, 9, 3, 1)

    def emit(bb, x):
        parts = [
            bb.emit(relax.op.strided_slice(x, [1], [start], [start + 2], [1])) for start in starts
        ]
        parts = [bb.emit(relax.op.reshape(part, (2, 2, 5, 1, 6, 8))) for part in parts]
        joined = bb.emit(relax.op.concat(parts, 3))
        images = bb.emit(relax.op.reshape(joined, (4, 15, 6, 8)))
        y = relax.op.nn.conv2d(images, weight, (3, 1), (3, 1, 3, 1), 1, 8, "NHWC", "OHWI")
        return bb.emit(relax.op.nn.relu(bb.emit(y)))

    mod = make_module(emit, (2, 5, 5, 6, 8))
    lowered = check_same(mod, rng.standard_normal((2, 5, 5, 6, 8)).astype("float32"))
    assert (list_operators(lowered) == ["float_conv2d"]) == is_read


@pytest.mark.slow
def test_lower_float__a_sum_of_two_products_belongs_to_one():
    rng = np.random.default_rng(2)
    a, b = const(rng, 8, 3, 3, 3), const(rng, 8, 3, 1, 1)

    def emit(bb, x):
        left = bb.emit(relax.op.nn.conv2d(x, a, padding=1))
        right = bb.emit(relax.op.nn.conv2d(x, b))
        return bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(left, right))))

    mod = make_module(emit, (1, 3, 9, 9))
    lowered = check_same(mod, rng.standard_normal((1, 3, 9, 9)).astype("float32"))
    assert list_operators(lowered).count("float_conv2d") == 2
    assert "relax.add" not in list_operators(lowered)


@pytest.mark.slow
def test_lower_float__transposed_convolutions_stay_in_the_layout_of_the_kernels():
    rng = np.random.default_rng(7)
    first, up, grouped = const(rng, 8, 3, 3, 3), const(rng, 8, 6, 2, 2), const(rng, 6, 2, 3, 3)
    bias, last = const(rng, 1, 6, 1, 1), const(rng, 4, 14, 1, 1)

    def emit(bb, x):
        low = bb.emit(relax.op.nn.conv2d(x, first, strides=2, padding=1))
        y = bb.emit(relax.op.nn.conv2d_transpose(low, up, strides=2))
        y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(y, bias))))
        y = bb.emit(
            relax.op.nn.conv2d_transpose(
                y, grouped, strides=2, padding=1, output_padding=1, groups=3
            )
        )
        wide = bb.emit(relax.op.image.resize2d(low, (24, 24), method="nearest_neighbor"))
        return bb.emit(relax.op.nn.conv2d(bb.emit(relax.op.concat([y, wide], 1)), last))

    mod = make_module(emit, (tirx.Var("n", "int64"), 3, 12, 12))
    lowered = check_same(mod, rng.standard_normal((2, 3, 12, 12)).astype("float32"))
    assert list_operators(lowered) == [
        "relax.permute_dims",
        "float_conv2d",
        "float_conv2d_transpose",
        "float_conv2d_transpose",
        "relax.image.resize2d",
        "float_copy",
        "float_conv2d",
        "relax.permute_dims",
    ]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("symbolic", [False, True])
def test_lower_float__products_are_written_into_a_concatenation(symbolic):
    """All kinds of products, values of other kinds between them, and what is read elsewhere too."""
    rng = np.random.default_rng(9)
    first, wide, point = const(rng, 20, 3, 3, 3), const(rng, 9, 20, 3, 3), const(rng, 33, 20, 1, 1)
    depthwise, up, last = const(rng, 20, 1, 3, 3), const(rng, 20, 6, 2, 2), const(rng, 8, 68, 1, 1)
    dense, other = const(rng, 8, 5), const(rng, 8, 18)

    def emit(bb, x):
        low = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, first, padding=1))))
        pooled = bb.emit(relax.op.nn.max_pool2d(low, 3, 2, padding=1))
        parts = [
            bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(low, wide, 2, padding=1)))),
            bb.emit(
                relax.op.nn.conv2d_transpose(
                    bb.emit(relax.op.nn.max_pool2d(pooled, 2, 2)), up, strides=2
                )
            ),
            bb.emit(relax.op.nn.conv2d(pooled, point)),
        ]
        deep = bb.emit(relax.op.nn.conv2d(low, depthwise, 2, padding=1, groups=20))
        joined = bb.emit(relax.op.concat([parts[0], pooled, parts[1], parts[2]], 1))
        # A second concatenation reads the same part twice, and a sum that keeps its residual.
        both = bb.emit(relax.op.concat([deep, deep], 1))
        deep = bb.emit(relax.op.add(deep, pooled))
        joined = bb.emit(relax.op.nn.conv2d(joined, last))
        y = bb.emit(relax.op.permute_dims(joined, [0, 2, 3, 1]))
        y = bb.emit(relax.op.concat([bb.emit(relax.op.matmul(y, w)) for w in (dense, other)], -1))
        sums = [bb.emit(relax.op.mean(value, [2, 3])) for value in (both, deep)]
        return bb.emit(relax.op.concat([bb.emit(relax.op.mean(y, [1, 2])), *sums], 1))

    mod = make_module(emit, (tirx.Var("n", "int64") if symbolic else 2, 3, 16, 16))
    lowered = check_same(mod, rng.standard_normal((2, 3, 16, 16)).astype("float32"))
    names = list_operators(lowered)
    assert names.count("relax.concat") == 2  # the part that is read twice, and means
    assert names.count("float_copy") == 1  # what is pooled
    assert names.count("relax.nn.max_pool2d") == 0


@pytest.mark.slow
def test_lower_float__a_pool_of_infinities_and_windows_beyond_the_image():
    rng = np.random.default_rng(10)
    first = const(rng, 4, 3, 1, 1)
    pools = [((3, 2), (2, 1), (1, 0, 1, 1), True), ((2, 2), (2, 2), (0, 0, 0, 0), False)]
    for size, strides, padding, ceil in pools:

        def emit(bb, x, size=size, strides=strides, padding=padding, ceil=ceil):
            y = bb.emit(relax.op.nn.conv2d(x, first))
            pool = relax.op.nn.max_pool2d(y, size, strides, padding, ceil_mode=ceil)
            return bb.emit(relax.op.exp(bb.emit(pool)))

        x = rng.standard_normal((1, 3, 7, 8)).astype("float32")
        check_same(make_module(emit, x.shape), x)


@pytest.mark.parametrize("why", ["weights at run time", "one channel of a group", "float64"])
def test_lower_float__transposed_convolutions_without_a_kernel(why):
    rng = np.random.default_rng(8)
    first, weight = const(rng, 4, 3, 3, 3), rng.standard_normal((4, 4, 2, 2)).astype("float32")
    groups = 4 if why == "one channel of a group" else 1
    weight = weight[:, :1] if groups == 4 else weight

    def emit(bb, x, given):
        y = bb.emit(relax.op.nn.conv2d(x, first, padding=1))
        w = given if why == "weights at run time" else relax.const(weight)
        if why == "float64":
            y, w = bb.emit(relax.op.astype(y, "float64")), relax.const(weight, "float64")
        y = bb.emit(relax.op.nn.conv2d_transpose(y, w, strides=2, groups=groups))
        return bb.emit(relax.op.astype(y, "float32"))

    mod = make_module(emit, (1, 3, 6, 6), weight.shape)
    x = rng.standard_normal((1, 3, 6, 6)).astype("float32")
    assert "relax.nn.conv2d_transpose" in list_operators(check_same(mod, x, weight))


def test_lower_float__a_value_read_twice_is_kept():
    rng = np.random.default_rng(3)
    w = const(rng, 6, 6)

    def emit(bb, x):
        y = bb.emit(relax.op.matmul(x, w))
        return bb.emit(relax.op.add(bb.emit(relax.op.nn.relu(y)), y))

    mod = make_module(emit, (5, 6))
    lowered = check_same(mod, rng.standard_normal((5, 6)).astype("float32"))
    assert list_operators(lowered) == ["float_dense", "relax.nn.relu", "relax.add"]


def test_lower_float__weights_that_are_no_constants_are_packed_at_run_time():
    rng = np.random.default_rng(4)
    shapes = [(2, 4, 8, 8), (12, 4, 3, 3), (12, 7)]

    def emit(bb, x, w, v):
        scaled = bb.emit(relax.op.permute_dims(w, [0, 1, 3, 2]))
        y = bb.emit(relax.op.nn.conv2d(x, scaled, padding=1))
        return bb.emit(relax.op.matmul(bb.emit(relax.op.mean(y, [2, 3])), v))

    arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
    operators = list_operators(check_same(make_module(emit, *shapes), *arrays))
    assert "float_conv2d_packing" in operators
    assert "float_batch_matmul" in operators


@pytest.mark.parametrize("leading", [(3,), (2, 3), ("n",), ("n", "m")])
def test_lower_float__rows_of_any_length_are_as_long_as_the_weights(leading):
    """The run time compares the sizes."""
    rng, weight = np.random.default_rng(5), np.random.default_rng(6).standard_normal((5, 16))
    sizes = [tirx.Var(n, "int64") if isinstance(n, str) else n for n in (*leading, "k")]
    mod = make_module(
        lambda bb, x: bb.emit(relax.op.matmul(x, relax.const(weight, "float32"))), tuple(sizes)
    )
    shape = [n if isinstance(n, int) else 3 for n in leading]
    machine = rq.Executor(rq.compile(mod))
    x = rng.standard_normal((*shape, 5)).astype("float32")
    (found,) = machine.run("main", [x])
    np.testing.assert_allclose(found, x @ weight, rtol=1e-4, atol=1e-5)
    with pytest.raises(rq.errors.DataError, match="allowed: float32 of shape"):
        machine.run("main", [x[..., :4]])


@pytest.mark.parametrize("batch", [(1,), (2, 3)])
def test_lower_float__products_of_activations(batch):
    rng = np.random.default_rng(5)
    shapes = [(*batch, 9, 8), (*batch, 8, 11)]
    arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
    mod = make_module(lambda bb, x, y: bb.emit(relax.op.matmul(x, y)), *shapes)
    assert list_operators(check_same(mod, *arrays)) == ["float_batch_matmul"]


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((2, 1, 4, 5), (3, 5, 6)), "batch dimensions are broadcast"),
        (((4, 5), (5,)), "vectors"),
        (((5,), (5, 3)), "vectors"),
        (((4, 5), (5, 1)), "a symbolic number of channels, or too few"),
    ],
)
def test_lower_float__what_has_no_kernel_stays(shapes, why):
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal(s).astype("float32") for s in shapes]
    mod = make_module(lambda bb, x, y: bb.emit(relax.op.matmul(x, y)), *shapes)
    assert list_operators(check_same(mod, *arrays)) == ["relax.matmul"]
    with hear_declined() as heard:
        lower_float(mod, TARGET)
    assert [(rule, reason) for rule, _, reason in heard] == [("lower_matmul", why)]


def build_attention(rows, seen, axes: list[int]) -> tvm.IRModule:
    """softmax(q k) v: q (1, 3, rows, 8), k by `axes` (1, 3, 8, seen), v (1, 3, seen, 6)."""
    extents = dict(zip(axes, (1, 3, 8, seen), strict=True))
    stored = [extents[axis] for axis in range(4)]

    def emit(bb, q, k, v):
        turned = bb.emit(relax.op.permute_dims(k, axes))
        score = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.matmul(q, turned))))
        return bb.emit(relax.op.matmul(score, v))

    return make_module(emit, (1, 3, rows, 8), stored, (1, 3, seen, 6))


def run_attention(executor: rq.Executor, axes: list[int], rows: int, seen: int) -> None:
    """Against float64."""
    rng = np.random.default_rng(rows)
    q, k, v = (rng.standard_normal(s) for s in ((1, 3, rows, 8), (1, 3, 8, seen), (1, 3, seen, 6)))
    stored = k.transpose(np.argsort(axes))
    score = np.exp(q @ k)
    expected = score / score.sum(-1, keepdims=True) @ v
    arrays = [np.ascontiguousarray(a, "float32") for a in (q, stored, v)]
    got = executor.run("main", arrays)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [[0, 1, 3, 2], [0, 2, 3, 1]])
def test_lower_float__attention_of_any_length_has_kernels(axes):
    """Both products; the transposition of keys vanishes."""
    rows, seen = tirx.Var("rows", "int64"), tirx.Var("seen", "int64")
    mod = build_attention(rows, seen, axes)
    used = list_operators(relax.transform.DeadCodeElimination()(lower_float(mod, TARGET)))
    assert used == ["float_dots", "relax.nn.softmax", "float_batch_matmul"]
    executor = rq.Executor(rq.compile(mod))
    run_attention(executor, axes, 5, 7)
    run_attention(executor, axes, 1, 33)


def test_lower_float__attention_of_one_row_reads_keys_where_they_lie():
    mod = build_attention(1, 9, [0, 2, 3, 1])
    used = list_operators(relax.transform.DeadCodeElimination()(lower_float(mod, TARGET)))
    assert used == ["float_dots", "relax.nn.softmax", "float_batch_matmul"]
    run_attention(rq.Executor(rq.compile(mod)), [0, 2, 3, 1], 1, 9)


@pytest.mark.parametrize(("rows", "axes"), [(20, [0, 1, 3, 2]), (1, [0, 2, 1, 3])])
def test_lower_float__transpositions_that_pay_off_or_are_others_stay(rows, axes):
    mod = build_attention(rows, 9, axes)
    used = list_operators(lower_float(mod, TARGET))
    assert used == [
        *("relax.permute_dims", "float_batch_matmul", "relax.nn.softmax", "float_batch_matmul")
    ]
    run_attention(rq.Executor(rq.compile(mod)), axes, rows, 9)


def test_lower_float__equal_products_share_a_kernel():
    rng = np.random.default_rng(7)
    weights = [const(rng, 8, 8) for _ in range(3)]

    def emit(bb, x):
        for w in weights:
            x = bb.emit(relax.op.nn.relu(bb.emit(relax.op.matmul(x, w))))
        return x

    lowered = check_same(make_module(emit, (4, 8)), np.ones((4, 8), "float32"))
    assert len(lowered.functions) == 2


def test_lower_float__names_and_the_input_module_are_kept():
    rng = np.random.default_rng(8)
    mod = make_module(emit_residual_net(rng), (1, 3, 12, 12))
    before = mod.script()
    lowered = lower_float(convert_layout(mod), TARGET)
    assert mod.script() == before
    assert [p.name for p in lowered["main"].params] == ["x0"]
