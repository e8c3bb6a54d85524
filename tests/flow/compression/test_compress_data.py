"""`compress_weights` with data, and within bounds on loss and size."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import tvm
from module_constants import list_constants
from tiny_llama import (
    AFFINE_ROWS,
    ROWS,
    bind_weights,
    make_prefill,
    select_calls,
    take_function,
)
from tvm import relax

import relayquant as rq
from relayquant.errors import ConfigError, DataError
from relayquant.flow.compression import fit_layers as observe
from relayquant.flow.compression import sequential as walk
from relayquant.flow.compression import smoothing
from relayquant.flow.compression.find import find_weights
from relayquant.flow.compression.sources import open_params


def draw_texts(count=12, length=16):
    """Batches of prefill."""
    rng = np.random.default_rng(0)
    return [make_prefill(rng.integers(0, 64, length).tolist()) for _ in range(count)]


def compress_with_data(llama, **settings):
    texts = settings.pop("dataset", draw_texts())
    return rq.compress_weights(*llama, texts, **{"bits": 3, "function": "prefill", **settings})


def measure_error(llama, q):
    """Mean squares at the scores of texts that were not fitted to."""
    bound, error = bind_weights(*llama), 0.0
    for text in draw_texts(16)[12:]:
        scores = (rq.reference.run(take_function(m, "prefill"), text)[0] for m in (q, bound))
        error += float(np.square(np.subtract(*scores)).sum())
    return error


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, ROWS, AFFINE_ROWS], ids=["float", "rows", "affine"])
def test_data__scores_are_nearer_to_float(llama, activation):
    errors = [
        measure_error(llama, compress_with_data(llama, effort=effort, activation=activation))
        for effort in ("fast", "balanced", "best")
    ]
    plain = measure_error(llama, rq.compress_weights(*llama, bits=3, activation=activation))
    assert max(errors[1:]) < 0.9 * plain
    assert errors[0] < 1.1 * plain


def test_data__functions_still_share_one_copy_of_each_weight(llama):
    q = compress_with_data(llama)
    calls = select_calls(q, "relax.qnn.grouped_dense")
    for one, other in zip(calls["prefill"], calls["decode"], strict=True):
        assert all(a.same_as(b) for a, b in zip(one.args[2:], other.args[2:], strict=True))
    assert rq.ledger(q).choices["weights"].startswith("fitted, GroupFit(rounds=2")
    plain = rq.ledger(rq.compress_weights(*llama))
    assert plain.choices["weights"] == "rounded to nearest, without data"


def test_data__what_it_does_not_reach_is_rounded_without_it():
    """A weight in a branch, and one behind: the second is fitted to what the float branch gives."""
    rng = np.random.default_rng(0)
    weights = [relax.const(rng.normal(size=(32, 32)).astype("float32")) for _ in range(2)]
    builder = relax.BlockBuilder()
    flag = relax.Var("flag", relax.TensorType([], "bool"))
    x = relax.Var("x", relax.TensorType([4, 32], "float32"))

    def branch(call):
        var = relax.Var("y", x.ty)
        return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, call)])], var)

    with builder.function("main", [flag, x]):
        chosen = builder.emit(
            relax.If(flag, branch(relax.op.matmul(x, weights[0])), branch(relax.op.negative(x)))
        )
        y = builder.emit(relax.op.matmul(chosen, weights[1]))
        builder.emit_func_output(y)
    data = [(np.array(True), rng.normal(size=(4, 32)).astype("float32")) for _ in range(8)]
    q = rq.compress_weights(builder.finalize(), None, data)
    assert len(rq.ledger(q).quantized) == 2
    assert rq.ledger(q).choices["weights"].endswith("by data; 1 weight without data")


@pytest.mark.slow
def test_data__is_worked_on_by_threads_some_batches_at_once(llama, monkeypatch):
    """Texts of different lengths: the same bits on any number of threads, the same weights as one
    text at a time but for the order of sums, and no product that nothing reads.
    """
    texts = [text for length in (3, 16, 5, 16) for text in draw_texts(4, length)]
    found, products = [], []
    original = walk.run_product
    monkeypatch.setattr(smoothing, "BATCHES", 0)  # its products would count too
    monkeypatch.setattr(walk, "run_product", lambda *a: products.append(a[1]) or original(*a))
    for threads, rows in (("1", 40), ("3", 40), ("2", 1), ("2", 10**6)):
        monkeypatch.setenv("TVM_NUM_THREADS", threads)
        monkeypatch.setattr(walk, "MOST_ROWS", rows)
        products.clear()
        found.append(compress_with_data(llama, dataset=texts))
        assert len({use.name for use in products}) == 5
        assert len(products) == 5 * {40: 5, 1: 16, 10**6: 1}[rows]
    tvm.ir.assert_structural_equal(found[0], found[1])
    errors = [measure_error(llama, q) for q in found]
    np.testing.assert_allclose(errors[1:], errors[0], rtol=0.05)


class Stopped(Exception):
    """Raised by a callback."""


class StopAfter(rq.Callback):
    """Counts finished weights, and raises behind one."""

    def __init__(self, last=99):
        self.last, self.seen = last, []

    def on_progress(self, event):
        self.seen.append((event.done, event.total))
        if event.done == self.last:
            raise Stopped


def test_data__a_run_that_was_stopped_goes_on(llama, tmp_path, monkeypatch):
    """With the same result, and without fitting again what was finished."""
    fitted = []
    original = observe.fit_groups
    monkeypatch.setattr(observe, "fit_groups", lambda *a: fitted.append(1) or original(*a))
    whole, path = compress_with_data(llama), tmp_path / "weights"
    count = len(fitted)
    assert count == 5
    with pytest.raises(Stopped):
        compress_with_data(llama, checkpoint=path, callbacks=StopAfter(4))
    before, watching = len(fitted), StopAfter()
    with pytest.raises(ConfigError, match="belongs to another compression; what differs: settings"):
        compress_with_data(llama, checkpoint=path, effort="best")
    with pytest.raises(ConfigError, match="what differs: data"):
        compress_with_data(llama, checkpoint=path, dataset=draw_texts(3))
    q = compress_with_data(llama, checkpoint=path, callbacks=watching)
    assert len(fitted) - before == count - (before - count)
    assert watching.seen == [(i, 6) for i in range(1, 7)]
    tvm.ir.assert_structural_equal(q, whole)
    assert not path.exists()


def test_data__a_damaged_checkpoint_is_named(llama, tmp_path):
    path = tmp_path / "weights"
    with pytest.raises(Stopped):
        compress_with_data(llama, checkpoint=path, callbacks=StopAfter(2))
    files = sorted((path / "steps").iterdir())
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(DataError, match=r"does not hold the weight of .* Delete the checkpoint"):
        compress_with_data(llama, checkpoint=path)


# --- Bounds -----------------------------------------------------------------------------------


def count_bytes_of(q):
    """Of all grouped weights of a module, each once."""
    found = {}
    for name in ("relax.qnn.grouped_dense", "relax.qnn.grouped_take"):
        for call in select_calls(q, name)["prefill"]:
            parts = [each.value.numpy() for each in call.args[-3:]]
            found[parts[0].tobytes()] = sum(part.nbytes for part in parts)
    return sum(found.values())


@pytest.mark.parametrize("has_data", [False, True])
def test_max_size__as_many_weights_keep_8_bits_as_fit(llama, has_data):
    least = count_bytes_of(rq.compress_weights(*llama))
    most = count_bytes_of(rq.compress_weights(*llama, bits=8))
    limit = (least + most) // 2
    given = {"bits": 4, "max_size": limit, "effort": "fast"}
    q = compress_with_data(llama, **given) if has_data else rq.compress_weights(*llama, **given)
    assert least < count_bytes_of(q) <= limit
    rows = rq.ledger(q).rows[:7]
    kept = [row for row in rows if "8 bits, because 4 lose" in row.rule]
    assert 0 < len(kept) < 5
    assert all(row.dtype == "int8" for row in kept)
    assert count_bytes_of(rq.compress_weights(*llama, max_size=most)) == most
    with pytest.raises(ConfigError, match=rf"take {least} bytes with their scales, allowed are 9 "):
        rq.compress_weights(*llama, max_size=9)


def test_max_bits__is_a_mean_over_all_weights(llama):
    count = sum(v.size for v in llama[1].values() if v.ndim > 1)
    q = rq.compress_weights(*llama, bits=2, embedding_bits=4, max_bits=6.5)
    assert 5.5 < count_bytes_of(q) * 8 / count <= 6.5


def test_max_loss__keeps_8_bits_where_fewer_lose_more(llama):
    def list_dtypes(**settings):
        return [row.dtype for row in rq.ledger(compress_with_data(llama, **settings)).rows[:7]]

    assert list_dtypes(max_loss=0.9) == ["int8", *["int3"] * 5, "int8"]
    assert set(list_dtypes(max_loss=1e-5)) == {"int8"}
    rows = rq.ledger(rq.compress_weights(*llama, bits=2, max_loss=1e-5)).rows
    assert "8 bits, because 2 lose more than max_loss=1e-05" in rows[1].rule


def test_data__a_token_that_the_table_does_not_have_is_named(llama):
    texts = [*draw_texts(2), make_prefill([1, 64, 3])]
    with pytest.raises(DataError, match=r"Sample 2: input 'tokens' holds the index 64;"):
        compress_with_data(llama, dataset=texts)


def opened(llama):
    """Arguments of `find_weights`."""
    mod, params = llama
    return mod, open_params(mod, params)


class LoadedParams(Mapping):
    """Arrays that are loaded when they are asked for; counts those that are alive."""

    def __init__(self, values):
        self.values_of, self.alive, self.most, self.loads = values, 0, 0, Counter()

    def __getitem__(self, name):
        array = self.values_of[name].copy()
        self.loads[name] += 1
        if array.ndim == 2:
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(array, self.free)
        return array

    def free(self):
        self.alive -= 1

    def __iter__(self):
        return iter(self.values_of)

    def __len__(self):
        return len(self.values_of)


@pytest.mark.parametrize("effort", ["fast", "best", None])
def test_params__that_are_loaded_one_at_a_time(llama, effort, tmp_path):
    """No two float weights are in memory at any time, and none is when the result is there; the
    same for the functions that read them, for data in float beside, and for bounds.
    """
    mod, params = llama
    lazy = LoadedParams(params)
    if effort:
        given = {"effort": effort, "max_bits": 6, "checkpoint": tmp_path / "weights"}
        expected = compress_with_data(llama, **given)
        q = compress_with_data((mod, lazy), **given)
    else:
        q, expected = rq.compress_weights(mod, lazy), rq.compress_weights(mod, params)
    assert (lazy.most, lazy.alive) == (1, 0)
    assert lazy.loads.keys() == params.keys()
    assert effort or set(lazy.loads.values()) == {2}
    tvm.ir.assert_structural_equal(q, expected, map_free_vars=True)
    assert [p.name for p in q["prefill"].params] == ["tokens", "cos", "sin", "mask"]


def test_params__of_a_file_in_place(llama, tmp_path):
    """Arrays of numpy's .npz are loaded when they are asked for, those of .npy read in place."""
    mod, params = llama
    np.savez(tmp_path / "w.npz", **params)
    mapped = {}
    for i, (name, array) in enumerate(params.items()):
        np.save(tmp_path / f"{i}.npy", array)
        mapped[name] = np.load(tmp_path / f"{i}.npy", mmap_mode="r")
    expected = compress_with_data(llama)
    with np.load(tmp_path / "w.npz") as loaded:
        for given in (loaded, mapped):
            tvm.ir.assert_structural_equal(compress_with_data((mod, given)), expected)


