"""relayquant: post-training quantization for Apache TVM. The public names, nothing else."""

from relayquant.base._tvm import check_versions

check_versions()

# What follows imports TVM, so it must come after the check of its version.
from relayquant import extend, relay, torch  # noqa: E402
from relayquant.analysis import AccumulatorReport  # noqa: E402
from relayquant.analysis.latency import Latency, measure_latency  # noqa: E402
from relayquant.analysis.lint import Finding, Severity, lint, measure_growth  # noqa: E402
from relayquant.base.events import Callback  # noqa: E402
from relayquant.base.qtypes import (  # noqa: E402
    Granularity,
    QParams,
    QSpec,
    Role,
    Rounding,
    Scheme,
    ValueInfo,
    choose_qparams,
)
from relayquant.base.runtime import Executor  # noqa: E402
from relayquant.base.storage.module_file import save_module  # noqa: E402
from relayquant.base.storage.qparams_file import load_qparams, save_qparams  # noqa: E402
from relayquant.config import (  # noqa: E402
    FLOAT16,
    Accumulator,
    BackendConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FixedOutput,
    FloatConfig,
    ModelType,
    ObservationType,
    Overflow,
    OverflowBound,
    PatternConfig,
    QConfig,
    QConfigMapping,
    TensorConfig,
)
from relayquant.config.observers import (  # noqa: E402
    MSE,
    AverageMax,
    Fixed,
    KLDivergence,
    MinMax,
    MovingAverageMinMax,
    Observer,
    Percentile,
)
from relayquant.errors import (  # noqa: E402
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
from relayquant.flow.compression import compress_weights  # noqa: E402
from relayquant.flow.equalization.layers import equalize_layers, smooth_activations  # noqa: E402
from relayquant.flow.evaluation import (  # noqa: E402
    accumulator_report,
    compare,
    ledger,
    sensitivity,
    verify,
)
from relayquant.flow.quantizer import quantize  # noqa: E402
from relayquant.flow.refine.prepared_edit import (  # noqa: E402
    load_prepared,
    merge_statistics,
    save_prepared,
)
from relayquant.flow.settings import Guard, GuardSettings  # noqa: E402
from relayquant.flow.steps import (  # noqa: E402
    calibrate,
    convert_to_reference,
    lower,
    prepare,
)
from relayquant.formats.load import load  # noqa: E402
from relayquant.formats.readers import import_onnx, import_tflite, import_torch, load_gguf  # noqa: E402
from relayquant.formats.writers import GroupedForm, export_onnx  # noqa: E402
from relayquant.ir import reference  # noqa: E402
from relayquant.ir.ops import BUILTIN_OPS  # noqa: E402
from relayquant.ir.plan import Plan, Support  # noqa: E402
from relayquant.ir.rewrite import Skip  # noqa: E402
from relayquant.plots import (  # noqa: E402
    Report,
    make_report,
    plot_error_by_depth,
    plot_latency,
    plot_ranges,
    plot_sensitivity,
)
from relayquant.stages.backends import ACCELERATOR, ARM, GENERIC, X86, default_backend  # noqa: E402
from relayquant.stages.calibration.observer_selection import OutputSQNR  # noqa: E402
from relayquant.stages.calibration.parameters import CalibrationContext  # noqa: E402
from relayquant.stages.calibration.passes import Order  # noqa: E402
from relayquant.stages.calibration.weights.adaround import AdaRoundSettings  # noqa: E402
from relayquant.stages.calibration.weights.fit import BiasCorrection, FitSettings, WeightRounding  # noqa: E402
from relayquant.stages.calibration.weights.ranges import RelativeMSE  # noqa: E402
from relayquant.stages.compilation import compile, pipeline  # noqa: E402
from relayquant.stages.conversion import AffineRule  # noqa: E402
from relayquant.stages.effort import Effort  # noqa: E402
from relayquant.stages.prepared import PreparedModel  # noqa: E402
from relayquant.torch.finetuning import finetune  # noqa: E402

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
