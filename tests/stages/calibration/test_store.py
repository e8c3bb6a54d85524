"""The store of intermediate values: on disk, a file per value and shard, gone when nothing reads
it.
"""

from __future__ import annotations

import os
import pickle
import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import relayquant as rq
from relayquant.base.runtime import ALIGNMENT
from relayquant.stages.calibration.store import (
    MOST_SHARDS,
    Shard,
    ValueMemory,
    ValueStore,
    cut_shards,
)

ONE = Shard(0, 0, 3)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("batches", [0, 1, 5, 31, 32, 33, 64, 200, 2000, 2001])
def test_shards__cover_all_batches_once_in_order(batches):
    shards = cut_shards(batches)
    assert [i for s in shards for i in range(s.start, s.stop)] == list(range(batches))
    assert [s.index for s in shards] == list(range(len(shards)))
    assert len(shards) <= MOST_SHARDS
    assert len({len(s) for s in shards[:-1]}) <= 1


def test_store__gives_back_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "a": [rng.standard_normal((2, 3)).astype("float32") for _ in range(3)],
        "layer/1:b": [rng.integers(-5, 5, (4,)).astype("int8") for _ in range(3)],
        "scalar": [np.float32(2.5).reshape(())] * 3,
        "empty": [np.zeros((0, 3), "float32")] * 3,
        "shapes": [np.ones((n, 2), "float32") for n in (1, 3, 2)],
        "strided": [np.arange(24, dtype="float32").reshape(4, 6)[::2, ::3].T] * 3,
    }
    store = ValueStore(tmp_path)
    for name, arrays in values.items():
        with store.write(name, ONE) as writer:
            for array in arrays:
                writer.append(array)
    elsewhere = pickle.loads(pickle.dumps(store))
    for name, arrays in values.items():
        for have, want in zip(elsewhere.read(name, ONE), arrays, strict=True):
            np.testing.assert_array_equal(have, want)
            assert (have.dtype, have.shape) == (want.dtype, want.shape)


def test_store__inputs_are_cut_after_they_were_written(tmp_path):
    store = ValueStore(tmp_path)
    with store.write_input("x") as writer:
        at = [writer.append(np.full(i, i, "float32")) for i in range(70)]
    shards = cut_shards(70)
    store = replace(store, starts={"x": tuple(at[s.start] for s in shards)})
    read = [array for shard in shards for array in store.read("x", shard)]
    assert [len(array) for array in read] == list(range(70))
    assert all((array == i).all() for i, array in enumerate(read))


def test_store__a_file_appears_whole_or_not_at_all(tmp_path):
    store = ValueStore(tmp_path)

    def fail() -> None:
        with store.write("a", ONE) as writer:
            writer.append(np.ones(10, "float32"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(tmp_path) == []
    with store.write("a", ONE) as writer:
        writer.append(np.ones(10, "float32"))
        assert not store.path("a", ONE).exists()
    assert files(tmp_path) == [store.path("a", ONE)]


def test_store__writes_that_the_system_takes_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, b"".join(parts)[:70]))
    array = np.arange(50, dtype="float32")
    store = ValueStore(tmp_path)
    with store.write("a", ONE) as writer:
        assert [writer.append(array + i) for i in range(3)] == [0, 320, 640]
    for i, found in enumerate(store.read("a", ONE)):
        np.testing.assert_array_equal(found, array + i)


def test_store__drop_frees_the_disk(tmp_path):
    store = ValueStore(tmp_path)
    for name in "ab":
        for shard in (ONE, Shard(1, 3, 6)):
            with store.write(name, shard) as writer:
                writer.append(np.ones(10, "float32"))
    store.drop("a", (ONE, Shard(1, 3, 6)))
    store.drop("unknown", (ONE,))
    assert len(files(tmp_path)) == 2
    with pytest.raises(rq.DataError, match=r"Value 'a' of batches 0\.\.2 cannot be read"):
        list(store.read("a", ONE))


