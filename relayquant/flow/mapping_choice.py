"""Prepared module, data and settings -> the mapping that the plan is made with, and the model's
type.
"""

from __future__ import annotations

from typing import Any

import tvm

from relayquant.config import BackendConfig, ModelType, QConfigMapping
from relayquant.flow.settings import PrepareSettings
from relayquant.stages.effort import default_mapping, read_recognized
from relayquant.stages.equalization import recognize_type


def choose_mapping(
    canonical: tvm.IRModule,
    dataset: Any,
    mapping: QConfigMapping | None,
    backend: BackendConfig,
    settings: PrepareSettings,
) -> tuple[QConfigMapping, ModelType | None]:
    """Return the user's mapping, or the default for the model's type, and the type. The type is the
    user's, or is recognized where the user leaves both open.
    """
    asked, level = settings.model_type, settings.level
    if mapping is not None:
        return mapping, asked or read_recognized(mapping)
    if asked is not None or dataset is None or settings.promises_integers:
        return default_mapping(backend, level, asked), asked
    found = recognize_type(canonical, dataset)
    return default_mapping(backend, level, found, is_recognized=found is not None), found
