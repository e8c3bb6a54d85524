"""normalization: pictures prepared in one known way, told from others by batch norms and labels."""

from __future__ import annotations

import io
import warnings
from itertools import pairwise

import numpy as np
import pytest
import tvm
from tvm import relax

import relayquant as rq
from relayquant.analysis.linting.label_scores import is_clearly_better
from relayquant.analysis.linting.lint import find_unchecked, lint
from relayquant.analysis.linting.normalization import PixelForm, find_form, list_forms
from relayquant.data.images import Preprocessing
from relayquant.data.item import describe_inputs
from relayquant.demo import load_digits

#: filters of the network below
FILTERS = 6


@pytest.fixture(scope="module")
def coloured():
    """Digits as pictures of 0 to 255, (300, 3, 8, 8), mostly red; classes."""
    demo = load_digits()
    rng = np.random.default_rng(0)
    grey = demo.images[:300] * 255
    colours = rng.uniform((0.7, 0.3, 0.1), (1, 0.6, 0.4), (300, 3)).astype("float32")
    pixels = grey * colours[:, :, None, None]
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 255, 0
    return pixels.round().astype("float32"), demo.labels[:300]


def build_network(images, labels, layout="NCHW", has_norm=True):
    """Convolution, batch norm with the statistics of these images, relu, and a linear classifier
    that is fitted to them by least squares.
    """
    rng = np.random.default_rng(1)
    channels, size = images.shape[1], images.shape[2]
    weight = rng.normal(size=(FILTERS, channels, 3, 3)).astype("float32") / 3
    builder = relax.BlockBuilder()
    shape = (tvm.tirx.Var("n", "int64"), channels, size, size)
    if layout == "NHWC":
        shape = (shape[0], size, size, channels)
    x = relax.Var("image", relax.TensorType(shape, "float32"))
    layouts = {"data_layout": layout, "kernel_layout": "OIHW"}

    def emit_features(x):
        return relax.op.nn.conv2d(x, relax.const(weight), padding=1, **layouts)

    data = images if layout == "NCHW" else images.transpose(0, 2, 3, 1)
    probe = relax.BlockBuilder()
    with probe.function("main", [x]):
        probe.emit_func_output(probe.emit(emit_features(x)))
    (raw,) = rq.reference.run(probe.get(), [np.ascontiguousarray(data)])
    axis = 1 if layout == "NCHW" else 3
    rest = tuple(i for i in range(4) if i != axis)
    mean, variance = raw.mean(rest), raw.var(rest)
    gamma, beta = np.float32(rng.uniform(0.5, 2, FILTERS)), np.float32(rng.normal(0, 0.5, FILTERS))
    along = [1] * 4
    along[axis] = -1
    scale = (gamma / np.sqrt(variance + 1e-5)).reshape(along)
    normed = (raw - mean.reshape(along)) * scale + beta.reshape(along)
    features = np.maximum(normed, 0).reshape(len(images), -1)
    wanted = np.eye(10)[labels]
    square = features.T @ features + 300 * np.eye(features.shape[1])
    readout = np.linalg.solve(square, features.T @ wanted).astype("float32")
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(emit_features(x), "conv")
            if has_norm:
                constants = (gamma, beta, mean.astype("float32"), variance.astype("float32"))
                norm = relax.op.nn.batch_norm(
                    y, *map(relax.const, constants), axis=axis, training=False
                )
                y = builder.emit(relax.TupleGetItem(builder.emit(norm), 0), "norm")
            else:
                y = builder.emit(relax.op.multiply(y, relax.const(scale.astype("float32"))))
                shift = beta.reshape(along) - mean.reshape(along) * scale
                y = builder.emit(relax.op.add(y, relax.const(shift.astype("float32"))))
            y = builder.emit(relax.op.nn.relu(y))
            y = builder.emit(relax.op.reshape(y, (shape[0], features.shape[1])))
            out = builder.emit_output(relax.op.matmul(y, relax.const(readout)))
        builder.emit_func_output(out)
    return builder.get()


RAW = PixelForm.of("scale=1", 3)
FORMS = {form.text: form for form in list_forms(3)}


def prepare(pixels, text, layout="NCHW"):
    """A batch of 20 for each."""
    x = RAW.convert(pixels, 1, FORMS[text])
    x = x if layout == "NCHW" else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return [x[i : i + 20] for i in range(0, len(x), 20)]


def checks(findings):
    return [f.check for f in findings if f.severity is not rq.analysis.Severity.INFO]


@pytest.mark.parametrize("text", FORMS)
def test_forms__as_the_command_line_prepares_a_picture(text):
    """Each is what `Preprocessing` does to a picture, in its order of channels."""
    image = pytest.importorskip("PIL.Image", reason="pip install relayquant[images]")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3)).astype("uint8")
    (info,) = describe_inputs(build_network(np.ones((2, 3, 6, 6), "float32"), [0, 1]))
    known = Preprocessing.parse(f"{text},crop=6,size=6")
    want = known.apply(image.fromarray(pixels), info)
    got = RAW.convert(pixels.transpose(2, 0, 1)[None].astype("float32"), 1, FORMS[text])
    np.testing.assert_allclose(got, want, atol=1e-4)
    # And back, from what the extremes tell.
    ends = np.stack([np.zeros((3, 2)), np.full((3, 2), 255.0)])[:, :, None]
    prepared = RAW.convert(ends, 1, FORMS[text])
    found = find_form(prepared.min((0, 2, 3)), prepared.max((0, 2, 3)), list_forms(3))
    assert found.is_same(FORMS[text])


def test_find_form__nothing_known_is_taken_by_its_extremes():
    found = find_form(np.array([-3.0, -3.0, -3.0]), np.array([7.0, 7.0, 7.0]), list_forms(3))
    assert found.text == ""
    np.testing.assert_allclose(found.ends, [[-3.0] * 3, [7.0] * 3])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("trained", ["tflite", "imagenet", "unit"])
