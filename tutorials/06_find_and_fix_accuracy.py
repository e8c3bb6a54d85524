"""
Find and fix lost accuracy
==========================

When a quantized model is worse than it should be, the loss is rarely everywhere: one value has a
bad range, or a few operators need more than 8 bits. This tutorial breaks a model on purpose, and
finds and mends it with the tools for the real case.
"""

# %%
# Is the data right?
# ------------------
# Most trouble comes from calibration data that is not what the model was trained on. ``rq.lint``
# looks at it before any time is spent.

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.report import compare_table, make_console
from relayquant.runtime import Executor

demo = load_digits()
mod, params = rq.load(str(demo.model_path))
console = make_console()

print("as trained:", rq.lint(mod, params, demo.calibration))
for finding in rq.lint(mod, params, [batch * 255 for batch in demo.calibration]):
    print(finding)

# %%
# Break it
# --------
# A calibration callback that covers a fiftieth of what one value needs: a typical slip, such as a
# range taken from a blank image.

BROKEN = "conv2/relu"


def pick_range(info: rq.ValueInfo, samples) -> rq.QParams:
    low = min(float(array.min()) for array in samples)
    high = max(float(array.max()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name == BROKEN else 1), info.spec)


def relative_error(mod_) -> float:
    """Error of the logits, relative to their size."""
    (got,) = Executor(rq.compile(mod_)).run("main", [demo.images])
    return float(np.linalg.norm(got - logits) / np.linalg.norm(logits))


(logits,) = Executor(rq.compile(mod)).run("main", [demo.images])
bad = rq.quantize(mod, params, demo.calibration, calibration=pick_range)
print(f"broken: error {relative_error(bad):.1%}")

# %%
# Where does it start?
# --------------------
# ``rq.compare`` puts the values of both models side by side. *SQNR* is accumulated: with all before
# it quantized. *Alone* is what the operator does by itself. The first value that drops is where to
# look; *saturated* says that its range is too small.

report = rq.compare(mod, bad, demo.calibration, params)
console.print(compare_table(report))
first = report.first_below(15)
assert first is not None
print(f"it starts at {first.name}: {first.saturated:.0%} of its elements are cut off")

# %%
# ``relayquant compare model.onnx model.json --data x.npz --values --plot sqnr.png`` prints and
# draws the same; ``relayquant.report.plot_ranges`` draws histograms with the range that was chosen.
#
# Which operators matter?
# -----------------------
# ``rq.sensitivity`` quantizes one operator at a time and measures the outputs. Neighbours share the
# value between them, so a bad value shows at the operator that makes it and at those that read it.

prepared = rq.prepare(mod, params)
rq.calibrate(prepared, demo.calibration, calibration=pick_range)
ranking = rq.sensitivity(prepared, demo.calibration)
print(ranking)

# %%
# Mend it
# -------
# The quick way: the worst operator stays in float.

patch = ranking.to_mapping(keep=1)
for rule in patch.rules:
    print(rule.description, "->", "quantized" if rule.qconfig else "float")
mended = rq.quantize(mod, params, demo.calibration, qconfig_mapping=patch, calibration=pick_range)
print(f"in float: error {relative_error(mended):.1%}")
print([row.name for row in rq.ledger(mended).floating])

# %%
# The better way, now that the cause is known: mend the range, and all of the model is integer.

good = rq.quantize(mod, params, demo.calibration)
print(f"good range: error {relative_error(good):.1%}")

# %%
# All of it by itself
# -------------------
# ``rq.fallback`` searches for the fewest operators to keep in float so that a metric of yours stays
# within a bound of the float model's. The metric gets the outputs of both; close over labels for an
# accuracy: ``lambda expected, got: (got[0].argmax(1) == labels).mean()``.


def minus_error(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    return -float(np.linalg.norm(got[0] - expected[0]) / np.linalg.norm(expected[0]))


found = rq.fallback(
    mod,
    params,
    demo.calibration,
    minus_error,
    max_drop=0.05,
    calibration=pick_range,
    effort="fast",
    budget=60,
)
print(f"{found.reverted} in float: score {found.score:.4f} after {found.trials} trials")
