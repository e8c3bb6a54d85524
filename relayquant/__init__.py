"""relayquant: post-training quantization for Apache TVM. The public names, nothing else; each is
loaded when it is first used.
"""

from typing import TYPE_CHECKING

from relayquant.base import lazy
from relayquant.base._tvm import check_versions
from relayquant.base.version import __version__ as __version__

check_versions()


if TYPE_CHECKING:
    from relayquant import analysis, config, errors, extend, plots, relay, torch
    from relayquant.analysis.linting.lint import lint
    from relayquant.base.events import Callback
    from relayquant.base.qtypes import QParams, QSpec, choose_qparams
    from relayquant.base.runtime import Executor
    from relayquant.base.storage.module_file import save_module
    from relayquant.base.storage.qparams_file import load_qparams, save_qparams
    from relayquant.config import BackendConfig, QConfig, QConfigMapping, TensorConfig, observers
    from relayquant.data.sequence import SampleSequence
    from relayquant.errors import (
        AccuracyWarning,
        ConfigError,
        DataError,
        DataWarning,
        ModelError,
        RelayQuantError,
    )
    from relayquant.flow.bundle import export_bundle
    from relayquant.flow.compression import compress_weights
    from relayquant.flow.equalizing import equalize_layers, smooth_activations
    from relayquant.flow.evaluation import compare, ledger, sensitivity, verify
    from relayquant.flow.generation import Generator, TokenSampling
    from relayquant.flow.quantizer import quantize
    from relayquant.flow.refine.prepared_edit import load_prepared, merge_statistics, save_prepared
    from relayquant.flow.steps import calibrate, convert_to_reference, lower, prepare
    from relayquant.formats.load import load
    from relayquant.formats.readers import load_gguf
    from relayquant.formats.readers.causal_lm import CausalLMOptions
    from relayquant.formats.tokenizers import Tokenizer, load_tokenizer
    from relayquant.formats.writers import export_onnx
    from relayquant.ir import reference
    from relayquant.ir.plan import Plan
    from relayquant.ir.state import StateValue, get_state, with_state
    from relayquant.plots.build import report
    from relayquant.stages.backends import get_backend_config
    from relayquant.stages.compilation import compile, get_pipeline
    from relayquant.stages.prepared import PreparedModel

__all__ = [
    "AccuracyWarning",
    "BackendConfig",
    "Callback",
    "CausalLMOptions",
    "ConfigError",
    "DataError",
    "DataWarning",
    "Executor",
    "Generator",
    "ModelError",
    "Plan",
    "PreparedModel",
    "QConfig",
    "QConfigMapping",
    "QParams",
    "QSpec",
    "RelayQuantError",
    "SampleSequence",
    "StateValue",
    "TensorConfig",
    "TokenSampling",
    "Tokenizer",
    "analysis",
    "calibrate",
    "choose_qparams",
    "compare",
    "compile",
    "compress_weights",
    "config",
    "convert_to_reference",
    "equalize_layers",
    "errors",
    "export_bundle",
    "export_onnx",
    "extend",
    "get_backend_config",
    "get_pipeline",
    "get_state",
    "ledger",
    "lint",
    "load",
    "load_gguf",
    "load_prepared",
    "load_qparams",
    "load_tokenizer",
    "lower",
    "merge_statistics",
    "observers",
    "plots",
    "prepare",
    "quantize",
    "reference",
    "relay",
    "report",
    "save_module",
    "save_prepared",
    "save_qparams",
    "sensitivity",
    "smooth_activations",
    "torch",
    "verify",
    "with_state",
]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.analysis.linting.lint": "lint",
        "relayquant.base.events": "Callback",
        "relayquant.base.qtypes": "QParams QSpec choose_qparams",
        "relayquant.base.runtime": "Executor",
        "relayquant.base.storage.module_file": "save_module",
        "relayquant.base.storage.qparams_file": "load_qparams save_qparams",
        "relayquant.config": "BackendConfig QConfig QConfigMapping TensorConfig",
        "relayquant.data.sequence": "SampleSequence",
        "relayquant.errors": (
            "AccuracyWarning ConfigError DataError DataWarning ModelError RelayQuantError"
        ),
        "relayquant.flow.bundle": "export_bundle",
        "relayquant.flow.compression": "compress_weights",
        "relayquant.flow.equalizing": "equalize_layers smooth_activations",
        "relayquant.flow.evaluation": "compare ledger sensitivity verify",
        "relayquant.flow.generation": "Generator TokenSampling",
        "relayquant.flow.quantizer": "quantize",
        "relayquant.flow.refine.prepared_edit": "load_prepared merge_statistics save_prepared",
        "relayquant.flow.steps": "calibrate convert_to_reference lower prepare",
        "relayquant.formats.load": "load",
        "relayquant.formats.readers": "load_gguf",
        "relayquant.formats.readers.causal_lm": "CausalLMOptions",
        "relayquant.formats.tokenizers": "Tokenizer load_tokenizer",
        "relayquant.formats.writers": "export_onnx",
        "relayquant.ir.plan": "Plan",
        "relayquant.ir.state": "StateValue get_state with_state",
        "relayquant.plots.build": "report",
        "relayquant.stages.backends": "get_backend_config",
        "relayquant.stages.compilation": "compile get_pipeline",
        "relayquant.stages.prepared": "PreparedModel",
    },
    modules={
        "analysis": "relayquant.analysis",
        "config": "relayquant.config",
        "errors": "relayquant.errors",
        "extend": "relayquant.extend",
        "observers": "relayquant.config.observers",
        "plots": "relayquant.plots",
        "reference": "relayquant.ir.reference",
        "relay": "relayquant.relay",
        "torch": "relayquant.torch",
    },
)
