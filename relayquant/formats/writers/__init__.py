"""Writers: a quantized module, in the reference form or with integers -> a file for other tools."""

from relayquant.config import GroupedForm
from relayquant.formats.writers.onnx.file import export_onnx

__all__ = ["GroupedForm", "export_onnx"]
