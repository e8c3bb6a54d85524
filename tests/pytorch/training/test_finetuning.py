"""finetune: what calibration leaves open is closed; resumed trainings give the same bits."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from float_models import draw_batches, residual_model

import relayquant as rq
from relayquant.base.events import TrainingEvent
from relayquant.data.item import InputInfo, describe_inputs
from relayquant.demo import load_digits
from relayquant.errors import ConfigError, DataError, FileError
from relayquant.ir.reference import run

torch = pytest.importorskip("torch", reason="pip install torch")

TWO_BITS = rq.QSpec(
    "int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL, quant_min=-2, quant_max=1
)


class Watch(rq.Callback):
    """Keeps what it hears, and stops a training by an error."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[TrainingEvent] = []
        self.stop_at = stop_at

    def on_training(self, event):
        self.events.append(event)

    def on_progress(self, event):
        if event.task == "training" and event.done == self.stop_at:
            raise KeyboardInterrupt


def make_mapping(weight: rq.QSpec = TWO_BITS) -> rq.QConfigMapping:
    config = rq.get_backend_config("x86").default_qconfig
    return rq.QConfigMapping().set_global(
        rq.QConfig(config.activation, rq.TensorConfig(weight, rq.observers.MinMax()))
    )


def test_finetune__digits_with_weights_of_two_bits():
    demo = load_digits(batch=32)
    mod, params = rq.load(demo.model_path)
    options = {"qconfig_mapping": make_mapping(), "backend": "x86", "effort": "fast"}
    before = rq.quantize(mod, params, demo.calibration, guard=rq.config.Guard.OFF, **options)
    watch = Watch()
    after = rq.torch.finetune(
        mod, params, demo.calibration, steps=60, lr=3e-2, validation_dataset=demo.calibration,
        callbacks=watch, **options,
    )  # fmt: skip
    (expected,), (first,), (second,) = (run(m, [demo.images]) for m in (mod, before, after))
    share = [(got.argmax(1) == expected.argmax(1)).mean() for got in (first, second)]
    assert share[0] < 0.95
    assert 1 - share[1] <= 0.4 * (1 - share[0]), "most of the gap is closed"
    assert rq.verify(after, [demo.images[:4]]).is_equal
    training = rq.ledger(after).to_dict()["choices"]["training"]
    assert training.startswith("ranges learned, 60 steps, the best after ")
    assert [event.step for event in watch.events] == [*range(0, 61, 6)]
    assert max(e.score for e in watch.events) > watch.events[0].score


def tune(path=None, callbacks=(), data=None, **options):
    """A short training of a small model."""
    mod = residual_model()
    return rq.torch.finetune(
        mod,
        None,
        draw_batches(mod, 3) if data is None else data,
        **{
            "steps": 8,
            "effort": "fast",
            "backend": "x86",
            "evaluate_every": 2,
            "validation_dataset": draw_batches(mod, 1, seed=1),
        }
        | options,
        checkpoint=path,
        callbacks=callbacks,
    )


def test_finetune__calibrated_model_gives_the_same():
    """`finetune` of what `calibrate` gives, and of the module, are one training."""
    mod, (batch,) = residual_model(), draw_batches(residual_model(), 1, seed=2)
    data = draw_batches(mod, 3)
    prepared = rq.prepare(mod, None, data, backend="x86", effort="fast")
    prepared = rq.calibrate(prepared, data)
    got = rq.torch.finetune(prepared, None, data, steps=4)
    expected = rq.torch.finetune(mod, None, data, steps=4, effort="fast", backend="x86")
    np.testing.assert_array_equal(run(got, batch)[0], run(expected, batch)[0])
    with pytest.raises(ConfigError, match="got a calibrated model, which already has parameters"):
        rq.torch.finetune(prepared, None, data, steps=4, backend="x86")


def measure(expected, got):
    """A metric: higher is better."""
    return -float(np.abs(expected[0] - got[0]).mean())


