"""Define-by-run: calls of standalone and custom modules. Each is one operator for the calling code.

In calibration, the float module or the observed form is called, and its calls and results are
stored. After `convert`, the separate integer module or the quantized form is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import tvm
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.overrides import handle_torch_function  # pyright: ignore[reportMissingImports]

from relayquant.base.qtypes import QParams
from relayquant.errors import ModelError
from relayquant.flow.quantizer import quantize
from relayquant.flow.settings import QuantizeSettings
from relayquant.ir.ledger import Ledger, read_ledger
from relayquant.stages.compilation import compile
from relayquant.stages.effort import default_mapping
from relayquant.torch.custom_config import PrepareCustomConfig, StandaloneRule
from relayquant.torch.define_by_run.deferred import dequantize_tensor, quantize_tensor
from relayquant.torch.define_by_run.executing import CompiledModule
from relayquant.torch.define_by_run.functions import SubmoduleFunction
from relayquant.torch.define_by_run.tensor_file import TensorFile
from relayquant.torch.exported import apply_config
from relayquant.torch.exporting import load_module
from relayquant.torch.standalone import Wrapper, call_builder, place_in_wrapper
from relayquant.torch.submodule_cut import TensorTree


class ObservedCall:
    """A call of a standalone or custom module. Same interface as `forwards.ModuleCall`."""

    def __init__(self, function: SubmoduleFunction) -> None:
        self.function = function

    def play(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module as one operator, visible to everything that watches operators."""
        tensors = [*args, *kwargs.values()]
        return handle_torch_function(self.function, tensors, *args, **kwargs)

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Nothing to learn."""

    def end(self, caller: Any) -> None:
        """Nothing to end."""

    def learn(self, recorded: Any, result: Any) -> None:
        """Nothing to learn."""


class ObservedStandalone:
    """A standalone module during calibration: it runs in float, and its arguments are stored."""

    def __init__(self, module: nn.Module, path: str, file: TensorFile) -> None:
        self._module, self._path, self._file = module, path, file
        self._calls: list[tuple[int, ...]] = []
        self._form: TensorTree | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            ModelError: an argument is not a tensor, or the module writes into one.
        """
        if kwargs or not all(isinstance(value, torch.Tensor) for value in args):
            raise ModelError(
                f"Module {self._path!r} is to be quantized separately, but is not called with "
                "positional tensors only. Choose an inner or an outer module.",
                code="RQ208",
            )
        versions = [value._version for value in args]
        self._calls.append(tuple(map(self._file.append, args)))
        result = type(self._module).forward(self._module, *args)
        if [value._version for value in args] != versions:
            raise ModelError(
                f"Module {self._path!r} is to be quantized separately, but writes into one of its "
                "arguments. An integer module cannot do that. Choose an outer module, or write "
                "it without in-place operators.",
                code="RQ208",
            )
        self._form = TensorTree.split(result)[0]
        return result

    def quantize(
        self, whole: nn.Module, rule: StandaloneRule, given: Any, settings: QuantizeSettings
    ) -> StandaloneModule | None:
        """Return the separate integer module. None if it was not called.

        Args:
            whole: The module that holds it, at its path.
            given: The mapping of `prepare`.
        """
        if self._form is None:
            return None
        mapping = given or default_mapping(settings.backend, settings.level)
        wrapper, config, given = place_in_wrapper(whole, self._path, rule, mapping)
        calls = [tuple(map(self._file.read, call)) for call in self._calls]
        options = {
            "backend": rule.backend or settings.backend,
            "effort": settings.effort,
            "observer": settings.observer,
            "qconfig_mapping": given,
        }
        arrays = [tuple(tensor.numpy() for tensor in call) for call in calls]
        module, options = apply_config(wrapper, config, calls[0], arrays, options)
        shapes = find_dynamic([tuple(tuple(t.shape) for t in call) for call in calls])
        if shapes is not None and isinstance(wrapper, Wrapper):
            shapes = (shapes,)
        mod, params = load_module(module, calls[0], dynamic_shapes=shapes)
        qmod = quantize(mod, params, arrays, **options)
        prefix = "" if isinstance(wrapper, Wrapper) else f"{self._path}."
        return StandaloneModule(qmod, prefix, self._form)