def test_params__float_weights_stay_once(llama):
    """Tables that stay are constants, one for both functions; the other weights are gone."""
    q = rq.compress_weights(*llama, embedding_bits=None)
    floats = {
        constant.value.data_ptr(): constant
        for name in ("prefill", "decode")
        for constant in list_constants(q[name])
        if tuple(constant.value.shape) == (64, 32)
    }
    (table,) = floats.values()
    np.testing.assert_array_equal(table.value.numpy(), llama[1]["embedding.weight"])


def test_data__weights_are_not_copied_to_be_looked_at(llama, monkeypatch):
    """Models have gigabytes of them: shapes come from types, values are read where they lie."""
    (use, *_), (own, *_) = find_weights(bind_weights(*llama), {}), find_weights(*opened(llama))
    assert own.shape == use.shape == use.array.shape
    assert use.array.ctypes.data == use.source.key
    assert np.shares_memory(own.array, llama[1][own.source.key])
    assert not use.array.flags.writeable
    assert not own.array.flags.writeable
    monkeypatch.setattr(tvm.runtime.Tensor, "numpy", None)
    compress_with_data(llama, bits=2, embedding_bits=4, max_bits=6)


def test_max_loss__a_weight_of_8_bits_is_fitted_once(llama, monkeypatch):
    fitted = []
    original = observe.fit_groups
    monkeypatch.setattr(observe, "fit_groups", lambda *a: fitted.append(1) or original(*a))
    compress_with_data(llama, bits=8, max_loss=1e-9)
    assert len(fitted) == 5


#: message -> arguments besides module and parameters
WRONG_DATA = {
    r"the module has no one model; the data is to be for one of decode, prefill": {"dataset": [1]},
    r"'past' of function 'decode' is not a tensor": {"dataset": [1], "function": "decode"},
    r"function='encode' reads no weight": {"dataset": [1], "function": "encode"},
    r"function= says what dataset= is for": {"function": "prefill"},
    r"max_loss=0.1, max_size=3; allowed: one of them": {"max_loss": 0.1, "max_size": 3},
    r"max_bits=0.0; allowed": {"max_bits": 0.0},
}


@pytest.mark.parametrize("message", WRONG_DATA)
def test_data__refuses(llama, message):
    with pytest.raises(ConfigError, match=message):
        rq.compress_weights(*llama, **WRONG_DATA[message])
