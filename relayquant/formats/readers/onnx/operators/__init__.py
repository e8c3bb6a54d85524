"""ONNX reader: conversions of operators, one module per family of operators. `table` lists them."""