def test_checkpoint__same_bits_after_resuming(tmp_path):
    path, (batch,) = tmp_path / "training", draw_batches(residual_model(), 1, seed=2)
    whole = Watch()
    (expected,) = run(tune(callbacks=whole), batch)
    with pytest.raises(KeyboardInterrupt):
        tune(path, Watch(stop_at=5))
    kept = path.read_bytes()
    with pytest.raises(ConfigError, match=r"another training; what differs: settings"):
        tune(path, lr=0.5)
    with pytest.raises(ConfigError, match=r"what differs: metric \(was the loss, is .*measure"):
        tune(path, metric=measure)
    with pytest.raises(ConfigError, match=r"differs: validation data\. Pass"):
        tune(path, validation_dataset=draw_batches(residual_model(), 1, seed=9))
    same, changed = (draw_batches(residual_model(), 3) for _ in range(2))
    changed[1] = {"x": changed[1]["x"] + 1}
    with pytest.raises(DataError, match="was started with other data"):
        tune(path, data=changed, calibration_dataset=same)
    assert path.read_bytes() == kept, "what does not fit leaves it as it is"
    rest = Watch()
    (got,) = run(tune(path, rest), batch)
    np.testing.assert_array_equal(got, expected)
    assert rest.events == whole.events[3:]
    assert not path.exists()
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(DataError, match="no checkpoint of a training, or is damaged"):
        tune(path)


#: the arguments of `tune` in another process, which stays in its first evaluation
OTHER = """
import sys, time
from pathlib import Path
import test_finetuning
import relayquant as rq

class Stay(rq.Callback):
    def on_training(self, event):
        Path(sys.argv[2]).touch()
        time.sleep(600)

test_finetuning.tune(sys.argv[1], Stay())
"""


@pytest.mark.slow
def test_checkpoint__of_another_process(tmp_path):
    """Refused while it runs; a process that was killed leaves no lock."""
    path, sign = tmp_path / "training", tmp_path / "running"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", OTHER, str(path), str(sign)]
    other = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": paths})
    try:
        while not sign.exists():
            assert other.poll() is None
            time.sleep(0.1)
        with pytest.raises(ConfigError, match="in use by another training; use a separate file"):
            tune(path)
    finally:
        other.kill()
        other.wait()
    tune(path)
    assert {each.name for each in tmp_path.iterdir()} == {"running"}


def test_checkpoint__one_training_at_a_time(tmp_path):
    path, link = tmp_path / "training", tmp_path / "link"
    link.symlink_to(path)

    class Second(rq.Callback):
        def on_training(self, event):
            tune(link)

    with pytest.raises(ConfigError, match="in use by another training"):
        tune(path, Second())
    tune(path)
    assert {each.name for each in tmp_path.iterdir()} == {"link"}


def test_validation__never_worse_and_patience_ends():
    """With a rate that ruins the model the calibrated state counts."""
    watch, mod = Watch(), residual_model()
    (batch,) = draw_batches(mod, 1, seed=3)
    got = tune(callbacks=watch, lr=3.0, patience=2)
    expected = rq.quantize(
        mod, None, draw_batches(mod, 3), effort="fast", backend="x86", guard=rq.config.Guard.OFF
    )
    np.testing.assert_array_equal(run(got, batch)[0], run(expected, batch)[0])
    assert [event.step for event in watch.events] == [0, 2, 4]
    assert "4 steps, the best as calibrated" in rq.ledger(got).to_dict()["choices"]["training"]


def test_hold_back__never_worse_without_validation_data():
    """A rate that ruins the model: what was held back chooses the calibrated state."""
    mod, watch = residual_model(), Watch()
    data = draw_batches(mod, 12)
    options = {"effort": "fast", "backend": "x86"}
    got = rq.torch.finetune(mod, None, data, steps=12, lr=3.0, callbacks=watch, **options)
    kept = data[:9] + data[10:]
    expected = rq.quantize(mod, None, kept, guard=rq.config.Guard.OFF, **options)
    np.testing.assert_array_equal(run(got, data[0])[0], run(expected, data[0])[0])
    assert "12 steps, the best as calibrated" in rq.ledger(got).to_dict()["choices"]["training"]
    assert watch.events[0].score > max(event.score for event in watch.events[1:])
    ruined = rq.torch.finetune(mod, None, data, steps=12, lr=3.0, hold_back=False, **options)
    assert not np.array_equal(run(ruined, data[0])[0], run(expected, data[0])[0])


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(3, 99, []), (4, 99, [3]), (9, 99, [8]), (19, 99, [9]), (20, 99, [9, 19]), (50, 20, [9, 19])],
)
@pytest.mark.parametrize("kind", [list, np.concatenate])
def test_hold_back__places(count, most, places, kind):
    from relayquant.torch.finetuning.settings import TrainingData

    items = [np.full((1, 2), i, "float32") for i in range(count)]
    data = TrainingData(kind(items), (InputInfo("x", (1, 2), "float32"),), most)
    assert [int(batch["x"][0, 0]) for batch in data.held] == places
    seen = [int(batch["x"][0, 0]) for batch, _ in itertools.islice(data, 2 * count)]
    once = [i for i in range(count) if i not in places]
    assert seen == (once * 3)[: 2 * count]


