"""`PrepareCustomConfig`: settings for single submodules, and for integer inputs and outputs.

The names are those of FX's `PrepareCustomConfig`. It is read before the model is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from relayquant.base.arguments import check_arguments, check_fields
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.config.mapping import MappingRule, Selector
from relayquant.errors import ConfigError, suggest_name

#: kinds of mapping lines that select by name, so they belong to one module
BY_NAME = (Selector.MODULE_NAME, Selector.MODULE_NAME_OBJECT_TYPE_ORDER)


@check_fields
@dataclass(frozen=True)
class SubmoduleRule:
    """Submodules of a path or a class.

    Attributes:
        key: The path of a module ("layer1.0"), or a class. Subclasses count too.
    """

    key: Any

    def __post_init__(self) -> None:
        if not isinstance(self.key, str | type):
            raise ConfigError(
                f"PrepareCustomConfig got {self.key!r}; allowed: the path of a module as text, or "
                "a class of modules.",
                code="RQ101",
            )

    def find_paths(self, module: Any) -> list[str]:
        """Find the paths of the submodules. None of them lies inside another.

        Raises:
            ConfigError: there are none.
        """
        parts = dict(module.named_modules())
        if isinstance(self.key, str):
            found = [self.key] if self.key in parts else []
        else:
            found = [path for path, part in parts.items() if isinstance(part, self.key)]
        found = [path for path in found if path]
        if found:
            return [path for path in found if not any(path.startswith(f"{p}.") for p in found)]
        name = self.key if isinstance(self.key, str) else self.key.__name__
        known = [path or "the module itself" for path in parts]
        hint = suggest_name(name, known) if isinstance(self.key, str) else ""
        raise ConfigError(
            f"PrepareCustomConfig names {name!r}, but the module has no such submodule. {hint}",
            code="RQ103",
        )


@check_fields
@dataclass(frozen=True)
class StandaloneRule(SubmoduleRule):
    """Submodules that are quantized separately.

    Attributes:
        qconfig_mapping: Their mapping, as for `relayquant.torch.quantize`, with names relative to
            the submodule. None: the caller's mapping.
        prepare_custom_config: Exceptions inside the submodule, with relative paths, and its integer
            inputs and outputs.
        backend: Their backend. None: the caller's backend.
    """

    qconfig_mapping: Any = None
    prepare_custom_config: PrepareCustomConfig | None = None
    backend: BackendConfig | str | None = None


@check_fields
@dataclass(frozen=True)
class CustomRule(SubmoduleRule):
    """Submodules of a class that has an observed form.

    Attributes:
        observed: A class of modules with `from_float(module)`.
    """

    observed: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_builder("set_float_to_observed_mapping", self.observed, "from_float")


@check_fields
@dataclass(frozen=True)
class PrepareCustomConfig:
    """Submodules with their own settings, and integer inputs and outputs. `set_` methods return new
    objects.

    Attributes:
        non_traceable: Modules that stay in float.
        standalone: Modules that are quantized separately.
        custom: Modules with an observed form.
        quantized_forms: (observed class, quantized class) of each.
        input_quantized_indexes, output_quantized_indexes: Numbers of the integer inputs and
        outputs.
    """

    non_traceable: tuple[SubmoduleRule, ...] = ()
    standalone: tuple[StandaloneRule, ...] = ()
    custom: tuple[CustomRule, ...] = ()
    quantized_forms: tuple[tuple[Any, Any], ...] = ()
    input_quantized_indexes: tuple[int, ...] = ()
    output_quantized_indexes: tuple[int, ...] = ()

    @check_arguments
    def set_non_traceable_module_names(self, names: Iterable[str]) -> PrepareCustomConfig:
        """Keep modules of these paths, and everything inside, in float."""
        return self._keep_float(names)

    @check_arguments
    def set_non_traceable_module_classes(self, classes: Iterable[type]) -> PrepareCustomConfig:
        """Keep modules of these classes, and everything inside, in float."""
        return self._keep_float(classes)

    def _keep_float(self, keys: Iterable[Any]) -> PrepareCustomConfig:
        rules = tuple(SubmoduleRule(key) for key in keys)
        return replace(self, non_traceable=(*self.non_traceable, *rules))

    @check_arguments
    def set_standalone_module_name(
        self,
        name: str,
        qconfig_mapping: Any = None,
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend: BackendConfig | str | None = None,
    ) -> PrepareCustomConfig:
        """Quantize the module of this path separately, on its inputs in the float model.

        The first rule that matches a module counts. The module is computed with operators of the
        caller's backend. An operator that this backend lacks is computed in float, between
        roundings.

        Args:
            name: The path.
            qconfig_mapping: Its mapping, with names relative to the module. None: the caller's
                mapping.
            prepare_custom_config: Exceptions inside the module, with relative names. Its
                `set_input_quantized_indexes` and `set_output_quantized_indexes` select where
                integers pass between caller and module, with the parameters that the module chooses
                and the caller adopts. Elsewhere integers pass if both sides have integers anyway.
            backend: Its backend. None: the caller's backend.
        """
        rule = StandaloneRule(name, qconfig_mapping, prepare_custom_config, backend)
        return replace(self, standalone=(*self.standalone, rule))

    @check_arguments
    def set_standalone_module_class(
        self,
        kind: type,
        qconfig_mapping: Any = None,
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend: BackendConfig | str | None = None,
    ) -> PrepareCustomConfig:
        """Same as `set_standalone_module_name` for every module of this class, each separately."""
        rule = StandaloneRule(kind, qconfig_mapping, prepare_custom_config, backend)
        return replace(self, standalone=(*self.standalone, rule))

    @check_arguments
    def set_float_to_observed_mapping(
        self, float_class: type, observed_class: type
    ) -> PrepareCustomConfig:
        """Replace modules of a class during calibration by `observed_class.from_float(module)`.

        The observed form is called instead of the module, with floats, when the model runs on the
        data, and returns what the module returns. In `prepare_qat` it trains.
        `set_observed_to_quantized_mapping` selects its replacement in the quantized model.
        """
        return replace(self, custom=(*self.custom, CustomRule(float_class, observed_class)))

    @check_arguments
    def set_observed_to_quantized_mapping(
        self, observed_class: type, quantized_class: type
    ) -> PrepareCustomConfig:
        """Replace observed forms after calibration by `quantized_class.from_observed(observed)`.

        The quantized form takes and returns floats. It becomes a part of the integer module as
        torch.export records it: operators of `torch.ops.quantized_decomposed` become integer
        operators, all others stay unchanged. (FX has this in its `ConvertCustomConfig`.)
        """
        check_builder("set_observed_to_quantized_mapping", quantized_class, "from_observed")
        forms = dict(self.quantized_forms) | {observed_class: quantized_class}
        return replace(self, quantized_forms=tuple(forms.items()))

    @check_arguments
    def set_input_quantized_indexes(self, indexes: Iterable[int]) -> PrepareCustomConfig:
        """Make the inputs of these numbers, from 0, integers."""
        return replace(self, input_quantized_indexes=tuple(indexes))

    @check_arguments
    def set_output_quantized_indexes(self, indexes: Iterable[int]) -> PrepareCustomConfig:
        """Make the outputs of these numbers, from 0, integers."""
        return replace(self, output_quantized_indexes=tuple(indexes))

    def name_dtypes(self, backend: BackendConfig) -> dict[str, dict[str | int, str]]:
        """Return `input_dtypes` and `output_dtypes` for the pipeline: the dtype of the
        backend's activations.
        """
        dtype = backend.activation_dtype
        return {
            "input_dtypes": dict.fromkeys(self.input_quantized_indexes, dtype),
            "output_dtypes": dict.fromkeys(self.output_quantized_indexes, dtype),
        }

    def extend_mapping(self, mapping: QConfigMapping, module: Any) -> QConfigMapping:
        """Extend `mapping` for the rest of the model.

        Adds a line for each module that stays in float or is quantized separately. Lines for
        modules inside are left out.

        Raises:
            ConfigError: a rule finds no module.
        """
        floats = [path for rule in self.non_traceable for path in rule.find_paths(module)]
        alone = [path for path, _ in self.find_standalone(module)]
        paths = dict.fromkeys([*floats, *alone])
        within = [
            rule for rule in mapping.rules
            if rule.kind in BY_NAME
            and any(rule.key == path or rule.key.startswith(f"{path}.") for path in paths)
        ]  # fmt: skip
        kept = mapping.without(within)
        if alone:  # all operators that a line selects may be inside such modules
            kinds = Selector.OBJECT_TYPE, Selector.MODULE_CLASS, Selector.MODULE_NAME_REGEX
            kept = make_optional(kept, kinds)
        lines = (MappingRule(Selector.MODULE_NAME, path, None, optional=True) for path in paths)
        return replace(kept, rules=(*kept.rules, *lines))

    def within(self, path: str, module: Any) -> PrepareCustomConfig:
        """Return the configuration for the contents of `module`, which is at `path`.

        Raises:
            ConfigError: a rule finds no module.
        """

        def move(rules: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(
                replace(rule, key=f"{path}.{each}")
                for rule in rules
                for each in rule.find_paths(module)
            )

        return replace(
            self,
            non_traceable=move(self.non_traceable),
            standalone=move(self.standalone),
            custom=move(self.custom),
        )

    def find_standalone(self, module: Any) -> Iterator[tuple[str, StandaloneRule]]:
        """Find (path, rule) of every module that is quantized separately.

        Raises:
            ConfigError: a rule finds no module, or a module inside another rule's module.
        """
        return iter(find_apart(self.standalone, module, "standalone").items())

    def find_custom(self, module: Any) -> dict[str, tuple[Any, Any]]:
        """Find (observed class, quantized class) of every module with these forms, by path.

        Raises:
            ConfigError: a rule finds no module, or a module inside another rule's module or inside
                a standalone module; or an observed form has no quantized form.
        """
        forms, found = dict(self.quantized_forms), {}
        alone = dict(self.find_standalone(module))
        for path, rule in find_apart(self.custom, module, "custom").items():
            if rule.observed not in forms:
                raise ConfigError(
                    f"PrepareCustomConfig: observed modules of {rule.observed.__name__} have no "
                    "quantized form. Add "
                    f"set_observed_to_quantized_mapping({rule.observed.__name__}, ...).",
                    code="RQ102",
                )
            outer = next((p for p in alone if path == p or path.startswith(f"{p}.")), None)
            if outer is not None:
                raise ConfigError(
                    f"PrepareCustomConfig makes {path!r} custom, but it is inside {outer!r}, "
                    "which is standalone. Name it in the PrepareCustomConfig of the standalone "
                    "module instead.",
                    code="RQ102",
                )
            found[path] = rule.observed, forms[rule.observed]
        return found


def find_apart(rules: Iterable[Any], module: Any, what: str) -> dict[str, Any]:
    """Map each module that a rule finds to its first rule, by path.

    Raises:
        ConfigError: a rule finds no module, or a module inside another rule's module.
    """
    found: dict[str, Any] = {}
    for rule in rules:
        for path in rule.find_paths(module):
            found.setdefault(path, rule)
    for path in found:
        outer = next((p for p in found if path.startswith(f"{p}.")), None)
        if outer is not None:
            raise ConfigError(
                f"PrepareCustomConfig makes {path!r} {what}, and also {outer!r}, which contains "
                "it. "
                + (
                    "Name the inner one in the PrepareCustomConfig of the outer one."
                    if what == "standalone"
                    else "Name one of them."
                ),
                code="RQ102",
            )
    return found


def make_optional(mapping: QConfigMapping, kinds: Iterable[Selector]) -> QConfigMapping:
    """Return the mapping with lines of some kinds marked as optional: they may match nothing."""
    chosen = tuple(kinds)
    rules = (
        replace(rule, optional=True) if rule.kind in chosen else rule for rule in mapping.rules
    )
    return replace(mapping, rules=tuple(rules))


def check_builder(method: str, kind: Any, builder: str) -> None:
    """Raise ConfigError if a class lacks the class method that builds it from a module."""
    if not isinstance(kind, type) or not callable(getattr(kind, builder, None)):
        name = kind.__name__ if isinstance(kind, type) else repr(kind)
        raise ConfigError(
            f"PrepareCustomConfig.{method} got {name}, which has no class method "
            f"`{builder}(module)`. Add it to the class.",
            code="RQ101",
        )
