"""Define-by-run: the prepared model, called to calibrate, and the converted model, called to
use it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import tvm
from torch.utils import _pytree as pytree  # pyright: ignore[reportMissingImports]

from relayquant.config import Unseen
from relayquant.errors import ConfigError, DataError, ModelError, format_count
from relayquant.flow.quantizer import quantize
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import Ledger, read_ledger
from relayquant.stages.compilation import compile
from relayquant.stages.effort import default_mapping
from relayquant.torch.call_form import CallForm, refuse_arrays
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.define_by_run.arguments import (
    FlatArguments,
    Slot,
    join_arguments,
    split_arguments,
)
from relayquant.torch.define_by_run.call_sites import (
    CallSite,
    SiteKey,
    SiteTable,
    join_modules,
    join_path,
)
from relayquant.torch.define_by_run.deferred import ValuePool, compute_result
from relayquant.torch.define_by_run.executing import (
    ADVICE,
    CompiledModule,
    Place,
    RegionRunner,
    RunningCode,
    describe_tensors,
)
from relayquant.torch.define_by_run.forwards import ModuleForward, replacing_forwards
from relayquant.torch.define_by_run.interface import ModelInterface, check_integers, list_tensors
from relayquant.torch.define_by_run.module_calls import find_calls
from relayquant.torch.define_by_run.quantized_regions import (
    QuantizedRegion,
    join_ledgers,
    quantize_regions,
)
from relayquant.torch.define_by_run.recording import KnownOperator, RecordedCall, has_equal_call
from relayquant.torch.define_by_run.settling import settle_constants
from relayquant.torch.define_by_run.submodule_calls import (
    ObservedCall,
    ObservedSubmodules,
    StandaloneModule,
    find_dynamic,
)
from relayquant.torch.define_by_run.tape import ModelConstants, Tape
from relayquant.torch.define_by_run.tensor_file import TensorFile
from relayquant.torch.exporting import check_state, export, load
from relayquant.torch.state import Attributes, find_changed, list_attributes
from relayquant_runtime.vm_errors import read_argument_error


def run_model(
    model: Callable[..., Any], mode: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call the model under a mode. Call sites are searched up to this frame.

    Raises:
        ModelError: the code lets PyTorch compile a part of it.
        DataError: the code fails, and an argument is an array of another package.
    """
    try:
        with mode, torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        if isinstance(error, TypeError):
            try:
                refuse_arrays(pytree.tree_leaves((args, dict(kwargs))))
            except DataError as fault:
                raise fault from error
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        raise ModelError(
            "The model lets PyTorch compile a part of its code (torch.compile, torch.cond, map "
            f"and the like), whose operators cannot be recorded: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]} Write it as plain code: `if`, `for` and `while` "
            "are followed.",
            code="RQ208",
        ) from error


def leaving_autocast() -> contextlib.AbstractContextManager[Any]:
    """Leave the surrounding `torch.autocast`.

    What PyTorch computes for a converted model has the dtypes of calibration. A `torch.autocast`
    inside the model's code still works.
    """
    if torch.is_autocast_enabled("cpu"):
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()


class Uncopied:
    """An object that belongs to one model and its code, and holds compiled code."""

    def __reduce__(self) -> Any:
        """Refuse `copy.deepcopy` and `pickle`.

        Raises:
            ConfigError: always.
        """
        raise self.refuse("cannot be copied or pickled")

    def state_dict(self) -> Any:
        """Refuse. Errors as for `__reduce__`."""
        raise self.refuse("has no state_dict")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse another dtype or device, as of a `torch.nn.Module`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"A {type(self).__name__} has no other dtype or device: it computes float32 and "
            "integers on this CPU. Leave to(), half(), double(), bfloat16() and the like out, and "
            "convert its arguments and results in place of it.",
            code="RQ105",
        )

    half = double = bfloat16 = type = cuda = to

    def refuse(self, what: str) -> ConfigError:
        """Return the error for an attempt to keep the object. It says what can be kept."""
        return ConfigError(
            f"A {type(self).__name__} {what}: it refers to the modules and "
            "code of one model, and to compiled code. Prepare and convert a copy of the float "
            "model instead. Integer modules of a converted model (.modules) can be saved: "
            "relayquant.torch.as_module makes a torch.nn.Module of each, which can be copied, "
            "pickled and has a state_dict.",
            code="RQ105",
        )


