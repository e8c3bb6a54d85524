"""First stage, ONNX: a model file becomes a float Relax module."""
