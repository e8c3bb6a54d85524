"""Float kernels against float64 numpy, on this machine's vectors and on narrower ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from convolutions import join_slices
from drawing import count_examples
from floats import FULL, HOST, ISAS, TARGET, check, convolve, draw, finish, run_kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import compile_kernel
from tvm import tirx
from tvm.target import Target

from relayquant.codegen.kernels.conv_shape import JoinedSlices
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d, make_conv2d_packing
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    pack_conv2d,
    packed_conv2d_size,
    plan_conv2d,
)
from relayquant.codegen.kernels.floating.convolution.transposed import (
    FloatConv2dTranspose,
    make_conv2d_transpose,
    pack_conv2d_transpose,
)
from relayquant.codegen.kernels.floating.gemm import (
    FloatDense,
    FloatMatmul,
    make_batch_matmul,
    make_dense,
    pack_dense,
    plan_dense,
)
from relayquant.codegen.kernels.floating.matmul_transposed_b import FloatDots, make_dots
from relayquant.codegen.kernels.floating.tile import (
    FloatEpilogue,
    FloatIsa,
    Panels,
    choose_float_isa,
    choose_panels,
    choose_rows,
)
from relayquant.codegen.kernels.isa.caches import Caches, find_caches

FEW = settings(
    max_examples=count_examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


def check_conv2d(spec: FloatConv2d, isa: FloatIsa, symbolic: bool = False) -> None:
    rng = np.random.default_rng(3)
    x = draw(rng, *spec.stored_shape)
    w = draw(rng, spec.out_channels, *spec.kernel, spec.group_in)
    expected, operands = finish(convolve(join_slices(x, spec), w, spec), spec.epilogue, rng)
    made = replace(spec, batch=tirx.Var("n", "int64")) if symbolic else spec
    packed = pack_conv2d(w, made, isa)
    assert packed.size == packed_conv2d_size(made, isa)
    at_run_time = run_kernel(make_conv2d_packing(made, isa), w, np.zeros_like(packed))
    np.testing.assert_array_equal(at_run_time, packed)
    out = np.full(expected.shape, np.nan, "float32")
    check(run_kernel(make_conv2d(made, isa), x, packed, *operands, out), expected)


@pytest.mark.sample(6)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "spec",
    [
        FloatConv2d(1, 9, 9, 5, 33, (3, 3), padding=(1, 1, 1, 1), epilogue=FULL),
        FloatConv2d(2, 8, 7, 3, 10, (5, 3), (2, 1), (2, 1, 0, 1)),
        FloatConv2d(1, 11, 11, 8, 48, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
        FloatConv2d(2, 7, 7, 16, 24, (3, 3), (1, 1), (1, 1, 1, 1), groups=4),
        FloatConv2d(1, 12, 12, 16, 32, (1, 1), (2, 2)),
        FloatConv2d(2, 5, 5, 12, 20, (1, 1), epilogue=FULL),
        FloatConv2d(1, 6, 6, 4, 1, (3, 3)),
        FloatConv2d(1, 12, 9, 20, 20, (3, 3), (1, 1), (1, 1, 1, 1), groups=20, epilogue=FULL),
        FloatConv2d(2, 12, 9, 6, 6, (5, 5), (2, 2), (0, 1, 2, 1), groups=6),
        FloatConv2d(1, 10, 10, 32, 32, (3, 3), (1, 1), (0, 0, 0, 0), (2, 2), groups=32),
        FloatConv2d(1, 1, 1, 16, 16, (3, 3), (1, 1), (1, 1, 1, 1)),
        FloatConv2d(2, 40, 1, 24, 40, (5, 1), (2, 3), (2, 0, 1, 0), (2, 1), epilogue=FULL),
        FloatConv2d(2, 9, 1, 8, 16, (3, 1), (1, 1), (1, 0, 2, 0), groups=2),
        FloatConv2d(1, 5, 30, 24, 24, (5, 3), (1, 2), (2, 6, 2, 9), (1, 3), groups=24),
        FloatConv2d(
            4,
            15,
            30,
            20,
            20,
            (9, 3),
            (3, 1),
            (3, 1, 3, 1),
            groups=20,
            epilogue=FULL,
            joined=JoinedSlices(4, 2, taps=3, stride=1, dilation=1),
        ),
        FloatConv2d(
            2,
            12,
            9,
            64,
            64,
            (4, 2),
            (4, 2),
            (2, 0, 0, 1),
            groups=64,
            joined=JoinedSlices(5, 2, taps=2, stride=2, dilation=2),
        ),
    ],
)
def test_make_conv2d__follows_numpy(spec, isa):
    check_conv2d(spec, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "spec",
    [
        FloatConv2d(1, 5, 5, 96, 24, (1, 1), epilogue=FloatEpilogue(bias=True)),
        FloatConv2d(1, 6, 6, 24, 16, (3, 3), epilogue=FloatEpilogue(bias=True)),
        FloatConv2d(1, 9, 9, 16, 16, (7, 7), groups=16, epilogue=FloatEpilogue(bias=True)),
    ],
    ids=["dense", "tiles", "depthwise"],
)
def test_make_conv2d__a_large_bias_is_rounded_once(spec, isa):
    """A sum that starts with it loses the last bits of each product."""
    rng = np.random.default_rng(3)
    x = draw(rng, *spec.stored_shape)
    w = draw(rng, spec.out_channels, *spec.kernel, spec.group_in) / 16
    bias = draw(rng, spec.out_channels) / 64 + np.float32(800)
    out = np.zeros(spec.out_shape, "float32")
    exact = convolve(x, w, spec) + bias
    got = run_kernel(make_conv2d(spec, isa), x, pack_conv2d(w, spec, isa), bias, out)
    assert np.abs(got - exact).max() < 0.6 * np.spacing(np.float32(800))


@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize("kernel", [1, 3])
def test_make_conv2d__symbolic_batch(groups, kernel):
    pad = kernel // 2
    spec = FloatConv2d(3, 6, 5, 16, 16, (kernel,) * 2, (1, 1), (pad,) * 4, groups=groups)
    check_conv2d(replace(spec, epilogue=FULL), HOST, symbolic=True)


@pytest.mark.parametrize("symbolic", [False, True])
def test_make_conv2d__large_weights_are_walked_panel_by_panel(symbolic):
    spec = FloatConv2d(2, 7, 7, 160, 256, (3, 3), padding=(1, 1, 1, 1), epilogue=FULL)
    check_conv2d(spec, HOST, symbolic)


def test_make_conv2d__tiles_of_a_symbolic_batch_share_the_next_panel_like_those_of_an_image():
    """Each tile fetching all of it costs a fifth of the time."""
    spec = FloatConv2d(1, 14, 14, 160, 256, (3, 3), padding=(1, 1, 1, 1))
    one, many = (
        make_conv2d(replace(spec, batch=batch), FloatIsa(16, 28)).script().count("prefetch")
        for batch in (1, tirx.Var("n", "int64"))
    )
    assert one == many > 1


def test_make_conv2d__large_weights_are_read_once_for_all_pixels():
    spec = FloatConv2d(1, 600, 1, 64, 768, (6, 1), padding=(1, 0, 3, 0), epilogue=FULL)
    check_conv2d(spec, HOST)


@pytest.mark.parametrize(
    "isa",
    [*ISAS, FloatIsa(4, 24), FloatIsa(16, 28, caches=Caches(set_lines=12))],
    ids=lambda isa: str(isa),
)
@pytest.mark.parametrize("inner", [512, 768, 1000, 1024, 2048, 3072])
def test_choose_panels__no_set_of_the_cache_gets_more_lines_than_it_has(isa, inner):
    """The weights and results of a tile need a line of each set, too."""
    isa, panels = choose_panels(256, None, isa, inner)
    rows = choose_rows(None, panels.most_rows)
    sets = {row * inner * 4 % 4096 // 64 for row in range(rows)}
    assert rows <= (isa.caches.set_lines - 1) * len(sets)
    assert rows * panels.blocks <= isa.accumulators


def test_pack_conv2d__follows_the_panels_of_rows_in_one_set():
    for spec in (
        FloatConv2d(1, 3, 5, 1024, 80, (1, 1), epilogue=FULL),
        FloatConv2d(1, 5, 9, 512, 64, (1, 1), (2, 2), epilogue=FULL),
        FloatConv2d(1, 4, 4, 512, 64, (3, 3), padding=(1, 1, 1, 1), epilogue=FULL),
    ):
        panels = plan_conv2d(spec, HOST)[1]
        assert HOST.accumulators < 24 or panels.most_rows < HOST.caches.set_lines
        check_conv2d(spec, HOST)


def test_lay_down__only_one_column_without_taps_beside_it():
    column = FloatConv2d(2, 40, 1, 24, 40, (5, 1), (2, 3), (2, 0, 1, 0), (2, 1))
    row = FloatConv2d(2, 1, 40, 24, 40, (1, 5), (3, 2), (0, 2, 0, 1), (1, 2))
    assert column.lay_down() == row
    for other in (
        replace(column, kernel=(5, 2), padding=(2, 1, 1, 0)),
        replace(column, padding=(2, 0, 1, 1)),
        replace(column, width=2),
    ):
        assert other.lay_down() is other


@FEW
@given(
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 20)),
    groups=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    isa=st.sampled_from(ISAS),
    bias=st.booleans(),
)
def test_make_conv2d__any_geometry(size, channels, groups, kernel, strides, padding, isa, bias):
    inner, outer = channels[0] * groups, channels[1] * groups
    epilogue = FloatEpilogue(bias=bias)
    spec = FloatConv2d(
        1, *size, inner, outer, kernel, strides, padding, groups=groups, epilogue=epilogue
    )
    check_conv2d(spec, isa)


def transpose_convolve(x: np.ndarray, w: np.ndarray, spec: FloatConv2dTranspose) -> np.ndarray:
    """What the reference evaluator of ONNX makes of NHWC data and OHWI weights."""
    onnx = pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    top, left, bottom, right = spec.padding
    node = onnx.helper.make_node(
        "ConvTranspose", ["x", "w"], ["y"], group=1, kernel_shape=spec.kernel,
        strides=spec.strides, pads=[top, left, bottom, right], dilations=spec.dilation,
        output_padding=spec.output_padding,
    )  # fmt: skip
    # The evaluator gets groups wrong: each is a convolution of its own here.
    parts = []
    for data, weight in zip(
        np.split(x.transpose(0, 3, 1, 2), spec.groups, 1), np.split(w, spec.groups), strict=True
    ):
        feeds = {"x": data, "w": weight.transpose(3, 0, 1, 2)}
        parts.append(evaluator(node).run(None, feeds)[0])
    return np.concatenate(parts, 1).transpose(0, 2, 3, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("isa", [ISAS[0], ISAS[2]])
@pytest.mark.parametrize(
    "spec",
    [
        FloatConv2dTranspose(1, 5, 4, 8, 20, (2, 2), (2, 2), epilogue=FULL),
        FloatConv2dTranspose(
            3, 5, 6, 6, 10, (3, 3), (2, 2), (1, 1, 1, 1), output_padding=(1, 1), epilogue=FULL
        ),
        FloatConv2dTranspose(1, 4, 5, 4, 33, (4, 3), (3, 1), (2, 0, 1, 1), output_padding=(2, 0)),
        FloatConv2dTranspose(2, 4, 4, 6, 8, (3, 2), (2, 3), (0, 1, 1, 0), dilation=(3, 2)),
        FloatConv2dTranspose(1, 6, 3, 12, 24, (3, 3), (2, 1), (1, 1, 1, 1), groups=3),
        FloatConv2dTranspose(1, 3, 3, 5, 4, (1, 1), (2, 2), output_padding=(1, 1), epilogue=FULL),
        FloatConv2dTranspose(2, 20, 18, 64, 64, (2, 2), (2, 2), epilogue=FULL),
    ],
)
def test_make_conv2d_transpose__follows_onnx(spec, isa):
    rng = np.random.default_rng(4)
    x = draw(rng, *spec.in_shape)
    w = draw(rng, spec.out_channels, *spec.kernel, spec.in_channels // spec.groups)
    total = transpose_convolve(x, w, spec)
    assert total.shape == spec.out_shape
    expected, operands = finish(total, spec.epilogue, rng)
    if spec.batch > 1:
        spec = replace(spec, batch=tirx.Var("n", "int64"))
    out = np.full(expected.shape, np.nan, "float32")
    packed = pack_conv2d_transpose(w, spec, isa)
    check(run_kernel(make_conv2d_transpose(spec, isa), x, packed, *operands, out), expected)


@pytest.mark.sample(15)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 5, 14, 29, None])
@pytest.mark.parametrize(("inner", "outputs"), [(1, 1), (7, 3), (33, 40), (16, 129)])
def test_make_dense__follows_numpy(isa, rows, inner, outputs):
    rng = np.random.default_rng(5)
    shape = (tirx.Var("n", "int64"), 3, inner) if rows is None else (rows, inner)
    spec = FloatDense(shape, outputs, FULL)
    x = draw(rng, *((11, 3, inner) if rows is None else (rows, inner)))
    w = draw(rng, outputs, inner)
    expected, operands = finish(x.astype("float64") @ w.T, FULL, rng)
    packed = pack_dense(w, spec, isa)
    planned, panels = plan_dense(spec, isa)
    assert packed.size == panels.vectors * planned.lanes * inner
    out = np.full(expected.shape, np.nan, "float32")
    check(run_kernel(make_dense(spec, isa), x, packed, *operands, out), expected)


@pytest.mark.parametrize(("inner", "outputs"), [(20, 72), (300, 20)])
def test_make_dense__every_number_of_rows_on_one_kernel(inner, outputs):
    rng = np.random.default_rng(5)
    spec = FloatDense((tirx.Var("n", "int64"), inner), outputs, FloatEpilogue(residual=True))
    w = draw(rng, outputs, inner)
    kernel = compile_kernel(make_dense(spec, HOST), TARGET)
    packed = tvm.runtime.tensor(pack_dense(w, spec, HOST))
    for rows in [*range(33), 1500]:
        x, residual = draw(rng, rows, inner), draw(rng, rows, outputs)
        y = tvm.runtime.tensor(np.full((rows, outputs), np.nan, "float32"))
        kernel(tvm.runtime.tensor(x), packed, tvm.runtime.tensor(residual), y)
        if rows:
            check(y.numpy(), x.astype("float64") @ w.T + residual)


@pytest.mark.sample(4)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outputs"), [(1, 4, 2), (17, 5, 33), (16, 8, 64)])
def test_make_batch_matmul__follows_numpy(isa, shared, rows, inner, outputs):
    rng = np.random.default_rng(6)
    for batch, real in (((2, 3), (2, 3)), ((tirx.Var("n", "int64"),), (4,))):
        x = draw(rng, *real, rows, inner)
        w = draw(rng, *(() if shared else real), inner, outputs)
        spec = FloatMatmul(batch, rows, inner, outputs, shared)
        out = np.full((*real, rows, outputs), np.nan, "float32")
        expected = x.astype("float64") @ w
        check(run_kernel(make_batch_matmul(spec, isa), x, w, out), expected)


def run_compiled(kernel, x: np.ndarray, w: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    y = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(w), y)
    return y.numpy()


@pytest.mark.sample(3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shared", [False, True])
def test_make_batch_matmul__of_any_rows_and_inner_extent(isa, shared):
    """One kernel for all: scores of attention by values, of a cache that grows."""
    rng = np.random.default_rng(7)
    batch, rows, inner = (tirx.Var(name, "int64") for name in ("b", "m", "k"))
    kernel = compile_kernel(
        make_batch_matmul(FloatMatmul((batch, 3), rows, inner, 33, shared), isa), TARGET
    )
    for m, k in [*((m, 5) for m in range(1, 30)), (1, 1), (7, 130), (150, 64)]:
        x = draw(rng, 2, 3, m, k)
        w = draw(rng, *(() if shared else (2, 3)), k, 33)
        check(run_compiled(kernel, x, w, (2, 3, m, 33)), x.astype("float64") @ w)


#: the axes of the weight in the order (batch, batch, K, N)
DOTS_ORDERS = [(0, 1, 3, 2), (0, 2, 3, 1), (1, 2, 3, 0)]


@pytest.mark.sample(16)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("order", DOTS_ORDERS)
@pytest.mark.parametrize("inner", [1, 5, 80])
def test_make_dots__of_any_sizes_are_those_of_static_ones(isa, order, inner):
    rng = np.random.default_rng(8)
    symbols = [tirx.Var(name, "int64") for name in ("b", "m", "n")]
    batch, rows, outputs = symbols
    dots = FloatDots((batch, 3), rows, inner, outputs, order)
    kernel = compile_kernel(make_dots(dots, isa), TARGET)
    sizes = [(1, 1), (1, 9), (2, 3), (5, 4), (9, 13), (4, 8), (0, 2), (3, 0), (40, 33)]
    for m, n in sizes:
        static = FloatDots((2, 3), m, inner, n, order)
        x, stored = draw(rng, 2, 3, m, inner), draw(rng, *static.weight_shape)
        got = run_compiled(kernel, x, stored, (2, 3, m, n))
        w = stored.transpose(order)
        assert w.shape == (2, 3, inner, n)
        if m * n:
            check(got, x.astype("float64") @ w)
        if (m, n) in sizes[1:5:3]:
            kernel_of_size = compile_kernel(make_dots(static, isa), TARGET)
            check(run_compiled(kernel_of_size, x, stored, (2, 3, m, n)), got)


def test_make_dots__threads_share_products_of_any_size():
    rng = np.random.default_rng(9)
    rows, outputs = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    kernel = compile_kernel(make_dots(FloatDots((16,), rows, 64, outputs, (0, 2, 1)), HOST), TARGET)
    x, w = draw(rng, 16, 70, 64), draw(rng, 16, 90, 64)
    got = run_compiled(kernel, x, w, (16, 70, 90))
    check(got, x.astype("float64") @ w.transpose(0, 2, 1))


@given(channels=st.integers(4, 300), blocks=st.integers(1, 8))
def test_panels__cover_every_channel_inside_the_buffer(channels, blocks):
    panels = Panels(channels, 4, blocks, 7)
    starts = panels.starts()
    covered = {s + lane for s in starts for lane in range(4)}
    assert covered == set(range(channels))
    assert len(starts) == panels.vectors == panels.full * blocks + len(panels.tail)
    assert starts[: panels.full * blocks] == [4 * i for i in range(panels.full * blocks)]


@pytest.mark.parametrize(
    ("cpu", "lanes"),
    [("skylake-avx512", 16), ("haswell", 8), ("nehalem", 4)],
)
def test_choose_float_isa__asks_the_target(cpu, lanes):
    target = Target({"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu"})
    assert choose_float_isa(target).lanes == lanes


@pytest.mark.parametrize(
    ("cpu", "set_lines", "near_bytes"),
    [
        ("cascadelake", 8, 1 << 20),
        ("icelake-server", 12, 5 << 18),
        ("sapphirerapids", 12, 2 << 20),
        ("znver4", 8, 1 << 20),
        ("znver5", 12, 1 << 20),
    ],
)
def test_find_caches__of_the_target(cpu, set_lines, near_bytes):
    """The sizes are those of the makers' manuals."""
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    caches = find_caches(target)
    assert (caches.set_lines, caches.near_bytes) == (set_lines, near_bytes)


def test_choose_float_isa__arm():
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
    assert choose_float_isa(target) == FloatIsa(4, 24, half=True, addresses=12)