class PreparedProgram(Uncopied):
    """A model that is calibrated by calling it. It returns what the float model returns.

    Attributes:
        model: The user's model, which it runs.
        sites: The operators that calls have reached.
        calls: Number of calls.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        settings: QuantizeSettings,
        unseen: Unseen,
        strict_order: bool,
        config: PrepareCustomConfig | None = None,
    ) -> None:
        self.model, self.settings, self.unseen = model, settings, unseen
        self.strict_order = strict_order
        self._table = SiteTable(model, run_model.__code__)
        if any(hasattr(each, "_orig_mod") for each in self._table.submodules):
            raise ModelError(
                "A submodule is compiled by torch.compile, and its operators cannot be recorded. "
                "Prepare the model before parts of it are compiled, or put the attribute _orig_mod "
                "of the submodule in its place.",
                code="RQ208",
            )
        self._constants = ModelConstants(self._table.modules)
        self._file = TensorFile()
        self._evaluation = Evaluation(self._table.submodules)
        self._tapes: list[Tape] = []
        #: for each call, whether it changed an attribute of a module
        self._changes: list[bool] = []
        self._known: dict[SiteKey, KnownOperator] = {}
        self._submodules: ObservedSubmodules | None = None
        self._submodule_calls: dict[int, ObservedCall] = {}
        if config is not None:
            whole, given = join_modules(model), settings.qconfig_mapping
            if config.standalone or config.custom:
                self._submodules = ObservedSubmodules.find(whole, config, given, self._file)
                self._submodule_calls = self._submodules.observe()
            mapping = given or default_mapping(settings.backend, settings.level)
            mapping = config.extend_mapping(mapping, whole)
            self.settings = replace(settings, qconfig_mapping=mapping)
        self._forwards = replace_forwards(self._submodule_calls, self._table.submodules)

    @property
    def sites(self) -> tuple[CallSite, ...]:
        return tuple(self._table.sites.values())

    @property
    def calls(self) -> int:
        return len(self._tapes)

    @property
    def order(self) -> list[CallSite] | None:
        """The operators of the first call. None if the order is free."""
        if not self.strict_order or not self._tapes:
            return None
        return [step.site for step in self._tapes[0].steps]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the float model on representative inputs, and record the call.

        Raises:
            ModelError: with `strict_order`, the order of operators differs from the first call.
        """
        tensors: list[torch.Tensor] = []
        arguments = split_arguments((args, kwargs), tensors)
        recorder = RecordedCall(
            self._table,
            self._constants,
            self._file,
            tensors,
            self.order,
            self._submodule_calls,
            self._known,
        )
        inputs = tuple(map(self._file.append, tensors))
        before = self._list_attributes()
        with self._evaluation, replacing_forwards(self._forwards, recorder):
            result = run_model(self.model, recorder, args, kwargs)
        tape = recorder.finish()
        tape.arguments, tape.inputs = arguments, inputs
        tape.sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        if self.settings.output_dtypes:
            recorder.note_results(list_tensors(result))
        self._tapes.append(tape)
        self._changes.append(bool(find_changed(before, self._list_attributes())))
        return result

    def _list_attributes(self) -> Attributes:
        """Return the current values of the model's attributes."""
        return {
            join_path(root, path): held
            for root, module in self._table.modules.items()
            for path, held in list_attributes(module).items()
        }

    def check_ranges(self) -> None:
        """Do nothing: the first call, in `prepare`, is calibration."""

    def to_quantized(self) -> QuantizedProgram | QuantizedWhole:
        """See `relayquant.torch.convert`."""
        modules = self._table.modules
        tapes = settle_constants(self._tapes, self._constants, modules, self._file)
        whole = self._quantize_whole(tapes)
        if whole is not None:
            return whole
        regions, interface = quantize_regions(tapes, self._constants, self._file, self.settings)
        forms = {} if self._submodules is None else self._submodules.convert(self.settings)
        calls = {} if self._submodules is None else self._submodules.make_calls(forms)
        return QuantizedProgram(
            self.model,
            self._table,
            self._constants,
            regions,
            self.unseen,
            self.order,
            forms,
            calls,
            interface,
        )

    def _quantize_whole(self, tapes: Sequence[Tape]) -> QuantizedWhole | None:
        """Return one integer module of the whole model, if torch.export accepts it."""
        first = tapes[0]
        is_module = isinstance(self.model, torch.nn.Module)
        args, kwargs = first.arguments
        if self._submodules is not None:
            return None  # each has its own place in the code
        if not is_module or kwargs or not all(map(is_flat, args)):
            return None
        for tape in tapes:
            if len(tape.steps) != len(first.steps) or tape.arguments != first.arguments:
                return None
            for step, other in zip(tape.steps, first.steps, strict=True):
                if step.site is not other.site or step.pure is None:
                    return None
                if not has_equal_call(step, other):
                    return None
        if any(tape.has_state for tape in tapes) or any(self._changes[1:] or self._changes):
            return None
        examples = tuple(map(self._file.read, first.inputs))
        try:
            inputs = join_arguments(args, examples)
            shapes = find_dynamic([tape.sizes for tape in tapes])
            program = export(self.model, inputs, dynamic_shapes=shapes)
            mod, params = load(program)
            check_state(self.model, inputs)
        except ModelError:
            return None  # Code that torch.export refuses, and state, is why this package exists.
        if len(mod["main"].params) != len(examples):
            return None

        def iterate() -> Iterator[tuple[Any, ...]]:
            for tape in tapes:
                yield tuple(self._file.read(at).numpy() for at in tape.inputs)

        settings = self.settings
        qmod = quantize(
            mod,
            params,
            iterate,
            qconfig_mapping=settings.qconfig_mapping,
            backend=settings.backend,
            effort=settings.effort,
            observer=settings.observer,
            input_dtypes=settings.input_dtypes,
            output_dtypes=settings.output_dtypes,
        )
        form = CallForm.read(self.model, program, inputs, None, is_free=True)
        return QuantizedWhole(qmod, form)


