"""lint: silent on data as the models' authors prepare it, and names what was broken on purpose."""

from __future__ import annotations

import io
import warnings
import weakref
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from float_models import Chain, build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.analysis.linting.finding import Severity
from relayquant.analysis.linting.first_layer import (
    PROBE_SAMPLES,
    find_first_layers,
    measure_moments,
)
from relayquant.analysis.linting.lint import lint, lint_samples, measure_growth
from relayquant.demo import load_digits
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.norm_statistics import read_norm_statistics


@pytest.fixture(scope="module")
def digits():
    demo = load_digits()
    return (*rq.load(str(demo.model_path)), np.concatenate(demo.calibration))


@pytest.fixture
def cifar(shared_data):
    """Images (N, 3, 32, 32) from 0 to 255, and normalized as the ResNet-20 wants them."""
    images = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"][:64]
    if images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    images = np.ascontiguousarray(images).astype("float32")
    mean = np.array([0.485, 0.456, 0.406], "float32").reshape(1, 3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], "float32").reshape(1, 3, 1, 1)
    return images, (images / np.float32(255) - mean) / std


def checks(findings) -> list[str]:
    return [finding.check for finding in findings]


def test_lint__digits_are_clean(digits):
    mod, params, images = digits
    assert lint(mod, params, [images[i : i + 10] for i in range(0, 120, 10)]) == []


@pytest.mark.slow
def test_lint__cifar_is_clean(cifar, shared_data):
    images, normal = cifar
    assert lint(*rq.load(str(shared_data("resnet20_cifar10.onnx"))), [normal]) == []
    mod, params = rq.load(str(shared_data("ic_resnet8_fp32.tflite")))
    assert lint(mod, params, [x[None] for x in images.transpose(0, 2, 3, 1)]) == []


def test_lint__one_sample_without_an_axis_for_more():
    """A vector is one sample, not as many as it has elements."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    torch.manual_seed(0)
    batches = [torch.randn(8).numpy() for _ in range(6)]
    layer = torch.nn.Linear(8, 6)
    example = (torch.from_numpy(batches[0]),)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.DataWarning)
        qmod = rq.torch.quantize(layer, example, batches, effort="fast")
    (got,) = rq.reference.run(qmod, [batches[1]])
    want = layer(torch.from_numpy(batches[1])).detach().numpy()
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def quantize_small(mod, data):
    rq.quantize(mod, None, data, effort="fast", guard="off")


def quantize_small_checked(mod, data):
    rq.quantize(mod, None, data)


def search_small(mod, data):
    rq.quantize(mod, None, data, effort="fast", metric=lambda a, b: 1.0, max_drop=0.1)


def calibrate_small(mod, data):
    rq.calibrate(rq.prepare(mod, effort="fast"), data)


def train_small(mod, data):
    pytest.importorskip("torch", reason="pip install torch")
    rq.torch.from_relax(mod, None, calibration_dataset=data, effort="fast")


def prepare_small(mod, data):
    torch = pytest.importorskip("torch", reason="pip install torch")
    example = (torch.zeros(1, 8),)
    arrays = [batch["x"] for batch in data]
    rq.torch.prepare_qat(torch.nn.Linear(8, 4), example, calibration_dataset=arrays, effort="fast")


def finetune_small(mod, data):
    pytest.importorskip("torch", reason="pip install torch")
    rq.torch.finetune(mod, None, data, steps=1, effort="fast", hold_back=False)


USES = [quantize_small, quantize_small_checked, search_small, calibrate_small, train_small]
USES += [prepare_small, finetune_small]


@pytest.mark.parametrize(("samples", "is_warned"), [(1, True), (3, True), (4, False)])
@pytest.mark.parametrize("use", USES)
def test_calibration__warns_of_a_few_samples(use, samples, is_warned):
    """Once, whatever calibrates, however often."""
    mod = build_model(lambda e, x: e.dense("out", x, 4), (1, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(mod, draw_batches(mod, samples))
    count = "1 sample" if samples == 1 else f"{samples} samples"
    said = [str(each.message) for each in caught if "Calibration data" in str(each.message)]
    assert len(said) == is_warned, said
    assert all(f"has only {count}. Ranges are" in text and "[RQ304]" in text for text in said)


def test_prepare_qat__does_not_warn_of_examples():
    """Without data, the first batches of training give the ranges."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.DataWarning)
        rq.torch.prepare_qat(torch.nn.Linear(8, 4), (torch.zeros(1, 8),))