def write_twelve(store: ValueStore, name: str, shard: Shard = ONE) -> None:
    """Three batches of 4 bytes each."""
    with store.write(name, shard) as writer:
        for i in range(3):
            writer.append(np.full(1, i, "float32"))


def test_store__what_memory_has_no_room_for_is_in_files(tmp_path):
    store = ValueStore(tmp_path, memory=ValueMemory(20))
    for name in "ab":  # of b, two batches have room before the third has none
        write_twelve(store, name)
    assert files(tmp_path) == [store.path("b", ONE)]
    for name in "ab":
        assert [float(a[0]) for a in store.read(name, ONE)] == [0, 1, 2]
    store.drop("a", (ONE,))
    write_twelve(store, "c")
    assert files(tmp_path) == [store.path("b", ONE)]
    with pytest.raises(rq.DataError, match=r"Value 'a' of batches 0\.\.2 cannot be read"):
        list(store.read("a", ONE))


def test_store__what_is_written_again_takes_the_place_of_the_first(tmp_path):
    """In memory or, where that has no room, in a file."""
    memory, one = ValueMemory(100), Shard(0, 0, 1)
    store = ValueStore(tmp_path, memory=memory)
    for size in (10, 20, 60, 5):
        with store.write("a", one) as writer:
            writer.append(np.full(size, size, "float32"))
        (found,) = store.read("a", one)
        np.testing.assert_array_equal(found, np.full(size, size, "float32"))
    store.drop("a", (one,))
    assert memory.reserve(100)


def test_store__a_writer_that_fails_gives_its_room_back(tmp_path):
    store = ValueStore(tmp_path, memory=ValueMemory(12))

    def fail() -> None:
        with store.write("a", ONE) as writer:
            writer.append(np.ones(3, "float32"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    write_twelve(store, "b")
    assert files(tmp_path) == []


def test_store__arrays_in_memory_are_laid_out_as_those_of_files(tmp_path):
    array = np.arange(24, dtype="float32").reshape(4, 6)[::2, ::3].T
    for memory in (None, ValueMemory(1 << 10)):
        store = ValueStore(tmp_path, memory=memory)
        with store.write("a", ONE) as writer:
            writer.append(array)
        (found,) = islice(store.read("a", ONE), 1)
        np.testing.assert_array_equal(found, array)
        assert found.strides == (4, 8)
        assert found.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"x" + b[1:], lambda b: b""])
def test_store__a_damaged_file_is_refused(tmp_path, damage):
    store = ValueStore(tmp_path)
    with store.write("a", ONE) as writer:
        for _ in range(3):
            writer.append(np.ones(10, "float32"))
    path = store.path("a", ONE)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(rq.DataError, match=r"Value 'a' of batches 0\.\.2 cannot be read"):
        list(store.read("a", ONE))


def test_store__a_header_does_not_ask_for_more_than_there_is(tmp_path):
    store = ValueStore(tmp_path)
    with store.write("a", ONE) as writer:
        writer.append(np.ones(10, "float32"))
    path = store.path("a", ONE)
    path.write_bytes(path.read_bytes().replace(b"[10]", b"[99]"))
    with pytest.raises(rq.DataError, match="the file ends early"):
        next(store.read("a", ONE))


def test_store__memory_does_not_grow_with_the_number_of_batches(tmp_path):
    def peak(batches: int) -> int:
        store, shard = ValueStore(tmp_path), Shard(0, 0, batches)
        tracemalloc.start()
        with store.write("a", shard) as writer:
            for index in range(batches):
                writer.append(np.full((100, 100), index, "float32"))
        total = sum(float(array[0, 0]) for array in store.read("a", shard))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total == sum(range(batches))
        return peak

    few, many = peak(4), peak(64)
    assert many < few + 100_000  # one batch is 40 kB; 60 more would be 2.4 MB
