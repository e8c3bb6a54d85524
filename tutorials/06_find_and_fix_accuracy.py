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

import warnings

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits
from relayquant.plots import compare_table, make_console

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


def pick_range(info: rq.observers.ValueInfo, samples) -> rq.QParams:
    low = min(float(array.min()) for array in samples)
    high = max(float(array.max()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name == BROKEN else 1), info.spec)


def relative_error(mod_) -> float:
    """Error of the logits, relative to their size."""
    (got,) = rq.Executor(rq.compile(mod_)).run("main", [demo.images])
    return float(np.linalg.norm(got - logits) / np.linalg.norm(logits))


(logits,) = rq.Executor(rq.compile(mod)).run("main", [demo.images])

# %%
# ``rq.quantize`` looks at what it made: it runs the integer model beside the float model on a few
# calibration samples. Where they deviate, it reverts the operators that cause it to float, says
# so in a warning, and in the ledger. With ``effort="fast"`` it only warns.

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", rq.AccuracyWarning)
    guarded = rq.quantize(mod, params, demo.calibration, observer=pick_range)
print(caught[0].message)
print(rq.ledger(guarded).guard)
print(f"with the guard: error {relative_error(guarded):.1%}")

# %%
# The guard saves the answers, not the integers. To find the cause, look at the model as it is
# without it.

bad = rq.quantize(mod, params, demo.calibration, observer=pick_range, guard=rq.config.Guard.OFF)
print(f"broken: error {relative_error(bad):.1%}")

# %%
# Where does it start?
# --------------------
# ``rq.compare`` puts the values of both models side by side. *SQNR* is accumulated: with all before
# it quantized. *Alone* is what the operator does by itself. The first value that drops is where to
# look; *saturated* says that its range is too small.

report = rq.compare(mod, params, bad, demo.calibration)
console.print(compare_table(report))
first = report.first_below(15)
assert first is not None
print(f"it starts at {first.name}: {first.saturated:.0%} of its elements are cut off")

# %%
# ``relayquant compare model.onnx model.json --data x.npz --values --plot sqnr.png`` prints and
# draws the same; ``rq.plots.plot_ranges`` draws histograms with the range that was chosen, and
# ``rq.report(mod, params, bad, demo.calibration).save("report.html")`` puts all on one page.
#
# Which operators matter?
# -----------------------
# ``rq.sensitivity`` quantizes one operator at a time and measures the outputs. Neighbours share the
# value between them, so a bad value shows at the operator that makes it and at those that read it.

prepared = rq.prepare(mod, params)
prepared = rq.calibrate(prepared, demo.calibration, observer=pick_range)
ranking = rq.sensitivity(prepared, demo.calibration)
print(ranking)

# %%
# Mend it
# -------
# The quick way: the worst operator stays in float. On the command line: ``relayquant sensitivity
# model.onnx --data x.npz --keep 1 -o patch.json``, then ``quantize`` with ``--config patch.json``.

patch = ranking.to_mapping(keep=1)
for rule in patch.rules:
    print(rule.description, "->", "quantized" if rule.qconfig else "float")
mended = rq.quantize(mod, params, demo.calibration, qconfig_mapping=patch, observer=pick_range)
print(f"in float: error {relative_error(mended):.1%}")
print([row.name for row in rq.ledger(mended).floating])

# %%
# The better way, now that the cause is known: mend the range, and all of the model is integer.

good = rq.quantize(mod, params, demo.calibration)
print(f"good range: error {relative_error(good):.1%}")

# %%
# All of it by itself
# -------------------
# With a metric, ``rq.quantize`` searches for the fewest operators to put back to int16 or float so
# that the metric stays within a bound of the float model's. It gets the outputs of both; close over
# labels for an accuracy: ``lambda expected, got: (got[0].argmax(1) == labels).mean()``. What was
# measured is in a file: a search that was stopped goes on from there.


def minus_error(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    return -float(np.linalg.norm(got[0] - expected[0]) / np.linalg.norm(expected[0]))


found = rq.ledger(
    rq.quantize(
        mod,
        params,
        demo.calibration,
        metric=minus_error,
        max_drop=0.05,
        budget=60,
        search_state="search.json",
        observer=pick_range,
        effort="fast",
    )
).search
print(f"{found.reverted} in {found.dtype}: score {found.score:.4f} after {found.trials} trials")

# %%
# The configuration that was found is plain data, to print, save and use again with
# ``qconfig_mapping=``.

patch = rq.QConfigMapping.from_dict(found.mapping)
print([rule.description for rule in patch.rules])