def test_lint__another_normalization_than_in_training(coloured, trained, layout):
    pixels, labels = coloured
    right = RAW.convert(pixels, 1, FORMS[trained])
    mod = build_network(right, labels, layout)
    assert checks(lint(mod, None, prepare(pixels, trained, layout))) == []
    for given in ("tflite", "imagenet", "unit", "cifar"):
        if given == trained or {given, trained} == {"cifar", "imagenet"}:
            continue
        findings = lint(mod, None, prepare(pixels, given, layout))
        assert set(checks(findings)) <= {"normalization", "scale"}
        assert f"prepared as {trained!r}" in " ".join(map(str, findings)).lower()


def test_lint__labels_decide(coloured):
    """What the float model scores, and with which preparation it scores more."""
    pixels, labels = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), labels)
    findings = lint(mod, None, prepare(pixels, "tflite"), labels)
    assert checks(findings) == []
    (score,) = [finding for finding in findings if finding.check == "labels"]
    (output,) = rq.reference.run(mod, [np.concatenate(prepare(pixels, "tflite"))])
    right = int((output.argmax(1) == labels).sum())
    assert f"right on {right} of 300 samples" in score.what
    (finding,) = [
        f for f in lint(mod, None, prepare(pixels, "unit"), labels) if f.check != "labels"
    ]
    assert finding.check == "normalization"
    assert f"{right / 300:.1%} prepared as 'tflite'" in finding.what
    assert "--preprocess tflite" in finding.advice


def test_lint__labels_where_the_norm_was_folded(coloured):
    pixels, labels = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), labels, has_norm=False)
    assert checks(lint(mod, None, prepare(pixels, "unit"), labels)) == ["normalization"]
    assert checks(lint(mod, None, prepare(pixels, "tflite"), labels)) == []


def test_lint__labels_that_count_from_one(coloured):
    pixels, labels = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), labels)
    (finding,) = [
        f
        for f in lint(mod, None, prepare(pixels, "tflite"), labels + 1)
        if f.severity is rq.analysis.Severity.WARNING
    ]
    assert finding.check == "labels"
    assert "with -1" in finding.what


def test_lint__as_many_labels_as_samples(coloured):
    pixels, labels = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), labels)
    with pytest.raises(rq.DataError, match="299 labels for 300 samples; allowed: one for each"):
        lint(mod, None, prepare(pixels, "tflite"), labels[1:])


@pytest.mark.slow
def test_quantize__metric_of_a_model_that_is_fed_wrong(coloured):
    """Its score is within the bound of a wrong score."""
    pixels, labels = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), labels)

    def top1(_expected, got):
        return float((got[0].argmax(1) == labels).mean())

    with pytest.warns(rq.DataWarning, match="float model itself has a top1 of .* as 'tflite'"):
        rq.quantize(mod, None, prepare(pixels, "unit"), metric=top1, effort="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.DataWarning)
        rq.quantize(mod, None, prepare(pixels, "tflite"), metric=top1, effort="fast")

        def agreement(expected, got):
            return float((got[0].argmax(1) == expected[0].argmax(1)).mean())

        rq.quantize(mod, None, prepare(pixels, "unit"), metric=agreement, effort="fast")


@pytest.mark.parametrize(
    ("gained", "lost", "is_clear"), [(1, 0, False), (9, 0, False), (10, 0, True), (40, 25, False)]
)
def test_is_clearly_better__not_by_a_few_pictures(gained, lost, is_clear):
    right = np.array([True] * gained + [False] * lost + [True] * 50)
    before = np.array([False] * gained + [True] * lost + [True] * 50)
    assert is_clearly_better(right, before) is is_clear


@pytest.mark.slow
def test_lint__photographs_prepared_otherwise(shared_data):
    """MobileNet was trained on pixels of -1 to 1, which its first batch norm remembers."""
    image = pytest.importorskip("PIL.Image", reason="Pillow decodes the JPEG images")
    with np.load(shared_data("imagenet_200.npz")) as data:
        jpeg, offsets, labels = data["jpeg"].tobytes(), data["offset"][:65], data["y"][:64]
    pictures = [
        np.asarray(image.open(io.BytesIO(jpeg[a:b])).convert("RGB"))[1:225, 1:225]
        for a, b in pairwise(offsets)
    ]
    pixels = np.stack(pictures).astype("float32").transpose(0, 3, 1, 2)
    mod, params = rq.load(str(shared_data("mobilenet_v1_0.75_224.onnx")))
    assert checks(lint(mod, params, prepare(pixels[:40], "tflite"))) == []
    findings = lint(mod, params, prepare(pixels, "imagenet"), labels)
    assert checks(findings) == ["normalization"]
    assert "prepared as 'tflite'" in findings[0].what
    (score,) = [f for f in findings if f.check == "labels"]
    assert "is right on" in score.what


@pytest.mark.parametrize("labels", [[0.5] * 300, ["a"] * 300])
def test_lint__labels_are_integers(coloured, labels):
    pixels, _ = coloured
    mod = build_network(RAW.convert(pixels, 1, FORMS["tflite"]), coloured[1])
    with pytest.raises(rq.DataError, match=r"labels of dtype .*allowed: integers"):
        lint(mod, None, prepare(pixels, "tflite"), labels)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("has_norm", [True, False])
def test_find_unchecked__where_no_norm_remembers(coloured, layout, has_norm):
    pixels, labels = coloured
    right = RAW.convert(pixels, 1, FORMS["tflite"])
    mod = build_network(right, labels, layout, has_norm)
    assert find_unchecked(mod, None) == ([] if has_norm else ["image"])
