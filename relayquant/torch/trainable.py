"""A prepared model as a `torch.nn.Module`: torch computes its calibration graph, and its
weights, biases and scales train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.base.qtypes import QParams, Role
from relayquant.config import Ranges
from relayquant.errors import ConfigError, DataError, ModelError, format_count
from relayquant.flow.pipeline import convert_model, lower_module, lower_prepared
from relayquant.ir.ledger import InterfaceValue
from relayquant.ir.plan import Plan
from relayquant.ir.rewrite import Emitter, rewrite_main
from relayquant.ir.rewrite.expressions import FunctionGraph, op_name, with_operands
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.batch_norm import FoldedNorm
from relayquant.torch.exporting import export, load
from relayquant.torch.program import TorchProgram, Values, Visitor, build_program
from relayquant.torch.reference_module import ReferenceModule
from relayquant.torch.rounding import MOMENTUM, FakeQuantize, align_channels
from relayquant.torch.standalone import Unit, finish_reference
from relayquant.torch.submodule_cut import Parts, name_parameter

#: distance of a fitted weight from the boundary of its cell, in steps: on the boundary, the first
#: optimizer step would undo the fit
MARGIN = 0.25


#: smaller integers are exact in float32
EXACT_INTEGERS = 2**24
#: int32 cannot hold a bias of this number of units
MOST_UNITS = 2**31
#: operators after a sum that do the same to integers
CLIPS = ("relax.nn.relu", "relax.clip")


@dataclass(frozen=True, eq=False)
class CallForm:
    """How a module is called, and what it returns, as trees of tensors.

    Attributes:
        inputs: (args, kwargs) of a call, as a tree.
        outputs: The result, as a tree.
        constants: Leaves of the result that are not tensors, by number.
        shapes: Input shapes of the integer module. None for any number of samples.
    """

    inputs: Any
    outputs: Any
    constants: Mapping[int, Any]
    shapes: tuple[tuple[int, ...], ...] | None

    def read_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call, in the order of the model's inputs. Also for a call with
        these tensors only.

        Raises:
            DataError: the structure differs from the example inputs.
        """
        if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
            return list(args)
        try:
            leaves = self.inputs.flatten_up_to((args, dict(kwargs)))
        except ValueError as error:
            raise DataError(
                f"The arguments have another structure than the example inputs: {error}",
                code="RQ302",
            ) from error
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def build_result(self, result: Any) -> Any:
        """Build the model's result from the tensors that it computes."""
        tensors = iter(result if isinstance(result, tuple) else (result,))
        count = self.outputs.num_leaves
        leaves = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        return pytree.tree_unflatten(leaves, self.outputs)


