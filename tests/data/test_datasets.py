"""Data sets: every accepted form gives the same batches, everything else a message that helps."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from relayquant.data import Dataset, InputInfo, SampleSequence, open_dataset, open_sequences
from relayquant.data.archive import list_arrays
from relayquant.errors import ConfigError, DataError, DataWarning, format_count

IMAGE = (InputInfo("image", ("n", 3, 4), "float32"),)
FIXED = (InputInfo("image", (1, 3, 4), "float32"),)
PAIR = (InputInfo("ids", ("n", "length"), "int32"), InputInfo("mask", ("n", "length"), "float32"))

DATA = np.random.default_rng(0).normal(size=(6, 3, 4)).astype("float32")


def image_batches(dataset, inputs=IMAGE, **options):
    return [batch["image"] for batch in open_dataset(dataset, inputs, **options)]


def save(path: Path, **arrays) -> Path:
    np.savez(path, **arrays)
    return path


class Loader:
    """As torch's DataLoader: iterable, has a length, is not a list."""

    def __len__(self):
        return len(DATA)

    def __iter__(self):
        return (x[None] for x in DATA)


class Indexed:
    """As torch's Dataset: no __iter__, and no IndexError at the end."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, i):
        return DATA[i % len(DATA)]


class Tensor:
    """A foreign tensor that numpy can convert, as torch.Tensor."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, "torch.float32"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)


class TrackedTensor(Tensor):
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


