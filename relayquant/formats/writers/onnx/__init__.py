"""ONNX writer: a module in the reference form or with integers -> a QDQ ONNX file."""
