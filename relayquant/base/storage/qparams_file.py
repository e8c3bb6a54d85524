"""Quantization parameters in files: our JSON, and the formats of ONNX Runtime and AIMET.

Pass loaded parameters as `quantize(..., parameters=...)`. Their values are not calibrated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relayquant.base.arguments import check_arguments
from relayquant.base.qtypes import QParams, QSpec, Scheme, choose_qparams
from relayquant.base.storage.files import decode_json, read_text, reading, write_text
from relayquant.errors import ConfigError, format_count

FORMAT = "relayquant.qparams"
VERSION = 1

#: Larger files are not parameters.
MAX_BYTES = 2**28

#: bits of AIMET's encodings of biases
BIAS_BITS = 32

PathLike = str | os.PathLike[str]


@check_arguments
def save_qparams(parameters: Mapping[str, QParams], path: PathLike) -> Path:
    """Write parameters by value name as JSON. `load_qparams` reads them back exactly.

    The file is written completely or not at all. `prepared.parameters` after `calibrate` is such a
    mapping. If effort "best" equalized layers (`prepared.choices["equalized"]`), the parameters
    belong to `prepared.mod`, not to the original module.

    Returns:
        The path.

    Raises:
        ConfigError: `parameters` is not a mapping of names to QParams.
        FileError: the file cannot be written.
    """
    path = Path(path)
    for name, qparams in parameters.items():
        if not isinstance(name, str) or not isinstance(qparams, QParams):
            raise ConfigError(
                f"save_qparams: {name!r} is a {type(qparams).__name__}; allowed: names of values "
                "with QParams, as in prepared.parameters.",
                code="RQ101",
            )
    rows = {name: qparams.to_dict() for name, qparams in parameters.items()}
    data = {"format": FORMAT, "version": VERSION, "values": rows}
    text = json.dumps(data, indent=1, allow_nan=False)
    write_text(path, text)
    return path


@check_arguments
def load_qparams(path: PathLike, *, dtype: str = "uint8") -> dict[str, QParams]:
    """Read parameters by value name.

    Args:
        path: One of: a file of `save_qparams`; a calibration table of ONNX Runtime
            (calibration.json or the text file calibration.cache), whose ranges are converted to
            scales and zero points; encodings of AIMET (JSON 0.6.1 or 1.0.0) of activations and
            weights, with the names of the ONNX or PyTorch model.
        dtype: Dtype for parameters that are computed from ranges.

    Raises:
        ConfigError: the file cannot be read, its kind is unknown, or a value in it is wrong.
    """
    path = Path(path)
    with reading(path, "file of quantization parameters", ConfigError):
        text = read_text(path, MAX_BYTES)
        if not text.lstrip().startswith("{"):
            return read_ranges(parse_table(text), dtype)
        data = decode_json(text)
        for matches, read in READERS:
            if matches(data):
                return read(data, dtype)
    raise ConfigError(
        f"{path} is not a file of quantization parameters of a known kind; allowed: what "
        "save_qparams writes, calibration tables of ONNX Runtime, encodings of AIMET 0.6.1 and "
        "1.0.0.",
        code="RQ502",
    )


def read_own(data: dict[str, Any], dtype: str) -> dict[str, QParams]:
    """Read the output of `save_qparams`."""
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r}; known: {VERSION}")
    return {name: QParams.from_dict(row) for name, row in data["values"].items()}


def parse_table(text: str) -> dict[str, tuple[float, float]]:
    """Read the text of calibration.cache: lines "<tensor> <largest absolute value>"."""
    ranges = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, value = line.rpartition(" ")
        try:
            bound = abs(float(value))
        except ValueError:
            raise ValueError(f"line {number} is not '<tensor> <number>': {line[:60]!r}") from None
        ranges[name] = (-bound, bound)
    if not ranges:
        raise ValueError("it names no tensor")
    return ranges


def read_ranges(ranges: Mapping[str, tuple[float, float]], dtype: str) -> dict[str, QParams]:
    """Compute affine parameters that cover (low, high)."""
    spec = QSpec(dtype, Scheme.AFFINE)
    return {name: choose_qparams(low, high, spec) for name, (low, high) in ranges.items()}


def read_onnxruntime(data: dict[str, Any], dtype: str) -> dict[str, QParams]:
    """Read calibration.json: {tensor: TensorData with lowest and highest}, or {tensor: [low,
    high]}.
    """
    rows = data.get("data", data) if data.get("CLS") == "TensorsData" else data
    ranges = {}
    for name, row in rows.items():
        ends = row if isinstance(row, list) else [row["lowest"], row["highest"]]
        low, high = (read_number(end) for end in ends)
        ranges[name] = (low, high)
    return read_ranges(ranges, dtype)


def read_number(value: Any) -> float:
    """Read a number, or an array of one number as ONNX Runtime writes it."""
    if isinstance(value, dict):
        value = value["data"]
    array = np.asarray(value, "float64")
    if array.size != 1:
        raise ValueError(f"{format_count(array.size, 'number')} where a range has one end")
    return float(array.reshape(()))


def read_aimet(data: dict[str, Any], dtype: str) -> dict[str, QParams]:
    """Read AIMET encodings of activations and weights: real = scale * (q + offset), q from 0
    (AIMET, encoding format).

    32-bit encodings of biases are left out, because a bias has the scale of its accumulator.
    """
    found = {}
    for name, row in list_aimet(data["activation_encodings"]):
        bits, scale, offset = read_encoding(name, row)
        if bits not in (8, 16):
            raise ValueError(f"{name!r} has {format_count(bits, 'bit')}; allowed: 8 and 16")
        if scale.size != 1:
            raise ValueError(
                f"{name!r} has {format_count(scale.size, 'scale')}; an activation has one"
            )
        zero_point: Any = -offset[0]
        found[name] = QParams(np.float32(scale[0]), zero_point, f"uint{bits}")  # pyright: ignore[reportArgumentType]
    for name, row in list_aimet(data.get("param_encodings", [])):
        bits, scale, offset = read_encoding(name, row)
        if bits == BIAS_BITS:
            continue
        if bits != 8:
            raise ValueError(f"{name!r} has {format_count(bits, 'bit')}; allowed for a weight: 8")
        # A symmetric range without its lowest integer has offset -127. The real values are the
        # same.
        is_symmetric = str(row.get("is_sym", row.get("is_symmetric", False))).lower() == "true"
        zero_point = np.zeros_like(offset) if is_symmetric else -offset - 128
        is_single = scale.size == 1
        found[name] = QParams(
            (scale[0] if is_single else scale).astype("float32"),
            zero_point[0] if is_single else zero_point,
            "int8",
            None if is_single else 0,
        )
    return found


def list_aimet(table: Any) -> list[tuple[str, dict[str, Any]]]:
    """List (name, row) of the values that are quantized to integers. A row has a number or a list
    of numbers.

    Version 0.6.1: {name: [row of a channel, ...]}. Version 1.0.0: [row with a name and lists].
    """
    if isinstance(table, list):
        rows = {row["name"]: row for row in table}
    else:
        rows = {
            name: {
                **channels[0],
                **{key: [row.get(key) for row in channels] for key in ("scale", "offset")},
            }
            for name, channels in table.items()
        }
    return [
        (name, row) for name, row in rows.items() if str(row.get("dtype", "int")).lower() == "int"
    ]


def read_encoding(name: str, row: dict[str, Any]) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (bits, scales, offsets) of an encoding, float64 (N,). N is 1 without channels.

    Raises:
        ValueError: the encoding has blocks, or the numbers of offsets and scales differ.
    """
    kind = str(row.get("enc_type", "PER_TENSOR")).upper()
    if kind not in ("PER_TENSOR", "PER_CHANNEL"):
        raise ValueError(f"{name!r} is encoded {kind}; allowed: PER_TENSOR, PER_CHANNEL")
    scale, offset = (np.asarray(row[key], "float64").reshape(-1) for key in ("scale", "offset"))
    if not scale.size or scale.size != offset.size:
        raise ValueError(
            f"{name!r} has {format_count(scale.size, 'scale')} and "
            f"{format_count(offset.size, 'offset')}"
        )
    return int(row.get("bw", row.get("bitwidth", 8))), scale, offset


def is_table(data: dict[str, Any]) -> bool:
    """Return whether every entry is a range."""
    return bool(data) and all(
        (isinstance(row, list) and len(row) == 2) or (isinstance(row, dict) and "lowest" in row)
        for row in data.values()
    )


#: (test whether a JSON object is of this kind, its reader)
READERS = (
    (lambda data: data.get("format") == FORMAT, read_own),
    (lambda data: "activation_encodings" in data, read_aimet),
    (lambda data: data.get("CLS") == "TensorsData" or is_table(data), read_onnxruntime),
)