@dataclass(frozen=True, eq=False)
class Source:
    """The parts that a trainable module and its copies share."""

    prepared: PreparedModel
    program: TorchProgram
    unit: Unit | None = None
    form: CallForm | None = None

    def __deepcopy__(self, memo: Any) -> Source:
        """Return the same object: it never changes."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to pickle: a file would hold code. Save the state of the module instead.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "A trainable module cannot be pickled. Save its state_dict() and load it into a "
            "module prepared in the same way; or save the result of relayquant.torch.convert.",
            code="RQ105",
        )


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


class LiveBatchNorm(nn.Module):
    """A batch norm separated from a quantized operator, with live statistics.

    The operator's weight is rounded as folded with the running statistics, as in FX's ConvBn (Jacob
    et al. 2018, section 3.2, https://arxiv.org/abs/1712.05877).

    With a = gamma / sqrt(running variance + epsilon) the operator's weight is weight * a. In
    training, its sum of products y is converted to the statistics of the batch: y * sqrt(running
    variance + epsilon) / sqrt(batch variance + epsilon), and the bias uses the batch's mean. In
    evaluation the factor is 1, and weight and bias are the folded ones.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    is_frozen: torch.Tensor

    def __init__(self, folded: FoldedNorm, bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        norm = folded.norm
        self.place, self.bias_shape = folded, bias_shape
        self.epsilon, self.momentum = norm.epsilon, norm.momentum
        self.gamma = nn.Parameter(torch.from_numpy(norm.gamma.copy()))
        self.beta = nn.Parameter(torch.from_numpy(norm.beta.copy()))
        self.register_buffer("running_mean", torch.from_numpy(norm.mean.copy()))
        self.register_buffer("running_var", torch.from_numpy(norm.variance.copy()))
        self.register_buffer("is_frozen", torch.tensor(False))

    def find_factor(self) -> torch.Tensor:
        """Return the factor of the weight."""
        return self.gamma / torch.sqrt(self.running_var + self.epsilon)

    def fold_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight folded for the operator."""
        return weight * align_channels(self.find_factor(), weight, self.place.weight_axis)

    def fold_bias(self) -> torch.Tensor:
        """Return the bias folded for the operator."""
        shift = self.beta - self.running_mean * self.find_factor()
        return shift.reshape(self.bias_shape)

    def forward(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert the folded weight's sum of products to the batch's statistics. Return it and
        the bias to add.
        """
        if not self.training or self.is_frozen:
            return total, self.fold_bias()
        axis = self.place.axis % total.ndim
        axes = [i for i in range(total.ndim) if i != axis]
        count = total.numel() // total.shape[axis]
        if count < 2:
            raise ModelError(
                f"Batch norm {self.place.norm.name!r}: a batch of one value per channel has no "
                "variance. Train with larger batches, or freeze_statistics().",
                code="RQ206",
            )
        deviation = torch.sqrt(self.running_var + self.epsilon)
        # The sum of the weight before folding. If that factor is 0, the product is 0 too.
        plain = total / align_channels(self.gamma / deviation, total, axis)
        variance, mean = torch.var_mean(plain, axes, correction=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        inverse = torch.rsqrt(variance + self.epsilon)
        bias = self.beta - self.gamma * mean * inverse
        return total * align_channels(deviation * inverse, total, axis), bias.reshape(
            self.bias_shape
        )


class TrainableModule(nn.Module):
    """A model that trains with its quantization. Values are rounded at the same places and in the
    same way as in the integer module.

    `relayquant.torch.prepare_qat` and `from_relax` return it, and `relayquant.torch.convert`
    converts it. Call it with the model's inputs, in order. It returns what the model returns, a
    tensor or a tuple.

    Attributes:
        weights: Weights and biases of quantized operators, by "<operator>:weight" and
            "<operator>:bias", with dots written as slashes. Layouts are those of the prepared
            model.
        floats: float32 constants of operators that stay in float, by "<value>:<argument>".
        quantizers: Rounding modules, by the key of their group in the plan.
        norms: Batch norms with live statistics, by the value that they compute.
        parts: Standalone submodules, also as trainable modules, and the observed forms of custom
            ones, by path, with dots written as slashes.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        ranges: Ranges,
        weight_ranges: Ranges,
        folded: Mapping[str, FoldedNorm],
        unit: Unit | None = None,
        form: CallForm | None = None,
        is_waiting: bool = False,
    ) -> None:
        super().__init__()
        check_trainable(prepared)
        placeholders = unit.opened.placeholders if unit else ()
        program = build_program(prepared.graph, placeholders, find_chained(prepared.plan))
        self.source = Source(prepared, program, unit, form)
        self.parts = Parts(unit.parts if unit else {})
        parameters = prepared.parameters
        self.quantizers = nn.ModuleDict(
            {
                name_parameter(group.key): FakeQuantize(
                    group,
                    parameters[group.key],
                    weight_ranges if group.constant else ranges,
                    is_waiting,
                )
                for group in prepared.plan.groups
            }
        )
        self.norms = nn.ModuleDict()
        norms: dict[str, LiveBatchNorm] = {}
        for name, place in folded.items():
            shape = prepared.graph.constants[place.bias].value.shape
            norms[place.weight] = LiveBatchNorm(place, shape)
            self.norms[name_parameter(name)] = norms[place.weight]
        shifts = {norm.place.bias: norm for norm in norms.values()}
        self.weights = nn.ParameterDict()
        for key, constant in prepared.graph.constants.items():
            start = torch.from_numpy(np.array(start_constant(prepared, key), "float32"))
            if key in shifts:  # a corrected bias moves beta
                change = start.reshape(-1) - torch.from_numpy(constant.value.reshape(-1))
                shifts[key].beta.data.add_(change)
                continue
            if key in norms:
                norm = norms[key]
                factor = norm.find_factor().detach()
                start = start / align_channels(factor, start, norm.place.weight_axis)
            self.weights[name_parameter(key)] = nn.Parameter(start)
        self.bias_scales = find_bias_scales(prepared.plan)
        self.input_groups = find_input_groups(prepared)
        self.sums = find_sums(prepared, program, self.bias_scales)
        self.floats = nn.ParameterDict(
            {
                name_parameter(f"{name}:{i}"): nn.Parameter(program.constants[constant].clone())
                for (name, i), constant in program.trained.items()
            }
        )

    # ---- running ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for these inputs.

        Raises:
            DataError: the inputs do not fit the model.
        """
        form = self.source.form
        if form is None:
            return self.compute(args)[0]
        return form.build_result(self.compute(form.read_inputs(args, kwargs))[0])

    def compute(
        self, inputs: Sequence[torch.Tensor], hidden: Collection[str] = ()
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the model's outputs, and the hidden values with the names `hidden`, by name."""
        found: dict[str, torch.Tensor] = {}
        visit = {name: keeping_visitor(name, found) for name in hidden}
        visit |= {norm.place.product: norm_visitor(self, norm) for norm in self.list_norms()}
        result = self.run(inputs, visit)
        if self.training:
            for quantizer in self.list_quantizers():
                quantizer.follow(MOMENTUM)
        return result, found

    def run(self, inputs: Sequence[torch.Tensor], visit: Mapping[str, Visitor]) -> Any:
        """Return the model's outputs. `visit` as for `TorchProgram.run`."""
        program, values = self.source.program, self.begin(inputs)
        if not self.training:
            held = self.fold_constants() if self.sums else {}
            exact = {
                name: self.make_requantizer(each, held[each.bias])
                for name, each in self.sums.items()
            }
            visit = {**exact, **visit}
        program.advance(values, program.steps, visit)
        return program.result(values)

    def begin(self, inputs: Sequence[torch.Tensor]) -> Values:
        """Return the state before the first step of the program."""
        program = self.source.program
        trained = {
            constant: self.floats[name_parameter(f"{name}:{i}")]
            for (name, i), constant in program.trained.items()
        }
        parameters = {
            self.find_variable(key): self.round_bias(key, value)
            for key, value in self.fold_constants().items()
        }
        unit = self.source.unit
        fill = self.parts.make_filler(unit.opened.placeholders if unit else ())
        values = program.begin(inputs, parameters, trained, self.round_value, fill)
        for name, key in self.input_groups.items():
            var = program.by_name[name]
            values.slots[var] = self.round_value(key, 1, values.slots[var])
        return values

    def find_variable(self, key: str) -> str:
        """Return the parameter of the calibration graph that holds a constant."""
        return self.source.prepared.graph.constants[key].var.name

    def fold_constants(self) -> dict[str, torch.Tensor]:
        """Return weights and biases for the operators, by key: with batch norms folded in."""
        graph = self.source.prepared.graph
        found = {
            key: self.weights[name_parameter(key)]
            for key in graph.constants
            if name_parameter(key) in self.weights
        }
        for norm in self.list_norms():
            found[norm.place.weight] = norm.fold_weight(found[norm.place.weight])
            found[norm.place.bias] = norm.fold_bias()
        return found

    def round_value(self, key: str, axis: int, value: torch.Tensor) -> torch.Tensor:
        """Round a value with its group."""
        return self.quantizers[name_parameter(key)](value, axis)

    def round_bias(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Round a bias to units of its accumulator, data scale x weight scale, with the gradient of
        the bias itself. Other constants are unchanged.

        The unit is small compared with a step of the result, unless weights are large. With large
        weights most results are clipped, and results of the bias alone stay within the range.
        """
        if key not in self.bias_scales or not self.find_data(key).is_known:
            return value
        unit = self.find_unit(key, value.shape)
        if not self.suits_bias(unit, value):
            return value
        return value + (torch.round(value / unit) * unit - value).detach()

    def find_unit(self, bias: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the accumulator scale for a bias of this shape."""
        data, weight = (self.find_scale(group) for group in self.bias_scales[bias])
        unit = (data * weight).clamp_min(torch.finfo(torch.float32).tiny)
        return unit.reshape(tuple(shape)) if unit.numel() > 1 else unit

    @torch.no_grad()
    def suits_bias(self, unit: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether int32 holds a bias in these units. Otherwise its operator stays in float, see
        `conversion.bias.refine_units`.
        """
        return bool((value.double() / unit.double()).abs().max() < MOST_UNITS)

    def find_data(self, bias: str) -> FakeQuantize:
        """Return the quantizer of the data that is multiplied by the weight of this bias."""
        return self.quantizers[name_parameter(self.bias_scales[bias][0])]  # pyright: ignore[reportReturnType]

    def find_scale(self, group: str) -> torch.Tensor:
        """Return the present scale of a group, without a gradient."""
        return self.quantizers[name_parameter(group)].find_scale().detach()

    def make_requantizer(self, place: Sum, bias: torch.Tensor) -> Visitor:
        """Make the function that `TorchProgram.run` calls with a sum of products in evaluation.

        The sum in units of the accumulator is an integer, except for the last bits of float32. It
        is scaled and rounded by the integer module's arithmetic, `float32(integer) * float32(unit /
        scale)`.

        Otherwise the last bits of float32 would decide how a sum between two steps is rounded. This
        affects one of a million sums, which changes the answers of deep 8-bit networks.
        """
        unit, scale = self.find_unit(place.bias, place.shape), self.find_scale(place.group)
        if not self.suits_bias(unit, bias.reshape(place.shape)):
            return lambda total: (total, {})
        multiplier = (unit.double() / scale.double()).float()

        def visit(total: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            integer = torch.round(total.detach() / unit)
            rounded = torch.round(integer * multiplier) * scale
            is_exact = integer.abs() < EXACT_INTEGERS
            return total + torch.where(is_exact, rounded - total.detach(), 0.0), {}

        return visit

    def find_quantizer(self, key: str) -> FakeQuantize | None:
        """Return the quantizer of a value. None if it is not rounded."""
        found = dict(self.quantizers.items()).get(name_parameter(key))
        return found if isinstance(found, FakeQuantize) else None

    def list_quantizers(self) -> Iterator[FakeQuantize]:
        """`quantizers`, typed."""
        for module in self.quantizers.values():
            if isinstance(module, FakeQuantize):
                yield module

    def list_norms(self) -> Iterator[LiveBatchNorm]:
        """`norms`, typed."""
        for module in self.norms.values():
            if isinstance(module, LiveBatchNorm):
                yield module

    def list_parts(self) -> Iterator[TrainableModule]:
        """Return the standalone submodules."""
        for module in self.parts.values():
            if isinstance(module, TrainableModule):
                yield module

    # ---- switches ----

    def freeze_ranges(self) -> TrainableModule:
        """Fix scales and zero points until `thaw_ranges`."""
        return self._set_ranges(True)

    def thaw_ranges(self) -> TrainableModule:
        """Let scales follow `ranges` again."""
        return self._set_ranges(False)

    def _set_ranges(self, is_frozen: bool) -> TrainableModule:
        for quantizer in self.list_quantizers():
            if quantizer.ranges is not Ranges.FROZEN:
                quantizer.is_frozen.fill_(is_frozen)
            if quantizer.log_factor is not None:
                quantizer.log_factor.requires_grad_(not is_frozen)
        for part in self.list_parts():
            part._set_ranges(is_frozen)
        return self

    def freeze_statistics(self) -> TrainableModule:
        """Let batch norms use their running statistics, unchanged, also in training."""
        return self._set_statistics(True)

    def thaw_statistics(self) -> TrainableModule:
        """Let batch norms use and update the statistics of batches in training again."""
        return self._set_statistics(False)

    def _set_statistics(self, is_frozen: bool) -> TrainableModule:
        for norm in self.list_norms():
            norm.is_frozen.fill_(is_frozen)
        for part in self.list_parts():
            part._set_statistics(is_frozen)
        return self

    # ---- results ----

    def check_ranges(self) -> None:
        """Check that every range was found, by calibration or by a training batch.

        Raises:
            ConfigError: one was not.
        """
        waiting = [q.group.key for q in self.list_quantizers() if not q.is_known]
        if waiting:
            raise ConfigError(
                "The module was prepared without calibration data and has not been trained: the "
                f"range of {waiting[0]!r} is not known. Call it in training mode (module.train()) "
                "with representative inputs, or prepare it with calibration_dataset=.",
                code="RQ105",
            )
        for part in self.list_parts():
            part.check_ranges()

    @property
    def is_quantized(self) -> bool:
        """Whether any value is rounded."""
        own = bool(self.source.prepared.plan.groups)
        return own or any(part.is_quantized for part in self.list_parts())

    def to_prepared(self) -> PreparedModel:
        """Return the calibrated model with the trained parameters, for `relayquant.lower`.

        Raises:
            ConfigError: a parameter is NaN or infinite; or the model calls standalone or custom
                submodules, so that one graph cannot hold it.
        """
        if self.source.unit is not None:
            raise ConfigError(
                "A model with standalone or custom modules is not one calibrated graph. Use "
                "relayquant.torch.convert, or relayquant.torch.convert_to_reference.",
                code="RQ105",
            )
        return self.collect()

    @torch.no_grad()
    def collect(self) -> PreparedModel:
        """Return the calibrated graph with the trained parameters, without submodules.

        Raises:
            ConfigError: a parameter is NaN or infinite.
        """
        prepared = self.source.prepared
        for name, parameter in self.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ConfigError(
                    f"Parameter {name!r} is NaN or infinite: training diverged. Lower the learning "
                    "rate, or go back to an earlier state.",
                    code="RQ101",
                )
        constants = {key: array(value) for key, value in self.fold_constants().items()}
        parameters = {q.group.key: q.qparams for q in self.list_quantizers()}
        mod = replace_constants(prepared.mod, self.source.program, dict(self.floats.items()))
        used = sorted({q.ranges.value for q in self.list_quantizers()})
        choices = {**prepared.choices, "training": f"ranges {', '.join(used)}"}
        return replace(
            prepared, mod=mod, parameters=parameters, constants=constants, choices=choices
        )

    def to_quantized(self) -> tvm.IRModule:
        """Return the integer module of the normal pipeline, with its ledger. The float module if
        the model is not quantized.

        The module in evaluation mode and the integer module agree within one step in every value
        that is computed from the same integers.

        With standalone or custom submodules it is made from the reference form, which includes
        them, for the shapes of the example inputs.

        Raises:
            ConfigError: training diverged.
            ModelError: a custom module has no quantized form that a graph can hold.
        """
        unit = self.source.unit
        if unit is not None:
            mod, _ = load(export(self.to_reference(), unit.examples))
            prepared = unit.prepared
            inputs, outputs = map(list_dtypes, (prepared.inputs, prepared.outputs))
            return lower_module(mod, prepared.backend, inputs, outputs)
        trained, form = self.collect(), self.source.form
        mod = lower_prepared(trained) if trained.plan.groups else trained.mod
        return mod if form is None or form.shapes is None else bind_sizes(mod, form.shapes)

    def to_reference(self) -> ReferenceModule:
        """See `relayquant.torch.convert_to_reference`."""
        trained, unit = self.collect(), self.source.unit
        if unit is None:
            return ReferenceModule(convert_model(trained), trained.graph.inputs)
        parts = {
            path: part.to_reference() if isinstance(part, TrainableModule) else part
            for path in unit.parts
            for part in [self.parts.find(path)]
        }
        return finish_reference(replace(unit, prepared=trained, parts=parts))

    def extra_repr(self) -> str:
        plan = self.source.prepared.plan
        operators = format_count(len(plan.operators), "operator")
        return f"{operators}, {format_count(len(plan.groups), 'set')} of parameters"


def keeping_visitor(name: str, found: dict[str, torch.Tensor]) -> Visitor:
    """Make the function that stores values in `found` when `TorchProgram.run` calls it."""

    def visit(value: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        found[name] = value
        return value, {}

    return visit


def norm_visitor(module: TrainableModule, norm: LiveBatchNorm) -> Visitor:
    """Make the function that `TorchProgram.run` calls after the sum of products of a batch norm."""
    variable = module.find_variable(norm.place.bias)

    def visit(total: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        total, bias = norm(total)
        return total, {variable: module.round_bias(norm.place.bias, bias)}

    return visit


def bind_sizes(mod: tvm.IRModule, shapes: Sequence[Sequence[int]]) -> tvm.IRModule:
    """Bind main to inputs of these shapes."""
    main = mod["main"]
    sizes = {
        dim: size
        for var, shape in zip(main.params, shapes, strict=True)
        for dim, size in zip(var.ty.shape.values, shape, strict=True)
        if isinstance(dim, tirx.Var)
    }
    if not sizes:
        return mod
    bound = main.bind_symbolic_vars(sizes)
    return tvm.IRModule({**dict(mod.functions.items()), mod.get_global_var("main"): bound})


def list_dtypes(values: Sequence[InterfaceValue]) -> dict[str | int, str]:
    """List the requested integer dtypes of inputs or outputs, by number."""
    return {i: value.requested for i, value in enumerate(values) if value.is_integer}


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


def array(tensor: torch.Tensor) -> np.ndarray:
    """Copy to a float32 array."""
    return tensor.detach().numpy().copy()


def check_trainable(prepared: PreparedModel) -> None:
    """Refuse operators that the calibration graph does not compute as the integer module does.

    Raises:
        ConfigError: names the operator and why.
    """
    for operator in prepared.plan.operators:
        reason = ""
        if operator.accumulator is not None:
            reason = (
                "has a narrow accumulator, whose overflow has no gradient: prepare for a backend "
                "without one, and use relayquant.analysis.accumulator_report on the result"
            )
        elif operator.grouped is not None:
            reason = (
                "has a weight with scales by group, which do not train: leave it in float, and "
                "use relayquant.compress_weights on the result"
            )
        elif operator.dynamic is not None:
            reason = (
                "gets its parameters at run time: use an activation that is not dynamic, or "
                "leave it in float"
            )
        if reason:
            raise ConfigError(
                f"Operator {operator.name!r} cannot be trained: it {reason}.", code="RQ206"
            )
    prepared.require_parameters()


def start_constant(prepared: PreparedModel, key: str) -> np.ndarray:
    """Return the start value of a weight or bias for training.

    A weight that calibration fitted is a multiple of its scale. Training starts from the point in
    that step's cell that is nearest to the float weight, so that both the fit and the rounding
    error are kept.
    """
    original, fitted = prepared.graph.constants[key].value, prepared.constants.get(key)
    if fitted is None:
        return original
    group = next((g for g in prepared.plan.groups if g.key == key), None)
    if group is None or group.info.role is not Role.WEIGHT:
        return fitted
    step = reshape_scale(prepared.parameters[key], fitted.ndim)
    half = (0.5 - MARGIN) * step
    return np.clip(original, fitted - half, fitted + half).astype("float32")


def reshape_scale(qparams: QParams, ndim: int) -> np.ndarray:
    """Reshape a scale to broadcast."""
    if qparams.axis is None:
        return qparams.scale
    shape = [1] * ndim
    shape[qparams.axis] = -1
    return qparams.scale.reshape(shape)


def replace_constants(
    mod: tvm.IRModule, program: TorchProgram, floats: Mapping[str, torch.Tensor]
) -> tvm.IRModule:
    """Replace constants of float operators in the prepared module by trained ones."""
    if not program.trained:
        return mod
    new = {
        constant: relax.const(array(floats[name_parameter(f"{name}:{i}")]), "float32")
        for (name, i), constant in program.trained.items()
    }

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        call = binding.value
        if not isinstance(call, Call):
            return emitter.get(call)
        args = [new[arg] if arg in new else emitter.get(arg) for arg in call.args]
        return with_operands(call, args)

    return rewrite_main(mod, visit)
