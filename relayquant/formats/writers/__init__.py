"""Quantized models out: the reference form or the integer module as a file that others read."""

from relayquant.config import GroupedForm
from relayquant.formats.writers.onnx_file import export_onnx

__all__ = ["GroupedForm", "export_onnx"]
