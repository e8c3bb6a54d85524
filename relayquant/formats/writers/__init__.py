"""Quantized models out: the reference form or the integer module as a file that others read."""

from relayquant.formats.writers.onnx_file import export_onnx
from relayquant.formats.writers.onnx_grouped import GroupedForm

__all__ = ["GroupedForm", "export_onnx"]
