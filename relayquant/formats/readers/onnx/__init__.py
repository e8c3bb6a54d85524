"""ONNX reader: a model file -> a float Relax module."""
