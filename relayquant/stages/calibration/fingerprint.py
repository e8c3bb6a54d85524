"""What a checkpoint belongs to: digests of model and plan, the settings, and what computes."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import numpy as np
import tvm
from tvm.target.codegen import llvm_get_system_cpu

from relayquant.stages.calibration.checkpoint import digest_text
from relayquant.stages.calibration.parameters import CallableCalibration, resolve_calibration
from relayquant.stages.prepared import PreparedModel


def describe_binding(
    prepared: PreparedModel, order: str, override: Any, fit: Any
) -> dict[str, str]:
    """Aspect -> digest or text, of all that the result of a calibration depends on, but the data.

    Of a callable that picks parameters only the name is known; versions and the processor count
    because float results differ between them.
    """
    callables = {
        group.key: describe_picker(group.calibration)
        for group in prepared.plan.groups
        if isinstance(resolve_calibration(group.calibration), CallableCalibration)
    }
    plan = {
        "plan": prepared.plan.to_dict(),
        "callables": callables,
        "graph": tvm.ir.save_json(prepared.graph.mod),
    }
    return {
        "model": digest_text(tvm.ir.save_json(prepared.mod)),
        "plan": digest_text(json.dumps(plan)),
        "backend": prepared.backend.name,
        "calibration": "that of the plan" if override is None else describe_picker(override),
        "order": order,
        "fit": repr(fit),
        "relayquant": metadata.version("relayquant"),
        "tvm": tvm.__version__,
        "numpy": np.__version__,
        "processor": llvm_get_system_cpu(),
    }


def describe_picker(picker: Any) -> str:
    """An observer with its settings; a callable by module and name."""
    if isinstance(picker, CallableCalibration):
        picker = picker.function
    if callable(picker):
        module = getattr(picker, "__module__", "")
        return f"{module}.{getattr(picker, '__qualname__', type(picker).__qualname__)}"
    return repr(picker)