@pytest.mark.slow
def test_lint__keywords_are_clean(shared_data):
    x = np.load(shared_data("kws_1000.npz"))["x"][:200].astype("float32")
    x = ((x - 83) * np.float32(0.58470291)).reshape(-1, 1, 49, 10)
    assert lint(*rq.load(str(shared_data("kws_dscnn.onnx"))), [x]) == []
    x = np.load(shared_data("kwt_unlabelled_100.npz"))["x"].astype("float32")
    assert lint(*rq.load(str(shared_data("kwt1_mfcc.onnx"))), [x]) == []


def test_lint__bytes_are_clean(shared_data):
    x = np.load(shared_data("magika_filetype_152.npz"))["x"].astype("int32")
    assert lint(*rq.load(str(shared_data("magika_v3_3_b1.onnx"))), list(x[:, None])) == []


@pytest.mark.slow
def test_lint__photographs_are_clean(shared_data):
    image = pytest.importorskip("PIL.Image", reason="Pillow decodes the JPEG images")
    with np.load(shared_data("imagenet_200.npz")) as data:
        jpeg, offsets = data["jpeg"].tobytes(), data["offset"][:21]
    pictures = [
        np.asarray(image.open(io.BytesIO(jpeg[a:b])).convert("RGB"))[1:225, 1:225]
        for a, b in pairwise(offsets)
    ]
    x = np.stack(pictures).astype("float32").transpose(0, 3, 1, 2)
    mod, params = rq.load(str(shared_data("mobilenet_v1_0.75_224.onnx")))
    assert lint(mod, params, [part / 127.5 - 1 for part in np.split(x, 10)]) == []
    assert checks(lint(mod, params, np.split(x, 10))) == ["scale"]


def test_lint__a_model_without_input_scaling_is_suspected(shared_data):
    # MNIST-8 takes pixels from 0 to 255 and hardly uses its first bias: a known limit.
    x = np.load(shared_data("mnist_1000.npz"))["x"].astype("float32").reshape(-1, 1, 1, 28, 28)
    (finding,) = lint(*rq.load(str(shared_data("mnist-8.onnx"))), list(x[:200]))
    assert finding.check == "scale"
    assert "trained on such values" in finding.advice


@pytest.mark.parametrize(("factor", "word"), [(255, "too large"), (1 / 255, "too small")])
def test_lint__wrong_scale(digits, factor, word):
    mod, params, images = digits
    (finding,) = lint(mod, params, [images * np.float32(factor)])
    assert (finding.check, finding.severity) == ("scale", Severity.WARNING)
    assert finding.where == "image"
    assert word in finding.what
    assert word in str(finding)


@pytest.mark.slow
def test_lint__pixels_for_a_normalizing_model(cifar, shared_data):
    images, _ = cifar
    assert checks(lint(*rq.load(str(shared_data("resnet20_cifar10.onnx"))), [images])) == ["scale"]


def test_lint__pixels_from_0_to_1_for_a_model_that_takes_0_to_255(cifar, shared_data):
    mod, params = rq.load(str(shared_data("ic_resnet8_fp32.tflite")))
    data = [x[None] / 255 for x in cifar[0].transpose(0, 2, 3, 1)]
    assert checks(lint(mod, params, data)) == ["scale"]


@pytest.mark.slow
def test_lint__reshaped_in_place_of_transposed(cifar, shared_data):
    images, normal = cifar
    mod, params = rq.load(str(shared_data("resnet20_cifar10.onnx")))
    scrambled = np.ascontiguousarray(normal.transpose(0, 2, 3, 1)).reshape(normal.shape)
    findings = lint(mod, params, [scrambled])
    assert "layout" in checks(findings)
    assert "transpose(0, 3, 1, 2)" in findings[checks(findings).index("layout")].advice
    mod, params = rq.load(str(shared_data("ic_resnet8_fp32.tflite")))
    assert checks(lint(mod, params, list(images.reshape(-1, 1, 32, 32, 3)))) == ["layout"]


CAFFE = np.float32([103.939, 116.779, 123.68]).reshape(1, 3, 1, 1)


@pytest.fixture(scope="module")
def pictures():
    """Pixels of 0 to 255 with smooth content, (32, 3, 16, 16): every channel has both extremes."""
    rng = np.random.default_rng(0)
    coarse = rng.uniform(0, 256, (32, 3, 4, 4)).repeat(4, 2).repeat(4, 3)
    pixels = np.clip(coarse + rng.normal(0, 8, coarse.shape), 0, 255).round().astype("float32")
    assert pixels.min((0, 2, 3)).max() == 0
    assert pixels.max((0, 2, 3)).min() == 255
    return pixels


