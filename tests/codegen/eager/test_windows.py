"""Tables of windows: products of any shape on the same kernels, as exact integers in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import build_model
from tvm import relax
from tvm.relax import op

from relayquant.codegen.eager import EagerModule, kernel_cache
from relayquant.codegen.eager.kernel_cache import KernelCache, host_kernels
from relayquant.codegen.eager.steps import product, windows
from relayquant.codegen.eager.steps.exact_parts import split_weight
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.gathered import GatheredProduct
from relayquant.codegen.kernels.floating.planar import make_planar
from relayquant.codegen.kernels.floating.tile import FloatIsa
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import run


def draw_integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Float32 integers whose sums of products are exact in any order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype("float32")


def convolve(x: np.ndarray, w: np.ndarray, stride: int, pad: int, groups: int) -> np.ndarray:
    """Convolution NCHW by OIHW in int64, window by window."""
    n, c, h, width = x.shape
    o, i, kh, kw = w.shape
    padded = np.zeros((n, c, h + 2 * pad, width + 2 * pad), "int64")
    padded[:, :, pad : pad + h, pad : pad + width] = x
    oh, ow = ((size + 2 * pad - k) // stride + 1 for size, k in ((h, kh), (width, kw)))
    y = np.zeros((n, o, oh, ow), "int64")
    for channel in range(o):
        first = channel // (o // groups) * i
        for row, col in np.ndindex(oh, ow):
            top, left = row * stride, col * stride
            window = padded[:, first : first + i, top : top + kh, left : left + kw]
            y[:, channel, row, col] = (window * w[channel].astype("int64")).sum(axis=(1, 2, 3))
    return y


#: images, channels, outputs, size, kernel, stride, padding, groups
CONVOLUTIONS = [
    (1, 3, 24, 9, 3, 2, 1, 1),  # panels that overlap
    (2, 5, 80, 6, 1, 1, 0, 1),  # a dense layer; vectors that are computed twice
    (2, 4, 3, 7, 3, 1, 1, 1),  # fewer outputs than a vector has lanes
    (3, 8, 34, 5, 3, 1, 0, 2),  # groups with panels of their own
    (7, 6, 6, 5, 3, 1, 1, 6),  # depthwise
    (1, 20, 20, 11, 5, 2, 2, 20),
    (9, 4, 16, 2, 2, 1, 0, 1),  # images of one result
    (2, 3, 2, 19, 3, 1, 1, 1),  # few outputs: vectors of pixels, of which the last overlaps
    (3, 2, 1, 40, 3, 2, 0, 1),  # every second column
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("rows", [8, windows.TABLE_ROWS], ids=["several calls", "one call"])
def test_convolution__equals_exact_integers(monkeypatch, case, rows):
    monkeypatch.setattr(windows, "TABLE_ROWS", rows)
    n, c, o, size, kernel, stride, pad, groups = case
    w, bias = draw_integers(o, c // groups, kernel, kernel), draw_integers(1, o, 1, 1, seed=1)

    def body(emit, x, other):
        options = {"strides": stride, "padding": pad, "groups": groups}
        y = emit("y", op.nn.conv2d(x, relax.const(w), **options))
        y = emit("sum", op.add(emit("biased", op.add(y, relax.const(bias))), other))
        return emit("clip", op.clip(y, -150, 200))

    x = draw_integers(n, c, size, size, seed=2)
    want = convolve(x, w, stride, pad, groups)
    other = draw_integers(*want.shape, seed=3)
    module = EagerModule(build_model(body, x.shape, other.shape))
    assert [s.var.name for s in module.programs["main"].steps if s.kernel] == ["clip"]
    (have,) = module.run("main", [x, other])
    np.testing.assert_array_equal(have, np.clip(want + bias + other, -150, 200))


@pytest.mark.parametrize(
    "attrs",
    [
        {"padding": (1, 2, 0, 3)},
        {"strides": (2, 3), "dilation": (1, 2), "padding": (2, 0, 2, 5)},
        {"strides": (1, 2), "dilation": (3, 1)},
    ],
)
@pytest.mark.parametrize("outputs", [1, 2])
def test_vectors_of_pixels__give_the_bits_of_vectors_of_outputs(monkeypatch, attrs, outputs):
    """With any stride and dilation, for data and a residual in any memory order."""
    rng = np.random.default_rng(0)
    w, bias = rng.normal(size=(outputs, 3, 2, 5)), rng.normal(size=(1, outputs, 1, 1))
    w, bias = w.astype("float32"), bias.astype("float32")

    def body(emit, x, other):
        y = emit("y", op.nn.conv2d(x, relax.const(w), **attrs))
        return emit("sum", op.add(emit("biased", op.add(y, relax.const(bias))), other))

    x = rng.normal(size=(2, 3, 9, 70)).astype("float32")
    alone = build_model(lambda e, x: e("y", op.nn.conv2d(x, relax.const(w), **attrs)), x.shape)
    (result,) = run(alone, [x])
    other = np.asfortranarray(rng.normal(size=result.shape).astype("float32"))
    mod = build_model(body, x.shape, other.shape)
    module = EagerModule(mod)
    (have,) = module.run("main", [x, other])
    assert [step.kernel.make for step in module.programs["main"].steps if step.kernel] == [
        make_planar
    ]
    monkeypatch.setattr(product, "choose_planar", lambda *_: None)
    (want,) = EagerModule(mod).run("main", [x, other])
    np.testing.assert_array_equal(have, want)


def test_clip__nan_and_infinity_are_those_of_numpy():
    weight = np.eye(4, dtype="float32")
    mod = build_model(lambda e, x: e("y", op.matmul(x, relax.const(weight))), (3, 4))
    x = np.float32([[1, -2, 3, -0.0], [np.nan] * 4, [np.inf] * 4])
    with np.errstate(invalid="ignore"):
        want = x @ weight
    np.testing.assert_array_equal(EagerModule(mod).run("main", [x])[0], want)


def test_kernels__a_network_of_many_shapes_needs_few(monkeypatch):
    made = []
    compile_kernel = kernel_cache.compile_kernel

    def counted(key, isa, target):
        made.append(key)
        return compile_kernel(key, isa, target)

    monkeypatch.setattr(kernel_cache, "compile_kernel", counted)

    def body(emit, x):
        for i, (inputs, size) in enumerate(((3, 3), (64, 1), (64, 3), (64, 5))):
            w = draw_integers(64, inputs, size, size, seed=i)
            x = emit(f"c{i}", op.nn.conv2d(x, relax.const(w), strides=1 + i % 2, padding=size // 2))
            x = emit(f"r{i}", op.nn.relu(x)) if i % 2 else x
        return x

    mod = build_model(body, (1, 3, 20, 20))
    EagerModule(mod, KernelCache(host_kernels().target)).run("main", [draw_integers(1, 3, 20, 20)])
    assert len(made) == 1


@pytest.mark.parametrize("outputs", [*range(2, 20), 63, 64, 65, 1000])
@pytest.mark.parametrize("lanes", [4, 16])
def test_panels__cover_every_output_of_every_group(outputs, lanes):
    panels = GatheredProduct.choose(outputs, FloatIsa(lanes, 24))
    starts = panels.list_starts(3, outputs)
    covered = starts[..., None] + np.arange(panels.lanes)
    for group, found in enumerate(np.split(covered, 3)):
        inside = np.arange(outputs) + group * outputs
        assert set(found.flat) == set(inside)
    assert list(panels.list_origins(3, outputs, 7)) == [
        group * 7 for group in range(3) for _ in range(len(starts) // 3)
    ]
    assert starts.size * panels.lanes < 3 * 2 * outputs


def test_windows__of_a_pixel_are_its_channels():
    found = windows.find_windows(FloatConv2d(1, 1, 1, 6, 4, (1, 1)))
    assert (list(found.rows), list(found.steps), found.image_size) == ([0], [*range(6)], 6)
    parts = list(found.plan_calls(10_000, 4, False))
    assert [(len(rows), extents.images) for rows, extents in parts] == [(4096, 2), (1808, 1)]
    assert (parts[1][1].first, parts[1][1].first_result) == (8192 * 6, 8192 * 4)


# --- Integers -----------------------------------------------------------------------------------


def integer_model(w: np.ndarray, zero: int, **attrs) -> tvm.IRModule:
    """qnn.conv2d or qnn.dense of uint8 with a weight int8 that has one zero point per output."""
    zeros = np.arange(len(w), dtype="int32") % 3
    scales = relax.const(np.float32(1)), relax.const(np.ones(len(w), "float32"))

    def body(emit, x):
        constants = relax.const(w), relax.const(np.int32(zero)), relax.const(zeros)
        operator = qnn.dense if w.ndim == 2 else qnn.conv2d
        return emit("y", operator(x, *constants, *scales, **attrs))

    shape = ("n", 5, w.shape[1]) if w.ndim == 2 else ("n", w.shape[1] * attrs["groups"], 6, 6)
    return build_model(body, shape, dtype="uint8")


@pytest.mark.parametrize(
    ("shape", "attrs"),
    [
        ((40, 3, 3, 3), {"groups": 1, "padding": (1, 1, 1, 1)}),
        ((20, 1, 3, 3), {"groups": 20, "strides": (2, 2), "padding": (1, 1, 1, 1)}),
        ((18, 4, 1, 1), {"groups": 2}),
        ((70, 33), {}),
    ],
)
def test_integers__run_on_a_float_kernel_and_stay_exact(shape, attrs):
    rng = np.random.default_rng(0)
    w = rng.integers(-128, 128, shape, dtype="int8")
    mod = integer_model(w, 131, **attrs)
    x = rng.integers(0, 256, [3, *map(int, mod["main"].params[0].ty.shape.values[1:])], "uint8")
    module = EagerModule(mod)
    assert [s.var.name for s in module.programs["main"].steps if s.kernel] == ["y"]
    (have,) = module.run("main", [x])
    centred = w.astype("int64") - (np.arange(len(w)) % 3).reshape(-1, *[1] * (w.ndim - 1))
    if w.ndim == 2:
        want = (x.astype("int64") - 131) @ centred.T
    else:
        pad, stride = max(attrs.get("padding", (0,))), max(attrs.get("strides", (1,)))
        want = convolve(x.astype("int64") - 131, centred, stride, pad, attrs["groups"])
    assert have.dtype == np.int32
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(("columns", "is_kernel"), [(600, True), (2000, True), (2200, False)])
def test_integers__sums_that_float32_does_not_hold_are_added_in_parts(columns, is_kernel):
    w = np.full((8, columns), 127, "int8")
    w[1::2] *= -1
    module = EagerModule(integer_model(w, 0))
    assert any(step.kernel for step in module.programs["main"].steps) is is_kernel
    (have,) = module.run("main", [np.full((1, 5, columns), 255, "uint8")])
    want = 255 * (w[:, 0].astype(int) - np.arange(8) % 3) * columns
    assert have.dtype == np.int32
    np.testing.assert_array_equal(have, np.broadcast_to(want, have.shape))


@pytest.mark.parametrize("groups", [1, 2])
def test_integers__sums_of_a_convolution_in_parts(groups):
    rng = np.random.default_rng(2)
    w = rng.choice(np.array([-128, 127], "int8"), (16, 200, 1, 1)).repeat(3, 2).repeat(3, 3)
    mod = integer_model(w, 10, groups=groups, padding=(1, 1, 1, 1))
    x = rng.choice(np.array([0, 255], "uint8"), (2, 200 * groups, 6, 6))
    x[0] = np.tile(np.where(w[0, :, :1, :1] > 0, 255, 0), (groups, 1, 1))
    module = EagerModule(mod)
    assert [s.var.name for s in module.programs["main"].steps if s.kernel] == ["y"]
    (have,), centred = module.run("main", [x]), w.astype("int64")
    centred -= (np.arange(len(w)) % 3).reshape(-1, 1, 1, 1)
    want = convolve(x.astype("int64") - 10, centred, 1, 1, groups)
    assert abs(want).max() > 1 << 24
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_split_weight__parts_add_up_and_float32_holds_their_sums(axis):
    rng = np.random.default_rng(4)
    weight = rng.integers(-128, 128, (9, 8, 7, 60)).astype("float64")
    parts = split_weight(weight, axis, 255)
    np.testing.assert_array_equal(sum(part.astype("float64") for part in parts), weight)
    others = tuple(place for place in range(4) if place != axis)
    assert all(np.abs(part).sum(axis=others).max() * 255 < 1 << 24 for part in parts)
    assert len(parts) > 1 or axis == 3
    assert all((part != 0).any() for part in parts)


def test_split_weight__none_where_int32_or_few_parts_do_not_hold_the_sums():
    assert split_weight(np.full((1, 1 << 14), 127.0), 0, 1 << 10) == []
    assert split_weight(np.full((1, 10), 127.0), 0, 1 << 18) == []
    assert split_weight(np.zeros((3, 0)), 0, 255)[0].shape == (3, 0)
