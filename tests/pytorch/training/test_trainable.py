"""Training with quantization: the module in evaluation mode and the integer module agree in every
value, whatever was trained; switches, states, refusals.
"""

from __future__ import annotations

import copy
import io
import sys

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches, residual_model
from tvm.relax import op

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.errors import ConfigError, MissingDependencyError, ModelError
from relayquant.ir.reference import run, run_values


def test_torch_missing__extra_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'relayquant\[torch\]'"):
        rq.torch.from_relax(residual_model())


torch = pytest.importorskip("torch", reason="pip install torch")

from torch_models import InvertedResiduals, ResidualNet, Transformer, make  # noqa: E402

from relayquant.config import BatchNorm, Ranges  # noqa: E402
from relayquant.torch.training.trainable import name_parameter  # noqa: E402

STEPS = 3


def train(module, *inputs, steps=STEPS, lr=1e-2):
    """A few steps of somebody's loop, toward outputs twice as large."""
    with torch.no_grad():
        expected = 2 * module.eval()(*inputs)
    optimizer = torch.optim.Adam(module.parameters(), lr)
    losses = []
    module.train()
    for _ in range(steps):
        loss = (module(*inputs) - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    return losses


@torch.no_grad()
def count_apart(module, qmod, inputs: dict[str, np.ndarray]) -> list[int]:
    """For each rounded value, how many steps it is apart at most, computed from the integers of the
    integer module.
    """
    integers, program = run_values(qmod, inputs), module.source.program
    computed = {step.var.name for step in program.steps}
    apart, visit = [], {}

    def compare(integer, qparams):
        real = (integer.astype("float32") - qparams.zero_point) * qparams.scale
        given = torch.from_numpy(real.astype("float32"))

        def replace(value):
            apart.append(round(float(((value - given).abs() / float(qparams.scale)).max())))
            return given, {}

        return replace

    for quantizer in module.list_quantizers():
        group = quantizer.group
        for name in (*group.points, *group.clamped) if group.base is None else ():
            value = integers.get(f"{name}.q", integers.get(name))
            is_integer = value is not None and value.dtype.kind in "iu"
            if group.constant is None and is_integer and f"{name}.d" in computed:
                visit[f"{name}.d"] = compare(value, quantizer.qparams)
    module.run([torch.from_numpy(inputs[var.name]) for var in program.inputs], visit)
    return apart


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_contract__same_answers_value_after_value(bits):
    """Each with its own values, from the image to the answer: sums of float32 differ in last bits,
    which reach no rounding but once in millions. The 500 images have millions of values: a rounding
    or two may fall to the other side, and the logits of that image differ.
    """
    demo, most = load_digits(batch=32), 2 ** (bits - 1) - 1
    mod, params = rq.load(demo.model_path)
    weight = rq.QSpec("int8", SYMMETRIC, CHANNELS, quant_min=-most - (bits == 2), quant_max=most)
    mapping = quantize_as(rq.QSpec("uint8", quant_max=15 if bits < 8 else 255), weight)
    module = rq.torch.from_relax(
        mod, params, mapping, "x86", calibration_dataset=demo.calibration, effort="fast"
    )
    train(module, torch.from_numpy(np.concatenate([*demo.calibration])[:64]), steps=20)
    (expected,) = run(rq.torch.convert(module), [demo.images])
    with torch.no_grad():
        got = module(torch.from_numpy(demo.images)).numpy()
    np.testing.assert_array_equal(got.argmax(1), expected.argmax(1))
    bound = 1e-5 * (np.abs(expected) + np.abs(expected).max())
    apart = (np.abs(got - expected) > bound).any(1)
    assert apart.sum() <= 2 < len(apart) / 100
    np.testing.assert_allclose(got[apart], expected[apart], atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize("activation", [None, torch.nn.ReLU(), torch.nn.ReLU6()])
@pytest.mark.parametrize("groups", [1, 4])
def test_contract__sums_on_the_border_of_two_steps(activation, groups):
    """A step of the result is twice the accumulator's, so that every odd sum is on a border: its
    last bits would say to which side it falls, were it not scaled as the integer module does.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(4, 8, 3, groups=groups), *([activation] if activation else [])]
    batch = 5 * torch.randn(4, 4, 12, 12)
    spec = rq.QSpec("int8", SYMMETRIC, quant_min=-1, quant_max=1)
    module = rq.torch.prepare_qat(
        torch.nn.Sequential(*layers, torch.nn.Conv2d(8, 4, 1)), (batch,),
        quantize_as(rq.QSpec("uint8"), spec), "x86", calibration_dataset=[batch],
        ranges=Ranges.FROZEN, effort="fast",
    ).eval()  # fmt: skip
    (place, *_) = module.sums.values()
    data, weight = (module.find_scale(group) for group in module.bias_scales[place.bias])
    module.quantizers[name_parameter(place.group)].scale.copy_(2 * (data * weight))
    (expected,) = run(rq.torch.convert(module), [batch.numpy()])
    with torch.no_grad():
        got = module(batch).numpy()
    assert len(np.unique(got)) > 20
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    module.sums = {}
    with torch.no_grad():
        other = module(batch).numpy()
    assert np.abs(other - expected).max() > 1e-3 * np.abs(expected).max(), "the case is one"


def quantize_as(activation: rq.QSpec, weight: rq.QSpec) -> rq.QConfigMapping:
    config = rq.QConfig(
        rq.TensorConfig(activation, rq.observers.MinMax()),
        rq.TensorConfig(weight, rq.observers.MinMax()),
    )
    return rq.QConfigMapping().set_global(config)


SYMMETRIC, CHANNELS = rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL
#: name -> (backend, activations, weights)
FORMATS = {
    "x86": ("x86", rq.QSpec("uint8"), rq.QSpec("int8", SYMMETRIC, CHANNELS, -127)),
    "arm": ("arm", rq.QSpec("int8"), rq.QSpec("int8", SYMMETRIC, CHANNELS, -127)),
    "per tensor": ("x86", rq.QSpec("uint8"), rq.QSpec("int8", SYMMETRIC)),
    "powers of two": (
        "generic",
        rq.QSpec("int8", SYMMETRIC, power_of_two=True),
        rq.QSpec("int8", SYMMETRIC, CHANNELS, power_of_two=True),
    ),
    "4 bits": (
        "x86",
        rq.QSpec("uint8", quant_max=15),
        rq.QSpec("int8", SYMMETRIC, CHANNELS, quant_min=-7, quant_max=7),
    ),
    "int4": ("x86", rq.QSpec("uint8"), rq.QSpec("int4", SYMMETRIC, CHANNELS)),
    "int16": ("generic", rq.QSpec("int16", SYMMETRIC), rq.QSpec("int8", SYMMETRIC, CHANNELS)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_contract__one_step_in_every_value(name):
    backend, *specs = FORMATS[name]
    mod = residual_model()
    data = draw_batches(mod, 3)
    for ranges in Ranges:
        module = rq.torch.from_relax(
            mod,
            None,
            quantize_as(*specs),
            backend,
            calibration_dataset=data,
            ranges=ranges,
            effort="fast",
        )
        losses = train(module, torch.from_numpy(data[0]["x"]))
        assert losses[-1] < losses[0]
        qmod = rq.torch.convert(module)
        apart = count_apart(module, qmod, data[1])
        assert len(apart) >= 6
        assert max(apart) <= 1
        (expected,) = run(qmod, data[1])
        with torch.no_grad():
            got = module(torch.from_numpy(data[1]["x"])).numpy()
        assert np.abs(got - expected).max() <= 0.15 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kind", "shape", "norms"),
    [(ResidualNet, (3, 8, 8), 5), (InvertedResiduals, (8, 8, 8), 3), (Transformer, (6, 16), 0)],
)
def test_prepare_qat__networks_agree_with_their_integer_modules(kind, shape, norms):
    torch.manual_seed(0)
    source, batches = make(kind), [torch.randn(6, *shape) for _ in range(3)]
    before = {name: value.clone() for name, value in source.state_dict().items()}
    for batch_norm in BatchNorm if norms else [BatchNorm.FROZEN]:
        module = rq.torch.prepare_qat(
            source,
            (batches[0],),
            backend="x86",
            calibration_dataset=batches,
            batch_norm=batch_norm,
            effort="fast",
            dynamic_shapes=({0: torch.export.Dim.AUTO},),
        )
        live = norms if batch_norm is BatchNorm.LIVE else 0
        assert len([*module.list_norms()]) == live
        train(module, batches[0])
        qmod = rq.torch.convert(module)
        x = torch.randn(3, *shape)  # another number of samples
        apart = count_apart(module, qmod, {"x": x.numpy()})
        assert len(apart) >= 5
        assert max(apart) <= 1
        assert rq.verify(qmod, [x.numpy()]).is_equal
        assert rq.ledger(qmod).to_dict()["choices"]["training"] == "ranges learned"
    assert all(torch.equal(before[k], v) for k, v in source.state_dict().items())
    assert source.training


def test_untrained__is_what_quantize_gives():
    """Calibration is where training starts: its roundings too."""
    mod = residual_model()
    data = draw_batches(mod, 3)
    expected = rq.quantize(mod, None, data, guard=rq.config.Guard.OFF, backend="x86")
    module = rq.torch.from_relax(mod, None, None, "x86", calibration_dataset=data)
    (got,), (want,) = run(rq.torch.convert(module), data[0]), run(expected, data[0])
    np.testing.assert_array_equal(got, want)


def test_state_dict__round_trip_and_copies():
    source, batch = make(ResidualNet), torch.randn(4, 3, 8, 8)

    def prepare(scale):
        return rq.torch.prepare_qat(
            source,
            (batch,),
            calibration_dataset=[scale * batch],
            ranges=Ranges.MOVING_AVERAGE,
            weight_ranges=Ranges.LEARNED,
            batch_norm=BatchNorm.LIVE,
            effort="fast",
        )

    trained, fresh = prepare(1), prepare(3)
    train(trained, batch)
    twin = copy.deepcopy(trained)
    fresh.load_state_dict(trained.state_dict())
    expected = trained(batch)
    assert torch.equal(fresh.eval()(batch), expected)
    assert torch.equal(twin(batch), expected)
    first, second = (run(rq.torch.convert(m), [batch.numpy()])[0] for m in (trained, fresh))
    np.testing.assert_array_equal(first, second)
    train(twin, batch)
    assert torch.equal(trained(batch), expected), "a copy shares nothing that trains"
    with pytest.raises(ConfigError, match=r"cannot be pickled\. Save its state_dict\(\)"):
        torch.save(trained, io.BytesIO())


def test_frozen__training_and_evaluation_are_one():
    """Behind freeze_ranges and freeze_statistics nothing is left that differs."""
    source, batch = make(ResidualNet), torch.randn(4, 3, 8, 8)
    module = rq.torch.prepare_qat(
        source, (batch,), calibration_dataset=[batch], ranges=Ranges.MOVING_AVERAGE,
        batch_norm=BatchNorm.LIVE, effort="fast",
    )  # fmt: skip
    train(module, batch)
    assert not torch.equal(module.train()(batch), module.eval()(batch))
    module.freeze_ranges().freeze_statistics()
    assert torch.equal(module.train()(batch), module.eval()(batch))


@pytest.mark.parametrize("ranges", [Ranges.MOVING_AVERAGE, Ranges.LEARNED])
def test_freeze__ranges_stay_until_thawed(ranges):
    mod = residual_model()
    data = draw_batches(mod, 2)
    x = 10 * torch.from_numpy(data[0]["x"])
    module = rq.torch.from_relax(mod, calibration_dataset=data, ranges=ranges, effort="fast")

    def read():
        return [quantizer.qparams for quantizer in module.list_quantizers()]

    calibrated = read()
    train(module.freeze_ranges(), x)
    assert read() == calibrated
    train(module.thaw_ranges(), x)
    moved = [now != before for now, before in zip(read(), calibrated, strict=True)]
    assert sum(moved) >= len(moved) - 1, "all but that of a value which is always 0"


def test_freeze__given_parameters_stay():
    """What the user or the backend fixes is not learned."""
    config = rq.get_backend_config("x86").default_qconfig
    fixed = rq.TensorConfig(config.activation.spec, rq.observers.Fixed(scale=0.05, zero_point=100))
    mapping = rq.QConfigMapping().set_global(rq.QConfig(fixed, config.weight))
    mod = residual_model()
    data = draw_batches(mod, 2)
    module = rq.torch.from_relax(mod, None, mapping, "x86", calibration_dataset=data)
    train(module, torch.from_numpy(data[0]["x"]))
    kinds = {
        q.group.constant is None: float(q.qparams.scale.flat[0]) for q in module.list_quantizers()
    }
    assert kinds[True] == pytest.approx(0.05)
    assert [q.ranges for q in module.list_quantizers() if q.group.constant is None] == [
        Ranges.FROZEN
    ] * len(module.source.prepared.plan.activations)


def test_from_module__float_trains_and_comes_back():
    mod = residual_model()
    (batch,) = draw_batches(mod, 1)
    module, x = rq.torch.from_relax(mod), torch.from_numpy(batch["x"])
    assert not module.is_quantized
    np.testing.assert_allclose(module(x).detach().numpy(), run(mod, batch)[0], rtol=1e-4, atol=1e-5)
    losses = train(module, x)
    assert losses[-1] < losses[0]
    (got,) = run(rq.torch.convert(module), batch)
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    assert np.abs(got - run(mod, batch)[0]).max() > 1e-3


def test_operators_left_in_float__train_too():
    source, batch = make(ResidualNet), torch.randn(4, 3, 8, 8)
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("layer1.0.conv1", None)
        .set_module_name("fc", None)
    )
    module = rq.torch.prepare_qat(
        source, (batch,), mapping, "x86", calibration_dataset=[batch], effort="fast"
    )
    assert len(module.floats) >= 3
    before = {name: value.clone() for name, value in module.floats.items()}
    train(module, batch)
    assert all(not torch.equal(before[name], value) for name, value in module.floats.items())
    (got,) = run(rq.torch.convert(module), [batch.numpy()])
    expected = module(batch).detach().numpy()
    assert np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


AFTER = torch.ones(5, 5).triu(1)
NEAR = -(torch.arange(5.0)[:, None] - torch.arange(5.0)).abs()
#: mask of scores, and of products, (query, key)
MASKS = {
    "infinite": (torch.full((5, 5), -torch.inf).triu(1), None),
    "lowest number": (torch.finfo(torch.float32).min * AFTER, None),
    "-100, as in Swin": (-100 * AFTER, None),
    "with a bias by distance": (NEAR - 1e9 * AFTER, None),
    "factors": (-1e9 * AFTER, 1 - AFTER),
}


class MaskedAttention(torch.nn.Module):
    """Input (N, 5, 8). A result depends on the positions up to it alone."""

    def __init__(self, mask, factors):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mask", mask)
        self.register_buffer("factors", factors)

    def forward(self, x):
        query, key, value = (layer(x) for layer in self.layers)
        share = torch.softmax(query @ key.mT / 8**0.5 + self.mask, -1)
        if self.factors is not None:
            share = share * self.factors
        return share @ value


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_mask__hides_the_same_after_training(name):
    torch.manual_seed(0)
    source, batch = MaskedAttention(*MASKS[name]), torch.randn(4, 5, 8)
    data = {"calibration_dataset": [batch], "effort": "fast"}
    module = rq.torch.prepare_qat(source, (batch,), backend="x86", **data)
    assert not module.floats
    train(module, batch)
    changed = batch.clone()
    changed[:, -1] *= -1
    for compute in (source, module, rq.torch.as_module(rq.torch.convert(module))):
        before, after = (compute(each).detach()[:, :-1] for each in (batch, changed))
        assert torch.equal(before, after)


@pytest.mark.slow
def test_bias__that_is_large_or_zero_is_no_mask():
    source, batch = torch.nn.LayerNorm(4), torch.randn(3, 4)
    with torch.no_grad():
        source.bias.copy_(torch.tensor([0.0, 1.0, 300.0, -90.0]))
    module = rq.torch.from_relax(rq.load(torch.export.export(source, (batch,)))[0])
    assert len(module.floats) == 2


def test_convert__diverged_and_others_refused():
    module = rq.torch.from_relax(
        residual_model(), calibration_dataset=draw_batches(residual_model(), 1)
    )
    with torch.no_grad():
        next(iter(module.weights.values())).fill_(float("nan"))
    with pytest.raises(ConfigError, match=r"Parameter 'weights\..*' is NaN or infinite"):
        rq.torch.convert(module)
    with pytest.raises(ConfigError, match=r"prepare_qat or from_relax, got Linear"):
        rq.torch.convert(torch.nn.Linear(2, 2))
    prepared = rq.calibrate(rq.prepare(residual_model()), draw_batches(residual_model(), 1))
    assert rq.torch.from_relax(prepared).is_quantized
    with pytest.raises(ConfigError, match="calibrated model, which already has parameters"):
        rq.torch.from_relax(prepared, backend="arm")


def test_dynamic_and_narrow__refused_with_the_reason():
    from dataclasses import replace

    mod = residual_model()
    patterns = tuple(
        replace(
            row,
            dtypes=tuple(
                replace(d, accumulator="int16")
                for d in row.dtypes
                if not (d.is_dynamic or d.is_grouped)
            ),
        )
        for row in rq.get_backend_config("generic").patterns
    )
    narrow = replace(rq.get_backend_config("generic"), name="narrow", patterns=patterns)
    with pytest.raises(ConfigError, match="narrow accumulator, whose overflow has no gradient"):
        rq.torch.from_relax(mod, None, None, narrow, calibration_dataset=draw_batches(mod, 1))

    def body(emit, x):
        return emit.dense("d", x, 4)

    dense = build_model(body, (2, 8))
    config = rq.QConfig(
        rq.TensorConfig(rq.QSpec("uint8", is_dynamic=True)),
        rq.get_backend_config("x86").default_qconfig.weight,
    )
    with pytest.raises(ConfigError, match="'d' cannot be trained: it gets its parameters at run"):
        rq.torch.from_relax(
            dense,
            None,
            rq.QConfigMapping().set_global(config),
            calibration_dataset=draw_batches(dense, 1),
        )


def test_operator_without_torch_form__refused():
    def body(emit, x):
        return emit("s", op.image.resize2d(emit.conv("c", x), (3, 3)))

    with pytest.raises(
        ModelError, match=r"1 operator of the model cannot be trained: image\.resize2d \('s'\)"
    ):
        rq.torch.from_relax(build_model(body, MAP))


def test_contract__bias_of_large_weights():
    """As in MobileNet's first depthwise layer: clipped results, but for those of zeros, which are
    the bias; in units of the accumulator that is coarser than a step of the result.
    """
    torch.manual_seed(0)
    depthwise = torch.nn.Conv2d(8, 8, 1, groups=8)
    with torch.no_grad():
        depthwise.weight.fill_(700)
        depthwise.bias.uniform_(0, 6)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU6(), depthwise, torch.nn.ReLU6()
    batches = [20 * torch.randn(2, 3, 6, 6) for _ in range(2)]
    for batch_norm in BatchNorm:
        norm = torch.nn.BatchNorm2d(8)
        source = torch.nn.Sequential(*layers[:3], norm, layers[3], torch.nn.Conv2d(8, 4, 1))
        module = rq.torch.prepare_qat(
            source, (batches[0],), backend="x86", calibration_dataset=batches,
            batch_norm=batch_norm, effort="fast",
        )  # fmt: skip
        module.eval()
        qmod = rq.torch.convert(module)
        apart = count_apart(module, qmod, {"input": batches[1].numpy()})
        assert len(apart) >= 3
        assert max(apart) <= 1
        module(batches[0]).sum().backward()
        biases = [p for name, p in module.named_parameters() if name.endswith(("bias", "beta"))]
        # What reaches the first layer was clipped.
        assert sum(bool(bias.grad.abs().sum() > 0) for bias in biases) == 2


class Biased(torch.nn.Module):
    """A layer without a bias of its own, and what is added to it."""

    def __init__(self, layer, bias):
        super().__init__()
        self.layer, self.bias = layer, torch.nn.Parameter(torch.randn(bias))

    def forward(self, x):
        return self.layer(x) + self.bias


#: name -> (layer, sizes of the bias that is added or None for the layer's own, sizes of the input)
BIASES = {
    "conv1d, a number": (lambda **given: torch.nn.Conv1d(6, 4, 3, **given), (), (6, 9)),
    "conv2d, one for all channels": (
        lambda **given: torch.nn.Conv2d(6, 4, 3, **given), (1, 1, 1, 1), (6, 5, 5)
    ),
    "linear, one for all channels": (lambda **given: torch.nn.Linear(6, 4, **given), (1,), (6,)),
    "transposed, grouped": (
        lambda **given: torch.nn.ConvTranspose2d(6, 4, 3, groups=2, **given), None, (6, 5, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_contract__bias_however_it_is_written(name):
    """The prepared module has one value per channel, each in units of its accumulator: `round_bias`
    needs as many as the weight has scales.
    """
    torch.manual_seed(0)
    make_layer, bias, shape = BIASES[name]
    source = make_layer() if bias is None else Biased(make_layer(bias=False), bias)
    batches = [torch.randn(3, *shape) for _ in range(2)]
    layers = source, torch.nn.ReLU(), torch.nn.Flatten()
    features = torch.nn.Sequential(*layers)(batches[0]).shape[1]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(features, 3))
    module = rq.torch.prepare_qat(
        net,
        (batches[0],),
        quantize_as(*FORMATS["arm"][1:]),
        "arm",
        calibration_dataset=batches,
        effort="fast",
    )
    counts = [
        (module.weights[name_parameter(key)].numel(), module.quantizers[name_parameter(w)].scale)
        for key, (_, w) in module.bias_scales.items()
    ]
    assert [values for values, _ in counts] == [4, 3]
    assert all(len(scales) in (1, values) for values, scales in counts)
    module.eval()
    apart = count_apart(module, rq.torch.convert(module), {"input": batches[1].numpy()})
    assert len(apart) >= 2
    assert max(apart) <= 1
