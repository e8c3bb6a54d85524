"""Bilinear samples of images: the kernel against PyTorch, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.codegen.kernels.floating.grid_sample import MOST_PIXELS, TASK_CHANNELS, GridSample
from relayquant.codegen.legalization.resizing import read_grid_sample
from relayquant.ir.rewrite.function import make_main

torch = pytest.importorskip("torch")

#: (N, C, H, W) and rows and columns of the result.
CASES = {
    "heads of attention": ((4, 32, 10, 12), (50, 4)),
    "tasks that are moved back": ((1, TASK_CHANNELS + 12, 6, 5), (7, 9)),
    "odd": ((2, 13, 7, 5), (3, 5)),
    "least": ((1, 8, 2, 4), (2, 4)),
    "one row": ((1, 9, 1, 11), (1, 30)),
    "threads": ((2, 40, 16, 16), (20, 20)),
}


def build_sample(
    shape: tuple[int | str, ...],
    result: tuple[int, ...],
    padding: str = "zeros",
    aligned: bool = False,
    method: str = "bilinear",
    dtype: str = "float32",
) -> tvm.IRModule:
    """main(x, grid) of one grid_sample."""
    batch = tvm.tirx.Var(shape[0], "int64") if isinstance(shape[0], str) else shape[0]
    x = relax.Var("x", relax.TensorType([batch, *shape[1:]], dtype))
    grid = relax.Var("grid", relax.TensorType([batch, len(result), *result], dtype))
    call = relax.op.image.grid_sample(
        x,
        grid,
        method=method,
        layout="NCHW" if len(result) == 2 else "NCDHW",
        padding_mode=padding,
        align_corners=aligned,
    )
    return make_main([x, grid], lambda _: call)


def find_spec(mod: tvm.IRModule) -> GridSample | None:
    """What is read of the only operator of a module, for a CPU."""
    (binding,) = mod["main"].body.blocks[0].bindings
    with Target("llvm"):
        found = read_grid_sample(binding.value)
    return None if found is None else found[1]


def draw(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Draw images, and places of which a third is outside of them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype("float32")
    return x, rng.uniform(-1.5, 1.5, (shape[0], 2, *result)).astype("float32")


def sample_in_pytorch(
    x: np.ndarray, grid: np.ndarray, padding: str = "zeros", aligned: bool = False
) -> np.ndarray:
    """Sample as PyTorch does, whose grid has the two coordinates last."""
    last = torch.from_numpy(np.ascontiguousarray(grid.transpose(0, 2, 3, 1)))
    return torch.nn.functional.grid_sample(
        torch.from_numpy(x), last, "bilinear", padding, aligned
    ).numpy()


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_grid_sample__equals_pytorch(name, aligned, padding):
    shape, result = CASES[name]
    mod = build_sample(shape, result, padding, aligned)
    assert find_spec(mod) is not None
    x, grid = draw(shape, result)
    (got,) = Executor(rq.compile(mod)).run("main", [x, grid])
    np.testing.assert_allclose(
        got, sample_in_pytorch(x, grid, padding, aligned), rtol=1e-5, atol=1e-5
    )


def test_grid_sample__any_batch():
    shape, result = (3, 16, 5, 6), (4, 8)
    mod = build_sample(("n", *shape[1:]), result)
    assert find_spec(mod) is not None
    x, grid = draw(shape, result)
    executor = Executor(rq.compile(mod))
    for batch in (1, 3):
        (got,) = executor.run("main", [x[:batch], grid[:batch]])
        want = sample_in_pytorch(x[:batch], grid[:batch])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_grid_sample__places_and_pixels_that_are_no_numbers(padding):
    """Places far outside read no memory of others, and no pixel of the image counts for them."""
    shape, result = (1, 8, 3, 4), (2, 8)
    x, grid = draw(shape, result)
    x[0, :, 0, 0] = x[0, :, -1, -1] = np.nan  # pixels to which places outside would be moved
    far = [1e30, -1e30, 3e9, -3e9, 7.0, -7.0, 1e5, -1e5]
    grid[0] = 0.3
    grid[0, 0, 0] = far
    grid[0, 1, 1] = [*far[:6], np.nan, 0.1]
    (got,) = Executor(rq.compile(build_sample(shape, result, padding))).run("main", [x, grid])
    np.testing.assert_allclose(got, sample_in_pytorch(x, grid, padding), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "result", "options"),
    [
        ((1, 3, 16, 16), (16, 16), {}),  # an image of few channels
        ((1, 8, 2, 3), (4, 4), {}),  # fewer pixels than a tile
        ((1, 8, 4, 4), (1, 7), {}),  # fewer places than a tile
        ((1, 8, 8 * MOST_PIXELS, 9), (1, 8), {}),  # an image that is hardly read
        ((1, 8, 4, 4), (4, 4), {"method": "nearest"}),
        ((1, 8, 4, 4), (4, 4), {"padding": "reflection"}),
        ((1, 8, 4, 4), (4, 4), {"dtype": "float64"}),
        ((1, 8, 4, 4, 4), (4, 4, 4), {}),  # volumes
    ],
)
def test_grid_sample__has_no_kernel(shape, result, options):
    assert find_spec(build_sample(shape, result, **options)) is None
