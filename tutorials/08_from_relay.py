"""
From Relay, and back
====================

Models that TVM 0.7 to 0.19 saved as Relay: read from text and parameters, quantized, compiled, and
written as Relay again for those who still build with it. The old TVM need not be installed.
"""

# %%
# A Relay module
# --------------
# Text as ``mod.astext()`` of the old TVM gives it. Weights are parameters here, as its frontends
# leave them; constants in a metadata section are read as well. ``%`` names become the names that
# the ledger and ``QConfigMapping`` use: ``%conv1`` is "conv1", ``%1`` is "1".

import tempfile
from pathlib import Path

import numpy as np

import relayquant as rq

TEXT = """#[version = "0.0.5"]
def @main(%image: Tensor[(1, 3, 16, 16), float32] /* ty=Tensor[(1, 3, 16, 16), float32] */,
          %w1: Tensor[(8, 3, 3, 3), float32], %b1: Tensor[(8), float32],
          %w2: Tensor[(8, 1, 3, 3), float32], %w3: Tensor[(5, 8), float32])
          -> Tensor[(1, 5), float32] {
  let %conv1 = nn.conv2d(%image, %w1, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  %0 = nn.bias_add(%conv1, %b1);
  let %relu1 = nn.relu(%0);
  let %depthwise = nn.conv2d(%relu1, %w2, strides=[2, 2], padding=[1, 1, 1, 1], groups=8,
                             channels=8, kernel_size=[3, 3]);
  let %relu2 = clip(%depthwise, a_min=0f, a_max=6f);
  %1 = nn.global_avg_pool2d(%relu2);
  %2 = nn.batch_flatten(%1);
  let %logits = nn.dense(%2, %w3, units=5);
  nn.softmax(%logits)
}
"""
rng = np.random.default_rng(0)
params = {
    "w1": rng.standard_normal((8, 3, 3, 3)).astype("float32") / 4,
    "b1": rng.standard_normal(8).astype("float32") / 4,
    "w2": rng.standard_normal((8, 1, 3, 3)).astype("float32") / 2,
    "w3": rng.standard_normal((5, 8)).astype("float32"),
}
mod = rq.relay.from_text(TEXT, params)

# %%
# Files work the same: ``rq.load`` takes ``.relay`` (text) or ``.json`` (``tvm.ir.save_json`` of the
# old TVM, which keeps all digits), with the weights of ``model.params`` beside it.

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.relay"
    path.write_text(TEXT)
    rq.relay.save_params(params, path.with_suffix(".params"))
    mod, _ = rq.load(path)

# %%
# A text does not say which TVM wrote it. Where that counts, for a transposed convolution without
# ``kernel_layout``, ``rq.relay.from_text(text, params, release="0.10")`` does.
#
# What is not supported is said at once, with the lines.

try:
    rq.relay.from_text("def @main(%x: Tensor[(4), float32]) { vision.nms(dyn.tile(%x)) }")
except rq.ModelError as error:
    print(error)

# %%
# Quantize and compile
# --------------------

images = [rng.standard_normal((1, 3, 16, 16)).astype("float32") for _ in range(32)]
qmod = rq.quantize(mod, None, images, effort="fast")
for row in rq.ledger(qmod).to_dict()["operators"]:
    print(f"{row['name']:10} {row['op']:18} {'integer' if row['quantized'] else row['reason']}")

want = rq.reference.run(mod, [images[0]])[0]
got = rq.reference.run(qmod, [images[0]])[0]
print("largest difference to float:", float(abs(got - want).max()))
print("compiled code equals numpy bit for bit:", not rq.verify(qmod, [images[0]]).differences)

# %%
# From relay.quantize
# -------------------
# What was written for Relay's quantizer changes in two lines. Before:
#
# .. code-block:: python
#
#     with relay.quantize.qconfig(calibrate_mode="global_scale", global_scale=8.0):
#         qmod = relay.quantize.quantize(mod, params, dataset)
#
# The options are the same, with Relay's defaults; a global scale needs no data.

config = rq.relay.qconfig(calibrate_mode="global_scale", global_scale=8.0)
ported = rq.quantize(mod, None, images if config.needs_data else None, **config.settings)
print([row["name"] for row in rq.ledger(ported).to_dict()["operators"] if row["quantized"]])

