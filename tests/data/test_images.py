"""Folders of pictures: what each preprocessing makes of a pixel, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.data import InputInfo
from relayquant.data.images import (
    PRESETS,
    Preprocessing,
    list_images,
    open_images,
    read_labels,
)

Image = pytest.importorskip("PIL.Image")

COLOUR = (255, 0, 51)
#: preset -> what becomes of COLOUR, computed from the frameworks' own descriptions
EXPECTED = {
    "imagenet": [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225],
    "caffe": [51 - 103.939, 0 - 116.779, 255 - 123.68],  # blue, green, red
    "tflite": [1.0, -1.0, -0.6],
    "cifar": [(1 - 0.4914) / 0.2470, -0.4822 / 0.2435, (0.2 - 0.4465) / 0.2616],
    "unit": [1.0, 0.0, 0.2],
}


def read_one(folder, text, shape, dtype="float32"):
    infos = (InputInfo("x", shape, dtype),)
    return [batch["x"] for batch in open_images(folder, Preprocessing.parse(text), infos)]


@pytest.fixture
def folder(tmp_path):
    Image.new("RGB", (300, 280), COLOUR).save(tmp_path / "b.png")
    (tmp_path / "deep").mkdir()
    Image.new("L", (40, 50), 255).save(tmp_path / "deep" / "c.png")
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


@pytest.mark.parametrize("preset", PRESETS)
def test_preprocessing__each_preset(preset, folder):
    assert set(EXPECTED) == set(PRESETS)
    first, second = read_one(folder, preset, ("n", 3, 224, 224))
    assert first.shape == second.shape == (1, 3, 224, 224)
    np.testing.assert_allclose(first[0, :, 100, 7], EXPECTED[preset], rtol=1e-5, atol=1e-6)
    last = read_one(folder, preset, (1, 224, 224, 3))[0]
    np.testing.assert_array_equal(last.transpose(0, 3, 1, 2), first)


def test_preprocessing__the_middle_is_cut_out(tmp_path):
    pixels = np.zeros((8, 12, 3), "uint8")
    pixels[2:6, 4:8] = 255  # the middle 4 x 4
    Image.fromarray(pixels).save(tmp_path / "x.png")
    (whole,) = read_one(tmp_path, "size=8,crop=4", (1, 3, "h", "w"))
    assert whole.shape == (1, 3, 4, 4)
    assert (whole == 1).all()


def test_preprocessing__grey_and_integers(folder):
    grey, white = read_one(folder, "scale=1,order=grey", (1, 1, 8, 8), "uint8")
    assert grey.dtype == "uint8"
    # ITU-R 601-2, as Pillow says: 299 red, 587 green, 114 blue of 1000.
    assert abs(int(grey[0, 0, 3, 3]) - (299 * 255 + 114 * 51) / 1000) <= 1
    assert (white == 255).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagnet", "Did you mean 'imagenet'"),
        ("size=4,imagenet", "a preset first"),
        ("sise=4", "a preset first"),
        ("size=big", "not a value for size"),
        ("order=gbr", "not a value for order"),
        ("std=0", "std other than 0"),
        ("size=0", "sides of 1 or more"),
        ("size=100,crop=200", "a crop up to the size"),
    ],
)
def test_preprocessing__says_what_is_wrong(text, message):
    with pytest.raises(rq.ConfigError, match=message):
        Preprocessing.parse(text)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 10), "takes no pictures"),
        ((1, 5, 8, 8), "takes no pictures"),
        ((4, 3, 8, 8), "takes 4 pictures at once"),
        ((1, 3, "h", "w"), "say which, with crop="),
    ],
)
def test_open_images__a_model_that_takes_none(folder, shape, message):
    with pytest.raises(rq.DataError, match=message):
        read_one(folder, "unit", shape)


def test_open_images__files_that_are_none(tmp_path):
    with pytest.raises(rq.DataError, match="holds no picture"):
        read_one(tmp_path, "unit", (1, 3, 8, 8))
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    with pytest.raises(rq.DataError, match=r"a\.jpg is not a readable picture"):
        read_one(tmp_path, "unit", (1, 3, 8, 8))


def test_open_images__a_picture_that_would_fill_the_memory(tmp_path, monkeypatch):
    Image.new("L", (64, 64)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(rq.DataError, match="decompression bomb"):
        read_one(tmp_path, "unit", (1, 3, 8, 8))


def test_read_labels__what_is_no_text(tmp_path):
    file = tmp_path / "labels.txt"
    file.write_bytes(b"\xff\xfe\x00")
    for path, message in {
        file: "is no file of labels, or is damaged",
        tmp_path: "it is a folder",
        tmp_path / "none.txt": "There is no file",
    }.items():
        with pytest.raises(rq.DataError, match=message) as caught:
            read_labels(path)
        assert caught.value.code == "RQ502"


@pytest.mark.parametrize(
    ("text", "word"),
    {"file,label\nb.png,1\n": "label", "b.png,1\na.png 1.0\n": "1.0", "b.png,1\n": "b.png"}.items(),
)
def test_read_labels__a_class_is_the_index_of_a_score(text, word, tmp_path):
    """Headings, names of classes, and names of samples that are no pictures are refused."""
    file = tmp_path / "labels.csv"
    file.write_text(text)
    with pytest.raises(rq.DataError, match=f"class '{word}' is no integer; .*from 0 on.*headings"):
        read_labels(file)


def test_read_labels__by_name_and_in_order(folder):
    images, file = list_images(folder), folder / "labels.txt"
    for text in ("deep/c.png,7\nb.png,3\n", "3\n7\n"):
        file.write_text(text)
        assert read_labels(file, images, folder).tolist() == [3, 7]
    for text, message in {
        "3\n": "has no line for|has no labels",
        "b.png 3\n": "no line for 1 picture, the first is 'deep/c.png'",
        "b.png 3 5\n": "'b.png', and one for 'b.png 3', which is no picture",
        "b.png cat\n": "'cat' is no integer",
        " " * 100_000 + "b.png cat\n": "'cat' is no integer",  # in one pass
        "": "has no labels",
    }.items():
        file.write_text(text)
        with pytest.raises(rq.DataError, match=message):
            read_labels(file, images, folder)
    file.write_text("a b, c.png , 3\n\nä  d.png\t7 \n")
    named = [folder / "a b, c.png", folder / "ä  d.png"]
    assert read_labels(file, named, folder).tolist() == [3, 7]
    file.write_text('"a b, c.png",3\n ,"ä  d.png","7",\n')  # as tables are written in CSV
    assert read_labels(file, named, folder).tolist() == [3, 7]
    file.write_text("b.png 3\ndeep/c.png 7\n", "utf-8-sig")  # with a byte order mark
    assert read_labels(file, images, folder).tolist() == [3, 7]
    file.write_text("b.png 3\n7\n")
    with pytest.raises(rq.DataError, match="has no labels"):
        read_labels(file, images, folder)
    file.write_text("3\n7 1\n")  # of samples that are no pictures
    assert read_labels(file).tolist() == [3, 7, 1]
    for text, message in {"3\ncat\n": "'cat'", "": "a line 'CLASS' for each sample"}.items():
        file.write_text(text)
        with pytest.raises(rq.DataError, match=message):
            read_labels(file)
