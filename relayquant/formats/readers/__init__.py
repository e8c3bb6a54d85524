"""Readers: a model file -> a float Relax module whose values keep the model's names. Each is loaded
when it is first used: the header of a GGUF file is read without a compiler.
"""

from typing import TYPE_CHECKING

from relayquant.base import lazy

if TYPE_CHECKING:
    from relayquant.formats.readers.gguf.parameters import load_gguf
    from relayquant.formats.readers.onnx.model import import_onnx
    from relayquant.formats.readers.tflite import import_tflite
    from relayquant.formats.readers.torch.program import import_torch

__all__ = ["import_onnx", "import_tflite", "import_torch", "load_gguf"]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.formats.readers.gguf.parameters": "load_gguf",
        "relayquant.formats.readers.onnx.model": "import_onnx",
        "relayquant.formats.readers.tflite": "import_tflite",
        "relayquant.formats.readers.torch.program": "import_torch",
    },
)