class QuantizedWhole(Uncopied):
    """A model that is one integer module.

    Attributes:
        mod: The module, the same as from `relayquant.torch.quantize`.
        executable: The module, compiled for this machine.
    """

    def __init__(self, mod: tvm.IRModule, form: CallForm) -> None:
        self.mod, self.executable, self._form = mod, compile(mod), form
        self._module, self._count = CompiledModule(self.executable), len(mod["main"].params)
        values = enumerate(self.ledger.inputs)
        self._integers = [(i, row.qparams) for i, row in values if row.qparams is not None]

    @property
    def modules(self) -> tuple[tvm.IRModule, ...]:
        """The integer modules of the model."""
        return (self.mod,)

    @property
    def ledger(self) -> Ledger:
        """What was quantized, and why other operators were not."""
        return read_ledger(self.mod)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for inputs of the calibrated shapes, in the structure of the float
        model's outputs.

        Raises:
            DataError: an integer input has another dtype, the number or a name of the arguments
                differs, or one is an array of another package.
            ModelError: an input has a size or a dtype that calibration never reached.
        """
        if kwargs:
            args, kwargs = self._form.place(args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) != self._count:
            refuse_arrays(leaves)
            wanted = format_count(self._count, "tensor")
            raise DataError(f"The model takes {wanted}, got {len(tensors)}.", code="RQ302")
        for i, qparams in self._integers:
            check_integers(tensors[i], qparams, f"Input {i} of the model")
        try:
            results = self._module.call(tensors)
        except (RuntimeError, TypeError, ValueError) as error:
            fault = read_argument_error(error)
            if fault is None:
                raise
            form = describe_tensors([tensors[fault.index]])
            raise ModelError(
                f"Input {fault.name!r} is {form}, which calibration never saw; allowed: "
                f"({fault.type}). {ADVICE}.",
                code="RQ208",
            ) from error
        return self._form.build_result(tuple(results))


class QuantizedProgram(Uncopied):
    """A model whose regions are integer modules, called from its own code.

    Several threads may call it, if the model's code allows it.

    Attributes:
        model: The user's model, whose code runs.
        regions: The integer modules, each with the operators that it stands for.
        sites: The operators that calibration reached.
        parts: Replacements of standalone and custom modules, by path: a `StandaloneModule`, or the
            quantized form.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        table: SiteTable,
        constants: ModelConstants,
        regions: Sequence[QuantizedRegion],
        unseen: Unseen,
        order: Sequence[CallSite] | None,
        forms: Mapping[str, Any],
        submodule_calls: Mapping[int, ObservedCall],
        interface: ModelInterface,
    ) -> None:
        self._interface = interface
        self.parts, self._submodule_calls = dict(forms), submodule_calls
        self.model, self.regions = model, tuple(regions)
        self._table, self._unseen, self._order = table, unseen, order
        self._warned: set[CallSite] = set()
        self._evaluation = Evaluation(table.submodules)
        self._thread = threading.local()  # its `pool`: values for later calls
        self._places = find_places(table, self.regions, constants)
        self._calls = find_calls(table.submodules, self._places)
        modules = {id(call.span.module): call.span.module for call in self._calls.values()}
        self._forwards = (
            *map(ModuleForward, modules.values()),
            *replace_forwards(submodule_calls, table.submodules),
        )

    @property
    def sites(self) -> tuple[CallSite, ...]:
        return tuple(self._table.sites.values())

    @property
    def modules(self) -> tuple[tvm.IRModule, ...]:
        """The integer modules of the model."""
        alone = (p.mod for p in self.parts.values() if isinstance(p, StandaloneModule))
        return (*(region.mod for region in self.regions), *alone)

    @property
    def ledger(self) -> Ledger:
        """What was quantized, and why other operators were not, for integer modules and PyTorch."""
        alone = [p.ledger for p in self.parts.values() if isinstance(p, StandaloneModule)]
        joined = join_ledgers(self.regions, self.sites, alone)
        return replace(joined, inputs=self._interface.inputs, outputs=self._interface.outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            ModelError: the call reaches an operator, a size or a constant that calibration never
                reached, unless `unseen` is float; or with `strict_order`, another order.
            DataError: an integer input has another dtype.
        """
        if self._interface.entries:
            args, kwargs = self._interface.enter(args, kwargs)
        code = RunningCode(
            self._table,
            self._places,
            self._unseen,
            self._order,
            self._warned,
            self._find_pool(),
            self._calls,
            self._submodule_calls,
        )
        with self._evaluation, replacing_forwards(self._forwards, code), leaving_autocast():
            result = run_model(self.model, code, args, kwargs)
        if code.region_pass is not None:
            code.region_pass.compute_in_float()
        if self._interface.exits:
            return self._interface.leave(result)
        return compute_result(result)

    def _find_pool(self) -> ValuePool:
        """Return the reusable values of this thread."""
        if not hasattr(self._thread, "pool"):
            self._thread.pool = ValuePool()
        return self._thread.pool


def replace_forwards(
    calls: Mapping[int, ObservedCall], modules: Sequence[torch.nn.Module]
) -> tuple[ModuleForward, ...]:
    """Return replacements for the `forward` of modules that are called differently."""
    return tuple(ModuleForward(module) for module in modules if id(module) in calls)


def find_places(
    table: SiteTable, regions: Sequence[QuantizedRegion], constants: ModelConstants
) -> dict[SiteKey, Place]:
    """Map each operator to where it runs."""
    keys = {site: key for key, site in table.sites.items()}
    places: dict[CallSite, Place] = {}
    for region in regions:
        runner = RegionRunner(region, constants)
        for number, step in enumerate(region.region.steps):
            site, call = step.step.site, step.step.call
            (caller, instruction), *_ = (*keys[site][2], (0, -1))
            places[site] = Place(
                site,
                runner,
                number,
                FlatArguments.of(call.arguments),
                call.function,
                caller,
                instruction,
            )
        runner.places = tuple(places[site] for site in runner.region.sites)
    return {key: places.get(site, Place(site)) for key, site in table.sites.items()}


class Evaluation:
    """A context with all modules in the modes that `eval()` gives them, which may be training where
    a class has its own `train`. At the end they return to their previous mode.

    Several threads may be inside: the last one to leave restores the modes.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules, self._training, self._users = tuple(modules), [], 0
        parts = {part for module in modules for part in module.children()}
        has_own = any(map(has_own_modes, modules))
        self._roots = [each for each in modules if each not in parts] if has_own else []
        self._kept: set[torch.nn.Module] = set()
        self._changing = threading.Lock()

    def __enter__(self) -> None:
        with self._changing:
            training = [module for module in self._modules if module.training]
            self._training += [module for module in training if module not in self._kept]
            self._users += 1
            for module in training if not self._roots else ():
                module.training = False
            for module in self._roots:
                module.eval()
            if self._roots:
                self._kept = {module for module in self._modules if module.training}

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._users -= 1
            if not self._users:
                for module in self._kept:
                    module.training = False
                for module in self._training:
                    module.training = True
                self._training, self._kept = [], set()


def has_own_modes(module: torch.nn.Module) -> bool:
    """Whether its class says itself what `train` or `eval` change."""
    kind, usual = type(module), torch.nn.Module
    return kind.train is not usual.train or kind.eval is not usual.eval


def is_flat(argument: Any) -> bool:
    """Whether an argument is a tensor."""
    return isinstance(argument, Slot)