@pytest.mark.parametrize("order", [1, -1], ids=["blue first", "red first"])
def test_lint__pixels_minus_a_mean_are_not_called_wrong(pictures, order):
    """A first layer as VGG has it: large results, small biases."""
    mod = build_model(lambda emit, x: emit.conv_bias("conv1", x, 8), (32, 3, 16, 16))
    data = pictures[:, ::order] - CAFFE[:, ::order]
    found = lint(mod, None, [data])
    assert [(f.check, f.severity) for f in found] == [("scale", Severity.INFO)]
    assert "Caffe (blue first)" in found[0].advice
    # Neither are they praised where one channel lacks its mean, or where there was none.
    for wrong in (data + CAFFE * np.float32([[[[1]], [[0]], [[0]]]]), pictures):
        (finding,) = lint(mod, None, [wrong])
        assert (finding.check, finding.severity) == ("scale", Severity.WARNING)


@pytest.mark.slow
def test_lint__pixels_minus_a_mean_for_a_network_that_wants_them_divided(cifar, shared_data):
    """Its batch norm knows better than any look at the data."""
    model = rq.load(str(shared_data("resnet20_cifar10.onnx")))
    (finding,) = lint(*model, [cifar[0][:, ::-1] - CAFFE])
    assert (finding.check, finding.severity) == ("scale", Severity.WARNING)
    assert "its batch norm saw in training: they look too large" in finding.what
    (finding,) = lint(*model, [cifar[0] / np.float32(255)])
    assert "they look too small" in finding.what, "a factor of 4.4 and a mean"


def test_read_norm_statistics__are_those_of_the_results(digits):
    """Of the digits that the network was trained on, measured behind its first batch norm."""
    mod, params, images = digits
    prepared = prepare_module(mod, params)
    (layer,) = find_first_layers(prepared).values()
    norm = read_norm_statistics(mod, params)[layer.result]
    moments = measure_moments("image", layer, [images])
    assert np.abs(moments.means.mean(0) - norm.mean).max() < 0.2 * norm.deviation.max()
    np.testing.assert_allclose(moments.spread(), norm.deviation, rtol=0.2)


def test_find_first_layers__declines_an_input_of_unknown_sizes():
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(ndim=4, dtype="float32"))
    with builder.function("main", [x]):
        weight = relax.const(np.ones((4, 3, 3, 3), "float32"))
        sums = builder.emit(relax.op.nn.conv2d(x, weight))
        bias = relax.const(np.ones((1, 4, 1, 1), "float32"))
        builder.emit_func_output(builder.emit(relax.op.add(sums, bias)))
    assert find_first_layers(builder.get()) == {}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("part", range(3))
def test_lint__red_and_blue_exchanged(part, shared_data):
    """Pictures that were read in the other order, and then prepared as in training."""
    images = np.load(shared_data("cifar10_unlabelled_1000.npz"))["x"][part * 250 :][:128]
    x = images.transpose(0, 3, 1, 2).astype("float32") / np.float32(255)
    mean = np.float32([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1)
    std = np.float32([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1)
    model = rq.load(str(shared_data("resnet20_cifar10.onnx")))
    assert lint(*model, [(x - mean) / std]) == []
    (finding,) = lint(*model, [(x[:, ::-1] - mean) / std])
    assert (finding.check, finding.where) == ("order", "input")
    assert "with red and blue exchanged" in finding.what
    (finding,) = lint(*model, [((x - mean) / std)[:, ::-1].copy()])
    assert finding.check == "order"
    assert "normalized with ImageNet's constants in reverse order" in finding.what


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_lint__a_channel_that_never_changes(pictures, layout, value):
    data = pictures / np.float32(255)
    data[:, 1] = value
    shape = (32, 3, 16, 16)
    if layout == "NHWC":
        data, shape = data.transpose(0, 2, 3, 1).copy(), (32, 16, 16, 3)

    def body(emit, x):
        if layout == "NCHW":
            return emit.conv_bias("conv1", x, 8)
        weight = relax.const(np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype("float32"))
        y = relax.op.nn.conv2d(x, weight, data_layout="NHWC", kernel_layout="OIHW")
        y = emit("conv1", y)
        return emit("sum", relax.op.add(y, relax.const(np.ones((1, 1, 1, 8), "float32"))))

    (finding,) = lint(build_model(body, shape), None, [data])
    assert (finding.check, finding.severity) == ("channel", Severity.WARNING)
    assert finding.what == f"channel 1 of 3 is {value:g} everywhere."


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x * 255, "10 samples of 100, in batch 3, are of another magnitude"),
        (np.zeros_like, "10 samples of 100, in batch 3, are of another magnitude"),
    ],
)
def test_lint__a_batch_unlike_the_others_is_named(digits, change, what):
    mod, params, images = digits
    batches = [images[i : i + 10] for i in range(0, 100, 10)]
    batches[3] = change(batches[3]).astype("float32")
    found = {finding.check: finding for finding in lint(mod, params, batches)}
    assert found["batch"].what.startswith(what)
    one = [*batches[:3], np.concatenate([batches[4][:9], batches[3][:1]]), *batches[4:]]
    found = {finding.check: finding for finding in lint(mod, params, one)}
    assert found["batch"].what.startswith("1 sample of 100, in batch 3, is of another magnitude")


