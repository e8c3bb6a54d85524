"""Readers: a model file -> a float Relax module whose values keep the model's names."""

from relayquant.formats.readers.gguf import load_gguf
from relayquant.formats.readers.onnx.model import import_onnx
from relayquant.formats.readers.tflite import import_tflite
from relayquant.formats.readers.torch.program import import_torch

__all__ = ["import_onnx", "import_tflite", "import_torch", "load_gguf"]
