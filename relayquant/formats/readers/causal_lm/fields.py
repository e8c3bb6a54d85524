"""Metadata of a model, untrusted -> checked numbers and texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relayquant.errors import ModelError, format_count


@dataclass(frozen=True)
class Fields:
    """Values by name. Each getter takes several names, and the first with a value counts.

    Attributes:
        values: Name -> value. None is no value.
        prefix: What all names begin with.
    """

    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, *names: str) -> Any:
        """Return a value, or None if there is none. An array is returned as a list."""
        for name in names:
            value = self.values.get(self.prefix + name)
            if value is not None:
                return value.tolist() if isinstance(value, np.ndarray) else value
        return None

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
            ModelError: it is missing and has no default, or is another kind of value.
        """
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(names, value, "an integer")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number. Errors as for `integer`."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(names, value, "a number")
        if not math.isfinite(value):
            raise self.refuse(names, value, "a finite number")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a truth value. Errors as for `integer`."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(names, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """Return a text. Errors as for `integer`."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(names, value, "a text")
        return value

    def items(self, count: int | None, *names: str) -> list[Any] | None:
        """Return a list of `count` values, None for any number, or None if there is none.

        Raises:
            ModelError: it is no list, or shorter.
        """
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < (count or 0):
            size = "" if count is None else f" of {format_count(count, 'value')}"
            raise self.refuse(names, value, f"a list{size}")
        return value[:count]

    def numbers(self, count: int, *names: str, default: int | None = None) -> list[int]:
        """Return a number of each of `count` layers: of one for all, or of one for each.

        Raises:
            ModelError: as for `integer`, or there are too few.
        """
        value = self.get(*names)
        if not isinstance(value, list):
            return [self.integer(*names, default=default)] * count
        is_right = all(isinstance(each, int) and each >= 0 for each in value)
        if not is_right or len(value) < count:
            allowed = f"{format_count(count, 'number')}, one for each layer"
            raise self.refuse(names, value, allowed)
        return value[:count]

    def refuse(self, names: tuple[str, ...], value: Any, allowed: str) -> ModelError:
        """Return the error for a value that is missing or wrong."""
        name = f"{self.prefix}{names[0]}"
        found = "is missing" if value is None else f"is {str(value)[:60]}"
        return ModelError(f"{name!r} of the model {found}; needed: {allowed}.", code="RQ204")
