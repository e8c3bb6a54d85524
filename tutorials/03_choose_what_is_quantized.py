"""
Choose what is quantized
========================

Which operators run on integers, with how many bits, and what the quantized model takes and
returns. Nothing is decided in silence: the ledger has a row and a reason for every operator.
"""

# %%
# The model
# ---------

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

import relayquant as rq
from relayquant.demo import load_digits

demo = load_digits()
mod, params = rq.load(str(demo.model_path))
data = demo.calibration[:4]
prepared = rq.prepare(mod, params, backend="generic")
for operator in prepared.plan.operators:
    print(f"{operator.name:24s} {operator.op:24s} {operator.pattern}")

# %%
# Lines of a mapping
# ------------------
# From the general to the particular: global, operator type, regular expression, name, and the n-th
# operator of a type below a name. The more particular line wins; ``None`` keeps an operator in
# float, ``FLOAT16`` computes it in float16. Names are those of the values, or of the nodes in the
# source model.

default = rq.get_backend_config("generic").default_qconfig
int16 = replace(default, activation=rq.TensorConfig(rq.QSpec("int16"), rq.observers.MinMax()))
four_bits = replace(default.weight.spec, quant_min=-7, quant_max=7)
int4_weights = replace(default, weight=rq.TensorConfig(four_bits, rq.observers.MSE()))
last = prepared.plan.operators[-1].name
mapping = (
    rq.QConfigMapping()
    .set_global(default)
    .set_object_type("matmul", int16)
    .set_module_name_object_type_order("", "nn.conv2d", 1, int4_weights)
    .set_module_name(last, rq.config.FLOAT16)
)
qmod = rq.quantize(mod, params, data, backend="generic", qconfig_mapping=mapping)
for row in rq.ledger(qmod).rows:
    print(f"{row.name:24s} {row.dtype:8s} {row.rule:40s} {row.reason}")

# %%
# A mapping is plain data
# -----------------------
# It can live in a JSON or TOML file. A wrong key is named, with the nearest right one.

assert rq.QConfigMapping.from_dict(mapping.to_dict()) == mapping
try:
    rq.QConfigMapping.from_dict({"objekt_type": []})
except rq.ConfigError as error:
    print(error)

# %%
# What a backend can run
# ----------------------
# A backend says which dtypes it runs for which pattern. What it cannot serve stays in float with a
# warning, or is one error for all of it with ``strict=True``.

print(rq.get_backend_config("x86").explain("conv2d_bias_relu"))
uint16 = replace(default, activation=rq.TensorConfig(rq.QSpec("uint16"), rq.observers.MinMax()))
wide = rq.QConfigMapping().set_global(uint16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rq.prepare(mod, params, qconfig_mapping=wide, backend="x86")
print(str(caught[0].message).splitlines()[0])
try:
    rq.prepare(mod, params, qconfig_mapping=wide, backend="x86", strict=True)
except rq.ConfigError as error:
    print(str(error).splitlines()[0])

# %%
# Integers in and out
# -------------------

qmod = rq.quantize(
    mod,
    params,
    data,
    backend="generic",
    input_dtypes={prepared.inputs[0].name: "uint8"},
    output_dtypes={prepared.outputs[0].name: "int8"},
)
source, result = rq.ledger(qmod).inputs[0], rq.ledger(qmod).outputs[0]
print(f"takes {source.dtype}, real = {source.scale[0]:.4g} * (integer - {source.zero_point[0]})")
print(f"gives {result.dtype}, real = {result.scale[0]:.4g} * (integer - {result.zero_point[0]})")

# %%
# Two processes, one model
# ------------------------
# Statistics of a parallel calibration can be put together; a prepared model travels as one file.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.prepared"
    rq.save_prepared(prepared, path)
    parts = [
        rq.calibrate(rq.load_prepared(path), share, order=rq.config.Order.PARALLEL)
        for share in (data[:2], data[2:])
    ]
merged = rq.merge_statistics(*parts)

# %%
# One value in another format
# ---------------------------
# A line of the mapping is the one way to say that an operator is quantized otherwise, or not at
# all, whether a person writes it or a search found it.

key = "conv2/relu"
wide = rq.TensorConfig(rq.QSpec("int16", rq.config.Scheme.SYMMETRIC), rq.observers.MinMax())
line = mapping.set_module_name(key, rq.QConfig(activation=wide, weight=default.weight))
changed = rq.calibrate(rq.prepare(mod, params, qconfig_mapping=line, backend="generic"), data)
qmod = rq.lower(changed)
images = demo.images[:64]
want = rq.reference.run(merged.mod, [images])[0]
have = rq.reference.run(qmod, [images])[0]
reads = dict(changed.plan.operator(key).operands)["data"]
print(f"{key} reads {changed.plan.group(reads).info.spec.dtype}")
print(f"same digits as float: {np.mean(want.argmax(1) == have.argmax(1)):.1%}")