def test_hold_back__a_loader_that_fills_one_array_again():
    from relayquant.torch.finetuning.settings import TrainingData

    def load():
        array = np.empty((1, 2), "float32")
        for number in range(20):
            array[:] = number
            yield {"x": array}

    data = TrainingData(load, (InputInfo("x", (1, 2), "float32"),), 99)
    assert [int(batch["x"][0, 0]) for batch in data.held] == [9, 19]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_validation__gains_by_chance_leave_the_calibrated_state(seed):
    """Training toward noise: the best of some states is better on few samples, by chance."""
    mod = residual_model()
    data, validation = draw_batches(mod, 3), draw_batches(mod, 2, seed=10 + seed)
    noise = torch.Generator().manual_seed(seed)
    watch = Watch()

    def loss(outputs, expected):  # of validation the same for all states, but for noise
        size = outputs[0].square().mean()
        return size - size.detach() + torch.randn((), generator=noise)

    got = tune(loss=loss, validation_dataset=validation, callbacks=watch, steps=40)
    before = rq.quantize(mod, None, data, effort="fast", backend="x86", guard=rq.config.Guard.OFF)
    np.testing.assert_array_equal(run(got, data[0])[0], run(before, data[0])[0])
    assert sum(event.is_best for event in watch.events) > 1, "some state was the best by chance"
    assert "within the noise of validation" in rq.ledger(got).to_dict()["choices"]["training"]


def test_estimate_error__of_a_mean():
    """That of scipy, for batches of several samples, and for samples that are batches."""
    from scipy.stats import sem

    from relayquant.torch.finetuning.jackknife import FOLDS, estimate_error

    rng = np.random.default_rng(0)
    values = rng.standard_normal((FOLDS, 3)).astype("float32")

    def mean(parts):
        return float(torch.cat([value for (value,) in parts[0]]).mean())

    for batches in (np.split(values, 5), np.split(values, FOLDS)):
        part = [[torch.from_numpy(batch)] for batch in batches]
        assert estimate_error(mean, [part]) == pytest.approx(sem(values.mean(1)), rel=1e-4)
    # Outputs that do not agree in their samples are one; of one sample nothing is known.
    odd = [[torch.zeros(2), torch.zeros(3)]]
    assert estimate_error(lambda parts: 1.0, [odd]) == 0


def test_loss_and_metric__of_the_user():
    """Labels come with the items; the metric sees all of validation."""
    data = [
        {**batch, "label": np.array([i])}
        for i, batch in enumerate(draw_batches(residual_model(), 2))
    ]
    labels, shapes = [], []

    def loss(outputs, expected, item):
        labels.append(int(item["label"][0]))
        return (outputs[0] - expected[0]).abs().mean()

    def metric(expected, got):
        shapes.append((expected[0].shape, got[0].shape))
        return -float(np.abs(expected[0] - got[0]).max())

    tune(data=data, loss=loss, metric=metric, steps=4)
    assert labels == [0, 1, 0, 1]
    assert len(shapes) == 3
    assert len(set(shapes)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"finetune got steps=0; allowed: numbers above 0"),
        ({"lr": -1.0}, r"finetune got lr=-1.0"),
        ({"scale_lr": 0.0}, r"finetune got scale_lr=0.0; allowed: numbers above 0"),
        ({"hidden_weight": -0.1}, r"finetune got hidden_weight=-0.1; allowed: 0 or more"),
        ({"hidden_weight": float("nan")}, r"finetune got hidden_weight=nan; allowed: 0 or more"),
        ({"reconstruction": -1}, r"finetune got reconstruction=-1; allowed: 0 or more"),
        ({"loss": lambda: 0}, "loss cannot be called with"),
        ({"loss": lambda outputs, expected: 1.0}, "loss returned a float; allowed: a tensor"),
        (
            {"loss": lambda outputs, expected: (outputs[0] - expected[0]).detach().sum()},
            "loss returned a tensor without a gradient",
        ),
        (
            {"metric": lambda a, b: 1.0, "steps": 3, "validation_dataset": None},
            "at least 4 items, and as many steps that read them, with hold_back=True",
        ),
        (
            {"loss": lambda outputs, expected: outputs[1] - expected[1]},
            r"loss raised IndexError after 0 steps, for outputs of shape \(\d+, ",
        ),
        (
            {"loss": lambda a, b: a[0].sum() * float("nan")},
            "The loss is nan on validation data",
        ),
        (
            {"loss": lambda a, b: a[0].sum() * float("nan"), "validation_dataset": None},
            "The loss is nan in step 0: nothing is trained yet. Check the loss",
        ),
    ],
)
def test_finetune__wrong_settings_named(options, message):
    with pytest.raises(ConfigError, match=message):
        tune(**options)


