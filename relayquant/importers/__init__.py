"""First stage: a model file becomes a float Relax module whose values carry the model's own
names.
"""

from relayquant.importers.gguf import load_gguf
from relayquant.importers.onnx.model import import_onnx
from relayquant.importers.tflite import import_tflite
from relayquant.importers.torch.program import import_torch

__all__ = ["import_onnx", "import_tflite", "import_torch", "load_gguf"]
