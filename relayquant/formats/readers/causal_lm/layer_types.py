"""Types of the layers of a language model: attention with a window or without, rotary positions.

Functions of one kind list the types of all layers (`ListTypes`), others which of them have rotary
positions (`ListTurned`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relayquant.formats.readers.causal_lm.fields import Fields

#: Kinds of layers in "layer_types" -> whether attention has a window.
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
#: (metadata, number of layers) -> types of layers, if metadata has no "layer_types".
ListTypes = Callable[[Fields, int], list[str]]
#: (metadata, types of layers, the window or 0) -> whether each layer has rotary positions.
ListTurned = Callable[[Fields, Sequence[str], int], list[Any]]


def list_types(pattern: int, count: int) -> list[str]:
    """Return the types of all layers for a pattern of windows. 0: in no layer. 1: in all. N: in all
    but each N-th.
    """
    return name_types(
        [pattern < 1 or (pattern > 1 and i % pattern == 0) for i in range(1, count + 1)]
    )


def name_types(is_full: Sequence[bool]) -> list[str]:
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def list_by_pattern(fields: Fields, count: int) -> list[str]:
    """Windows in a pattern that metadata has."""
    return list_types(fields.integer("sliding_window_pattern"), count)


def in_pattern(pattern: int) -> ListTypes:
    """Windows in a pattern, see `list_types`."""
    return lambda _fields, count: list_types(pattern, count)


def list_late(fields: Fields, count: int) -> list[str]:
    """Windows from a layer on."""
    first = fields.integer("max_window_layers")
    return name_types([i < first for i in range(count)])


def list_first_even(fields: Fields, count: int) -> list[str]:
    """Windows in each second layer of the first ones."""
    end = fields.integer("max_window_layers")
    return name_types([i % 2 > 0 or i >= end for i in range(count)])


def list_unturned(fields: Fields, count: int) -> list[str]:
    """Windows in layers without rotary positions."""
    return name_types([*map(bool, list_turned(fields, list_types(0, count), 0))])


def list_last_full(_fields: Fields, count: int) -> list[str]:
    """Windows in all layers but each sixth and the last one."""
    return [*list_types(6, count)[:-1], "full_attention"]


def list_each_fourth(fields: Fields, count: int) -> list[str]:
    """Attention in each N-th layer, and the delta rule in others."""
    period = fields.integer("full_attention_interval")
    if period < 1:
        raise fields.refuse(("full_attention_interval",), period, "an integer from 1 on")
    kinds = ("linear_attention", "full_attention")
    return [kinds[i % period == 0] for i in range(1, count + 1)]


def list_attention(fields: Fields, count: int) -> list[str]:
    """Attention in the layers of a list, convolutions in all others."""
    found = fields.items(None, "full_attn_idxs")
    return ["full_attention" if found is None or i in found else "conv" for i in range(count)]


def leave_out(period: int) -> ListTurned:
    """Rotary positions in all layers but each `period`-th. 0: in all."""
    return lambda _fields, types, _window: [
        period < 1 or i % period != 0 for i in range(1, len(types) + 1)
    ]


#: Rotary positions in all layers.
TURN_ALL = leave_out(0)


def list_turned(fields: Fields, types: Sequence[str], window: int) -> list[Any]:
    """Rotary positions as metadata says, layer by layer or by a period."""
    turned = fields.items(len(types), "no_rope_layers")
    if turned is None:
        period = fields.integer("no_rope_layer_interval", default=0)
        return leave_out(period)(fields, types, window)
    return turned


def turn_windowed(_fields: Fields, types: Sequence[str], _window: int) -> list[bool]:
    """Rotary positions in layers with a window."""
    return [LAYER_TYPES.get(kind, False) for kind in types]


def turn_windowed_or_all(fields: Fields, types: Sequence[str], window: int) -> list[bool]:
    """Rotary positions in layers with a window, or in all if there is none."""
    return turn_windowed(fields, types, window) if window else [True] * len(types)
