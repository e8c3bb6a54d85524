"""Inputs of a size that the model does not take: every way to run it names input, sizes, remedy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import as_main
from tvm.script import relax as R

import relayquant as rq
from relayquant.errors import DataError, suggest_sizes
from relayquant_runtime import Library, align_array


@as_main
def fixed(x: R.Tensor((8, 4), "float32"), y: R.Tensor(("n", 4), "float32")):
    return R.matmul(x, R.permute_dims(y))


RNG = np.random.default_rng(0)
EIGHT, THREE, FLAT = (RNG.random(shape, "float32") for shape in ((8, 4), (3, 4), (4,)))
COMPLEX = tvm.runtime.from_dlpack(align_array(np.ones((8, 4), "complex64")))
ADVICE = (
    r"For other sizes load the model with free ones: ONNX and TFLite with relayquant\.load\(path, "
    r"shapes=\{'x': \('n0', 4\)\}\), PyTorch exported with "
    r"dynamic_shapes=\{'x': \{0: torch\.export\.Dim\('n0'\)\}\}\."
)


def quantize_fixed():
    return rq.quantize(fixed, None, [(EIGHT, EIGHT)])


def compile_with_relayquant():
    return rq.Executor(rq.compile(fixed))


def compile_with_tvm():
    return rq.Executor(tvm.compile(fixed, "llvm"))


@pytest.fixture(scope="module", params=[compile_with_relayquant, compile_with_tvm])
def executor(request):
    return request.param()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            [THREE, EIGHT],
            r"^input 'x' of 'main' is float32 of shape \(3, 4\); allowed: float32 of shape "
            rf"\(8, 4\)\. {ADVICE}",
        ),
        (
            [FLAT, EIGHT],
            r"'x' of 'main' is float32 of shape \(4,\); allowed: .* \(8, 4\)\. "
            r"It takes 2 dimensions, and got 1\. Reshape the array\. \[RQ3",
        ),
        (
            [EIGHT.astype("float64"), EIGHT],
            r"'x' of 'main' is float64 .*; allowed.*e\(\"float32\"\)\. \[R",
        ),
        ([EIGHT, EIGHT[:, :3]], r"'y' of .* \(8, 3\); .*shapes=\{'y': \('n', 'n1'\)\}"),
        ([tvm.runtime.ShapeTuple([8, 4]), EIGHT], r"'x' of 'main' is a Shape; allowed: an array"),
        ([EIGHT], r"'main' takes 2 inputs \(x, y\), and got 1\. Pass a list with .*\[RQ302\]"),
        (EIGHT, r"of type ndarray; allowed: a list .* run\('main', \[array\]\)\. \[RQ101\]"),
        ([EIGHT, "text"], r"\(ndarray, str\) do not all become arrays: .* Pass a list with one"),
        ([COMPLEX, EIGHT], r"become arrays: one has complex numbers; allowed: real numbers\. Pass"),
    ],
    ids=[
        *("size", "rank", "dtype", "size beside a free one", "shape", "number", "array", "text"),
        "complex",
    ],
)
def test_executor__names_the_input(executor, inputs, message):
    with pytest.raises(DataError, match=message):
        executor.run("main", inputs)
    assert executor.run("main", [EIGHT, THREE])[0].shape == (8, 3)  # it runs on


def test_executor__no_such_function(executor):
    with pytest.raises(DataError, match=r"no function 'nain' .* mostly 'main'\. \[RQ101\]"):
        executor.run("nain", [EIGHT, THREE])


def test_executor__sizes_of_one_name():
    @as_main
    def same(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
        return R.add(x, y)

    with pytest.raises(
        DataError, match=r"'y' .*\(3, 4\); .*\(n, 4\)\. Sizes with the same name must"
    ):
        rq.Executor(rq.compile(same)).run("main", [EIGHT, THREE])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "run",
    [
        lambda inputs: rq.reference.run(fixed, inputs),
        lambda inputs: rq.verify(fixed, inputs, None),
        lambda inputs: rq.quantize(fixed, None, [tuple(inputs)]),
        lambda inputs: rq.calibrate(rq.prepare(fixed), [tuple(inputs)]),
        lambda inputs: rq.compare(fixed, None, quantize_fixed(), [tuple(inputs)]),
    ],
    ids=["reference", "verify", "quantize", "calibrate", "compare"],
)
def test_run__names_the_input(run):
    with pytest.raises(DataError, match=rf"'x' .*\(8, 4\).* {ADVICE}"):
        run([THREE, EIGHT])


def test_library__names_the_input(tmp_path):
    rq.compile(fixed).export_library(str(tmp_path / "fixed.so"))
    library = Library(tmp_path / "fixed.so")
    message = (
        r"^input 'x' of 'main' is float32 of shape \(3, 4\); fixed\.so takes R\.Tensor\(\(8, 4\), "
        r'dtype="float32"\)\. For other sizes compile .* shapes= of .*dynamic_shapes= of '
    )
    with pytest.raises(ValueError, match=message):
        library.run("main", [THREE, EIGHT])
    assert library.run("main", [EIGHT, THREE])[0].shape == (8, 3)


def test_advice__makes_a_model_that_takes_the_sizes():
    torch = pytest.importorskip("torch", reason="pip install torch")
    module = torch.nn.Linear(4, 2)
    mod, _ = rq.load(torch.export.export(module, (torch.from_numpy(EIGHT),)))
    with pytest.raises(DataError) as caught:
        rq.reference.run(mod, [THREE])
    advice = str(caught.value).partition("dynamic_shapes=")[2].partition("}}")[0] + "}}"
    shapes = eval(advice, {"torch": torch})
    free, _ = rq.load(
        torch.export.export(module, (torch.from_numpy(EIGHT),), dynamic_shapes=shapes)
    )
    (got,) = rq.reference.run(free, [THREE])
    np.testing.assert_allclose(got, module(torch.from_numpy(THREE)).detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "given", "shapes"),
    [
        ((8, 4), (3, 4), "('n0', 4)"),
        ((8, 4), (3, 5), "('n0', 'n1')"),
        ((8,), (3,), "('n0',)"),
        (("batch", 4), (3, 5), "('batch', 'n1')"),
        (("2 * n", 4), (3, 5), "('n0', 'n1')"),
        ((8, 4), (8, 4), None),
        (("batch", 4), (3, 4), None),
        ((8, 4), (8,), None),
    ],
)
def test_advice__frees_what_differs(wanted, given, shapes):
    advice = suggest_sizes("x", wanted, given)
    assert (advice == "") if shapes is None else (f"shapes={{'x': {shapes}}}" in advice)
