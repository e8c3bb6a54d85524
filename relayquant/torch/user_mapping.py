"""Lines of a QConfigMapping for classes of modules: their modules are looked up in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relayquant.config import QConfigMapping
from relayquant.config.mapping import Selector
from relayquant.config.torch_names import name_class
from relayquant.errors import ConfigError


def find_classes(mapping: Any, module: Any) -> Any:
    """Return the mapping with the paths of the modules of each class. Optional lines for classes
    that the model does not have are left out.

    Raises:
        ConfigError: the model has no module of a class.
    """
    if not isinstance(mapping, QConfigMapping):
        return mapping  # None, or a wrong type, which the call that gets it refuses
    if all(rule.kind is not Selector.MODULE_CLASS for rule in mapping.rules):
        return mapping
    paths: dict[str, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for kind in type(part).__mro__:
            paths.setdefault(name_class(kind), []).append(path)
    rules = []
    for rule in mapping.rules:
        if rule.kind is Selector.MODULE_CLASS:
            found = tuple(paths.get(rule.key, ()))
            if not found and rule.optional:
                continue
            if not found:
                known = dict.fromkeys(name_class(type(part)) for part in module.modules())
                raise ConfigError(
                    f"QConfigMapping: {rule.description}: the model has no module of this class. "
                    f"Known: {', '.join(known)}.",
                    code="RQ103",
                )
            rule = replace(rule, modules=found)
        rules.append(rule)
    return replace(mapping, rules=tuple(rules))
