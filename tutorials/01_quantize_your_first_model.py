"""
Quantize your first model
=========================

From a float ONNX model and a few hundred sample inputs to an integer model that runs on this
machine. The model is the built-in example, a small convolutional network for handwritten digits;
put the path of your own in its place.
"""

# %%
# Load
# ----
# ``load`` reads ONNX, TFLite and torch.export files and gives a Relax module. A module that you
# already have from a TVM frontend serves as well. Values keep the names of the source model.

import tempfile
import time
from pathlib import Path

import numpy as np
import tvm

import relayquant as rq
from relayquant.demo import load_digits

demo = load_digits()
mod, params = rq.load(str(demo.model_path))
print(f"{len(demo.calibration)} batches to calibrate with, {len(demo.images)} held-out images")

# %%
# Quantize
# --------
# The data set is anything that can be iterated over more than once and yields inputs: a list of
# arrays, of tuples in input order, or of dicts by input name. No labels are needed.

start = time.perf_counter()
qmod = rq.quantize(mod, params, demo.calibration)
print(f"quantized in {time.perf_counter() - start:.1f} s")

# %%
# What became of each operator
# ----------------------------
# The ledger has a row for every operator of the float model: what it became, or why it stayed in
# float and what to do about it. It travels with the module.

for row in rq.ledger(qmod).rows:
    print(f"{row.name:28s} {row.op:16s} {row.pattern:24s} {row.dtype:8s} {row.reason}")

# %%
# Compile and run
# ---------------
# ``compile`` gives a TVM executable for this machine; pass ``target="llvm -mcpu=cascadelake"`` or
# another target for a different one. The module has the inputs and outputs of the float model.

float_model = rq.Executor(rq.compile(mod))
int8_model = rq.Executor(rq.compile(qmod))


def accuracy(model: rq.Executor) -> float:
    """Share of held-out digits that are recognized."""
    (logits,) = model.run("main", [demo.images])
    return float((logits.argmax(1) == demo.labels).mean())


print(f"accuracy: float {accuracy(float_model):.2%}, int8 {accuracy(int8_model):.2%}")

# %%
# Compiled code and reference agree, bit for bit
# ----------------------------------------------
# ``reference.run`` executes any module in numpy. ``verify`` compares every integer value of the
# compiled model with it. Results of this network have the same bits, too: no operator is in float.

(expected,) = rq.reference.run(qmod, [demo.images[:4]])
(got,) = int8_model.run("main", [demo.images[:4]])
print(f"largest difference of the results: {np.abs(got - expected).max()}")
report = rq.verify(qmod, [demo.images[:4]])
print(f"{report.compared} values compared, equal: {report.is_equal}")

# %%
# Keep it
# -------
# The module is saved as JSON, the executable as a shared library. In another process, loading the
# module again needs ``import relayquant.extend``, which makes TVM know the integer operators.

with tempfile.TemporaryDirectory() as folder:
    module_path, library_path = Path(folder) / "digits.json", Path(folder) / "digits.so"
    module_path.write_text(tvm.ir.save_json(qmod))
    rq.compile(qmod).export_library(str(library_path))
    again = tvm.ir.load_json(module_path.read_text())
    print(f"module {module_path.stat().st_size} bytes, library {library_path.stat().st_size} bytes")
    assert len(rq.ledger(again).rows) == len(rq.ledger(qmod).rows)
