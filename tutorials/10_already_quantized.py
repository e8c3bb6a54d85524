"""
Models that are quantized already
=================================

A model may come with quantization parameters: from ONNX Runtime, from quantization-aware training,
from TensorFlow Lite. They are kept. This page writes such a model with ``export_onnx``, reads it
back, and finishes one that is quantized in part.
"""

# %%
# A quantized model as a file
# ---------------------------
# ``export_onnx`` writes the reference form, or the integer module, as ONNX with QuantizeLinear and
# DequantizeLinear. ONNX Runtime runs it, and so do many other tools.

import tempfile
from pathlib import Path

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits

demo = load_digits()
mod, params = rq.load(demo.model_path)
folder = Path(tempfile.mkdtemp())

prepared = rq.prepare(mod, params, effort="fast")
prepared = rq.calibrate(prepared, demo.calibration)
reference = rq.convert_to_reference(prepared)
path = rq.export_onnx(reference, folder / "digits.int8.onnx")
print(f"{path.name}: {path.stat().st_size} bytes, float: {demo.model_path.stat().st_size}")

# %%
# Reading it
# ----------
# ``load`` keeps quantize and dequantize as operators of the module. ``lower`` makes integer
# operators of what stands between them; no data is needed. The result is that of our own
# quantization, integer for integer.

quantized, _ = rq.load(path)
qmod = rq.lower(quantized)
print(rq.ledger(qmod))


def run(module, images=demo.images[:50]) -> np.ndarray:
    return rq.Executor(rq.compile(module)).run("main", [images])[0]


own = rq.lower(reference)
print("equal to our own:", np.array_equal(run(qmod), run(own)))

# %%
# A model that is quantized in part
# ---------------------------------
# Here one convolution stays in float, as a careful colleague might have left it.

first = next(row.name for row in rq.ledger(own).rows if row.op == "nn.conv2d")
qconfig = rq.get_backend_config("x86").default_qconfig
mapping = rq.QConfigMapping().set_global(qconfig).set_module_name(first, None)
partial = rq.prepare(mod, params, qconfig_mapping=mapping, effort="fast")
partial = rq.calibrate(partial, demo.calibration)
path = rq.export_onnx(rq.convert_to_reference(partial), folder / "digits.partial.onnx")

half, _ = rq.load(path)
for row in rq.ledger(rq.lower(half)).floating:
    print(f"in float: {row.name} ({row.reason})")

# %%
# Finishing it
# ------------
# ``quantize`` calibrates what has no parameters and leaves the rest as it is.

finished = rq.quantize(half, None, demo.calibration)
print("in float now:", [row.name for row in rq.ledger(finished).floating])
for name, module in (("partial", rq.lower(half)), ("finished", finished)):
    accuracy = (run(module, demo.images).argmax(1) == demo.labels).mean()
    print(f"{name:9s} {100 * accuracy:.1f} % of the held-out images")

# %%
# Parameters alone
# ----------------
# They are written as JSON, and read from what ONNX Runtime and AIMET write. ``quantize`` and
# ``prepare`` take them with ``parameters=``: these values are not calibrated any more.

image = {name: q for name, q in prepared.parameters.items() if name == "image"}
file = rq.save_qparams(image, folder / "parameters.json")
again = rq.prepare(mod, params, qparams=rq.load_qparams(file), effort="fast")
again = rq.calibrate(again, demo.calibration)
print("kept:", again.parameters["image"] == prepared.parameters["image"])
