"""Dialect: a table of the `relax.qnn` operators that are allowed at each stage of the data flow.

`check_stage` checks the output of every stage, so that a mistake is found at the stage that made
it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, Op

from relayquant.errors import ModelError
from relayquant.ir.dialect.qnn import OPERATORS, attention, delta, fourier, grouped, recurrent


class Stage(enum.Enum):
    """The state of a module after each stage, in the order of the data flow."""

    FLOAT = "float"  #: as imported or canonicalized
    SIMULATED = "simulated"  #: calibration graph with simulated quantization
    REFERENCE = "reference"  #: dequantize - float operator - quantize
    QNN = "qnn"  #: integer operators
    LOWERED = "lowered"  #: kernels; an operator without a kernel is still a qnn operator


_SIMULATED_ONLY = frozenset({Stage.SIMULATED})
_NOT_FLOAT = frozenset(Stage) - {Stage.FLOAT}
_INTEGER = frozenset({Stage.QNN, Stage.LOWERED})

#: Operators on real data.
REAL = attention.ATTENTION_OPERATORS | delta.DELTA_OPERATORS | fourier.FOURIER_OPERATORS

#: Operator name -> stages at which the operator is allowed. All other operators are allowed
#: everywhere.
LEGAL_STAGES: dict[str, frozenset[Stage]] = {
    **{operator.full_name: _INTEGER for operator in OPERATORS},
    "relax.qnn.quantize": _NOT_FLOAT,
    "relax.qnn.dequantize": _NOT_FLOAT,
    # compressed weights: the rest of the model is unchanged
    **{operator.full_name: frozenset(Stage) for operator in grouped.OPERATORS},
    # recurrent layers: float with a float32 weight
    **{operator.full_name: frozenset(Stage) for operator in recurrent.OPERATORS},
    **dict.fromkeys(REAL, frozenset(Stage)),
    "relax.qnn.simulated_quantize": _SIMULATED_ONLY,
    "relax.qnn.simulated_dequantize": _SIMULATED_ONLY,
}


def is_integer_operator(name: str) -> bool:
    """Whether an operator with this name shows that a module is quantized."""
    return name.startswith("relax.qnn.") and name not in REAL | recurrent.RECURRENT_OPERATORS


def iterate_bindings(expr: Any) -> Iterator[Any]:
    """Iterate over all bindings of a normalized expression, also in branches and functions."""
    if isinstance(expr, relax.Function):
        yield from iterate_bindings(expr.body)
    elif isinstance(expr, relax.If):
        yield from iterate_bindings(expr.true_branch)
        yield from iterate_bindings(expr.false_branch)
    elif isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            for binding in block.bindings:
                yield binding
                yield from iterate_bindings(binding.value)


def list_calls(mod: tvm.IRModule) -> list[Call]:
    """List the calls of all Relax functions, also in branches."""
    bindings = (each for func in mod.functions.values() for each in iterate_bindings(func))
    return [each.value for each in bindings if isinstance(each.value, Call)]


def check_stage(mod: tvm.IRModule, stage: Stage, *, with_integers: bool = False) -> None:
    """Raise unless `mod` is well formed and all of its operators are allowed at `stage`.

    With `with_integers`, operators of stage QNN are allowed too. This is for a model that was
    imported partly quantized.

    Raises:
        ModelError: An operator is not allowed. The message names it, its value and the function.
        ValueError: The module is not well formed. This is a bug of the stage that made it.
    """
    for global_var, function in mod.functions.items():
        if not isinstance(function, relax.Function):
            continue
        for binding in iterate_bindings(function):
            value = binding.value
            if not isinstance(value, Call) or not isinstance(value.op, Op):
                continue
            legal = LEGAL_STAGES.get(value.op.name)
            if with_integers and legal is not None and Stage.QNN in legal:
                continue
            if legal is not None and stage not in legal:
                allowed = ", ".join(each.name for each in Stage if each in legal)
                raise ModelError(
                    f"{value.op.name.removeprefix('relax.')} computes value "
                    f"'{binding.var.name}' of function '{global_var.name_hint}', "
                    f"but is not allowed at stage {stage.name}; allowed: {allowed}. "
                    + _ADVICE[stage],
                    code="RQ204",
                )
    try:
        relax.analysis.well_formed(mod)
    except Exception as error:
        # A user cannot change this. It is a bug of a stage.
        raise ValueError(f"The module is not well formed at stage {stage.name}: {error}") from error


_ADVICE = {
    Stage.FLOAT: "Start from the float model; a quantized one cannot be quantized again.",
    Stage.SIMULATED: "A calibration graph computes in float: use the simulated operators.",
    Stage.REFERENCE: "The reference form computes in float between dequantize and quantize.",
    Stage.QNN: "Convert the calibration graph first.",
    Stage.LOWERED: "Convert the calibration graph first.",
}
