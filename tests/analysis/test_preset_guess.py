"""The guessed preprocessing: what the first layer was trained on, else what is usual."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.linting.normalization import RAW, PixelForm
from relayquant.analysis.linting.preset_guess import fit_size, guess_preset
from relayquant.data.item import describe_inputs
from relayquant.demo import load_digits

PIXELS = [
    np.random.default_rng(i).integers(0, 256, (1, 3, 16, 16)).astype("float32") for i in range(24)
]
SHAPE = (1, 3, 16, 16)
#: what lint says of pictures that were prepared in another way than in training
WRONG_PIXELS = {"scale", "layout", "order", "normalization"}


def build_first_layer(preset: str | None, bias: float = 0.0) -> tuple:
    """A convolution, followed by a batch norm that saw pictures of a preset, if there is one."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype("float32") / 5

    def body(emit, x):
        result = emit("conv", op.nn.conv2d(x, relax.const(weight), padding=1))
        if preset is None:
            return emit("out", op.add(result, relax.const(np.full((1, 4, 1, 1), bias, "float32"))))
        seen = [PixelForm.of(RAW, 3).convert(x, 1, PixelForm.of(preset, 3)) for x in PIXELS]
        values = run_first(weight, np.concatenate(seen))
        mean, variance = values.mean((0, 2, 3)), values.var((0, 2, 3))
        numbers = [np.ones(4), np.zeros(4), mean, variance]
        constants = [relax.const(np.asarray(n, "float32")) for n in numbers]
        normed = op.nn.batch_norm(result, *constants, axis=1, training=False)
        return emit("out", relax.TupleGetItem(emit("norm", normed), 0))

    return build_model(body, SHAPE)


def run_first(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    found = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(weight), padding=1)
    return found.numpy()


@pytest.mark.parametrize("preset", ["imagenet", "caffe", "tflite", "unit"])
def test_guess_preset__batch_norm_tells(preset):
    mod = build_first_layer(preset)
    found = guess_preset(mod, None, describe_inputs(mod)[0], PIXELS)
    assert found.text.split(",")[0] == preset
    assert "batch norm stores" in found.reason


def test_guess_preset__without_a_batch_norm_the_usual_one_whose_scale_fits():
    mod = build_first_layer(None, bias=0.5)
    found = guess_preset(mod, None, describe_inputs(mod)[0], PIXELS)
    assert found.text == "imagenet,size=16,crop=16"
    assert "usual for the layout NCHW; no batch norm confirms it" in found.reason
    mod = build_first_layer(None, bias=60.0)  # of pixels that are not divided
    assert guess_preset(mod, None, describe_inputs(mod)[0], PIXELS).text == RAW


def build_normalizing_model() -> tuple:
    """A model as Keras exports it: pixels, channels last, normalized and transposed in the graph,
    then a convolution and a batch norm that saw pictures of `imagenet`.
    """
    form, weight = PixelForm.of("imagenet", 3), np.ones((4, 3, 1, 1), "float32")
    weight += np.random.default_rng(0).normal(size=weight.shape).astype("float32")
    seen = np.concatenate([PixelForm.of(RAW, 3).convert(x, 1, form) for x in PIXELS])
    values = np.einsum("nchw,oc->nohw", seen, weight[:, :, 0, 0])
    numbers = [np.ones(4), np.zeros(4), values.mean((0, 2, 3)), values.var((0, 2, 3))]

    def body(emit, x):
        scaled = emit("mul", op.multiply(x, relax.const(form.gain.astype("float32"))))
        moved = emit("add", op.add(scaled, relax.const(form.offset.astype("float32"))))
        turned = emit("turned", op.permute_dims(moved, [0, 3, 1, 2]))
        result = emit("conv", op.nn.conv2d(turned, relax.const(weight)))
        constants = [relax.const(np.asarray(n, "float32")) for n in numbers]
        normed = op.nn.batch_norm(result, *constants, axis=1, training=False)
        return emit("out", relax.TupleGetItem(emit("norm", normed), 0))

    return build_model(body, (1, 16, 16, 3))


def test_guess_preset__the_graph_normalizes():
    mod = build_normalizing_model()
    pixels = [x.transpose(0, 2, 3, 1) for x in PIXELS]
    found = guess_preset(mod, None, describe_inputs(mod)[0], pixels)
    assert found.text == RAW
    assert "batch norm stores" in found.reason


def test_lint__the_graph_normalizes():
    mod = build_normalizing_model()
    pixels = [np.ascontiguousarray(x.transpose(0, 2, 3, 1)) for x in PIXELS]
    assert {each.check for each in rq.lint(mod, None, pixels)}.isdisjoint(WRONG_PIXELS)
    divided = [x / 255 for x in pixels]
    assert [each.check for each in rq.lint(mod, None, divided) if each.check in WRONG_PIXELS] == [
        "scale"
    ]


def test_guess_preset__built_in_example():
    mod, params = rq.load(load_digits().model_path)
    pixels = [image[None] * 255 for image in load_digits().images[:24]]
    (info,) = describe_inputs(mod)
    assert guess_preset(mod, params, info, pixels).text == "unit"


def test_fit_size__keeps_the_margin_of_large_pictures():
    assert fit_size("imagenet", 224, 224) == "imagenet"
    assert fit_size("imagenet", 448, 448) == "imagenet,size=512,crop=448"
    assert fit_size("imagenet", 32, 32) == "imagenet,size=32,crop=32"
    assert fit_size("tflite", 96, 96) == "tflite"
