"""Resizes of symbolic sizes, as the onnx evaluator and PyTorch compute them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime

import relayquant as rq

MODES = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
NEAREST = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
#: (mode, nearest_mode, rank of the data)
SAMPLINGS = [
    *(("nearest", near, rank) for near, rank in zip(NEAREST, (4, 3, 5, 4), strict=True)),
    ("nearest", "round_prefer_ceil", 4),
    ("linear", "", 4),
    ("linear", "", 3),
    ("linear", "", 5),
    ("cubic", "", 4),
]
#: sizes before -> sizes after, of up to three axes
SIZES = [((5, 7, 4), (9, 4, 6)), ((6, 4, 2), (1, 8, 5)), ((1, 9, 6), (7, 1, 1))]


def make_resize(mode, coordinates, nearest, rank, factors=None, **attrs):
    """A model of one Resize of open sizes, by `factors` or to the sizes of a second input."""
    dims = ["n", "c", "h", "w", "d"][:rank]
    attrs |= {"mode": mode, "coordinate_transformation_mode": coordinates}
    if nearest:
        attrs["nearest_mode"] = nearest
    inputs, nodes = {"x": tuple(dims)}, []
    if factors is None:
        inputs["z"] = ("n", "c", *(f"{name}2" for name in dims[2:]))
        nodes = [helper.make_node("Shape", ["z"], ["size"])]
        nodes.append(helper.make_node("Resize", ["x", "", "", "size"], ["y"], **attrs))
        return make_onnx(nodes, inputs, {"y": (None,) * rank}, opset=18)
    scales = np.array([1, 1, *factors[: rank - 2]], "float32")
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], **attrs)]
    return make_onnx(nodes, inputs, {"y": (None,) * rank}, {"scales": scales}, 18)


def check_resize(model, rank, sizes=SIZES):
    """Compare a compiled model with the evaluator for several sizes."""
    machine = rq.Executor(rq.compile(rq.load(model)))
    for before, after in sizes:
        x = np.random.default_rng(0).standard_normal((2, 3, *before[: rank - 2])).astype("float32")
        inputs = {"x": x, "z": np.zeros((2, 3, *after[: rank - 2]), "float32")}
        inputs = {each.name: inputs[each.name] for each in model.graph.input}
        (want,) = ReferenceEvaluator(model).run(None, inputs)
        (found,) = machine.run("main", list(inputs.values()))
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("coordinates", MODES)
@pytest.mark.parametrize(("mode", "nearest", "rank"), SAMPLINGS)
def test_resize__to_sizes_known_at_run_time(mode, nearest, rank, coordinates):
    # For one element, the evaluator computes pytorch_half_pixel otherwise than ONNX defines it.
    several = [(before, after) for before, after in SIZES if 1 not in after[: rank - 2]]
    differs = mode == "cubic" and coordinates == "pytorch_half_pixel"
    check_resize(make_resize(mode, coordinates, nearest, rank), rank, several if differs else SIZES)


@pytest.mark.parametrize("factors", [(2, 3, 2), (1.5, 2.5, 0.5)])
@pytest.mark.parametrize("coordinates", MODES)
@pytest.mark.parametrize(("mode", "nearest", "rank"), SAMPLINGS)
def test_resize__by_factors(mode, nearest, rank, coordinates, factors):
    """Parts of elements are left out, and the factor still says where each element lies."""
    model = make_resize(mode, coordinates, nearest, rank, factors)
    is_whole = factors == (2, 3, 2)
    if is_whole or (coordinates != "align_corners" and mode != "cubic"):
        check_resize(model, rank)
        return
    match = "align_corners of a symbolic" if coordinates == "align_corners" else "mode 'cubic' of"
    with pytest.raises(rq.ModelError, match=match):
        rq.load(model)


@pytest.mark.parametrize(
    ("factors", "attrs", "match"),
    [
        ((1.3, 1.3), {}, "size h by 1.29.*; supported: quotients of integers up to 65536 such as"),
        ((2, 2), {"antialias": 1}, "antialias True and exclude_outside False; supported: half_pix"),
        ((2, 2), {"exclude_outside": 1}, "exclude_outside True; supported: .* fix the dimension"),
    ],
)
def test_resize__of_a_symbolic_size_is_refused(factors, attrs, match):
    with pytest.raises(rq.ModelError, match=match):
        rq.load(make_resize("linear", "half_pixel", "", 4, factors, **attrs))


@pytest.mark.parametrize("factors", [(2, 2.5, 3), (2, 1.5, 3), (1.5, 1.75, 0.5), None])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize(("mode", "nearest", "rank"), SAMPLINGS)
def test_resize__of_a_symbolic_and_a_fixed_size(mode, nearest, rank, coordinates, factors):
    """A fixed size has its exact factor, whatever the symbolic one has."""
    model = make_resize(mode, coordinates, nearest, rank, factors)
    for given in model.graph.input:
        dims = given.type.tensor_type.shape.dim
        for at, size in zip(range(3, rank), (6, 5) if given.name == "x" else (9, 4), strict=False):
            dims[at].dim_value = size
    sizes = [((5, 6, 5), (9, 9, 4)), ((1, 6, 5), (7, 9, 4))]
    if mode == "cubic" and factors == (1.5, 1.75, 0.5):
        with pytest.raises(rq.ModelError, match="mode 'cubic' of a symbolic size"):
            rq.load(model)
    else:
        check_resize(model, rank, sizes)


def test_resize__of_a_symbolic_batch_has_fixed_sizes():
    """A size that stays is not resized."""
    attrs = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    node = helper.make_node("Resize", ["x", "roi", "scales"], ["y"], **attrs)
    roi = np.array([0, 0, 0.2, 0.1, 1, 1, 0.8, 0.7], "float32")
    constants = {"roi": roi, "scales": np.array([1, 1, 2, 0.5], "float32")}
    shapes = {"x": ("n", 2, 6, 8)}, {"y": ("n", 2, 12, 4)}
    model = make_onnx([node], *shapes, constants, 18)
    x = np.random.default_rng(0).standard_normal((3, 2, 6, 8)).astype("float32")
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = rq.Executor(rq.compile(rq.load(model))).run("main", [x])
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


INTERPOLATIONS = [
    *({"scale_factor": 2, "mode": mode} for mode in ("nearest", "bilinear", "bicubic")),
    {"scale_factor": 1.5, "mode": "bilinear"},
    {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    *({"mode": mode} for mode in ("nearest", "bilinear", "bicubic")),
    *({"mode": mode, "align_corners": True} for mode in ("bilinear", "bicubic")),
    *({"size": (17, 19), "mode": mode} for mode in ("nearest", "bilinear")),
]


@pytest.mark.parametrize("given", INTERPOLATIONS, ids=str)
def test_interpolate__of_run_time_sizes(given):
    """Without a size or a scale, to the size of the picture before a convolution of stride 2."""
    torch = pytest.importorskip("torch")

    class Interpolation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)

        def forward(self, x):
            is_given = {"size", "scale_factor"} & given.keys()
            wanted = given if is_given else {"size": x.shape[2:], **given}
            return torch.nn.functional.interpolate(self.conv(x), **wanted)

    module, picture = Interpolation().eval(), torch.randn(1, 3, 24, 32)
    height, width = (torch.export.Dim(name, min=4, max=512) for name in "hw")
    program = torch.export.export(module, (picture,), dynamic_shapes=({2: height, 3: width},))
    machine = rq.Executor(rq.compile(rq.load(program)))
    for sizes in itertools.pairwise((24, 32, 23, 8, 9)):
        x = torch.randn(1, 3, *sizes)
        (found,) = machine.run("main", [x.numpy()])
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
FACTORS = [{"scale_factor": 2}, {"scale_factor": 1.5}, {"size": 5}]


@pytest.mark.parametrize("given", FACTORS, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("rank", LINEAR)
def test_interpolate__of_lines_and_volumes(rank, mode, given):
    torch = pytest.importorskip("torch")
    given = {**given, "mode": LINEAR[rank] if mode == "linear" else mode}

    class Interpolation(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.interpolate(torch.relu(x), **given)

    sizes = (8, 9, 6)[:rank], (5, 7, 4)[:rank]
    first, second = (torch.randn(1, 3, *each) for each in sizes)
    dims = {axis + 2: torch.export.Dim.DYNAMIC for axis in range(rank)}
    program = torch.export.export(Interpolation(), (first,), dynamic_shapes=(dims,))
    machine = rq.Executor(rq.compile(rq.load(program)))
    for x in (first, second):
        (found,) = machine.run("main", [x.numpy()])
        np.testing.assert_allclose(found, Interpolation()(x).numpy(), rtol=1e-5, atol=1e-5)


def test_adaptive_max_pool__of_run_time_sizes_to_one_element():
    torch = pytest.importorskip("torch")

    class Pool(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.adaptive_max_pool2d(torch.relu(x), 1)

    picture, dims = torch.randn(1, 3, 8, 9), {2: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Pool(), (picture,), dynamic_shapes=(dims,))
    x = torch.randn(1, 3, 5, 9)
    (found,) = rq.Executor(rq.compile(rq.load(program))).run("main", [x.numpy()])
    np.testing.assert_array_equal(found, Pool()(x).numpy())


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_quantize__a_network_that_resizes_to_run_time_sizes(mode, tmp_path):
    torch = pytest.importorskip("torch")

    class Segmentation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
            self.deep = torch.nn.Conv2d(16, 16, 3, stride=2, padding=1)
            self.last = torch.nn.Conv2d(32, 4, 1)

        def forward(self, x):
            wide = torch.relu(self.first(x))
            deep = torch.relu(self.deep(wide))
            deep = torch.nn.functional.interpolate(deep, size=wide.shape[2:], mode=mode)
            return self.last(torch.cat([wide, deep], 1))

    torch.manual_seed(0)
    module, picture = Segmentation().eval(), torch.randn(1, 3, 24, 32)
    height, width = (torch.export.Dim(name, min=4, max=512) for name in "hw")
    program = torch.export.export(module, (picture,), dynamic_shapes=({2: height, 3: width},))
    rng = np.random.default_rng(0)
    sizes = ((24, 32), (23, 41), (40, 17)) * 3
    data = [rng.standard_normal((1, 3, *size)).astype("float32") for size in sizes]
    qmod = rq.quantize(*rq.load(program), data, effort="fast", guard="off")
    x = rng.standard_normal((1, 3, 29, 35)).astype("float32")
    want = module(torch.from_numpy(x)).detach().numpy()
    (found,) = rq.Executor(rq.compile(qmod)).run("main", [x])
    noise = np.square(want - found).sum() / np.square(want).sum()
    assert 10 * np.log10(noise) < -30
    (written,) = run_onnxruntime(rq.export_onnx(qmod, tmp_path / "q.onnx"), {"x": x})
    np.testing.assert_allclose(written, found, rtol=1e-4, atol=0.02 * np.abs(found).max())
