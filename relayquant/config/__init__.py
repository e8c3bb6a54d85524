"""What the user chooses: which operators are quantized, how (QConfig), and what a backend can run
(BackendConfig).

Frozen values; `with_` and `set_` methods return new objects. Names follow PyTorch's FX Graph Mode
Quantization.
"""

from relayquant.config.accumulator import Accumulator, Overflow, OverflowBound
from relayquant.config.backend import (
    BackendConfig,
    FixedOutput,
    ObservationType,
    PatternConfig,
    QuantPattern,
)
from relayquant.config.dtypes import (
    DTypeConfig,
    DTypeWithConstraints,
)
from relayquant.config.mapping import (
    MappingRule,
    OperatorSite,
    QConfigMapping,
    Selector,
    count_parts,
    is_below,
    is_type,
)
from relayquant.config.model_type import MODEL_TYPES, ModelType, ModelTypeSettings
from relayquant.config.qconfig import (
    FLOAT16,
    KEPT_IN_FLOAT,
    FloatConfig,
    QConfig,
    TensorConfig,
    check_calibration,
    read_qconfig,
)

__all__ = [
    "FLOAT16",
    "KEPT_IN_FLOAT",
    "MODEL_TYPES",
    "Accumulator",
    "BackendConfig",
    "DTypeConfig",
    "DTypeWithConstraints",
    "FixedOutput",
    "FloatConfig",
    "MappingRule",
    "ModelType",
    "ModelTypeSettings",
    "ObservationType",
    "OperatorSite",
    "Overflow",
    "OverflowBound",
    "PatternConfig",
    "QConfig",
    "QConfigMapping",
    "QuantPattern",
    "Selector",
    "TensorConfig",
    "check_calibration",
    "count_parts",
    "is_below",
    "is_type",
    "read_qconfig",
]
