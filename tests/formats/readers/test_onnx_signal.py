"""DFT and STFT of ONNX: what onnx computes, and numpy."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from test_onnx import draw, make_model, run_imported
from test_onnx_operators import make_mixed_model

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx
from relayquant.ir.dialect.fourier import MOST_ELEMENTS


def check(node, x, weights, opset, atol=2e-5):
    model = make_model([node], {"x": x.shape}, weights=weights, opset=opset)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = run_imported(import_onnx(model)[0], {"x": x})
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=atol)


def make_dft(opset, axis, length, **attrs):
    """A DFT and its constants. `length` is None where the operator finds it."""
    weights = {} if length is None else {"n": np.array(length)}
    operands = ["x", "n" if weights else ""]
    if opset < 20:
        attrs["axis"] = axis
    else:
        operands, weights = [*operands, "a"], {**weights, "a": np.array(axis)}
    return helper.make_node("DFT", operands, ["y"], **attrs), weights


@pytest.mark.sample(6)
@pytest.mark.parametrize("length", [None, 5, 6, 11])
@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("attrs", [{}, {"onesided": 1}, {"inverse": 1}])
@pytest.mark.parametrize("parts", [1, 2])
def test_dft__every_axis(parts, attrs, opset, length):
    if parts == 2 and "onesided" in attrs:
        pytest.skip("defined for real numbers")
    x = draw(2, 7, 8, parts)
    for axis in (1, -2, 0):
        node, weights = make_dft(opset, axis, length, **attrs)
        check(node, x, weights, opset)


@pytest.mark.parametrize("length", [None, 5, 6, 9, 14])
def test_dft__inverse_to_real_numbers(length):
    """The imaginary part of the first result, and of the middle one, plays no part."""
    x = draw(2, 6, 3, 2)
    node, weights = make_dft(20, 1, length, onesided=1, inverse=1)
    check(node, x, weights, 20)


def test_dft__axis_without_its_operand():
    node = helper.make_node("DFT", ["x"], ["y"])
    check(node, draw(2, 3, 4, 1), {}, 20)


@pytest.mark.parametrize("length", [256, 1000, 44_100])
def test_dft__is_as_exact_as_float32_allows(length):
    x = draw(1, length, 1)
    node, weights = make_dft(20, 1, None, onesided=1)
    model = make_model([node], {"x": x.shape}, weights=weights, opset=20)
    (found,) = run_imported(import_onnx(model)[0], {"x": x})
    expected = np.fft.rfft(x[0, :, 0].astype("float64"))
    error = found[0, :, 0] + 1j * found[0, :, 1] - expected
    assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("axes", [("N", 8, 1), ("N", 8, 2)])
def test_dft__symbolic_batch(axes):
    node, weights = make_dft(20, 1, None)
    model = make_model([node], {"x": list(axes)}, weights=weights, opset=20)
    mod, _ = import_onnx(model)
    for count in (1, 3):
        x = draw(count, *axes[1:])
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        (found,) = run_imported(mod, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_stft__frames_windows_sides(parts, onesided, has_length, has_window):
    if (parts == 2 and onesided) or not (has_window or has_length):
        pytest.skip("not defined")
    weights = {"step": np.array(3)}
    if has_window:
        weights["w"] = np.hanning(8).astype("float32")
    if has_length:
        weights["n"] = np.array(8)
    operands = ["x", "step", "w" if has_window else "", "n" if has_length else ""]
    node = helper.make_node("STFT", operands, ["y"], onesided=onesided)
    check(node, draw(2, 31, parts), weights, 17)


@pytest.mark.parametrize("step", [1, 4, 7, 8, 11])
@pytest.mark.parametrize("size", [8, 31, 32])
def test_stft__steps(step, size):
    """Frames that overlap, that touch, and with what nothing reads between them."""
    node = helper.make_node("STFT", ["x", "step", "w", ""], ["y"])
    weights = {"step": np.array(step), "w": np.hanning(8).astype("float32")}
    check(node, draw(2, size, 1), weights, 17)


@pytest.mark.parametrize("shape", [(2, 31), (2, "L"), ("N", "L")])
def test_stft__of_a_signal_without_an_axis_of_parts(shape):
    """As exporters of feature extractors write it, and ONNX Runtime reads it."""
    node = helper.make_node("STFT", ["x", "step", "w"], ["y"])
    weights = {"step": np.array(3), "w": np.hanning(8).astype("float32")}
    model, x = make_model([node], {"x": list(shape)}, weights=weights, opset=17), draw(2, 31)
    (found,) = run_imported(import_onnx(model)[0], {"x": x})
    frames = np.lib.stride_tricks.sliding_window_view(x, 8, axis=1)[:, ::3]
    expected = np.fft.rfft(frames * weights["w"])
    np.testing.assert_allclose(found[..., 0] + 1j * found[..., 1], expected, rtol=1e-4, atol=2e-5)


def test_stft__of_known_length_is_written_in_relay():
    node = helper.make_node("STFT", ["x", "step", "w", ""], ["y"])
    weights = {"step": np.array(5), "w": np.hanning(16).astype("float32")}
    model, x = make_model([node], {"x": (1, 70, 1)}, weights=weights, opset=17), draw(1, 70, 1)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    (found,) = rq.reference.run(rq.relay.from_text(*rq.relay.to_text(rq.load(model))), [x])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 20])
def test_stft__symbolic_signal(step):
    node = helper.make_node("STFT", ["x", "step", "w"], ["y"])
    weights = {"step": np.array(step), "w": np.hamming(16).astype("float32")}
    model = make_model([node], {"x": ["N", "L", 1]}, weights=weights, opset=17)
    mod, _ = import_onnx(model)
    for shape in ((1, 16, 1), (3, 50, 1)):
        x = draw(*shape)
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        (found,) = run_imported(mod, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("node", "shape", "weights", "message"),
    [
        (
            make_dft(20, 1, None)[0],
            [1, "L", 1],
            {"a": np.array(1)},
            "a symbolic number L of",
        ),
        (make_dft(17, 1, 4)[0], [1, 0, 1], {"n": np.array(4)}, "no values along axis 1; supported"),
        (make_dft(17, 1, None)[0], [1, 8, 3], {}, "last axis of size 3; supported: 1 or 2"),
        (make_dft(17, 1, 0)[0], [1, 8, 1], {"n": np.array(0)}, "dft_length is 0; supported: 1 or"),
        (
            make_dft(17, 1, None)[0],
            [1, 70_001, 1],
            {},
            f"transforms 70001 numbers .* up to {MOST_ELEMENTS // 2}",
        ),
        (
            helper.make_node("STFT", ["x", "step", "w", "n"], ["y"]),
            [1, 64, 1],
            {"step": np.array(4), "w": np.ones(8, "float32"), "n": np.array(16)},
            "dimension of the window must match the frame_length",
        ),
        (
            helper.make_node("STFT", ["x", "step", "", "n"], ["y"]),
            [1, 64, 2],
            {"step": np.array(4), "n": np.array(16)},
            "onesided, of complex numbers; supported: onesided=0",
        ),
        (
            helper.make_node("STFT", ["x", "step", "", "n"], ["y"]),
            [1, 64, 1],
            {"step": np.array(0), "n": np.array(16)},
            "frame_step is 0, its frame_length 16; supported: 1 or more",
        ),
        (
            helper.make_node("STFT", ["x", "step", "", "n"], ["y"]),
            [1, 15, 1],
            {"step": np.array(4), "n": np.array(16)},
            "signal has 15 values, a frame 16; supported: no fewer",
        ),
        (
            helper.make_node("STFT", ["x", "step"], ["y"]),
            [1, 64, 1],
            {"step": np.array(4)},
            "neither window nor frame_length; supported: one",
        ),
    ],
)
def test_refusal__says_what_is_supported(node, shape, weights, message, capfd):
    opset = 20 if "a" in weights else 17
    with pytest.raises(ModelError, match=message):
        import_onnx(make_model([node], {"x": shape}, weights=weights, opset=opset))
    gc.collect()
    assert "remaining blocks" not in capfd.readouterr().err  # of TVM, of no help to a user


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_signals__of_other_types(dtype):
    """Sums have float32 at least, and are rounded once."""
    x, window = draw(2, 24, 1).astype(dtype), np.hanning(8).astype(dtype)
    dft, weights = make_dft(20, 1, 20, onesided=1)
    stft = helper.make_node("STFT", ["x", "step", "w", ""], ["y"])
    frames = {"step": np.array(4), "w": window}
    for node, constants in ((dft, weights), (stft, frames)):
        model = make_mixed_model(node, {"x": x}, 20, constants)
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        (found,) = run_imported(import_onnx(model)[0], {"x": x})
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, atol=2e-2 if dtype == "float16" else 1e-9)
