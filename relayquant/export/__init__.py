"""Quantized models out: the reference form or the integer module as a file that others read."""

from relayquant.export.onnx_file import export_onnx

__all__ = ["export_onnx"]
