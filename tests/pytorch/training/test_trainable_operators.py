"""Torch forms of operators against the numpy ones, which the compiled modules confirm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from interpreter_cases import CASES, build, c, find_unread, floats
from tvm.relax import op

torch = pytest.importorskip("torch", reason="pip install torch")

from relayquant.errors import DataError, ModelError  # noqa: E402
from relayquant.ir.dialect import qnn  # noqa: E402
from relayquant.ir.fourier import write_products  # noqa: E402
from relayquant.ir.reference import run  # noqa: E402
from relayquant.ir.reference.relax import OPERATORS  # noqa: E402
from relayquant.stages.prepared import CalibrationGraph  # noqa: E402
from relayquant.torch.interpreter import operators, program  # noqa: E402
from relayquant.torch.interpreter.operators import TORCH_OPERATORS  # noqa: E402
from relayquant.torch.interpreter.program import build_program  # noqa: E402

#: What the reference has and torch models are not made of: integers, indices, creation.
MISSING = {
    "arange",
    "dequantize",
    "eye",
    "gather_nd",
    "index_put",
    "index_tensor",
    "left_shift",
    "median",
    "one_hot",
    "quantize",
    "right_shift",
    "scatter_elements",
    "scatter_nd",
    "vision.all_class_non_max_suppression",
}
#: Cases of operators that are missing, or of attributes that are only compiled.
REFUSED = {
    *(name for name in CASES if name in MISSING),
    "batch_norm_training",  # the program normalizes by the statistics it is given
    "resize2d",
}
#: Sums of integers, which torch has no exact form for: nothing of a trained model.
INTEGER_PRODUCTS = {"conv2d_integers", "matmul_integers", "max_pool2d_integers"}


def run_torch(mod, arrays):
    """(outputs of the program, its inputs as tensors that want gradients)."""
    names = tuple(param.name for param in mod["main"].params)
    built = build_program(CalibrationGraph(mod, {}, names))
    inputs = [torch.from_numpy(np.array(a)) for a in arrays]
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    result = built.run(inputs, {}, {}, lambda key, axis, value: value, {})
    return list(result) if isinstance(result, tuple) else [result], inputs


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("onesided", [False, True])
def test_dft__and_its_gradient(parts, inverse, onesided):
    """The transform and the products that compute it have the same gradient."""
    numbers = 33 if inverse and onesided else 60
    mod = build(lambda x: qnn.dft(x, 64, inverse, onesided), floats(2, numbers, parts))
    data = [floats(2, numbers, parts)]
    gradients = []
    for each in (mod, write_products(mod)):
        (found,), (x,) = run_torch(each, data)
        np.testing.assert_allclose(found.detach().numpy(), run(mod, data)[0], atol=2e-5)
        (found * torch.arange(found.numel()).reshape(found.shape)).sum().backward()
        gradients.append(x.grad.numpy())
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=2e-6 * np.abs(gradients[0]).max())


def test_operators__are_those_of_the_reference():
    assert set(OPERATORS) - set(TORCH_OPERATORS) == MISSING
    assert set(TORCH_OPERATORS) <= set(OPERATORS)


def test_operators__read_every_attribute(monkeypatch):
    """An attribute that no row reads is one that trained models compute without."""

    def compute(table, mod, arrays):
        monkeypatch.setattr(operators, "TORCH_OPERATORS", table)
        run_torch(mod, arrays)

    names = sorted(set(CASES) - REFUSED - INTEGER_PRODUCTS)
    assert find_unread(TORCH_OPERATORS, names, compute) == []


def test_attribute__that_a_row_does_not_name_is_refused(monkeypatch):
    row = program.TRAINED_ROWS["cumsum"]
    monkeypatch.setitem(program.TRAINED_ROWS, "cumsum", replace(row, attributes=("axis", "dtype")))
    make, *arrays = CASES["cumsum"]
    run_torch(build(make, *arrays), arrays)
    make, *arrays = CASES["cumsum_exclusive"]
    with pytest.raises(ModelError, match=r"cumsum has exclusive=True"):
        run_torch(build(make, *arrays), arrays)


@pytest.mark.parametrize("operator", ["divide", "floor_divide", "floor_mod", "mod"])
def test_division__of_integers_by_zero_is_that_of_the_reference(operator):
    arrays = [np.int32([7, -7, 0, 5]), np.int32([0, 2, 0, -3])]
    mod = build(getattr(op, operator), *arrays)
    (got,), _ = run_torch(mod, arrays)
    np.testing.assert_array_equal(got.numpy(), run(mod, arrays)[0])


def test_batch_norm__by_the_statistics_of_the_batch_is_refused():
    make, *arrays = CASES["batch_norm_training"]
    with pytest.raises(ModelError, match=r"training=True; allowed: False"):
        run_torch(build(make, *arrays), arrays)


@pytest.mark.parametrize("name", sorted(set(CASES) - REFUSED - INTEGER_PRODUCTS))
def test_operator__equals_the_reference(name):
    make, *arrays = CASES[name]
    mod = build(make, *arrays)
    got, _ = run_torch(mod, arrays)
    expected = run(mod, arrays)
    assert len(got) == len(expected)
    for mine, wanted in zip(got, expected, strict=True):
        assert mine.detach().numpy().dtype == wanted.dtype
        np.testing.assert_allclose(mine.detach().numpy(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "name", ["conv2d_layouts", "conv2d_transpose", "layer_norm", "softmax_axis", "avg_pool1d"]
)
def test_gradient__is_that_of_the_numbers(name):
    """Against differences of the numpy form, in a random direction."""
    make, *arrays = CASES[name]
    mod, rng = build(make, *arrays), np.random.default_rng(0)
    (got,), (tensor, *_) = run_torch(mod, arrays)
    weights = rng.standard_normal(got.shape)
    (got * torch.from_numpy(weights.astype("float32"))).sum().backward()
    direction = rng.standard_normal(arrays[0].shape).astype("float32")
    step = 1e-2
    ends = [run(mod, [arrays[0] + sign * step * direction, *arrays[1:]])[0] for sign in (1, -1)]
    expected = ((ends[0].astype("float64") - ends[1]) * weights).sum() / (2 * step)
    found = float((tensor.grad.numpy().astype("float64") * direction).sum())
    assert found == pytest.approx(expected, rel=0.01, abs=0.01)


@pytest.mark.parametrize(("size", "channels"), [(1, 3), (3, 3), (3, 1)])
@pytest.mark.parametrize(
    ("name", "data", "kernel"),
    [("conv2d", data, kernel) for data in ("NCHW", "NHWC") for kernel in ("OIHW", "HWIO", "OHWI")]
    + [("conv1d", "NWC", "WIO"), ("conv2d_transpose", "NCHW", "IOHW")],
)
def test_gradient__of_weights_in_any_layout(name, data, kernel, size, channels):
    """Torch has an algorithm for each size, and not all take a weight whose axes are permuted:
    of one small image and one channel of results it is refused.
    """
    spatial = kernel.replace("O", "").replace("I", "")
    sizes = {"N": 1, "C": 32, "I": 32, "O": channels} | dict.fromkeys(spatial, size)
    x = floats(*(sizes[axis] if axis in "NC" else 3 for axis in data))
    weight = floats(*(sizes[axis] for axis in kernel))
    function = getattr(op.nn, name)
    mod = build(lambda v, w: function(v, w, data_layout=data, kernel_layout=kernel), x, weight)
    (got,), inputs = run_torch(mod, [x, weight])
    got.square().sum().backward()
    direction, step = np.random.default_rng(0).standard_normal(weight.shape), 1e-2
    ends = [
        np.square(run(mod, [x, (weight + sign * step * direction).astype("float32")])[0]).sum(
            dtype="float64"
        )
        for sign in (1, -1)
    ]
    found = float((inputs[1].grad.numpy().astype("float64") * direction).sum())
    assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=0.01, abs=0.01)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_pad__equals_numpy(mode):
    x = floats(2, 3, 5)
    mod = build(lambda v: op.nn.pad(v, (0, 0, 1, 2, 3, 1), mode), x)
    (got,), _ = run_torch(mod, [x])
    numpy_mode = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    np.testing.assert_array_equal(
        got.detach().numpy(), np.pad(x, ((0, 0), (1, 2), (3, 1)), mode=numpy_mode)
    )


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("include", [False, True])
def test_pool__windows_of_the_reference(ceil_mode, dilation, include):
    x = floats(1, 2, 7, 8)
    common = ((3, 2), (2, 3), (1, 0, 1, 1), dilation, ceil_mode)
    for make in (
        lambda v: op.nn.max_pool2d(v, *common),
        lambda v: op.nn.avg_pool2d(v, *common, count_include_pad=include),
    ):
        mod = build(make, x)
        (got,), _ = run_torch(mod, [x])
        np.testing.assert_allclose(got.detach().numpy(), run(mod, [x])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 2, -1, -2])
def test_strided_slice__equals_the_reference(step):
    x = floats(2, 5)
    forward, backward = ((-6, 6), (1, 3), (-4, -1), (0, 5)), ((4, -6), (3, 0), (-1, -4))
    for begin, end in forward if step > 0 else backward:
        mod = build(lambda v: op.strided_slice(v, [1], [begin], [end], [step]), x)  # noqa: B023
        (got,), _ = run_torch(mod, [x])
        np.testing.assert_array_equal(got.detach().numpy(), run(mod, [x])[0])


def test_missing__all_named():
    x = floats(4, 4)
    first = c(np.int64([[0]]))

    def make(v):
        return op.gather_nd(op.image.resize2d(op.reshape(v, (1, 1, 4, 4)), (2, 2)), first)

    message = r"2 operators.*gather_nd \('\w+'\), image\.resize2d \('\w+'\)"
    with pytest.raises(ModelError, match=message):
        run_torch(build(make, x), [x])


def test_inputs__wrong_ones_named():
    x = floats(2, 3)
    mod = build(lambda v: op.multiply(v, c(np.float32(2))), x)
    program = build_program(CalibrationGraph(mod, {}, ("x0",)))

    def call(*inputs):
        return program.run(inputs, {}, {}, lambda key, axis, value: value, {})

    assert call(torch.from_numpy(x).double()).dtype == torch.float32
    with pytest.raises(DataError, match=r"takes 1 input \(x0\), got 0"):
        call()
    with pytest.raises(DataError, match=r"'x0' has shape \(2, 4\); allowed: \(2, 3\)"):
        call(torch.zeros(2, 4))
    with pytest.raises(DataError, match=r"'x0' is a ndarray; allowed: a torch.Tensor"):
        call(x)
    with pytest.raises(DataError, match=r"'x0' is torch.int64; the model takes torch.float32"):
        call(torch.zeros(2, 3, dtype=torch.int64))
