"""First stage: a model file becomes a float Relax module whose values carry the model's own
names.
"""

from relayquant.importers.gguf_file import load_gguf
from relayquant.importers.onnx_model import import_onnx
from relayquant.importers.tflite_model import import_tflite
from relayquant.importers.torch_program import import_torch

__all__ = ["import_onnx", "import_tflite", "import_torch", "load_gguf"]
