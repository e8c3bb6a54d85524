"""Plan and program -> what a trainable module rounds as the integer module does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from tvm import relax

from relayquant.ir.plan import Plan
from relayquant.ir.rewrite.expressions import FunctionGraph, op_name
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.interpreter.program import TorchProgram

#: operators after a sum that do the same to integers
CLIPS = ("relax.nn.relu", "relax.clip")


@dataclass(frozen=True)
class Sum:
    """A sum of products with its bias, requantized once to the scale of the result.

    Attributes:
        bias, shape: Key of the bias, and its shape.
        group: Key of the group of the result.
    """

    bias: str
    shape: tuple[int, ...]
    group: str


def find_input_groups(prepared: PreparedModel) -> dict[str, str]:
    """Map each requested integer input to the group that rounds it. Float operators read the
    rounded value too.
    """
    keys = prepared.plan.value_groups
    return {
        value.name: keys[value.name][0]
        for value in prepared.inputs
        if value.is_integer and keys.get(value.name)
    }


def find_chained(plan: Plan) -> set[str]:
    """Find values of operator chains that become lookup tables. The elements of an array there
    are one number and must stay equal.
    """
    return {
        value
        for operator in plan.operators
        if operator.quantized and operator.op == "relax.elementwise_chain"
        for value in operator.values
    }


def find_bias_scales(plan: Plan) -> dict[str, tuple[str, str]]:
    """Map each bias to the groups of data and weight whose scales are its unit. A bias with its
    own group uses that group.
    """
    found = {}
    for operator in plan.operators:
        keys = dict(operator.operands)
        if {"data", "weight"} <= keys.keys() and "bias" not in keys:
            found[f"{operator.name}:bias"] = keys["data"], keys["weight"]
    return found


def find_sums(
    prepared: PreparedModel, program: TorchProgram, bias_scales: Collection[str]
) -> dict[str, Sum]:
    """Find sums that are rounded once and that nothing else reads, by the name of the value.

    A sum that something is added to has another arithmetic (`qnn.add`). So has a sum whose operator
    continues in a table.
    """
    plan, found = prepared.plan, {}
    main = prepared.graph.mod["main"]
    values = {var.name: value for var, value in FunctionGraph(main).values.items()}
    readers = Counter(var.name for step in program.steps for var in step.reads)
    readers.update(var.name for var in relax.analysis.free_vars(main.body.body))
    groups = [group for group in plan.groups if group.base is None and not group.constant]
    points = {point: group.key for group in groups for point in group.points}
    for operator in plan.operators:
        bias, output = f"{operator.name}:bias", operator.output
        if bias not in bias_scales or output not in points or "residual" in dict(operator.operands):
            continue
        name = output
        while name in values and op_name(values[name]) in CLIPS and readers[name] == 1:
            name = values[name].args[0].name
        is_sum = name in values and op_name(values[name]) == "relax.add"
        constant = prepared.graph.constants.get(bias)
        if is_sum and readers[name] == 1 and constant is not None:
            added = [arg.name for arg in values[name].args if isinstance(arg, relax.Var)]
            if constant.var.name in added:
                found[name] = Sum(bias, constant.value.shape, points[output])
    return found