FORMS = {
    "list_of_arrays": [x[None] for x in DATA],
    "list_of_arrays_without_batch": list(DATA),
    "list_of_dicts": [{"image": x[None]} for x in DATA],
    "list_of_tuples": [(x[None],) for x in DATA],
    "list_of_lists": [[x[None]] for x in DATA],
    "nested_numbers": DATA[:, None].tolist(),
    "loader": Loader(),
    "indexed": Indexed(),
    "array": DATA,
    "stacked_array": DATA[:, None],
    "dict": {"image": DATA},
    "foreign_tensors": [Tensor(x[None]) for x in DATA],
    "foreign_tensor": Tensor(DATA),
    "function_of_generator": lambda: (x[None] for x in DATA),
    "function_of_list": lambda: list(DATA),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs", [IMAGE, FIXED], ids=["symbolic", "fixed"])
def test_open_dataset__all_forms_give_the_same_batches(form, inputs):
    dataset = open_dataset(FORMS[form], inputs)
    for _ in range(2):  # and again from the beginning
        batches = list(dataset)
        assert len(batches) == 6
        for batch, expected in zip(batches, DATA, strict=True):
            assert list(batch) == ["image"]
            assert batch["image"].shape == (1, 3, 4)
            assert batch["image"].dtype == np.float32
            assert batch["image"].flags.c_contiguous
            np.testing.assert_allclose(batch["image"][0], expected, rtol=1e-6)
    assert dataset.length == (None if callable(FORMS[form]) else 6)


@pytest.mark.parametrize("save_with", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", ["image", "arr_0"])
def test_archive__batches(tmp_path, save_with, name):
    path = tmp_path / "data.npz"
    save_with(path, **{name: DATA})
    for source in (path, str(path)):
        dataset = open_dataset(source, IMAGE)
        assert dataset.length == 6
        np.testing.assert_array_equal(np.concatenate([b["image"] for b in dataset]), DATA)
        np.testing.assert_array_equal(np.concatenate([b["image"] for b in dataset]), DATA)


@settings(max_examples=count_examples(25), deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans())
def test_archive_and_array__batch_size(count, size, fixed, fortran):
    data = np.arange(count * 6, dtype="float32").reshape(count, 2, 3)
    inputs = (InputInfo("x", (size if fixed else "n", 2, 3), "float32"),)
    file = io.BytesIO()
    np.savez(file, x=np.asfortranarray(data) if fortran else data)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        path.write_bytes(file.getvalue())
        for source in (path, data, {"x": data}):
            if fixed and count < size:
                message = f"{format_count(count, 'sample')}, fewer than one batch"
                with pytest.raises(DataError, match=message):
                    open_dataset(source, inputs)
                continue
            dataset = open_dataset(source, inputs, batch_size=size)
            batches = [b["x"] for b in dataset]
            assert dataset.length == len(batches)
            whole = count - count % size if fixed else count
            assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
            np.testing.assert_array_equal(np.concatenate(batches), data[:whole])


def test_archive__labels_are_ignored_and_inputs_ordered(tmp_path):
    path = save(
        tmp_path / "pair.npz",
        labels=np.arange(4),
        mask=np.ones((4, 5), "float32"),
        ids=np.arange(20).reshape(4, 5),
    )
    batches = list(open_dataset(path, PAIR, batch_size=3))
    assert [list(b) for b in batches] == [["ids", "mask"]] * 2
    assert batches[0]["ids"].dtype == np.int32
    np.testing.assert_array_equal(batches[1]["ids"], [[15, 16, 17, 18, 19]])


def test_archive__stacked_batches(tmp_path):
    path = save(tmp_path / "data.npz", image=DATA.reshape(3, 2, 3, 4))
    batches = image_batches(path)
    assert [b.shape for b in batches] == [(2, 3, 4)] * 3
    with pytest.raises(ConfigError, match="batch_size does not apply"):
        open_dataset(path, IMAGE, batch_size=2)


def test_archive__is_never_loaded_as_a_whole(tmp_path):
    data = np.zeros((64, 64, 1024), "float32")  # 16 MB, 256 KB each
    path = tmp_path / "big.npz"
    np.savez_compressed(path, x=data)
    inputs = (InputInfo("x", ("n", 64, 1024), "float32"),)
    del data
    tracemalloc.start()
    for batch in open_dataset(path, inputs):
        assert batch["x"].nbytes == 2**18
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_archive__objects_are_not_unpickled(tmp_path):
    path = save(tmp_path / "data.npz", image=np.array([{"a": 1}, None], dtype=object))
    with pytest.raises(DataError, match=r"image.npy is no array.*holds Python objects"):
        open_dataset(path, IMAGE)


def test_archive__damage(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"is no data set in an \.npz"):
        open_dataset(path, IMAGE)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 3, 4)}
    )
    for content, message in (
        (
            header.getvalue() + b"\0" * 48,
            "data.npz: image.npy is no array.* says shape .* but it has",
        ),
        (b"rubbish", "data.npz: image.npy is no array"),
        (b"", "data.npz: image.npy is no array"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("image.npy", content)
        with pytest.raises(DataError, match=message):
            open_dataset(path, IMAGE)


@pytest.mark.parametrize("order", ["C", "F"])
def test_archive__a_small_file_does_not_fill_the_memory(tmp_path, order):
    """Zeros compress by a thousand. One after the other they are read, all at once they are not."""
    path = tmp_path / "data.npz"
    data = np.zeros((100, 2**18), "float32", order)  # 100 MB
    np.savez_compressed(path, image=data)
    del data
    assert path.stat().st_size < 2**18
    whole = [InputInfo("image", (100, 2**18), "float32")]
    with pytest.raises(DataError, match=r"data.npz: .*image.npy.* takes 104857600 bytes"):
        open_dataset(path, whole)
    rows = [InputInfo("image", ("n", 2**18), "float32")]
    if order == "F":
        with pytest.raises(DataError, match=r"in Fortran order, read as a whole"):
            open_dataset(path, rows)
    else:
        assert next(iter(open_dataset(path, rows)))["image"].nbytes == 2**20


def test_archive__says_which_array_it_took(tmp_path):
    path = save(tmp_path / "data.npz", picture=DATA)
    with pytest.warns(DataWarning, match="no array 'image'; its only array 'picture' is used"):
        open_dataset(path, IMAGE)


def test_archive__changed_bytes_are_found(tmp_path):
    path = save(tmp_path / "data.npz", image=DATA)
    content = bytearray(path.read_bytes())
    place = content.find(DATA[3].tobytes())
    content[place] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"image\.npy is no array, or is damaged: .*CRC"):
        image_batches(path)


def test_archive__names(tmp_path):
    path = save(tmp_path / "data.npz", imag=DATA, labels=np.zeros(6))
    with pytest.raises(
        DataError, match=r"lacks input 'image'; it has 'imag', 'labels' and the model takes 'image'"
    ):
        open_dataset(path, IMAGE)


def test_paths__messages(tmp_path):
    with pytest.raises(DataError, match=r"'nowhere.npz' is not a file; expected an .npz"):
        open_dataset("nowhere.npz", IMAGE)
    with pytest.raises(DataError, match="is not a file"):
        open_dataset(tmp_path, IMAGE)
    np.save(tmp_path / "x.npy", DATA)
    match = r"is an .npy file, which names no input, but the model has 2 inputs \('ids', 'mask'\)"
    with pytest.raises(DataError, match=match):
        open_dataset(tmp_path / "x.npy", PAIR)
    with pytest.raises(DataError, match=r"'nowhere.npy' is not a file"):
        open_dataset("nowhere.npy", IMAGE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.csv", b"1.5,2\n", r"begins with b'1.5,2\\n', and an .npz with b'PK'\. .*np\.loadtxt"),
        ("d.png", b"\x89PNG\r\n\x1a\n....", r"begins with b'\\x89PNG.*folder of pictures"),
        ("d.npz", b"", r"it is empty\. Write one with np\.savez"),
        ("d.npz", b"PK\x03\x04 the rest is missing", r"it ends early, so copy or write it again"),
        ("d.npz", b"\x93NUMPY\x01\x00", r"so name it \.npy"),
        ("d.npz", b"PK\x05\x06" + bytes(18), r"it is a zip without an array of numpy"),
    ],
)
def test_archive__that_is_none(tmp_path, name, content, message):
    """Named with what it is and what to do, also where a model has state."""
    (tmp_path / name).write_bytes(content)
    match = rf"{name} is no data set in an \.npz, or is damaged: .*{message}.*\[RQ502\]"
    for read in (lambda path: open_dataset(path, IMAGE), list_arrays):
        with pytest.raises(DataError, match=match):
            read(tmp_path / name)


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy__is_the_one_input(tmp_path, order):
    np.save(tmp_path / "x.npy", np.asarray(DATA, order=order))
    made = image_batches(tmp_path / "x.npy")
    for got, expected in zip(made, image_batches(DATA), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x93NUMPY\x01\x00"])
def test_npy__damaged(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"x.npy"):
        open_dataset(tmp_path / "x.npy", IMAGE)


def test_npy__shorter_than_it_says(tmp_path):
    np.save(tmp_path / "x.npy", DATA)
    data = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(data[:-8])
    with pytest.raises(DataError, match=r"x.npy is no array.* says shape .* but it has"):
        open_dataset(tmp_path / "x.npy", IMAGE)


STATES = {"hidden": np.zeros((1, 2), "float32"), "cell": np.zeros((1, 2), "float32")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hiden", "cells"], r"lacks the state 'cell'; its array 'cells' is no input"),
        (["hidden"], r"has the state 'hidden', and lacks the state 'cell'; allowed: all states"),
        (["hidden", "celll"], r"lacks the state 'cell'; its array 'celll' is no input"),
        (["labels"], ""),
        ([], ""),
    ],
)
def test_state_in_a_file__misspelled_or_missing(tmp_path, given, message):
    """It would begin with its initial value, and the data would be one sequence."""
    inputs = (*IMAGE, *(InputInfo(name, each.shape, "float32") for name, each in STATES.items()))
    arrays = {name: np.zeros((len(DATA), 2), "float32") for name in given}
    path = save(tmp_path / "data.npz", image=DATA, **arrays)
    if message:
        with pytest.raises(DataError, match=message):
            open_sequences(path, inputs, STATES, lambda batch: STATES)
    else:
        assert len([*open_sequences(path, inputs, STATES, lambda batch: STATES)]) == len(DATA)


