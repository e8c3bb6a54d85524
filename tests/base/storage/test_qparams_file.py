"""Parameters on disk: ours exactly, tables of ONNX Runtime and encodings of AIMET by their meaning,
everything else with an error that says what is wrong.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from drawing import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

import relayquant as rq
from relayquant.errors import ConfigError

scales = st.floats(2.0**-60, 2.0**60, width=32)


@settings(max_examples=count_examples(30), deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(scales, st.integers(0, 255))))
def test_save_load__exact(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("q") / "q.json"
    parameters = {name: rq.QParams(np.float32(s), z, "uint8") for name, (s, z) in rows.items()}
    parameters["w"] = rq.QParams(np.array([0.1, 0.3], "float32"), np.zeros(2), "int8", 1)
    assert rq.load_qparams(rq.save_qparams(parameters, path)) == parameters


def test_save__refuses_other_values(tmp_path):
    with pytest.raises(ConfigError, match=r"\{'x': 0\.1\}; allowed: .*QParams"):
        rq.save_qparams({"x": 0.1}, tmp_path / "q.json")
    assert not list(tmp_path.iterdir())


def load(tmp_path, text: str, **settings):
    path = tmp_path / "file"
    path.write_text(text)
    return rq.load_qparams(path, **settings)


def test_onnxruntime__its_own_calibrator(tmp_path, monkeypatch):
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
    tools = pytest.importorskip("onnxruntime.quantization.quant_utils")
    pytest.importorskip("flatbuffers")
    ranges = {"a": (np.float32(-1.0), np.float32(1.55)), "b": (np.float32(0.0), np.float32(5.1))}
    data = calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, ranges)
    monkeypatch.chdir(tmp_path)
    try:
        tools.write_calibration_table(data)
    except Exception as error:
        pytest.skip(f"this ONNX Runtime does not write its table: {error}")
    found = rq.load_qparams("calibration.json")
    assert found["a"] == rq.QParams(np.float32(2.55 / 255), 100, "uint8")
    assert found["b"] == rq.QParams(np.float32(np.float32(5.1) / 255.0), 0, "uint8")


def test_onnxruntime__plain_ranges_and_text(tmp_path):
    expected = {"conv 1": rq.choose_qparams(-2.0, 2.0, rq.QSpec("int8", rq.config.Scheme.AFFINE))}
    assert load(tmp_path, '{"conv 1": [-2, 2]}', dtype="int8") == expected
    assert load(tmp_path, "conv 1 2.0\n", dtype="int8") == expected


AIMET = {"bitwidth": 8, "dtype": "int", "scale": 0.02, "offset": -100, "max": 3.1, "min": -2.0}


def test_aimet__both_versions(tmp_path):
    old = {"version": "0.6.1", "activation_encodings": {"y": [AIMET]}, "param_encodings": {}}
    row = {"name": "y", "bw": 8, "dtype": "INT", "scale": [0.02], "offset": [-100]}
    skipped = {"name": "f", "bw": 16, "dtype": "FLOAT"}
    new = {"version": "1.0.0", "activation_encodings": [row, skipped], "param_encodings": []}
    for data in (old, new):
        found = load(tmp_path, json.dumps(data))
        assert found == {"y": rq.QParams(np.float32(0.02), 100, "uint8")}


def encode_weight(scales, offset: int, *, is_new: bool, **more) -> dict:
    """An entry of param_encodings with one scale for each channel, and its list of activations."""
    if is_new:
        kind = "PER_CHANNEL" if len(scales) > 1 else "PER_TENSOR"
        row = {"name": "w", "bw": 8, "dtype": "INT", "enc_type": kind, "is_sym": True} | more
        row |= {"scale": scales, "offset": [offset] * len(scales)}
        return {"version": "1.0.0", "activation_encodings": [], "param_encodings": [row]}
    channel = {"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "offset": offset} | more
    rows = [channel | {"scale": scale, "max": 127 * scale} for scale in scales]
    return {"version": "0.6.1", "activation_encodings": {}, "param_encodings": {"w": rows}}


@pytest.mark.parametrize("is_new", [False, True])
def test_aimet__weights(tmp_path, is_new):
    def read(*arguments, **more):
        return load(tmp_path, json.dumps(encode_weight(*arguments, is_new=is_new, **more)))

    scales = np.array([0.01, 0.02], "float32")
    expected = {"w": rq.QParams(scales, np.zeros(2), "int8", 0)}
    assert read([0.01, 0.02], -128) == expected
    # A grid without -128 has the same values.
    assert read([0.01, 0.02], -127) == expected
    assert read([0.01], -128) == {"w": rq.QParams(np.float32(0.01), 0, "int8")}
    affine = {"is_sym" if is_new else "is_symmetric": "False"}
    assert read([0.01], -100, **affine) == {"w": rq.QParams(np.float32(0.01), -28, "int8")}
    bits = "bw" if is_new else "bitwidth"
    assert read([0.01], -128, **{bits: 32}) == {}, "a bias"
    with pytest.raises(ConfigError, match="'w' has 4 bits; allowed for a weight: 8"):
        read([0.01], -8, **{bits: 4})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: Expecting property"),
        ('{"format": "relayquant.qparams", "version": 9, "values": {}}', "version 9; known: 1"),
        ('{"format": "relayquant.qparams", "version": 1}', "'values' is missing"),
        (
            '{"format": "relayquant.qparams", "version": 1, "values": {"x": {"scale": -1, '
            '"zero_point": 0, "dtype": "int8", "axis": null}}}',
            "scale must be finite and > 0",
        ),
        ('{"x": [NaN, 1]}', "NaN is not allowed"),
        ('{"x": [1, 2, 3]}', "known kind; allowed: what save_qparams writes"),
        ('{"x": [2, 1]}', "low <= high"),
        ("conv1 zero", "line 1 is not"),
        ('{"activation_encodings": {"y": [{"scale": 1, "offset": 0, "bitwidth": 5}]}}', "5 bits"),
        (
            '{"activation_encodings": [], "param_encodings": [{"name": "w", "enc_type": "LPBQ"}]}',
            "'w' is encoded LPBQ; allowed: PER_TENSOR, PER_CHANNEL",
        ),
        (
            '{"activation_encodings": [], "param_encodings": [{"name": "w", "scale": [1, 2], '
            '"offset": [0]}]}',
            "'w' has 2 scales and 1 offset",
        ),
        ("[" * 100000, "line 1"),
        ('{"a":' * 100000, "nested too deeply"),
        ("\n", "it names no tensor"),
    ],
)
def test_malformed__clear_error(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing__named(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no file .*nothing\.json"):
        rq.load_qparams(tmp_path / "nothing.json")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        rq.load_qparams(tmp_path / "b")
