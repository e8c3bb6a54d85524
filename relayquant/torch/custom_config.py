"""What `relayquant.torch.quantize` is told of single submodules; the names are those of FX's
`PrepareCustomConfig`.

Around the data flow: read before the model is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from relayquant.arguments import check_arguments, check_fields
from relayquant.config import MappingRule, QConfigMapping, Selector
from relayquant.errors import ConfigError, suggest_name


@check_fields
@dataclass(frozen=True)
class SubmoduleRule:
    """Submodules of a path or a class.

    Attributes:
        key: The path of a module ("layer1.0"), or a class, of which subclasses count too.
        qconfig_mapping: How they are quantized by themselves; names in it are paths within.
    """

    key: Any
    qconfig_mapping: QConfigMapping | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str | type):
            raise ConfigError(
                f"PrepareCustomConfig got {self.key!r}; allowed: the path of a module as text, or "
                "a class of modules."
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
            f"PrepareCustomConfig names {name!r}, but the module has no such submodule. {hint}"
        )


@check_fields
@dataclass(frozen=True)
class PrepareCustomConfig:
    """Submodules that are not quantized as the rest is; `set_` methods return new objects.

    Attributes:
        non_traceable: Those that stay in float.
        standalone: Those that are quantized by themselves.
    """

    non_traceable: tuple[SubmoduleRule, ...] = ()
    standalone: tuple[SubmoduleRule, ...] = ()

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
        self, name: str, qconfig_mapping: QConfigMapping | None = None
    ) -> PrepareCustomConfig:
        """The module of this path is quantized by itself, on what it gets from the float model;
        `qconfig_mapping` None: the backend's default. The first rule that finds a module counts.
        """
        return self._set_standalone(name, qconfig_mapping)

    @check_arguments
    def set_standalone_module_class(
        self, kind: type, qconfig_mapping: QConfigMapping | None = None
    ) -> PrepareCustomConfig:
        """As `set_standalone_module_name`, for every module of this class, each by itself."""
        return self._set_standalone(kind, qconfig_mapping)

    def _set_standalone(self, key: Any, mapping: QConfigMapping | None) -> PrepareCustomConfig:
        return replace(self, standalone=(*self.standalone, SubmoduleRule(key, mapping)))

    def extend_mapping(self, mapping: QConfigMapping, module: Any) -> QConfigMapping:
        """`mapping` with a line for each module that stays in float, and none for what is within.

        Raises:
            ConfigError: a rule finds no module.
        """
        paths = [path for rule in self.non_traceable for path in rule.find_paths(module)]
        within = [
            rule for rule in mapping.rules
            if rule.kind in (Selector.MODULE_NAME, Selector.MODULE_NAME_OBJECT_TYPE_ORDER)
            and any(rule.key.startswith(f"{path}.") for path in paths)
        ]  # fmt: skip
        lines = tuple(
            MappingRule(Selector.MODULE_NAME, path, None, optional=True)
            for path in dict.fromkeys(paths)
        )
        kept = mapping.without(within)
        return replace(kept, rules=(*kept.rules, *lines))

    def find_standalone(self, module: Any) -> Iterator[tuple[str, QConfigMapping | None]]:
        """(path, mapping) of every module that is quantized by itself.

        Raises:
            ConfigError: a rule finds no module, or one within another's.
        """
        found: dict[str, QConfigMapping | None] = {}
        for rule in self.standalone:
            for path in rule.find_paths(module):
                found.setdefault(path, rule.qconfig_mapping)
        for path in found:
            outer = next((p for p in found if path.startswith(f"{p}.")), None)
            if outer is not None:
                raise ConfigError(
                    f"PrepareCustomConfig makes {path!r} standalone, and {outer!r}, which holds "
                    "it. Name one of them."
                )
        return iter(found.items())
