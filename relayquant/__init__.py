"""relayquant: post-training quantization for Apache TVM. The public names, nothing else; each is
loaded when it is first used.
"""

from typing import TYPE_CHECKING

from relayquant.base import lazy
from relayquant.base._tvm import check_versions

check_versions()


if TYPE_CHECKING:
    from relayquant import extend, relay, torch
    from relayquant.analysis import AccumulatorReport
    from relayquant.analysis.latency import Latency, measure_latency
    from relayquant.analysis.lint import Finding, Severity, lint, measure_growth
    from relayquant.base.events import Callback
    from relayquant.base.qtypes import (
        Granularity,
        QParams,
        QSpec,
        Role,
        Rounding,
        Scheme,
        ValueInfo,
        choose_qparams,
    )
    from relayquant.base.runtime import Executor
    from relayquant.base.storage.module_file import save_module
    from relayquant.base.storage.qparams_file import load_qparams, save_qparams
    from relayquant.config import (
        FLOAT16,
        Accumulator,
        AdaRoundSettings,
        BackendConfig,
        BiasCorrection,
        DTypeConfig,
        DTypeWithConstraints,
        Effort,
        FitSettings,
        FixedOutput,
        FloatConfig,
        GroupedForm,
        Guard,
        GuardSettings,
        ModelType,
        ObservationType,
        Order,
        Overflow,
        OverflowBound,
        PatternConfig,
        QConfig,
        QConfigMapping,
        TensorConfig,
        WeightRounding,
    )
    from relayquant.config.observers import (
        MSE,
        AverageMax,
        Fixed,
        KLDivergence,
        MinMax,
        MovingAverageMinMax,
        Observer,
        Percentile,
    )
    from relayquant.errors import (
        AccuracyWarning,
        ConfigError,
        DataError,
        DataWarning,
        FileError,
        MissingDependencyError,
        ModelError,
        QnnError,
        RelayQuantError,
        WorkerError,
    )
    from relayquant.flow.compression import compress_weights
    from relayquant.flow.equalizing import equalize_layers, smooth_activations
    from relayquant.flow.evaluation import accumulator_report, compare, ledger, sensitivity, verify
    from relayquant.flow.quantizer import quantize
    from relayquant.flow.refine.prepared_edit import load_prepared, merge_statistics, save_prepared
    from relayquant.flow.steps import calibrate, convert_to_reference, lower, prepare
    from relayquant.formats.load import load
    from relayquant.formats.readers import import_onnx, import_tflite, import_torch, load_gguf
    from relayquant.formats.writers import export_onnx
    from relayquant.ir import reference
    from relayquant.ir.ops import BUILTIN_OPS
    from relayquant.ir.plan import Plan, Support
    from relayquant.ir.rewrite import Skip
    from relayquant.plots import (
        Report,
        make_report,
        plot_error_by_depth,
        plot_latency,
        plot_ranges,
        plot_sensitivity,
    )
    from relayquant.stages.backends import ACCELERATOR, ARM, GENERIC, X86, default_backend
    from relayquant.stages.calibration.observer_selection import OutputSQNR
    from relayquant.stages.calibration.parameters import CalibrationContext
    from relayquant.stages.calibration.weights.ranges import RelativeMSE
    from relayquant.stages.compilation import compile, pipeline
    from relayquant.stages.conversion import AffineRule
    from relayquant.stages.prepared import PreparedModel
    from relayquant.torch.finetuning import finetune

