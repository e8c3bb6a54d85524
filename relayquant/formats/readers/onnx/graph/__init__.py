"""ONNX reader: reading, checks and rewrites of the ONNX graph, before its nodes are converted."""
