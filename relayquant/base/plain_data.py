"""Frozen values <-> plain data, as JSON and TOML hold it. Errors name the wrong key and the nearest
right one.

A frozen dataclass that extends `PlainFields` is written field by field and read back by its
annotations. A class whose plain data differs from its fields overrides `to_dict` and `from_dict`.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np

from relayquant.base.arguments import find_hints
from relayquant.errors import ConfigError, suggest_name

EnumT = TypeVar("EnumT", bound=enum.Enum)
ClassT = TypeVar("ClassT")
FieldsT = TypeVar("FieldsT", bound="PlainFields")
SettingsT = TypeVar("SettingsT", bound="NamedSettings")


def check_mapping(data: object, where: str) -> Mapping[str, Any]:
    """Return `data` if it is a dict with text keys.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{where} is {data!r}; allowed: a dict with text keys.", code="RQ101")
    return data


def check_keys(
    data: object, allowed: Iterable[str], where: str, required: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return `data` if it is a dict with only `allowed` keys and all `required` keys.

    Raises:
        ConfigError: names the first wrong key and the nearest right one, or the missing keys.
    """
    found, allowed = check_mapping(data, where), tuple(allowed)
    for key in found:
        if key not in allowed:
            raise ConfigError(
                f"{where} has no key {key!r}. {suggest_name(key, allowed)}", code="RQ101"
            )
    missing = [key for key in required if key not in found]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(map(repr, missing))}.", code="RQ101")
    return found


def check_list(data: object, where: str) -> list[Any] | tuple[Any, ...]:
    """Return `data` if it is a list or tuple. ConfigError otherwise."""
    if not isinstance(data, list | tuple):
        raise ConfigError(f"{where} is {data!r}; allowed: a list.", code="RQ101")
    return data


def read_enum(kind: type[EnumT], value: object, where: str) -> EnumT:
    """Return the member of an enum with this value.

    Raises:
        ConfigError: there is no such member. Names the nearest value.
    """
    for member in kind:
        if value == member.value:
            return member
    raise ConfigError(
        f"{where} is {value!r}. {suggest_name(str(value), [m.value for m in kind])}", code="RQ101"
    )


def to_plain(value: Any) -> Any:
    """Convert a field's value to plain data: enums to their value, tuples and arrays to lists."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.to_dict() if isinstance(value, PlainFields) else value


def to_tuple(value: Any) -> Any:
    """Convert lists to tuples recursively, for frozen values."""
    return tuple(to_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def read_plain(hint: Any, data: Any, where: str) -> Any:
    """Read a field's value by its annotation, the inverse of `to_plain`. Texts, numbers and values
    of any type are not checked here. The class checks them.

    Raises:
        ConfigError: a key, an enum value or the structure is wrong. `where` is its path.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        # A class that is read from a dict may also accept a short form, for example a name.
        readable = [kind for kind in args if is_readable(kind)]
        return read_plain((readable or args)[0], data, where)
    if origin is tuple:
        rows = check_list(data, where)
        kinds = args[:1] * len(rows) if args[-1] is ... else args
        if len(kinds) != len(rows):
            raise ConfigError(
                f"{where} is {data!r}; allowed: a list of {len(kinds)}.", code="RQ101"
            )
        pairs = zip(kinds, rows, strict=True)
        return tuple(read_plain(kind, row, f"{where}[{i}]") for i, (kind, row) in enumerate(pairs))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        found = check_mapping(data, where)
        return {key: read_plain(args[1], row, f"{where}.{key}") for key, row in found.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return read_enum(hint, data, where)
    if is_readable(hint) and not isinstance(data, hint):
        return hint.from_dict(data, where)
    return data


def is_readable(kind: Any) -> bool:
    """Return whether a type in an annotation has `from_dict`."""
    return isinstance(kind, type) and issubclass(kind, PlainFields)


def read_fields(
    kind: type[ClassT], data: object, where: str, required: Iterable[str] = ()
) -> ClassT:
    """Read a dataclass from plain data with one key per field. Fields with a default may be missing
    unless they are `required`.

    Raises:
        ConfigError: a key is unknown (names the nearest) or missing, or a value is not allowed.
    """
    keys = {find_key(field): field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    found = check_keys(data, keys, where, (*list_required(kind), *required))
    hints = find_hints(kind)
    return kind(
        **{keys[k]: read_plain(hints[keys[k]], v, f"{where}.{k}") for k, v in found.items()}
    )


def find_key(field: Any) -> str:
    """Return the key of a field in plain data: metadata "key", or else the field's name."""
    return field.metadata.get("key", field.name)


def list_required(kind: type[Any]) -> list[str]:
    """List the keys of fields without a default."""
    return [
        find_key(f) for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    ]


class PlainFields:
    """Base of frozen dataclasses that are read and written field by field."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. `from_dict` reads it back."""
        return {find_key(f): to_plain(getattr(self, f.name)) for f in fields(self)}  # pyright: ignore[reportArgumentType]

    @classmethod
    def from_dict(cls: type[FieldsT], data: object, where: str = "") -> FieldsT:
        """Read the output of `to_dict`. `where` names it in messages. Fields with a default may be
        missing.

        Raises:
            ConfigError: a key is unknown (names the nearest) or missing, or a value is not allowed.
        """
        return read_fields(cls, data, where or cls.__name__)


class PlainSettings(PlainFields):
    """Base of settings that users write, also in TOML, which has no None."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON and TOML. Settings that are None are left out."""
        return {key: value for key, value in super().to_dict().items() if value is not None}


class NamedSettings(PlainSettings):
    """Base of frozen dataclasses that plain data refers to by class name: {"name": "Percentile",
    "percentile": 99.9}.

    Every subclass can be read back, also a user's class. Nothing has to be registered.
    """

    @classmethod
    def find_kinds(cls) -> dict[str, type[Any]]:
        """Return all public subclasses that are dataclasses, by name. If two have the same name,
        the later one counts.
        """
        found: dict[str, type[Any]] = {}
        for kind in cls.__subclasses__():
            if is_dataclass(kind) and not kind.__name__.startswith("_"):
                found[kind.__name__] = kind
            found.update(kind.find_kinds())
        return found

    def to_dict(self) -> dict[str, Any]:
        """Convert to {"name": class, setting: value, ...}. Settings that are None are left out,
        because TOML has no None.
        """
        return {"name": type(self).__name__, **super().to_dict()}

    @classmethod
    def from_dict(cls: type[SettingsT], data: object, where: str = "") -> SettingsT:
        """Read the output of `to_dict`.

        Raises:
            ConfigError: the class is unknown, it has no such setting, or it rejects a value.
        """
        where = where or "settings"
        found = check_mapping(data, where)
        kinds = cls.find_kinds()
        name = found.get("name")
        if name not in kinds:
            raise ConfigError(
                f"{where} has name {name!r}. {suggest_name(str(name), kinds)}", code="RQ101"
            )
        kind = kinds[name]
        known = [f.name for f in fields(kind)]
        check_keys(found, ("name", *known), f"{where} ({name})", list_required(kind))
        return kind(**{key: to_tuple(value) for key, value in found.items() if key != "name"})