@pytest.mark.parametrize("one_shot", [(x for x in DATA), iter([DATA]), map(abs, DATA)])
def test_one_shot__says_what_to_pass(one_shot):
    with pytest.raises(DataError, match=r"read only once.*Pass list\(...\) of it, or a function"):
        open_dataset(one_shot, IMAGE)


def test_reader__of_onnxruntime():
    """Its length is NotImplementedError, and it is read once."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.items = iter([{"image": DATA[:1]}, {"image": DATA[1:2]}])

        def get_next(self):
            return next(self.items, None)

    with pytest.raises(DataError, match=r"only once.*: lambda: Reader\(\.\.\.\)"):
        open_dataset(Reader(), IMAGE)
    opened = open_dataset(Reader, IMAGE)
    assert [len(list(opened)) for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("empty", [[], list, ()])
def test_empty__is_an_error(empty):
    with pytest.raises(DataError, match="yields no sample"):
        list(open_dataset(empty, IMAGE))
    with pytest.raises(DataError, match="axis 0 has length 0"):
        open_dataset(DATA[:0], IMAGE)


def test_function__that_returns_the_same_exhausted_iterator():
    items = iter(list(DATA))
    dataset = open_dataset(lambda: items, IMAGE)
    assert len(list(dataset)) == 6
    with pytest.raises(DataError, match="must return a fresh iterator at every call"):
        list(dataset)


@pytest.mark.parametrize("result", [DATA, {"image": DATA}, "data.npz"])
def test_function__that_returns_no_iterator(result):
    with pytest.raises(DataError, match="must return an iterator of samples"):
        list(open_dataset(lambda: result, IMAGE))
    with pytest.raises(DataError, match="returned int, which is not iterable"):
        list(open_dataset(lambda: 3, IMAGE))


def test_function__that_needs_arguments():
    def read_samples(folder):
        return [DATA]

    with pytest.raises(DataError, match=r"read_samples.*missing a required argument: 'folder'"):
        open_dataset(read_samples, IMAGE)


class Broken:
    """A data set that cannot read its sample 2."""

    def __init__(self, length=6):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if i == 2:
            raise OSError("no picture 2.png")
        return DATA[i]


class BrokenLoader(Broken):
    def __iter__(self):
        return (self[i] for i in range(len(self)))


class Unopened:
    def __iter__(self):
        raise RuntimeError("no worker")


def draw_broken():
    yield DATA[0]
    yield {}["label"]


@pytest.mark.parametrize(
    ("source", "message", "cause"),
    [
        (Broken(), "Sample 2: the data set Broken raised OSError: no picture 2.png", OSError),
        (BrokenLoader(), "Sample 2: the data set BrokenLoader raised OSError: no pic", OSError),
        (draw_broken, "Sample 1: the data set draw_broken raised KeyError: 'label'", KeyError),
        (lambda: 1 // 0, "The data set .*lambda> raised ZeroDivisionError", ZeroDivisionError),
        (Unopened(), "The data set Unopened raised RuntimeError: no worker", RuntimeError),
    ],
)
def test_data_set_that_raises__is_named_with_the_sample(source, message, cause):
    with pytest.raises(DataError, match=message) as caught:
        list(open_dataset(source, IMAGE))
    assert isinstance(caught.value.__cause__, cause)


def test_data_set_that_raises__in_any_order_and_of_its_length():
    with pytest.raises(DataError, match="Sample 2: the data set Broken raised OSError"):
        open_dataset(Broken(), IMAGE).pick(3)
    with pytest.raises(DataError, match="The data set Broken raised ValueError"):
        open_dataset(Broken(-1), IMAGE)


def draw_broken_sequences():
    yield SampleSequence([DATA[:1]] * 5)
    raise OSError("no file 1")


@pytest.mark.parametrize(
    ("source", "message", "cause"),
    [
        (
            [DATA[:1], SampleSequence(BrokenLoader())],
            "Sample 1, step 2: the data set BrokenLoader raised OSError: no picture 2.png",
            OSError,
        ),
        (
            [DATA[:1], SampleSequence([DATA[:1], DATA[:0]])],
            "Sample 1, step 1: input 'image'",
            type(None),
        ),
        (
            SampleSequence(Unopened()),
            "Sample 0: the data set Unopened raised RuntimeError: no worker",
            RuntimeError,
        ),
        (draw_broken_sequences, "Sample 1: the data set draw_broken_sequences raised", OSError),
        (
            [SampleSequence([DATA[:1]] * 5), DATA[0, 0]],
            "Sample 1: input 'image'",
            type(None),
        ),
        ([DATA[:1], SampleSequence([])], "sequence at sample 1 is empty", type(None)),
    ],
)
def test_sequence_that_raises__is_counted_as_a_sample_with_its_steps(source, message, cause):
    data = open_sequences(source, IMAGE, {}, lambda batch: {})
    with pytest.raises(DataError, match=message) as caught:
        list(data)
    assert isinstance(caught.value.__cause__, cause)


def test_class__is_called_each_time():
    assert len(list(open_dataset(Loader, IMAGE))) == 6


def test_wrong_type():
    with pytest.raises(DataError, match="data set is of type int; allowed: a list"):
        open_dataset(3, IMAGE)
    with pytest.raises(DataError, match="of type NoneType"):
        open_dataset(None, IMAGE)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"imgae": DATA[:1]},
            r"gives 'imgae', which is not an input of the model. Did you mean 'image'",
        ),
        ({"image": DATA[:1], "y": 1}, r"gives 'y', which is not an input"),
        ({}, r"lacks input 'image'; it has none"),
        ((DATA[:1], 3), r"tuple of 2, but the model has 1 input \('image'\).*\[x for x, label"),
        (DATA[:1, :2], r"axis 1 is 2 instead of 3"),
        (DATA[:1].transpose(0, 2, 1), r"axis 1 is 4 instead of 3, axis 2 is 3 instead of 4"),
        (DATA[0].T, r"has shape \(4, 3\), the model takes \(n, 3, 4\).*one axis fewer"),
        (DATA[0, 0], r"rank 1 instead of 3"),
        (DATA[None], r"rank 4 instead of 3"),
        (DATA[:0], r"It holds no element"),
        (np.full((1, 3, 4), np.nan), r"holds 12 NaN and 0 infinite of 12 elements in float64"),
        (np.full((1, 3, 4), 1e300), r"holds 0 NaN and 12 infinite of 12 elements in float32"),
        (np.full((1, 3, 4), 1j), r"not a numeric array \(numpy dtype complex128\)"),
        (np.ma.masked_less(DATA[:1], 0.5), r"cannot be converted .*values are masked"),
        ("text", r"of type str is not a numeric array"),
        (None, r"of type NoneType is not a numeric array"),
        (TrackedTensor(DATA[:1]), r"cannot be converted to a numpy array: Can't call numpy"),
    ],
)
def test_item__messages_name_sample_and_input(item, message):
    dataset = open_dataset([DATA[:1], item], IMAGE)
    with pytest.raises(DataError, match=message) as caught:
        list(dataset)
    assert "Sample 1" in str(caught.value)
    assert "image" in str(caught.value)


@pytest.mark.parametrize("inputs", [FIXED, IMAGE])
@pytest.mark.parametrize("batch", [1, 2])
def test_item__layout_hint(inputs, batch):
    hint = "in another order; transpose the data"
    is_order = inputs is IMAGE or batch == 1  # the fixed batch is 1: two samples are another error
    with pytest.raises(DataError, match=hint if is_order else "axis 0 is 2 instead of 1"):
        list(open_dataset([DATA[:batch].transpose(0, 2, 1)], inputs))
    with pytest.raises(DataError) as caught:
        list(open_dataset([np.zeros((1, 3, 5), "float32")], inputs))
    assert hint not in str(caught.value)


def test_item__fixed_batch():
    inputs = (InputInfo("image", (2, 3, 4), "float32"),)
    with pytest.raises(DataError, match=r"stack 2 samples along a new axis 0"):
        list(open_dataset([DATA[0]], inputs))
    with pytest.raises(DataError, match=r"axis 0 is 6 instead of 2\. The batch is fixed"):
        list(open_dataset([DATA], inputs))
    with pytest.raises(ConfigError, match="batch_size is 3, but the model's batch is fixed at 2"):
        open_dataset(DATA, inputs, batch_size=3)
    assert [b.shape for b in image_batches(DATA[:5], inputs)] == [(2, 3, 4)] * 2


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "2"])
def test_batch_size__refused(batch_size):
    with pytest.raises(ConfigError, match=r"batch_size is .*; allowed: an integer >= 1"):
        open_dataset(DATA, IMAGE, batch_size=batch_size)


def test_batch_size__does_not_apply_to_iterables():
    with pytest.raises(ConfigError, match=r"batch_size applies to arrays, .npz and .npy"):
        open_dataset([DATA], IMAGE, batch_size=2)


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int64", "bool", "float32"])
def test_dtype__numbers_become_floats(dtype):
    data = np.ones((1, 3, 4), dtype)
    (batch,) = image_batches([data])
    assert batch.dtype == np.float32
    np.testing.assert_array_equal(batch, data.astype("float32"))


def test_dtype__integers_that_fit():
    inputs = (InputInfo("ids", ("n",), "int32"),)
    (batch,) = open_dataset([np.array([2**31 - 1, -5])], inputs)
    assert batch["ids"].dtype == np.int32
    np.testing.assert_array_equal(batch["ids"], [2**31 - 1, -5])
    with pytest.raises(DataError, match=r"int64 with values from 0 to 2147483648, which int32"):
        list(open_dataset([np.array([0, 2**31])], inputs))
    with pytest.raises(DataError, match=r"which int32 of the model cannot hold"):
        list(open_dataset([np.array([2**63], "uint64")], inputs))
    with pytest.raises(DataError, match=r"dtype float64, the model takes int32; cast it yourself"):
        list(open_dataset([np.array([1.0, 2.0])], inputs))
    flags = (InputInfo("mask", ("n",), "bool"),)
    (batch,) = open_dataset([np.array([0, 1])], flags)
    assert batch["mask"].dtype == np.bool_
    with pytest.raises(DataError, match=r"cannot hold \(0..1\)"):
        list(open_dataset([np.array([0, 2])], flags))


def test_input_info__unknown_dtype():
    with pytest.raises(ConfigError, match="dtype 'float99', which numpy does not know"):
        InputInfo("x", (1,), "float99")


def test_pair__by_name_or_order():
    ids, mask = np.arange(10).reshape(2, 5), np.ones((2, 5))
    for item in ((ids, mask), [ids, mask], {"mask": mask, "ids": ids}):
        (batch,) = open_dataset([item], PAIR)
        assert list(batch) == ["ids", "mask"]
        np.testing.assert_array_equal(batch["ids"], ids)


def test_pair__messages():
    ids = np.arange(10).reshape(2, 5)
    with pytest.raises(DataError, match="yield a dict by name or a tuple in this order"):
        list(open_dataset([ids], PAIR))
    with pytest.raises(DataError, match="one array, but the model has 2 inputs"):
        open_dataset(ids, PAIR)
    with pytest.raises(
        DataError, match=r"dimension length is 5 in input 'ids' but 4 in input 'mask'"
    ):
        list(open_dataset([(ids, np.ones((2, 4)))], PAIR))
    with pytest.raises(DataError, match=r"dimension n is 2 in input 'ids' but 1 in input 'mask'"):
        list(open_dataset([(ids, np.ones(5))], PAIR))
    with pytest.raises(DataError, match="same number of samples along axis 0"):
        open_dataset({"ids": ids, "mask": np.ones((3, 5))}, PAIR)
    with pytest.raises(DataError, match="gives 'label', which is not an input"):
        open_dataset({"ids": ids, "mask": np.ones((2, 5)), "label": ids}, PAIR)
    with pytest.raises(DataError, match="do not have the rank of the inputs"):
        open_dataset({"ids": ids, "mask": np.ones((2, 1, 5))}, PAIR)


def test_arrays__a_model_without_inputs(tmp_path):
    with pytest.raises(DataError, match="The model has no inputs, so its results never change"):
        open_dataset(save(tmp_path / "data.npz", image=DATA), ())


def test_arrays__wrong_shape_is_found_at_once():
    with pytest.raises(DataError, match=r"axis 2 is 5 instead of 4"):
        open_dataset(np.ones((6, 3, 5)), IMAGE)
    with pytest.raises(DataError, match="do not have the rank"):
        open_dataset(np.ones((6, 3)), IMAGE)


def test_arrays__bad_sample_is_named():
    data = DATA.copy()
    data[4, 1, 1] = np.inf
    with pytest.raises(DataError, match=r"Sample 4: input 'image' holds 0 NaN and 1 infinite"):
        list(open_dataset(data, IMAGE))


def test_arrays__model_without_batch():
    inputs = (InputInfo("x", (3, 4), "float32"),)
    assert [b["x"].shape for b in open_dataset(DATA, inputs)] == [(3, 4)] * 6
    assert [b["x"].shape for b in open_dataset(DATA[0], inputs)] == [(3, 4)]


def test_pick__spread_where_items_can_be_read_in_any_order():
    for source in (list(DATA), tuple(DATA), DATA, {"image": DATA}):
        data = open_dataset(source, IMAGE)
        every = [next(iter(batch.values())) for batch in data]
        picked = [next(iter(batch.values())) for batch in data.pick(3)]
        step = len(every) // 3
        assert len(picked) == 3
        for got, want in zip(picked, every[::step], strict=False):
            np.testing.assert_array_equal(got, want)
        assert len(data.pick(100)) == len(every)
    taken = []

    def source():
        for x in DATA:
            taken.append(1)
            yield x

    # A stream is read no further than it has to be.
    assert len(open_dataset(source, IMAGE).pick(2)) == len(taken) == 2


def test_head__limits_and_nests():
    dataset = open_dataset(DATA, IMAGE)
    assert len(list(dataset.head(2))) == 2
    assert dataset.head(2).length == 2
    assert dataset.head(100).length == 6
    assert dataset.head(2).head(4).length == 2
    taken = []

    def source():
        for x in DATA:
            taken.append(1)
            yield x

    head = open_dataset(source, IMAGE).head(3)
    assert head.length is None
    assert len(list(head)) == 3
    assert len(taken) == 3  # nothing is read ahead
    for wrong in (0, -1, 1.0, True):
        with pytest.raises(ConfigError, match="head takes an integer >= 1"):
            dataset.head(wrong)


def test_open_dataset__of_a_dataset():
    dataset = open_dataset(DATA, IMAGE).head(2)
    again = open_dataset(dataset, IMAGE)
    assert isinstance(again, Dataset)
    assert len(list(again)) == 2
