"""Reconstruction: weights that make up for what the operators before them lost."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import draw_batches, residual_model
from test_finetuning import Watch, make_mapping, tune

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.errors import ConfigError, DataError
from relayquant.ir.reference import run

torch = pytest.importorskip("torch", reason="pip install torch")


@pytest.mark.parametrize("with_bias", [True, False])
def test_fit_sums__as_least_squares(with_bias):
    """Against `lstsq` of the rows with those of the ridge below, and a column for the bias."""
    from relayquant.torch.finetuning import reconstruction

    rng = np.random.default_rng(0)
    groups, count, outputs, columns = 2, 50, 3, 4
    y = rng.normal(1.0, 1.0, (groups, count, columns)).astype("float32")
    x = (0.8 * y + rng.normal(0, 0.3, y.shape)).astype("float32")
    weight = rng.normal(size=(groups, outputs, columns)).astype("float32")
    got = reconstruction.fit_sums(x, y, weight, with_bias=with_bias)
    for g in range(groups):
        centred = x[g] - (x[g].mean(0) if with_bias else 0)
        size = np.square(centred).sum(0).mean()
        ridge = np.sqrt((reconstruction.RIDGE + columns / count) * size) * np.eye(columns)
        rows = np.concatenate([x[g], ridge])
        if with_bias:
            ones = np.concatenate([np.ones(count), np.zeros(columns)])[:, None]
            rows = np.concatenate([rows, ones], axis=1)
        wanted = np.concatenate([y[g] @ weight[g].T, ridge @ weight[g].T])
        expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][:columns].T
        np.testing.assert_allclose(got.weight[g], expected, rtol=1e-4, atol=1e-5)


def make_pair(mod, params, calibration, **options):
    """(trainable module, calibrated; the float one; the batches as tensors)."""
    student = rq.torch.from_relax(
        mod, params, make_mapping(), "x86", calibration_dataset=calibration, **options
    )
    names = [var.name for var in student.source.program.inputs]
    batches = [
        [torch.from_numpy(np.array(batch[n] if isinstance(batch, dict) else batch)) for n in names]
        for batch in calibration
    ]
    return student, rq.torch.from_relax(student.source.prepared.mod), batches


def test_reconstruct__digits_with_weights_of_two_bits():
    """Without a step of training; what is written is what the integer module computes."""
    from relayquant.torch.finetuning.reconstruction import reconstruct

    demo = load_digits(batch=32)
    mod, params = rq.load(demo.model_path)
    student, teacher, batches = make_pair(mod, params, demo.calibration, effort="fast")
    with torch.no_grad():
        expected = teacher.eval()(torch.from_numpy(demo.images)).argmax(1).numpy()
    told, shares = [], []
    for is_fitted in (False, True):
        if is_fitted:
            reconstruct(student, teacher, batches, lambda *numbers: told.append(numbers))
        (got,) = run(rq.torch.convert(student), [demo.images])
        shares.append((got.argmax(1) == expected).mean())
    assert shares[0] < 0.8
    assert shares[1] > 0.96
    assert told == [(i + 1, 5) for i in range(5)]


def test_reconstruct__scales_that_do_not_learn_stay():
    from relayquant.torch.finetuning.reconstruction import reconstruct

    mod = residual_model()
    for ranges in (rq.config.Ranges.FROZEN, rq.config.Ranges.LEARNED):
        student, teacher, batches = make_pair(
            mod, None, draw_batches(mod, 3), effort="fast", weight_ranges=ranges
        )
        before = {key: value.clone() for key, value in student.state_dict().items()}
        scales = {q.group.key: q.qparams.scale for q in student.list_quantizers()}
        reconstruct(student, teacher, batches, lambda done, total: None)
        changed = [k for k, v in student.state_dict().items() if not torch.equal(v, before[k])]
        assert {"weights.stem:weight", "weights.stem:bias"} <= {*changed}
        same = [
            np.array_equal(q.qparams.scale, scales[q.group.key])
            for q in student.list_quantizers()
            if q.group.constant is not None
        ]
        assert all(same) == (ranges is rq.config.Ranges.FROZEN)


def test_reconstruct__values_that_are_not_finite_refused():
    from relayquant.torch.finetuning.reconstruction import reconstruct

    mod = residual_model()
    student, teacher, batches = make_pair(mod, None, draw_batches(mod, 1), effort="fast")
    batches[0][0][:] = float("nan")
    with pytest.raises(DataError, match="Operator 'stem' reads values that are not finite"):
        reconstruct(student, teacher, batches, lambda done, total: None)


def test_finetune__begins_with_a_reconstruction():
    """Both states of step 0 are evaluated; what comes of it is never worse."""
    watch = Watch()
    options = {"qconfig_mapping": make_mapping(), "reconstruction": 3}
    tune(callbacks=watch, steps=2, lr=1e-9, **options)
    assert [event.step for event in watch.events] == [0, 0, 2]
    first, second, last = (event.score for event in watch.events)
    assert second > first
    assert last == pytest.approx(second, rel=0.01), "the average begins with it"


def test_finetune__a_reconstruction_alone():
    watch = Watch()
    tune(callbacks=watch, steps=0, qconfig_mapping=make_mapping(), reconstruction=3)
    assert [event.step for event in watch.events] == [0, 0]
    assert watch.events[1].score > watch.events[0].score
    with pytest.raises(ConfigError, match="steps=0; allowed: numbers above 0, and steps=0 with a"):
        tune(steps=0)


def read_training(mod):
    return rq.ledger(mod).to_dict()["choices"]["training"]


def score_weights(better):
    """A metric: `better` for the first state that is asked, and then one number less each time."""
    scores = iter(range(better, better - 100, -1))
    return lambda expected, got: float(next(scores))


def test_finetune__a_worse_reconstruction_ends_no_steps():
    """Patience counts evaluations behind steps."""
    options = {"qconfig_mapping": make_mapping(), "reconstruction": 2, "metric": score_weights(0)}
    watch = Watch()
    tune(callbacks=watch, patience=1, **options)
    assert [event.step for event in watch.events] == [0, 0, 2]


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("is_metric", [False, True])
def test_finetune__a_worse_reconstruction_is_not_given(steps, is_metric, monkeypatch):
    """By the loss or a metric, the calibrated state is what is given, and what steps begin with."""
    from relayquant.torch.finetuning import loop

    def spoil(student, teacher, batches, report):
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.add_(torch.ones(()))

    monkeypatch.setattr(loop, "reconstruct", spoil)
    mod, watch = residual_model(), Watch()
    (batch,) = draw_batches(mod, 1, seed=3)
    options = {"metric": lambda a, b: -float(np.abs(a[0] - b[0]).mean())} if is_metric else {}
    options |= {"steps": steps, "lr": 1e-9, "patience": 2}
    got = tune(callbacks=watch, reconstruction=2, **options)
    expected = rq.quantize(
        mod, None, draw_batches(mod, 3), effort="fast", backend="x86", guard=rq.config.Guard.OFF
    )
    np.testing.assert_array_equal(run(got, batch)[0], run(expected, batch)[0])
    first, second, *rest = (event.score for event in watch.events)
    assert second < first
    assert rest == pytest.approx([first] * len(rest), rel=1e-3), "steps begin with the calibrated"
    assert read_training(got).endswith(("as calibrated", "left as calibrated"))


def test_finetune__says_that_the_reconstruction_is_the_best():
    got = tune(steps=0, qconfig_mapping=make_mapping(), reconstruction=3)
    assert read_training(got).endswith("0 steps, the best after the reconstruction")


def test_finetune__data_that_ends_is_read_once(monkeypatch):
    """For the reconstruction: samples that come twice are not two."""
    from relayquant.torch.finetuning import loop

    counts = []
    monkeypatch.setattr(
        loop, "reconstruct", lambda student, teacher, batches, report: counts.append(len(batches))
    )
    for count in (2, 5):
        tune(steps=0, reconstruction=count)
    assert counts == [2, 3]


def test_checkpoint__same_bits_after_resuming_behind_a_reconstruction(tmp_path):
    path, (batch,) = tmp_path / "training", draw_batches(residual_model(), 1, seed=2)
    options = {"qconfig_mapping": make_mapping(), "reconstruction": 2}
    (expected,) = run(tune(**options), batch)
    with pytest.raises(KeyboardInterrupt):
        tune(path, Watch(stop_at=5), **options)
    (got,) = run(tune(path, **options), batch)
    np.testing.assert_array_equal(got, expected)
