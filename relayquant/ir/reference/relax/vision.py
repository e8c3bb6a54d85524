"""Numpy forms of Relax operators on boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def select_boxes(args: list[Any], attrs: Any) -> Any:
    """Compute all_class_non_max_suppression in ONNX format.

    Returns rows (batch, class, box), int64, and the number of rows, int64 (1,).

    Boxes are (B, N, 4): lower corner, upper corner. Scores are (B, C, N). For each batch and class,
    boxes with a score above the score threshold are selected, the best first, at most `most`. A box
    that overlaps a better box by the overlap threshold or more is dropped. The result has a row for
    each box and class. Rows beyond the number are 0.
    """
    if str(attrs.output_format) != "onnx":
        return NotImplemented
    boxes, scores, most, overlap, least = (np.asarray(arg) for arg in args)
    if scores.ndim != 3:
        return NotImplemented
    batch, classes, count = scores.shape
    found = [
        (at, kind, box)
        for at in range(batch)
        for kind in range(classes)
        for box in suppress(boxes[at], scores[at, kind], int(most), overlap, least)
    ]
    rows = np.zeros((batch * classes * count, 3), "int64")
    rows[: len(found)] = np.array(found, "int64").reshape(-1, 3)
    return rows, np.array([len(found)], "int64")


def suppress(boxes: Array, scores: Array, most: int, overlap: Any, least: Any) -> list[int]:
    """Return the indices of the selected boxes of one class, the best first."""
    chosen: list[int] = []
    for box in np.argsort(-scores, kind="stable"):
        if len(chosen) >= most or not scores[box] > least:
            break
        if all(measure_overlap(boxes[box], boxes[other]) < overlap for other in chosen):
            chosen.append(int(box))
    return chosen


def measure_overlap(first: Array, second: Array) -> Any:
    """Return the intersection of two boxes (4,) divided by their union."""
    low = np.maximum(first[:2], second[:2])
    high = np.minimum(first[2:], second[2:])
    shared = np.prod(np.maximum(high - low, 0), dtype=first.dtype)
    areas = [np.prod(box[2:] - box[:2], dtype=box.dtype) for box in (first, second)]
    whole = areas[0] + areas[1] - shared
    return shared / whole if whole > 0 else whole.dtype.type(0)
