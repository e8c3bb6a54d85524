"""First stage, TensorFlow Lite: a flatbuffer becomes a Relax module; layout stays NHWC, tensor
names are kept.
"""

from relayquant.formats.readers.tflite.model import import_tflite

__all__ = ["import_tflite"]