__all__ = [
    "ACCELERATOR",
    "ARM",
    "BUILTIN_OPS",
    "FLOAT16",
    "GENERIC",
    "MSE",
    "X86",
    "Accumulator",
    "AccumulatorReport",
    "AccuracyWarning",
    "AdaRoundSettings",
    "AffineRule",
    "AverageMax",
    "BackendConfig",
    "BiasCorrection",
    "CalibrationContext",
    "Callback",
    "ConfigError",
    "DTypeConfig",
    "DTypeWithConstraints",
    "DataError",
    "DataWarning",
    "Effort",
    "Executor",
    "FileError",
    "Finding",
    "FitSettings",
    "Fixed",
    "FixedOutput",
    "FloatConfig",
    "Granularity",
    "GroupedForm",
    "Guard",
    "GuardSettings",
    "KLDivergence",
    "Latency",
    "MinMax",
    "MissingDependencyError",
    "ModelError",
    "ModelType",
    "MovingAverageMinMax",
    "ObservationType",
    "Observer",
    "Order",
    "OutputSQNR",
    "Overflow",
    "OverflowBound",
    "PatternConfig",
    "Percentile",
    "Plan",
    "PreparedModel",
    "QConfig",
    "QConfigMapping",
    "QParams",
    "QSpec",
    "QnnError",
    "RelativeMSE",
    "RelayQuantError",
    "Report",
    "Role",
    "Rounding",
    "Scheme",
    "Severity",
    "Skip",
    "Support",
    "TensorConfig",
    "ValueInfo",
    "WeightRounding",
    "WorkerError",
    "accumulator_report",
    "calibrate",
    "choose_qparams",
    "compare",
    "compile",
    "compress_weights",
    "convert_to_reference",
    "default_backend",
    "equalize_layers",
    "export_onnx",
    "extend",
    "finetune",
    "import_onnx",
    "import_tflite",
    "import_torch",
    "ledger",
    "lint",
    "load",
    "load_gguf",
    "load_prepared",
    "load_qparams",
    "lower",
    "make_report",
    "measure_growth",
    "measure_latency",
    "merge_statistics",
    "pipeline",
    "plot_error_by_depth",
    "plot_latency",
    "plot_ranges",
    "plot_sensitivity",
    "prepare",
    "quantize",
    "reference",
    "relay",
    "save_module",
    "save_prepared",
    "save_qparams",
    "sensitivity",
    "smooth_activations",
    "torch",
    "verify",
]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.analysis": "AccumulatorReport",
        "relayquant.analysis.latency": "Latency measure_latency",
        "relayquant.analysis.lint": "Finding Severity lint measure_growth",
        "relayquant.base.events": "Callback",
        "relayquant.base.qtypes": (
            "Granularity QParams QSpec Role Rounding Scheme ValueInfo choose_qparams"
        ),
        "relayquant.base.runtime": "Executor",
        "relayquant.base.storage.module_file": "save_module",
        "relayquant.base.storage.qparams_file": "load_qparams save_qparams",
        "relayquant.config": (
            "Accumulator BackendConfig DTypeConfig DTypeWithConstraints FLOAT16 FixedOutput "
            "FloatConfig ModelType ObservationType Overflow OverflowBound PatternConfig QConfig "
            "QConfigMapping TensorConfig"
        ),
        "relayquant.config.observers": (
            "AverageMax Fixed KLDivergence MSE MinMax MovingAverageMinMax Observer Percentile"
        ),
        "relayquant.errors": (
            "AccuracyWarning ConfigError DataError DataWarning FileError MissingDependencyError "
            "ModelError QnnError RelayQuantError WorkerError"
        ),
        "relayquant.flow.compression": "compress_weights",
        "relayquant.flow.equalizing": "equalize_layers smooth_activations",
        "relayquant.flow.evaluation": "accumulator_report compare ledger sensitivity verify",
        "relayquant.flow.quantizer": "quantize",
        "relayquant.flow.refine.prepared_edit": "load_prepared merge_statistics save_prepared",
        "relayquant.flow.settings": "Guard GuardSettings",
        "relayquant.flow.steps": "calibrate convert_to_reference lower prepare",
        "relayquant.formats.load": "load",
        "relayquant.formats.readers": "import_onnx import_tflite import_torch load_gguf",
        "relayquant.formats.writers": "GroupedForm export_onnx",
        "relayquant.ir.ops": "BUILTIN_OPS",
        "relayquant.ir.plan": "Plan Support",
        "relayquant.ir.rewrite": "Skip",
        "relayquant.plots": (
            "Report make_report plot_error_by_depth plot_latency plot_ranges plot_sensitivity"
        ),
        "relayquant.stages.backends": "ACCELERATOR ARM GENERIC X86 default_backend",
        "relayquant.stages.calibration.observer_selection": "OutputSQNR",
        "relayquant.stages.calibration.parameters": "CalibrationContext",
        "relayquant.stages.calibration.passes": "Order",
        "relayquant.stages.calibration.weights.adaround": "AdaRoundSettings",
        "relayquant.stages.calibration.weights.fit": "BiasCorrection FitSettings WeightRounding",
        "relayquant.stages.calibration.weights.ranges": "RelativeMSE",
        "relayquant.stages.compilation": "compile pipeline",
        "relayquant.stages.conversion": "AffineRule",
        "relayquant.stages.effort": "Effort",
        "relayquant.stages.prepared": "PreparedModel",
        "relayquant.torch.finetuning": "finetune",
    },
    modules={
        "extend": "relayquant.extend",
        "reference": "relayquant.ir.reference",
        "relay": "relayquant.relay",
        "torch": "relayquant.torch",
    },
)
