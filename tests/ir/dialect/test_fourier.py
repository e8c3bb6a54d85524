"""qnn.dft: numpy's transforms, in compiled code, in TVM's own build, in ONNX and in Relay."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from onnx_runtime import run_onnxruntime
from operator_names import list_operators
from qnn_testing import make_module
from tvm import relax

import relayquant as rq
from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.fourier import Transform
from relayquant.ir.fourier import write_products

#: (inverse, onesided) -> what it is in numpy
KINDS = {
    (False, False): np.fft.fft,
    (True, False): np.fft.ifft,
    (False, True): lambda x, n: np.fft.fft(x, n)[..., : n // 2 + 1],
    (True, True): np.fft.irfft,
}


def make_dft(shape, length, inverse=False, onesided=False, dtype="float32"):
    """A module of one transform. Sizes of the shape may be names."""
    sizes = [tvm.tirx.Var(each, "int64") if isinstance(each, str) else each for each in shape]
    ty = relax.TensorType(sizes, dtype)
    return make_module(lambda x: qnn.dft(x, length, inverse, onesided), [ty])


def draw(shape, dtype="float32"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def compute(x, length, inverse=False, onesided=False):
    """What numpy computes in double precision, as numbers of one or two parts."""
    numbers = x[..., 0].astype("float64") + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    if inverse and onesided:
        return np.fft.irfft(numbers, length)[..., None]
    found = KINDS[inverse, onesided](numbers, length)
    return np.stack([found.real, found.imag], -1)


def measure(found, expected):
    """The largest error, relative to the largest number."""
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


#: Whole matrices, two factors of equal and unequal size, a prime and an odd length.
LENGTHS = [1, 2, 12, 97, 225, 256, 400, 480]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("inverse", "onesided"), KINDS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("missing", [0, 1, 50])
def test_dft__is_numpys(length, inverse, onesided, parts, missing):
    numbers = max(1, (length // 2 + 1 if inverse and onesided else length) - missing)
    x = draw((3, numbers, parts))
    expected = compute(x, length, inverse, onesided)
    mod = make_dft(x.shape, length, inverse, onesided)
    found = {
        "reference": rq.reference.run(mod, [x])[0],
        "compiled": rq.Executor(rq.compile(mod)).run("main", [x])[0],
        "products": rq.reference.run(write_products(mod), [x])[0],
    }
    for name, each in found.items():
        assert each.dtype == "float32"
        assert measure(each, expected) < 2e-6, name


@given(st.integers(1, 400), st.sampled_from(list(KINDS)), st.sampled_from([1, 2]), st.data())
def test_products__of_any_length(length, kind, parts, data):
    most = length // 2 + 1 if all(kind) else length
    x = draw((2, data.draw(st.integers(1, most)), parts), "float64")
    mod = write_products(make_dft(x.shape, length, *kind, "float64"))
    assert "qnn.dft" not in list_operators(mod)
    assert measure(rq.reference.run(mod, [x])[0], compute(x, length, *kind)) < 1e-13


def test_factors__take_a_tenth_of_the_multiply_adds():
    """2048 real numbers: 2048 * 2050 with the whole matrix."""
    first, second = Transform(2048, inverse=False, onesided=True, numbers=2048, parts=1).factors
    groups = -(-1025 // first)
    assert first * second == 2048
    assert 2 * 2048 * first + 2 * 2048 * 2 * groups < 2048 * 2050 / 10


def test_factors__of_a_prime_and_of_a_large_length():
    assert Transform(401, inverse=False, onesided=True, numbers=401, parts=1).factors == (1, 401)
    long = Transform(2**18, inverse=False, onesided=False, numbers=2**18, parts=2)
    assert long.elements < 2**20 + 1


def test_dft__symbolic_batch_and_axes():
    mod = make_dft(("n", 2, 256, 1), 256, onesided=True)
    executor = rq.Executor(rq.compile(mod))
    for count in (1, 3):
        x = draw((count, 2, 256, 1))
        expected = compute(x, 256, onesided=True)
        assert measure(executor.run("main", [x])[0], expected) < 2e-6
        assert measure(rq.reference.run(mod, [x])[0], expected) < 2e-6


@pytest.mark.parametrize("length", [97, 256])
def test_build__of_tvm_alone(length):
    """`relax.build` runs none of our passes."""
    x = draw((2, length, 1))
    machine = relax.VirtualMachine(relax.build(make_dft(x.shape, length), "llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x)).numpy()
    assert measure(found, compute(x, length)) < 2e-6


@pytest.mark.parametrize(("inverse", "onesided"), KINDS)
def test_export_onnx__is_products(tmp_path, inverse, onesided):
    x = draw((2, 33 if inverse and onesided else 240, 2 if inverse else 1))
    length = 64 if inverse and onesided else 240
    path = rq.export_onnx(make_dft(x.shape, length, inverse, onesided), tmp_path / "m.onnx")
    (found,) = run_onnxruntime(path, {"v0": x})
    assert measure(found, compute(x, length, inverse, onesided)) < 2e-6


def test_relay__is_products():
    x = draw((2, 240, 1))
    text, params = rq.relay.to_text(make_dft(x.shape, 240, onesided=True))
    (found,) = rq.reference.run(rq.relay.from_text(text, params), [x])
    assert measure(found, compute(x, 240, onesided=True)) < 2e-6


@pytest.mark.parametrize(
    ("shape", "length", "dtype", "message"),
    [
        ((2, 8, 1), 0, "float32", r"length=0; allowed: numbers from 1 on"),
        ((2, 8, 1), 7, "float32", r"has size 8 in dimension 1; allowed: a number from 1 to 7"),
        ((2, "n", 1), 8, "float32", r"has size n in dimension 1; allowed: a number from 1 to 8"),
        ((2, 8, 3), 8, "float32", r"has size 3 in dimension 2; allowed: 1, real .*, or 2, complex"),
        ((8,), 8, "float32", r"has rank 1; allowed: rank 2 or more"),
        ((2, 8, 1), 8, "int8", r"has dtype int8; allowed: float32, float64\. Cast"),
        ((2, 70_001, 1), 70_001, "float32", r"from 70001 numbers to 70001; allowed: products"),
    ],
)
def test_refusal__says_what_is_allowed(shape, length, dtype, message):
    with pytest.raises(QnnError, match=message):
        make_dft(shape, length, dtype=dtype)


def test_quantize__leaves_transforms_in_float():
    """The layer behind a transform is quantized, the transform is not."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((257 * 2, 16)) / 20).astype("float32")

    def body(x):
        bins = relax.op.reshape(qnn.dft(x, 512, False, True), (1, 514))
        return relax.op.nn.relu(relax.op.matmul(bins, relax.const(weight)))

    mod = make_module(body, [relax.TensorType((1, 512, 1), "float32")])
    data = [rng.standard_normal((1, 512, 1)).astype("float32") for _ in range(8)]
    quantized = rq.quantize(mod, {}, data)
    names = list_operators(quantized)
    assert names.count("qnn.dft") == 1
    assert "qnn.dense" in names
    # 514 * 16 beside 512 * 32 + 2 * 512 * 34, with 512 = 16 * 32
    assert "(14% of the multiply-adds)" in rq.ledger(quantized).summarize()
    (expected,), (found,) = (rq.reference.run(each, [data[0]]) for each in (mod, quantized))
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.995
