"""Frozen values <-> plain data (what JSON and TOML hold); errors name the wrong key and the nearest
right one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from relayquant.errors import ConfigError, suggest_name

EnumT = TypeVar("EnumT", bound=enum.Enum)
SettingsT = TypeVar("SettingsT", bound="NamedSettings")


def check_mapping(data: object, where: str) -> Mapping[str, Any]:
    """`data` if it is a dict with text keys.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{where} is {data!r}; allowed: a dict with text keys.")
    return data


def check_keys(
    data: object, allowed: Iterable[str], where: str, required: Iterable[str] = ()
) -> Mapping[str, Any]:
    """`data` if it is a dict with these keys only, and all `required` ones.

    Raises:
        ConfigError: names the first wrong key and the nearest right one, or the missing keys.
    """
    found, allowed = check_mapping(data, where), tuple(allowed)
    for key in found:
        if key not in allowed:
            raise ConfigError(f"{where} has no key {key!r}. {suggest_name(key, allowed)}")
    missing = [key for key in required if key not in found]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(map(repr, missing))}.")
    return found


def check_list(data: object, where: str) -> list[Any] | tuple[Any, ...]:
    """`data` if it is a list or tuple; ConfigError if not."""
    if not isinstance(data, list | tuple):
        raise ConfigError(f"{where} is {data!r}; allowed: a list.")
    return data


def read_enum(kind: type[EnumT], value: object, where: str) -> EnumT:
    """The member of an enum by value.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    for member in kind:
        if value == member.value:
            return member
    raise ConfigError(f"{where} is {value!r}. {suggest_name(str(value), [m.value for m in kind])}")


def to_plain(value: Any) -> Any:
    """A field's value as plain data: enums by value, tuples as lists."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def to_tuple(value: Any) -> Any:
    """Lists as tuples, all the way down: what frozen values hold."""
    return tuple(to_tuple(item) for item in value) if isinstance(value, list | tuple) else value


class NamedSettings:
    """Base of frozen dataclasses that plain data refers to by class: {"name": "Percentile",
    "percentile": 99.9}.

    Every subclass, also one of the user's own, can be read back without being registered anywhere.
    """

    @classmethod
    def find_kinds(cls) -> dict[str, type[Any]]:
        """All public dataclasses below this class, by name; of two with one name, that defined
        last.
        """
        found: dict[str, type[Any]] = {}
        for kind in cls.__subclasses__():
            if is_dataclass(kind) and not kind.__name__.startswith("_"):
                found[kind.__name__] = kind
            found.update(kind.find_kinds())
        return found

    def to_dict(self) -> dict[str, Any]:
        """{"name": class, setting: value, ...}; settings that are None are left out, TOML has no
        None.
        """
        values = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)}  # pyright: ignore[reportArgumentType]
        kept = {key: value for key, value in values.items() if value is not None}
        return {"name": type(self).__name__, **kept}

    @classmethod
    def from_dict(cls: type[SettingsT], data: object, where: str = "settings") -> SettingsT:
        """What `to_dict` wrote.

        Raises:
            ConfigError: no such class, or it has no such setting; or the class refuses a value.
        """
        found = check_mapping(data, where)
        kinds = cls.find_kinds()
        name = found.get("name")
        if name not in kinds:
            raise ConfigError(f"{where} has name {name!r}. {suggest_name(str(name), kinds)}")
        kind = kinds[name]
        known = [f.name for f in fields(kind)]
        needed = [
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        ]
        check_keys(found, ("name", *known), f"{where} ({name})", needed)
        return kind(**{key: to_tuple(value) for key, value in found.items() if key != "name"})
