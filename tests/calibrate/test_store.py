"""The store of intermediate values: on disk, one file per value, gone when nothing reads it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from relayquant.calibrate.store import ValueStore


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_store__gives_back_what_was_appended(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": [rng.standard_normal((2, 3)).astype("float32") for _ in range(3)],
        "layer/1:b": [rng.integers(-5, 5, (4,)).astype("int8") for _ in range(2)],
        "scalar": [np.float32(2.5).reshape(())],
        "empty": [np.zeros((0, 3), "float32"), np.ones((1, 3), "float32")],
        "shapes": [np.ones((1, 2), "float32"), np.ones((3, 2), "float32")],
    }
    with ValueStore(tmp_path) as store:
        for index in range(3):
            for name, batches in arrays.items():
                if index < len(batches):
                    store.append(name, batches[index])
        for name, batches in arrays.items():
            for index in reversed(range(len(batches))):
                have = store.read(name, index)
                np.testing.assert_array_equal(have, batches[index])
                assert have.dtype == batches[index].dtype
                assert have.shape == batches[index].shape
            assert len(list(store.read_all(name))) == len(batches)


def test_store__arrays_that_are_not_contiguous(tmp_path):
    array = np.arange(24, dtype="float32").reshape(4, 6)[::2, ::3].T
    with ValueStore(tmp_path) as store:
        store.append("a", array)
        np.testing.assert_array_equal(store.read("a", 0), array)


def test_store__drop_frees_the_disk(tmp_path):
    with ValueStore(tmp_path) as store:
        store.append("a", np.ones(10, "float32"))
        store.append("b", np.ones(10, "float32"))
        assert len(files(tmp_path)) == 2
        store.drop("a")
        store.drop("unknown")
        assert len(files(tmp_path)) == 1
        with pytest.raises(KeyError):
            store.read("a", 0)


def test_store__nothing_is_left_behind(tmp_path):
    def fail() -> None:
        with ValueStore(tmp_path) as store:
            store.append("a", np.ones(10, "float32"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_store__memory_does_not_grow_with_the_number_of_batches(tmp_path):
    def peak(batches: int) -> int:
        with ValueStore(tmp_path) as store:
            tracemalloc.start()
            for index in range(batches):
                store.append("a", np.full((100, 100), index, "float32"))
            total = sum(float(array[0, 0]) for array in store.read_all("a"))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert total == sum(range(batches))
        return peak

    few, many = peak(4), peak(64)
    assert many < few + 100_000  # one batch is 40 kB; 60 more would be 2.4 MB
