"""Transformers without a cache in int8, static or with parameters of the run time, for all engines.

Static: ranges of two batches of noise. Dynamic: products alone, each row with a scale of its own in
ours and ONNX Runtime's `quantize_dynamic` per tensor, as it has no other; OpenVINO has int8 weights
of NNCF and quantizes rows in groups of 32 while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import tvm
from models import MODELS, build_transformer

import relayquant as rq
from relayquant.analysis.speed.onnxruntime_baseline import quantize_with_onnxruntime
from relayquant.analysis.speed.openvino_baseline import quantize_with_nncf

GROUP = 32
BATCHES = 2
#: int8 with a scale for each row, weights per channel
DYNAMIC = rq.QConfig(
    rq.TensorConfig(
        rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
    ),
    rq.TensorConfig(
        rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL),
        rq.observers.MinMax(),
    ),
)


@dataclass(frozen=True)
class Encoder:
    """A float model, and whether its integers have parameters of the run time."""

    make: Callable[[], onnx.ModelProto]
    is_dynamic: bool

    def write_float(self, folder: Path) -> Path:
        """The ONNX file."""
        path = folder / "float.onnx"
        if not path.exists():
            onnx.save(self.make(), path)
        return path

    def draw_batches(self, folder: Path, count: int) -> list[dict[str, np.ndarray]]:
        """Noise of the shape of its input."""
        model = onnx.load(self.write_float(folder), load_external_data=False)
        (value,) = model.graph.input
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        rng = np.random.default_rng(0)
        return [{value.name: rng.standard_normal(shape, "float32")} for _ in range(count)]


BERT = partial(build_transformer, layers=4, width=768, heads=12, norm_first=False, name="bert")
ENCODERS = {
    "BERT-base, 4 layers, int8": Encoder(BERT, is_dynamic=False),
    "BERT-base, 4 layers, int8 rows": Encoder(BERT, is_dynamic=True),
    "KWT-1, int8": Encoder(MODELS["kwt1"], is_dynamic=False),
    "KWT-1, int8 rows": Encoder(MODELS["kwt1"], is_dynamic=True),
}


def build_encoder(encoder: Encoder, folder: Path) -> tvm.IRModule:
    """Quantized, weights rounded to nearest."""
    mod, params = rq.load(encoder.write_float(folder))
    mapping = None
    if encoder.is_dynamic:
        mapping = rq.QConfigMapping().set_object_type("relax.matmul", DYNAMIC, optional=True)
    batches = encoder.draw_batches(folder, BATCHES)
    return rq.quantize(mod, params, batches, qconfig_mapping=mapping, effort="fast")


def save_encoder_onnx(encoder: Encoder, folder: Path) -> Path:
    """What ONNX Runtime's own quantizers make of it."""
    source = encoder.write_float(folder)
    if not encoder.is_dynamic:
        return quantize_with_onnxruntime(source, encoder.draw_batches(folder, BATCHES), folder)
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / "dynamic.onnx"
    quantize_dynamic(str(source), str(path), per_channel=True, weight_type=QuantType.QInt8)
    return path


def save_encoder_openvino(encoder: Encoder, folder: Path) -> Path:
    """What NNCF makes of it."""
    source = encoder.write_float(folder)
    if not encoder.is_dynamic:
        return quantize_with_nncf(source, encoder.draw_batches(folder, BATCHES), folder)
    import nncf
    import openvino as ov

    mode = nncf.CompressWeightsMode.INT8_SYM
    model = nncf.compress_weights(ov.Core().read_model(source), mode=mode)
    model.set_rt_info(str(GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    ov.save_model(model, folder / "dynamic.xml")
    return folder / "dynamic.xml"
