"""What functions of this package are told of single submodules, and of what the model takes and
gives; the names are those of FX's `PrepareCustomConfig`.

Around the data flow: read before the model is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from relayquant.base.arguments import check_arguments, check_fields
from relayquant.config import BackendConfig, QConfigMapping
from relayquant.config.mapping import MappingRule, Selector
from relayquant.errors import ConfigError, suggest_name

#: lines of a mapping that go by names, which lie within a module or not
BY_NAME = (Selector.MODULE_NAME, Selector.MODULE_NAME_OBJECT_TYPE_ORDER)


@check_fields
@dataclass(frozen=True)
class SubmoduleRule:
    """Submodules of a path or a class.

    Attributes:
        key: The path of a module ("layer1.0"), or a class, of which subclasses count too.
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
        """Paths of the submodules, none of which lies within another.

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
    """Submodules that are quantized by themselves.

    Attributes:
        qconfig_mapping: How; names in it are paths within. None: the caller's mapping.
        prepare_custom_config: What is not quantized as the rest of it, by paths within, and which
            inputs and outputs are integers.
        backend: Whose operators they are quantized for; None: the caller's.
    """

    qconfig_mapping: QConfigMapping | None = None
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
    """Submodules that are not quantized as the rest is, and inputs and outputs that are integers;
    `set_` methods return new objects.

    Attributes:
        non_traceable: Modules that stay in float.
        standalone: Those that are quantized by themselves.
        custom: Those with an observed form.
        quantized_forms: (observed class, quantized class) of each.
        input_quantized_indexes, output_quantized_indexes: Numbers of the inputs and outputs that
            are integers.
    """

    non_traceable: tuple[SubmoduleRule, ...] = ()
    standalone: tuple[StandaloneRule, ...] = ()
    custom: tuple[CustomRule, ...] = ()
    quantized_forms: tuple[tuple[Any, Any], ...] = ()
    input_quantized_indexes: tuple[int, ...] = ()
    output_quantized_indexes: tuple[int, ...] = ()

    @check_arguments
    def set_non_traceable_module_names(self, names: Iterable[str]) -> PrepareCustomConfig:
        """Modules of these paths, and all within, stay in float."""
        return self._keep_float(names)

    @check_arguments
    def set_non_traceable_module_classes(self, classes: Iterable[type]) -> PrepareCustomConfig:
        """Modules of these classes, and all within, stay in float."""
        return self._keep_float(classes)

    def _keep_float(self, keys: Iterable[Any]) -> PrepareCustomConfig:
        rules = tuple(SubmoduleRule(key) for key in keys)
        return replace(self, non_traceable=(*self.non_traceable, *rules))

    @check_arguments
    def set_standalone_module_name(
        self,
        name: str,
        qconfig_mapping: QConfigMapping | None = None,
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend: BackendConfig | str | None = None,
    ) -> PrepareCustomConfig:
        """The module of this path is quantized by itself, on what it gets from the float model.

        The first rule that finds a module counts. It is computed with the operators that the
        caller's backend has: what that has none for is computed in float, between roundings.

        Args:
            name: The path.
            qconfig_mapping: How it is quantized; names in it are paths within. None: the caller's
                mapping.
            prepare_custom_config: What within stays in float, is standalone or custom in its turn;
                names in it are paths within. Its `set_input_quantized_indexes` and
                `set_output_quantized_indexes` say where integers pass between caller and module:
                on the grid that the module picks, which the caller takes over. Elsewhere they
                pass where both sides have integers anyway.
            backend: What it is quantized for; None: the caller's.
        """
        rule = StandaloneRule(name, qconfig_mapping, prepare_custom_config, backend)
        return replace(self, standalone=(*self.standalone, rule))

    @check_arguments
    def set_standalone_module_class(
        self,
        kind: type,
        qconfig_mapping: QConfigMapping | None = None,
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend: BackendConfig | str | None = None,
    ) -> PrepareCustomConfig:
        """As `set_standalone_module_name`, for every module of this class, each by itself."""
        rule = StandaloneRule(kind, qconfig_mapping, prepare_custom_config, backend)
        return replace(self, standalone=(*self.standalone, rule))

    @check_arguments
    def set_float_to_observed_mapping(
        self, float_class: type, observed_class: type
    ) -> PrepareCustomConfig:
        """Modules of a class have a form that observes: `observed_class.from_float(module)`.

        It is called in place of the module, with floats, when the model runs on the data, and gives
        what the module gives; in `prepare_qat` it trains. `set_observed_to_quantized_mapping`
        says what takes its place then.
        """
        return replace(self, custom=(*self.custom, CustomRule(float_class, observed_class)))

    @check_arguments
    def set_observed_to_quantized_mapping(
        self, observed_class: type, quantized_class: type
    ) -> PrepareCustomConfig:
        """What has observed is replaced by `quantized_class.from_observed(observed)`.

        That takes and gives floats and is a part of the integer module as torch.export writes it
        down: what it quantizes with `torch.ops.quantized_decomposed` becomes integer operators,
        all else of it stays as it is. (FX has this in its `ConvertCustomConfig`.)
        """
        check_builder("set_observed_to_quantized_mapping", quantized_class, "from_observed")
        forms = dict(self.quantized_forms) | {observed_class: quantized_class}
        return replace(self, quantized_forms=tuple(forms.items()))

    @check_arguments
    def set_input_quantized_indexes(self, indexes: Iterable[int]) -> PrepareCustomConfig:
        """The inputs of these numbers, from 0, are integers."""
        return replace(self, input_quantized_indexes=tuple(indexes))

    @check_arguments
    def set_output_quantized_indexes(self, indexes: Iterable[int]) -> PrepareCustomConfig:
        """The outputs of these numbers, from 0, are integers."""
        return replace(self, output_quantized_indexes=tuple(indexes))

    def name_dtypes(self, backend: BackendConfig) -> dict[str, dict[str | int, str]]:
        """`input_dtypes` and `output_dtypes` for the pipeline: integers of a backend's
        activations.
        """
        dtype = backend.default_qconfig.activation.spec.dtype
        return {
            "input_dtypes": dict.fromkeys(self.input_quantized_indexes, dtype),
            "output_dtypes": dict.fromkeys(self.output_quantized_indexes, dtype),
        }

    def extend_mapping(self, mapping: QConfigMapping, module: Any) -> QConfigMapping:
        """`mapping` for the rest of the model: a line for each module that stays in float or is
        quantized by itself, and none for what is within.

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
        if alone:  # their operators may be all that a line selects
            kept = make_optional(kept, (Selector.OBJECT_TYPE, Selector.MODULE_NAME_REGEX))
        lines = (MappingRule(Selector.MODULE_NAME, path, None, optional=True) for path in paths)
        return replace(kept, rules=(*kept.rules, *lines))

    def within(self, path: str, module: Any) -> PrepareCustomConfig:
        """The configuration of `module` for what holds it at `path`.

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
        """(path, rule) of every module that is quantized by itself.

        Raises:
            ConfigError: a rule finds no module, or one within another's.
        """
        return iter(find_apart(self.standalone, module, "standalone").items())

    def find_custom(self, module: Any) -> dict[str, tuple[Any, Any]]:
        """(observed class, quantized class) of every module with such forms, by path.

        Raises:
            ConfigError: a rule finds no module, or one within another's or within a standalone
                one; or there is no quantized form of what observes.
        """
        forms, found = dict(self.quantized_forms), {}
        alone = dict(self.find_standalone(module))
        for path, rule in find_apart(self.custom, module, "custom").items():
            if rule.observed not in forms:
                raise ConfigError(
                    f"PrepareCustomConfig: modules of {rule.observed.__name__} observe, but "
                    "nothing says what they become. Add set_observed_to_quantized_mapping("
                    f"{rule.observed.__name__}, ...).",
                    code="RQ102",
                )
            outer = next((p for p in alone if path == p or path.startswith(f"{p}.")), None)
            if outer is not None:
                raise ConfigError(
                    f"PrepareCustomConfig makes {path!r} custom, and {outer!r}, which holds it, "
                    "standalone. Say so in the PrepareCustomConfig of the standalone module.",
                    code="RQ102",
                )
            found[path] = rule.observed, forms[rule.observed]
        return found


def find_apart(rules: Iterable[Any], module: Any, what: str) -> dict[str, Any]:
    """The first rule of each module that one finds, by path.

    Raises:
        ConfigError: a rule finds no module, or one within another's.
    """
    found: dict[str, Any] = {}
    for rule in rules:
        for path in rule.find_paths(module):
            found.setdefault(path, rule)
    for path in found:
        outer = next((p for p in found if path.startswith(f"{p}.")), None)
        if outer is not None:
            raise ConfigError(
                f"PrepareCustomConfig makes {path!r} {what}, and {outer!r}, which holds it. "
                + (
                    "Name the inner one in the PrepareCustomConfig of the outer one."
                    if what == "standalone"
                    else "Name one of them."
                ),
                code="RQ102",
            )
    return found


def make_optional(mapping: QConfigMapping, kinds: Iterable[Selector]) -> QConfigMapping:
    """The mapping, whose lines of some kinds may select nothing."""
    chosen = tuple(kinds)
    rules = (
        replace(rule, optional=True) if rule.kind in chosen else rule for rule in mapping.rules
    )
    return replace(mapping, rules=tuple(rules))


def check_builder(method: str, kind: Any, builder: str) -> None:
    """Raise ConfigError if a class does not have the method that makes one of another module."""
    if not isinstance(kind, type) or not callable(getattr(kind, builder, None)):
        name = kind.__name__ if isinstance(kind, type) else repr(kind)
        raise ConfigError(
            f"PrepareCustomConfig.{method} got {name}, which has no class method "
            f"`{builder}(module)` that makes it.",
            code="RQ101",
        )
