"""Pooling windows along an axis, shared by the readers, writers and compilers of pools."""

from __future__ import annotations


def count_windows(
    size: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], ceil_mode: bool
) -> int:
    """Count the windows along an axis with (before, after) `pads`. Below 1 if none fits.

    With `ceil_mode` the last window may end beyond the padding, but it starts in the data or before
    it (PyTorch, `pooling_output_shape`; ONNX, operator MaxPool).
    """
    free = size + sum(pads) - (kernel - 1) * dilation - 1
    if not ceil_mode:
        return free // stride + 1
    count = -(-free // stride) + 1
    return count - ((count - 1) * stride >= size + pads[0])


def reach_end(count: int, size: int, kernel: int, stride: int, dilation: int, before: int) -> int:
    """Return the padding after an axis that the last window needs, with `before` in front."""
    return max(0, (count - 1) * stride + (kernel - 1) * dilation + 1 - size - before)