class EnoughTraining(Exception):
    """An exception of the user, which ends the training."""


@pytest.mark.parametrize(
    "error",
    [
        EnoughTraining("the loss is small"),
        torch.OutOfMemoryError("tried to allocate 2 GiB"),
        rq.DataError("item 3 has no label", code="RQ301"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_finetune__what_a_loss_raises_on_purpose_is_passed_on(error):
    def loss(outputs, expected):
        raise error

    with pytest.raises(type(error)) as caught:
        tune(loss=loss)
    assert caught.value is error
    assert re.search(r"the loss of finetune after 0 steps, for outputs of", error.__notes__[0])


def train_student(loss=None, **options):
    """(what was trained, the float module, the state before) of a small model."""
    from relayquant.torch.finetuning.loop import train
    from relayquant.torch.finetuning.settings import FinetuneSettings, TrainingData

    mod = residual_model()
    teacher = rq.torch.from_relax(mod, None)
    student = rq.torch.from_relax(
        mod, None, backend="x86", calibration_dataset=draw_batches(mod, 3), effort="fast",
        qconfig_mapping=make_mapping(), ranges=rq.config.Ranges.LEARNED,
    )  # fmt: skip
    before = {name: value.clone() for name, value in student.state_dict().items()}
    data = TrainingData(draw_batches(mod, 3), describe_inputs(mod))
    train(student, teacher, data, loss, FinetuneSettings(**options))
    return student, teacher, before


def test_scale_rate__learned_scales_alone_move_so_many_times_as_far():
    """Weights are looked at in units of their scales, with which they move."""
    from relayquant.torch.finetuning.units import find_scaled

    moved = []
    for rate in (1.0, 5.0):
        student, _, before = train_student(steps=1, lr=1e-3, scale_lr=rate)
        for scaled in find_scaled(student):
            scaled.weight.data /= align(scaled.factor.detach().exp(), scaled.weight)
        after = student.state_dict()
        moved.append({name: after[name].double() - before[name].double() for name in before})
    factors = [name for name in moved[0] if name.endswith("log_factor")]
    assert factors
    assert any(moved[0][name].abs().max() > 0 for name in factors)
    for name, once in moved[0].items():
        expected = once * 5 if name in factors else once
        torch.testing.assert_close(moved[1][name], expected, rtol=1e-3, atol=1e-9)


def test_average__weights_fall_polynomially_into_the_past(monkeypatch):
    """What is given is the average in closed form: of step k among n, the share
    (e + 1) / (k + e) * prod over j > k of (1 - (e + 1) / (j + e)).
    """
    from relayquant.torch.finetuning import loop

    met, step_relative = [], loop._Training.step_relative

    def step_and_look(self):
        step_relative(self)
        met.append([p.detach().numpy().astype("float64") for p in self.parameters])

    monkeypatch.setattr(loop._Training, "step_relative", step_and_look)
    student, _, _ = train_student(steps=30, lr=3e-2)
    assert len(met) == 30
    late = [Fraction(loop.LATENESS + 1, k + loop.LATENESS) for k in range(1, 31)]
    shares = [late[k] * math.prod(1 - w for w in late[k + 1 :]) for k in range(30)]
    assert sum(shares) == 1
    assert sum(shares[15:]) > Fraction(99, 100), "what is early is forgotten"
    trained = [p.detach().numpy() for p in student.parameters() if p.requires_grad]
    for i, got in enumerate(trained):
        expected = sum(float(share) * state[i] for share, state in zip(shares, met, strict=True))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert any(np.abs(got - last).max() > 1e-3 for got, last in zip(trained, met[-1], strict=True))


def test_average__evaluation_leaves_the_training_as_it_is():
    often, once = Watch(), Watch()
    tune(callbacks=often, evaluate_every=1)
    tune(callbacks=once, evaluate_every=8)
    assert [event.step for event in once.events] == [0, 8]
    assert once.events[-1].score == often.events[-1].score


def align(values, weight):
    """One number per output channel of a convolution O I H W, or of a matrix I O."""
    return values.reshape(-1, 1, 1, 1) if weight.ndim == 4 else values


def find_levels(student):
    return {
        key: torch.round(weight / align(student.quantizers[key].find_scale().detach(), weight))
        for key, weight in student.weights.items()
        if key in student.quantizers
    }


def test_scales__move_and_levels_of_weights_stay():
    """What calibration fitted is in the levels, whose errors make up for one another."""
    before, _, _ = train_student(steps=1, lr=1e-9)
    after, _, _ = train_student(steps=1, lr=1e-5, scale_lr=1e4)
    first, second = find_levels(before), find_levels(after)
    assert first
    for key, levels in first.items():
        factor = after.quantizers[key].log_factor.detach()
        assert factor.abs().max() > 0.05
        assert (levels == second[key]).float().mean() > 0.99


def test_scales__gradient_with_levels_kept():
    """A rounded weight is s * level: its derivative to log s is itself, within bounds or not."""
    from relayquant.torch.finetuning.units import find_scaled

    student, _, _ = train_student(steps=1, lr=1e-9)
    for scaled in find_scaled(student):
        scaled.weight.data *= 1.5  # some are beyond the bounds
        rounded = scaled.quantizer(scaled.weight, scaled.axis)
        slopes = torch.randn(rounded.shape, generator=torch.Generator().manual_seed(0))
        scaled.weight.grad = scaled.factor.grad = None
        (rounded * slopes).sum().backward()
        scaled.carry_gradient()
        sums = (rounded * slopes).detach().transpose(0, scaled.axis).flatten(1).sum(1)
        expected = sums * scaled.quantizer.find_gradient_scale(scaled.weight)
        torch.testing.assert_close(scaled.factor.grad, expected, rtol=1e-4, atol=1e-5)


def test_inner_weight__values_inside_come_nearer_where_outputs_say_nothing():
    from relayquant.torch.finetuning.loop import find_hidden
    from relayquant.torch.finetuning.losses import measure_distance

    def silent(outputs, expected):
        return outputs[0].sum() * 0

    (batch,) = draw_batches(residual_model(), 1)
    inputs, distances = [torch.from_numpy(value) for value in batch.values()], []
    for weight in (0.0, 1.0):
        student, teacher, _ = train_student(silent, steps=12, lr=3e-2, hidden_weight=weight)
        names = find_hidden(student, teacher)
        assert len(names) >= 3, "the operators of the model"
        with torch.no_grad():
            found, wanted = (m.eval().compute(inputs, names)[1] for m in (student, teacher))
        assert list(found) == list(wanted)
        distances.append(sum(float(measure_distance(found[n], wanted[n])) for n in names))
    assert distances[1] < 0.6 * distances[0]


def test_validation__by_the_loss_of_the_user():
    """Unless it needs the item, which validation data does not have."""

    def of_outputs(outputs, expected):
        return (outputs[0] - outputs[0].detach()).sum() + 7.0

    def of_items(outputs, expected, item):
        return (outputs[0] - outputs[0].detach()).sum() + 7.0

    scores = {}
    for loss in (of_outputs, of_items):
        watch = Watch()
        tune(loss=loss, steps=2, callbacks=watch)
        scores[loss] = [event.score for event in watch.events]
    assert scores[of_outputs] == [-7.0, -7.0]
    assert all(-1 < score < 0 for score in scores[of_items])


def test_finetune__metric_without_data_refused():
    mod = residual_model()
    with pytest.raises(ConfigError, match="no validation data to measure on"):
        rq.torch.finetune(mod, None, draw_batches(mod, 1), metric=lambda a, b: 0.0)


def score_nan(expected, got):
    return float("nan")


def score_text(expected, got):
    return "good"


@pytest.mark.parametrize("metric", [score_nan, score_text])
def test_metric__that_gives_no_number_refused(metric):
    """Nothing is better than NaN: the first state would count for ever."""
    with pytest.raises(ConfigError, match=f"The metric {metric.__name__} returned"):
        tune(metric=metric, patience=1)


def test_validation__that_gives_no_number_refused():
    data = draw_batches(residual_model(), 1)
    data[0]["x"][0] = 3e38
    with pytest.raises(ConfigError, match="outputs of the float model are not finite after step 0"):
        tune(validation_dataset=data)


def test_checkpoint__place_is_asked_before_the_work(tmp_path):
    with pytest.raises(FileError, match="there is no folder"):
        tune(tmp_path / "none" / "training")
