"""A prepared model as a `torch.nn.Module`: torch computes its calibration graph, and its
weights, biases and scales train.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax, tirx
from tvm.ir import Call

from relayquant.config import Ranges
from relayquant.errors import ConfigError, format_count
from relayquant.flow.pipeline import convert_model, lower_module, lower_prepared
from relayquant.ir.ledger import InterfaceValue
from relayquant.ir.rewrite import Emitter, rewrite_main
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.call_form import CallForm
from relayquant.torch.exporting import export, load
from relayquant.torch.interpreter.program import (
    ConstantPlace,
    TorchProgram,
    Values,
    Visitor,
    build_program,
)
from relayquant.torch.interpreter.reference_module import ReferenceModule
from relayquant.torch.standalone import Unit, finish_reference
from relayquant.torch.submodule_cut import Parts, name_parameter
from relayquant.torch.training.batch_norm import FoldedNorm
from relayquant.torch.training.live_batch_norm import LiveBatchNorm
from relayquant.torch.training.origins import Origins, Tie, find_ties, is_frozen
from relayquant.torch.training.rounding import MOMENTUM, FakeQuantize, align_channels
from relayquant.torch.training.start import check_trainable, start_constant
from relayquant.torch.training.sums import (
    Sum,
    find_bias_scales,
    find_chained,
    find_input_groups,
    find_sums,
)

#: smaller integers are exact in float32
EXACT_INTEGERS = 2**24
#: int32 cannot hold a bias of this number of units
MOST_UNITS = 2**31


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
        module: nn.Module | None = None,
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
        #: constants that are another one, by their name in `named_parameters` before
        self.ties: dict[str, Tie] = {}
        if module is not None:
            self.follow_module(module)

    def follow_module(self, module: nn.Module) -> None:
        """Freeze what is frozen in the module, or a buffer there, and tie what is one tensor there.

        Raises:
            ConfigError: tied constants became different in the preparation.
        """
        prepared, program = self.source.prepared, self.source.program
        known = Origins(module, prepared)
        found: dict[str, list[torch.Tensor]] = {}
        plain: dict[str, torch.Tensor] = {}
        for key, constant in prepared.graph.constants.items():
            name = f"weights.{name_parameter(key)}"
            if name_parameter(key) in self.weights:
                found[name] = known.find_constant(key, constant.value.size)
                plain[name] = torch.from_numpy(np.array(constant.value))
        for norm in self.list_norms():
            key = norm.place.weight
            factor = norm.find_factor().detach()
            name = f"weights.{name_parameter(key)}"
            folded = plain[name]
            plain[name] = folded / align_channels(factor, folded, norm.place.weight_axis)
            tensors = known.find_norm(norm.place.norm.name)
            for own, tensor in zip((norm.gamma, norm.beta), tensors, strict=False):
                own.requires_grad_(tensor.requires_grad)
        for place, constant in program.trained.items():
            name = f"floats.{name_parameter(f'{place[0]}:{place[1]}')}"
            value = program.constants[constant]
            found[name], plain[name] = known.find_float(place, value.numpy()), value
        is_complete = known.covers(found.values())
        for name, tensors in found.items():
            is_built = is_complete and not tensors  # a constant that forward builds
            if is_built or is_frozen(tensors):
                self.get_parameter(name).requires_grad_(False)
        self.ties = dict(find_ties(found, plain))
        with torch.no_grad():
            for name, tie in self.ties.items():
                self.get_parameter(tie.source).copy_(plain[tie.source])
                kind, _, key = name.partition(".")
                del self.get_submodule(kind)[key]  # pyright: ignore[reportIndexIssue]

    def read_parameter(self, name: str) -> torch.Tensor:
        """Return a trained constant by its name, also one that is tied to another."""
        tie = self.ties.get(name)
        return (
            self.get_parameter(name)
            if tie is None
            else self.get_parameter(tie.source).permute(tie.axes)
        )

    def list_floats(self) -> dict[ConstantPlace, torch.Tensor]:
        """Return the trained constants of float operators, by place."""
        return {
            (name, i): self.read_parameter(f"floats.{name_parameter(f'{name}:{i}')}")
            for name, i in self.source.program.trained
        }

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply what `to`, `half`, `double` and the like do to each tensor.

        Raises:
            ConfigError: it makes another dtype of float32.
        """
        dtype = fn(torch.zeros(1)).dtype
        if dtype != torch.float32:
            raise ConfigError(
                f"A trainable module computes in float32, as the integer module does between its "
                f"integers, got {dtype}; allowed: float(), and to(device). Leave the conversion "
                "out, or convert the module's results.",
                code="RQ105",
            )
        return super()._apply(fn, recurse)

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
        floats = self.list_floats()
        trained = {constant: floats[place] for place, constant in program.trained.items()}
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
        names = {key: f"weights.{name_parameter(key)}" for key in graph.constants}
        found = {
            key: self.read_parameter(name)
            for key, name in names.items()
            if name in self.ties or name_parameter(key) in self.weights
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
        mod = replace_constants(prepared.mod, self.source.program, self.list_floats())
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


def array(tensor: torch.Tensor) -> np.ndarray:
    """Copy to a float32 array."""
    return tensor.detach().numpy().copy()


def replace_constants(
    mod: tvm.IRModule, program: TorchProgram, floats: Mapping[ConstantPlace, torch.Tensor]
) -> tvm.IRModule:
    """Replace constants of float operators in the prepared module by trained ones."""
    if not program.trained:
        return mod
    new = {
        constant: relax.const(array(floats[place]), "float32")
        for place, constant in program.trained.items()
    }

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        call = binding.value
        if not isinstance(call, Call):
            return emitter.get(call)
        args = [new[arg] if arg in new else emitter.get(arg) for arg in call.args]
        return with_operands(call, args)

    return rewrite_main(mod, visit)