def test_lint__samples_that_differ_by_nature_are_not_odd(digits):
    """As silence and speech: the magnitudes have no gap."""
    mod, params, images = digits
    factors = np.geomspace(0.02, 20, 100).astype("float32").reshape(-1, 1, 1, 1)
    assert "batch" not in checks(lint(mod, params, [images[:100] * factors]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_lint__not_finite(digits, bad):
    mod, params, images = digits
    broken = images.copy()
    broken[17, 0, 3, 3] = bad
    findings = lint(mod, params, [broken[i : i + 10] for i in range(0, 100, 10)])
    assert findings[0].severity is Severity.ERROR
    assert "Sample 1" in findings[0].what


def test_lint__empty_data_and_wrong_shape(digits):
    mod, params, images = digits
    (finding,) = lint(mod, params, [])
    assert finding.severity is Severity.ERROR
    assert "no sample" in finding.what
    (finding,) = lint(mod, params, [images.transpose(0, 2, 3, 1)])
    assert finding.severity is Severity.ERROR
    assert "axis 1 is 8 instead of 1" in finding.what


def test_lint__constant_input(digits):
    mod, params, images = digits
    findings = lint(mod, params, [np.ones_like(images[:10])] * 4)
    assert "constant" in checks(findings)
    assert "duplicates" in checks(findings)


def test_lint__constant_integers_are_worth_a_hint():
    """A mask of full length, token types of one sentence: nothing that calibration reads."""

    def body(emit: Chain, ids: relax.Expr) -> relax.Expr:
        return emit("y", relax.op.take(emit.constant(4, 4), ids, 0))

    mod = build_model(body, (2, 6), dtype="int32")
    findings = lint(mod, None, [np.full((2, 6), 1, "int32")])
    hint = findings[checks(findings).index("constant")]
    assert hint.severity is Severity.INFO
    assert "mask" in hint.advice


def test_lint__values_that_make_the_first_layer_overflow(digits):
    mod, params, images = digits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lint(mod, params, [images * np.float32(2e38)])
    assert "scale" in checks(found)
    assert "too large" in found[checks(found).index("scale")].what


def test_lint__outliers(digits):
    mod, params, images = digits
    broken = images[:200].copy()
    broken[3, 0, 0, 0] = 50.0
    (finding,) = lint(mod, params, [broken])
    assert finding.check == "outliers"
    assert "50" in finding.what


def test_lint_samples__a_bias_of_zeros_says_nothing():
    """`prepare` adds one where there is none, to hold a correction."""
    mod = build_model(lambda emit, x: emit.conv("y", x), (20, 4, 6, 6))
    data = np.random.default_rng(0).normal(0, 9, (20, 4, 6, 6)).astype("float32")
    prepared = rq.prepare(mod, None)
    assert any("y_unbiased" in str(name) for name in prepared.mod["main"].script().split())
    assert lint_samples(prepared.mod, [{"x": data}]) == []


def test_lint_samples__a_state_that_begins_with_zeros_is_no_mistake():
    """Samples at hand are the first ones of sequences."""
    x, state = (relax.Var(name, relax.TensorType((2,), "float32")) for name in ("x", "mean"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, state]):
        with bb.dataflow():
            new = bb.emit(relax.op.add(x, state))
            out = bb.emit_output(relax.Tuple([new, new]))
        bb.emit_func_output(out)
    mod = rq.with_state(bb.get(), [rq.StateValue("mean", (2,), "float32")])
    batches = [{"x": np.array([i, -i], "float32"), "mean": np.zeros(2, "float32")} for i in (1, 2)]
    assert lint_samples(rq.prepare(mod, None).mod, batches) == []
    still = [{**batch, "x": np.zeros(2, "float32")} for batch in batches]
    assert "constant" in checks(lint_samples(rq.prepare(mod, None).mod, still))


def test_lint__few_samples_and_copies(digits):
    mod, params, images = digits
    (few,) = lint(mod, params, [images[:8]])
    assert (few.check, few.what) == ("samples", "the data has only 8 samples.")
    findings = lint(mod, params, [images[:20], images[:20]])
    assert checks(findings) == ["duplicates"]
    assert "20 of 40" in findings[0].what


def test_lint__samples_before_an_error_are_not_counted(digits):
    mod, params, images = digits
    broken = images[8:16].copy()
    broken[0, 0, 0, 0] = np.nan
    assert checks(lint(mod, params, [images[:8], broken, images[16:]])) == ["data"]


def test_lint__range_that_still_grows(digits):
    mod, params, images = digits
    sorted_images = images[:100] * np.linspace(0.1, 1, 100, dtype="float32").reshape(-1, 1, 1, 1)
    assert checks(lint(mod, params, list(sorted_images))) == ["growth"]


def test_lint__batch_of_a_fixed_size():
    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        return emit.conv_bias("y", x)

    mod = build_model(body, (20, 4, 6, 6))
    data = [np.random.default_rng(i).normal(size=(20, 4, 6, 6)).astype("float32") for i in (0, 1)]
    assert lint(mod, None, data) == []
    assert checks(lint(mod, None, [x * np.float32(1e-3) for x in data])) == ["scale"]


def test_lint__keeps_few_samples_however_small_the_batches():
    """The first layer is computed on some of them; the rest pass by."""
    kept = []

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        return emit.conv_bias("y", x)

    def read(count: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        alive: list[weakref.ref[np.ndarray]] = []
        for _ in range(count):
            sample = rng.uniform(-1, 1, (1, 4, 6, 6)).astype("float32")
            alive.append(weakref.ref(sample))
            yield sample
        kept.append(sum(array() is not None for array in alive))

    assert lint(build_model(body, (1, 4, 6, 6)), None, lambda: read(300)) == []
    assert kept[-1] <= PROBE_SAMPLES + 2


BROKEN = {
    "scale": lambda x: x * np.float32(255),
    "constant": np.zeros_like,
    "duplicates": lambda x: np.repeat(x[:1], len(x), 0),
}


@pytest.mark.parametrize("check", BROKEN)
def test_quantize__warns_of_data_that_looks_wrong(digits, check):
    mod, params, images = digits
    broken = BROKEN[check](images[:16])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rq.quantize(mod, params, [broken], effort="fast")
    texts = [str(w.message) for w in caught if w.category is rq.DataWarning]
    seen = broken[::2]  # 8 samples, spread over the data
    found = lint_samples(rq.prepare(mod, params).mod, [{"image": seen}])
    assert check in checks(found)
    assert texts == [f"Calibration data: {finding} [RQ304]" for finding in found]
    assert all(w.filename == __file__ for w in caught if w.category is rq.DataWarning)


def test_quantize__does_not_warn_of_good_data(digits):
    mod, params, images = digits
    with warnings.catch_warnings():
        warnings.simplefilter("error", rq.DataWarning)
        rq.quantize(mod, params, [images[:16]], effort="fast")


@pytest.mark.slow
def test_lint_samples__layouts_outliers_and_integers(cifar, shared_data):
    _, normal = cifar
    prepared = rq.prepare(*rq.load(str(shared_data("resnet20_cifar10.onnx")))).mod
    (name,) = (param.name for param in prepared["main"].params)
    assert lint_samples(prepared, [{name: normal[:8]}]) == []
    scrambled = np.ascontiguousarray(normal.transpose(0, 2, 3, 1)).reshape(normal.shape)
    assert checks(lint_samples(prepared, [{name: scrambled[:8]}])) == ["layout"]
    far = normal[:8].copy()
    far[3, 1, 2, 2] = 300
    assert checks(lint_samples(prepared, [{name: far}])) == ["outliers"]
    assert lint_samples(prepared, [{"mask": np.arange(8, dtype="int32").reshape(2, 4)}]) == []


def test_measure_growth__ends_at_the_whole_range(digits):
    mod, params, images = digits
    (curve,) = measure_growth(mod, params, [images[i : i + 1] * (i + 1) for i in range(4)]).values()
    shares = [share for _, share in curve]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert curve[0][0] == 1
    assert len(measure_growth(mod, params, [images[:5]] * 6)["image"]) == 1
