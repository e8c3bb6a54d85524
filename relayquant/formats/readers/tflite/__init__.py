"""TensorFlow Lite reader: a flatbuffer -> a Relax module. The layout stays NHWC and tensor names
are kept.
"""

from relayquant.formats.readers.tflite.model import import_tflite

__all__ = ["import_tflite"]
