"""The QConfigMapping that a user gives for a PyTorch model -> the mapping that annotate reads.

Objects of `torch.ao.quantization` are translated, and the modules of each class are looked up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relayquant.base.arguments import check_type
from relayquant.config import QConfigMapping
from relayquant.config.mapping import Selector
from relayquant.config.torch_names import name_class
from relayquant.errors import ConfigError
from relayquant.stages.backends import resolve_backend


def read_mapping(given: Any, module: Any, backend: Any) -> Any:
    """Return the mapping of a model as `relayquant.quantize` takes it. None stays None.

    Args:
        given: A QConfigMapping, or a `torch.ao.quantization` QConfigMapping or QConfig.
        module: The model, a `torch.nn.Module`.
        backend: As for `relayquant.quantize`.

    Raises:
        ConfigError: it is something else, or a part of it has no counterpart here; or the model has
            no module of a class.
    """
    from relayquant.torch.ao_config import is_from_torch, read_ao_mapping

    if is_from_torch(given):
        given = read_ao_mapping(given, resolve_backend(backend).default_qconfig)
    if given is None:
        return None
    check_type(given, QConfigMapping, "qconfig_mapping")
    return find_classes(given, module)


def find_classes(mapping: QConfigMapping, module: Any) -> QConfigMapping:
    """Return the mapping with the paths of the modules of each class. Optional lines for classes
    that the model does not have are left out.

    Raises:
        ConfigError: the model has no module of a class.
    """
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
