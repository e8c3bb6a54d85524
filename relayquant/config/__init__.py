"""What the user chooses: which operators are quantized, how (QConfig), and what a backend can run
(BackendConfig).

All objects are frozen. `with_` and `set_` methods return new objects. Names follow PyTorch's FX
Graph Mode Quantization.
"""

from relayquant.base.qtypes import Granularity, Role, Rounding, Scheme
from relayquant.config.accumulator import Accumulator, Overflow, OverflowBound
from relayquant.config.backend import (
    BackendConfig,
    FixedOutput,
    ObservationType,
    PatternConfig,
)
from relayquant.config.choices import (
    BatchNorm,
    BiasCorrection,
    Effort,
    GroupedForm,
    Guard,
    Order,
    Precision,
    Ranges,
    RecurrentForm,
    Support,
    Unseen,
    WeightRounding,
)
from relayquant.config.dtypes import (
    DTypeConfig,
    DTypeWithConstraints,
)
from relayquant.config.fitting import AdaRoundSettings, FitSettings, ReconstructionSettings
from relayquant.config.guard import GuardSettings
from relayquant.config.mapping import (
    QConfigMapping,
)
from relayquant.config.model_type import ModelType
from relayquant.config.qconfig import (
    FLOAT16,
    FloatConfig,
    QConfig,
    TensorConfig,
)

__all__ = [
    "FLOAT16",
    "Accumulator",
    "AdaRoundSettings",
    "BackendConfig",
    "BatchNorm",
    "BiasCorrection",
    "DTypeConfig",
    "DTypeWithConstraints",
    "Effort",
    "FitSettings",
    "FixedOutput",
    "FloatConfig",
    "Granularity",
    "GroupedForm",
    "Guard",
    "GuardSettings",
    "ModelType",
    "ObservationType",
    "Order",
    "Overflow",
    "OverflowBound",
    "PatternConfig",
    "Precision",
    "QConfig",
    "QConfigMapping",
    "Ranges",
    "ReconstructionSettings",
    "RecurrentForm",
    "Role",
    "Rounding",
    "Scheme",
    "Support",
    "TensorConfig",
    "Unseen",
    "WeightRounding",
]
