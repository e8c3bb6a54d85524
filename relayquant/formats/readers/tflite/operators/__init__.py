"""TensorFlow Lite reader: conversions of operators, by family. `table` lists them."""
