"""Damaged copies of files, drawn by number: cut short, bytes changed, members of zip archives
replaced, values in JSON replaced by others.

JSON inside of archives and of other texts, and headers of .npy, are reached too: a flipped byte
ends at a checksum or at a parser, what is well formed and wrong comes further.
"""

from __future__ import annotations

import copy
import io
import json
import zipfile
from typing import Any

import numpy as np

#: What takes the place of a value in JSON; the last ones are no JSON, or no number.
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**31, -(2**63), 10**30, 0.5, -1.5, 1e300, "", "x", "relu", "/",
    [], {}, [[]], {"x": 1}, [None], ["x", "x"], float("nan"), float("inf"),
)  # fmt: skip
#: Headers of .npy that numpy's parser, or the memory, does not take.
ODD_HEADERS = (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    b"{'descr': '|V0', 'fortran_order': False, 'shape': (3,), }",
    b"{'descr': '|V999999999', 'fortran_order': False, 'shape': (), }",
    b"{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (1,), }",
    b"{'descr': '<f4', 'fortran_order': 3, 'shape': (True,), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)",
    b"{'descr': 'x4', 'shape': 3}",
    b"(" * 3000,
    b"''' ",
    b"\xff\xfe",
)
#: Deep enough for any parser that recurses.
DEEP = 100_000


def damage(data: bytes, seed: int) -> bytes:
    """A damaged copy of a file; the same for the same number."""
    rng = np.random.default_rng(seed)
    return mutate(data, rng)


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """`data` with one fault in it, of a kind that its format can have."""
    ways = [cut, change_bytes]
    if data[:4] == b"PK\x03\x04":
        ways += [change_member] * 6
    elif data[:6] == b"\x93NUMPY":
        ways += [change_header] * 4
    elif data[:1] in (b"{", b"["):
        ways += [change_json] * 10 + [nest]
    return ways[rng.integers(len(ways))](data, rng)


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(0, max(len(data), 1))]


def change_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data or b"x")
    for at in rng.integers(0, len(changed), rng.integers(1, 5)):
        changed[at] = rng.integers(0, 256)
    return bytes(changed)


def change_header(data: bytes, rng: np.random.Generator) -> bytes:
    """An .npy with an odd header before the same values."""
    text = ODD_HEADERS[rng.integers(len(ODD_HEADERS))] + b"\n"
    length = int.from_bytes(data[8:10], "little")
    return data[:8] + len(text).to_bytes(2, "little") + text + data[10 + length :]


def change_member(data: bytes, rng: np.random.Generator) -> bytes:
    """A zip whose checksums are right, one member of which is damaged, missing, or another's."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            infos = old.infolist()
            members = [(info.filename, old.read(info)) for info in infos]
    except Exception:  # a damaged zip is damaged again
        return change_bytes(data, rng)
    at = int(rng.integers(len(members)))
    name, content = members[at]
    kind = rng.integers(12)
    if kind == 0:
        del members[at]
    elif kind == 1:
        members[at] = ("../" + name, content)
    elif kind == 2:
        members[at] = (name, members[rng.integers(len(members))][1])
    elif kind == 3:
        members.append((name, content))
    else:
        members[at] = (name, mutate(content, rng))
    result = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if kind == 4 else infos[0].compress_type
    with zipfile.ZipFile(result, "w", method) as new:
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content, method)
    changed = bytearray(result.getvalue())
    if kind == 5:  # a method of compression, or a flag, that Python does not know
        start = changed.rfind(b"PK\x01\x02")
        changed[start + (10 if rng.integers(2) else 8)] = rng.integers(1, 255)
    return bytes(changed)


def nest(data: bytes, rng: np.random.Generator) -> bytes:
    opening, closing = ((b"[", b"]"), (b'{"x":', b"}"))[rng.integers(2)]
    return opening * DEEP + b"1" + closing * DEEP


def change_json(data: bytes, rng: np.random.Generator) -> bytes:
    """JSON with one value replaced, left out, doubled or taken from another place."""
    try:
        value = json.loads(data)
    except ValueError:
        return change_bytes(data, rng)
    return json.dumps(change_value(value, rng)).encode()


def change_value(value: Any, rng: np.random.Generator) -> Any:
    """A copy of plain data with one fault."""
    value = copy.deepcopy(value)
    places = list(list_places(value))
    if not places:
        return ODD_VALUES[rng.integers(len(ODD_VALUES))]
    holder, key = places[rng.integers(len(places))]
    inner = holder[key]
    kind = rng.integers(6)
    if isinstance(inner, str) and inner[:1] in ("{", "[") and kind < 5:
        holder[key] = change_json(inner.encode(), rng).decode()
    elif kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(inner))
    elif kind <= 2:
        other, place = places[rng.integers(len(places))]
        holder[key] = copy.deepcopy(other[place])
    elif kind == 3 and isinstance(inner, int | float):
        holder[key] = inner + int(rng.choice([-1, 1, 7, 1000]))
    else:
        holder[key] = ODD_VALUES[rng.integers(len(ODD_VALUES))]
    return value


def list_places(value: Any):
    """(container, key) of everything in plain data."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
