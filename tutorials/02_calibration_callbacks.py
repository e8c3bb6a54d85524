"""
Choose how parameters are picked
================================

Calibration runs the model on sample inputs and picks a scale and a zero point for every value that
becomes an integer. How they are picked is yours to choose: with a built-in observer, or with a
function of your own.
"""

# %%
# Observers
# ---------
# An observer sees the values as they stream by and keeps a small state: the range, or a histogram.
# Pass one as ``observer=`` and it serves all activations. Weights are known beforehand; the
# backend's default gives each output channel a scale of its own.

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits

demo = load_digits()
mod, params = rq.load(str(demo.model_path))
(expected,) = rq.Executor(rq.compile(mod)).run("main", [demo.images])


def sqnr(qmod) -> float:
    """Signal to quantization noise at the outputs, in dB."""
    (got,) = rq.Executor(rq.compile(qmod)).run("main", [demo.images])
    return float(10 * np.log10((expected**2).sum() / ((got - expected) ** 2).sum()))


for observer in (
    rq.observers.MinMax(),
    rq.observers.Percentile(99.9),
    rq.observers.MSE(),
    rq.observers.KLDivergence(),
):
    qmod = rq.quantize(mod, params, demo.calibration, observer=observer)
    print(f"{observer.name:14s} {sqnr(qmod):5.1f} dB")

# %%
# A function of your own
# ----------------------
# It is called once per value, in topological order, and sees the effect of all earlier choices:
# what it gets are the values with everything before them already quantized. ``info`` says which
# value it is and what is wanted; ``samples`` can be iterated over as often as you like and gives
# one array per batch. With a third parameter, ``context``, it also gets the calibration graph, the
# parameters picked so far, and ``context.run(inputs)``, which computes every value with these.


def cover_three_sigma(info: rq.observers.ValueInfo, samples) -> rq.QParams:
    """Cover the mean plus and minus three standard deviations, but nothing that does not occur."""
    data = np.concatenate([array.reshape(-1) for array in samples])
    low = max(data.min(), data.mean() - 3 * data.std())
    high = min(data.max(), data.mean() + 3 * data.std())
    return rq.choose_qparams(low, high, info.spec)


qmod = rq.quantize(mod, params, demo.calibration, observer=cover_three_sigma)
print(f"three sigma    {sqnr(qmod):5.1f} dB")

# %%
# Different observers for different operators
# -------------------------------------------
# A ``QConfig`` says how the tensors of an operator are quantized, a ``QConfigMapping`` which
# operators get it. ``None`` keeps an operator in float, and the ledger says so.

default = rq.get_backend_config("x86").default_qconfig
precise = rq.QConfig(
    activation=rq.TensorConfig(default.activation.spec, rq.observers.MSE()), weight=default.weight
)
first = rq.ledger(qmod).rows[0]
mapping = (
    rq.QConfigMapping().set_global(default).set_object_type("matmul", precise)
).set_module_name(first.name, None)
qmod = rq.quantize(mod, params, demo.calibration, qconfig_mapping=mapping)
row = rq.ledger(qmod).row(first.name)
print(f"{row.name}: quantized={row.quantized}, {row.reason}")
print(f"mixed          {sqnr(qmod):5.1f} dB")

# %%
# Watching
# --------
# A callback is told what happens: stages, progress, and every choice.


class PrintChoices(rq.Callback):
    """Prints the first few choices."""

    def __init__(self) -> None:
        self.count = 0

    def on_parameters(self, event) -> None:
        self.count += 1
        if self.count <= 5:
            scale = np.atleast_1d(event.qparams.scale)
            print(f"{event.info.name:32s} {event.qparams.dtype:6s} scale {scale[0]:.5f}")


rq.quantize(mod, params, demo.calibration, callbacks=PrintChoices())

# %%
# In steps
# --------
# The same flow with a stop between the stages: the plan, the calibration graph, the reference
# model (dequantize, float operator, quantize) that runs on any target, and the integer model.

prepared = rq.prepare(mod, params)
print(f"{len(prepared.plan.operators)} operators, {len(prepared.plan.groups)} sets of parameters")
prepared = rq.calibrate(prepared, demo.calibration)
reference = rq.convert_to_reference(prepared)
qmod = rq.lower(reference)
print(f"in steps       {sqnr(qmod):5.1f} dB")