# %%
# ========================  ====================================================================
# option of relay.qconfig   here
# ========================  ====================================================================
# nbit_input, dtype_input   ``QSpec`` of activations: int8 or int16, symmetric, up to their bits
# nbit_weight,              ``QSpec`` of weights: int8, one scale per tensor, 2 to 8 bits
# dtype_weight
# nbit_activation,          sums are int32: 32 and "int32", else an error
# dtype_activation
# calibrate_mode,           ``Fixed(scale=global_scale / 2 ** (nbit_input - 1))``,
# global_scale              ``KLDivergence()`` or ``Percentile(99.999)``
# weight_scale              "max": any scale, "power2": ``QSpec(power_of_two=True)``
# skip_conv_layers          ``set_module_name_object_type_order("", "nn.conv2d", index, None)``
# skip_dense_layer          ``set_object_type("nn.dense", None)``
# debug_enabled_ops         ``set_object_type`` for these alone; the others stay in float
# rounding,                 no effect: to nearest, ties to even, without a fixed-point product
# calibrate_chunk_by        no effect: memory does not grow with the data
# do_simulation             an error: ``rq.convert_to_reference(rq.prepare(...))`` is the model with
#                           rounding in float
# round_for_shift           an error if False
# partition_conversions     an error: ``quantize(..., input_dtypes=, output_dtypes=)``
# ========================  ====================================================================
#
# ``config.mapping`` is an ordinary ``QConfigMapping``, which may be changed. Operators are selected
# by the names of Relay ("nn.dense", "concatenate") as well as by those of Relax. Without these
# options, as above, ``rq.quantize`` quantizes more and is more accurate.

# %%
# A model that is integer already
# -------------------------------
# Operators of Relay's QNN dialect keep the meaning they had, rounding included, so such a model is
# compiled as it is. (With ``qnn.dequantize``, float operators and ``qnn.quantize`` between, pass it
# through ``rq.lower`` first: it joins them to integer operators, with the model's own scales.)

QNN = """
def @main(%x: Tensor[(1, 64), int8], %w: Tensor[(10, 64), int8], %b: Tensor[(10), int32]) {
  %0 = qnn.dense(%x, %w, 3, 0, 0.05f, 0.01f, units=10, out_dtype="int32");
  %1 = add(%0, %b);
  qnn.requantize(%1, 0.0005f, 0, 0.1f, -4, rounding="UPWARD", compute_dtype="int64",
                 out_dtype="int8")
}
"""
weights = {
    "w": rng.integers(-127, 128, (10, 64)).astype("int8"),
    "b": rng.integers(-999, 999, 10).astype("int32"),
}
integer = rq.relay.from_text(QNN, weights)
x = rng.integers(-128, 128, (1, 64)).astype("int8")
print("the QNN model in numpy:", rq.reference.run(integer, [x])[0])
print("and compiled, the same:", not rq.verify(integer, [x]).differences)

# %%
# Back to Relay
# -------------
# For microTVM and forks that still compile Relay. Relay has no rounding to even: such an operator
# is written as float32 arithmetic with the same bits. With ``exact=False`` it is Relay's own
# ``qnn.requantize``, which patterns of other back ends look for, and ties fall otherwise.
#
# ``release`` is the TVM that is to read it, 0.8 to 0.19: a parser refuses attributes that it does
# not know. Symbolic inputs get their sizes by ``shapes={"image": (1, 3, 16, 16)}``.
#
# With the old TVM: ``mod = tvm.relay.parse(text)``, also called ``tvm.relay.fromtext`` (0.11 and
# later; up to 0.10 these are ``tvm.parser.parse`` and ``tvm.parser.fromtext``), then
# ``relay.build(mod, target, params=tvm.runtime.load_param_dict(bytes))``.

text, constants = rq.relay.to_text(qmod)
print(text[: text.index("%4 =")])
again = rq.relay.from_text(text, constants)
same = np.array_equal(rq.reference.run(again, [images[0]])[0], got)
print("read again, the same bits:", same)
native, _ = rq.relay.to_text(qmod, exact=False, release="0.10")
print("requantize operators of Relay:", native.count("qnn.requantize("))
print("bytes of params:", len(rq.relay.encode_params(constants)))
