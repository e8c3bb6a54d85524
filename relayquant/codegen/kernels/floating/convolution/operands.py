"""Buffers that the emitters of a float convolution pass on."""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.codegen.kernels.floating.tile import Buffer


@dataclass(frozen=True)
class FloatOperands:
    """Data, packed weights and results of a kernel, and what its epilogue adds; None: nothing."""

    data: Buffer
    weight: Buffer
    bias: Buffer | None
    residual: Buffer | None
    result: Buffer
