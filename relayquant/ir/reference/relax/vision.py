"""Relax operators on boxes in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def select_boxes(args: list[Any], attrs: Any) -> Any:
    """all_class_non_max_suppression in ONNX's format: (rows (batch, class, box) int64, their number
    int64 (1,)).

    Of boxes (B, N, 4), the lower corner and the upper one, and scores (B, C, N): by batch and class
    the boxes with a score above the threshold, the best first, at most `most` of them, without
    those that overlap a better one by the threshold or more. There is a row for each box and class;
    those beyond the number are 0.
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
    """Numbers of the selected boxes of one class, the best first."""
    chosen: list[int] = []
    for box in np.argsort(-scores, kind="stable"):
        if len(chosen) >= most or not scores[box] > least:
            break
        if all(measure_overlap(boxes[box], boxes[other]) < overlap for other in chosen):
            chosen.append(int(box))
    return chosen


def measure_overlap(first: Array, second: Array) -> Any:
    """Area that two boxes (4,) share over the area of both."""
    low = np.maximum(first[:2], second[:2])
    high = np.minimum(first[2:], second[2:])
    shared = np.prod(np.maximum(high - low, 0), dtype=first.dtype)
    areas = [np.prod(box[2:] - box[:2], dtype=box.dtype) for box in (first, second)]
    whole = areas[0] + areas[1] - shared
    return shared / whole if whole > 0 else whole.dtype.type(0)