def find_dynamic(sizes: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[Any, ...] | None:
    """Return dynamic shapes for `torch.export` from the sizes in each call: the sizes that
    differ. None if all are equal.
    """
    dims = tuple(
        {
            axis: torch.export.Dim.AUTO
            for axis in range(len(shape))
            if len({size[k][axis] for size in sizes}) > 1
        }
        for k, shape in enumerate(sizes[0])
    )
    return dims if any(dims) else None


class StandaloneModule:
    """A converted standalone module: a separate integer module that takes and returns floats.

    Attributes:
        mod: The integer module. If its configuration has integer inputs and outputs, they are
            rounded here.
    """

    def __init__(self, mod: tvm.IRModule, prefix: str, form: TensorTree) -> None:
        self.mod, self._form = mod, form
        ledger = read_ledger(mod)
        self._prefix = prefix
        self._module = CompiledModule(compile(mod))
        self._inputs = find_qparams(ledger.inputs)
        self._outputs = find_qparams(ledger.outputs)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the module, with names of the whole model."""
        ledger = read_ledger(self.mod)
        rows = (replace(row, name=f"{self._prefix}{row.name}") for row in ledger.rows)
        return replace(ledger, rows=tuple(rows))

    def __call__(self, *args: torch.Tensor) -> Any:
        """Return what the float module would return."""
        given = [*map(quantize_by, args, self._inputs)]
        results = self._module.call(given)
        return self._form.join([*map(dequantize_by, results, self._outputs)])


def find_qparams(values: Sequence[Any]) -> list[QParams | None]:
    """Find the parameters of inputs or outputs. None for float ones."""
    return [value.qparams if value.is_integer else None for value in values]


def quantize_by(tensor: torch.Tensor, qparams: QParams | None) -> torch.Tensor:
    """Quantize a float tensor for a module."""
    return tensor if qparams is None else quantize_tensor(tensor, qparams)


def dequantize_by(tensor: torch.Tensor, qparams: QParams | None) -> torch.Tensor:
    """Dequantize a tensor from a module."""
    return tensor if qparams is None else dequantize_tensor(tensor, qparams)


@dataclass(frozen=True, eq=False)
class ObservedSubmodules:
    """The standalone and custom modules of a prepared model.

    Attributes:
        whole: The module that holds them, at their paths.
        standalone: Each with its rule, by path.
        observed: The observed form of each custom module, and the class of the quantized form.
        mapping: The user's mapping.
    """

    whole: nn.Module
    standalone: Mapping[str, tuple[ObservedStandalone, StandaloneRule]]
    observed: Mapping[str, tuple[nn.Module, Any]]
    mapping: Any

    @staticmethod
    def find(
        whole: nn.Module, config: PrepareCustomConfig, mapping: Any, file: TensorFile
    ) -> ObservedSubmodules:
        """Find the modules that a configuration names.

        Raises:
            ConfigError: a rule finds none.
        """
        alone = {
            path: (ObservedStandalone(whole.get_submodule(path), path, file), rule)
            for path, rule in config.find_standalone(whole)
        }
        custom = {
            path: (call_builder(kind.from_float, whole.get_submodule(path), path).eval(), quantized)
            for path, (kind, quantized) in config.find_custom(whole).items()
        }
        return ObservedSubmodules(whole, alone, custom, mapping)

    def make_calls(self, forms: Mapping[str, Callable[..., Any]]) -> dict[int, ObservedCall]:
        """Map id of a module to the call of its replacement, for modules with a path here."""
        calls: dict[int, ObservedCall] = {}
        for path, form in forms.items():
            reason = (
                "it is standalone: a separate integer module"
                if path in self.standalone
                else "it is custom: its quantized form is called"
            )
            module = self.whole.get_submodule(path)
            function = SubmoduleFunction(type(module).__name__, form, reason)
            calls[id(module)] = ObservedCall(function)
        return calls

    def observe(self) -> dict[int, ObservedCall]:
        """Return the modules that are called during calibration."""
        forms: dict[str, Callable[..., Any]] = {p: form for p, (form, _) in self.observed.items()}
        forms.update((path, form) for path, (form, _) in self.standalone.items())
        return self.make_calls(forms)

    def convert(self, settings: QuantizeSettings) -> dict[str, Any]:
        """Return the modules that are called after `convert`, by path.

        Raises:
            ModelError: a custom module's `from_observed` returns no module.
        """
        forms: dict[str, Any] = {}
        for path, (observed, quantized) in self.observed.items():
            forms[path] = call_builder(quantized.from_observed, observed, path).eval()
        for path, (observed, rule) in self.standalone.items():
            form = observed.quantize(self.whole, rule, self.mapping, settings)
            if form is not None:
                forms[path] = form
        return forms
