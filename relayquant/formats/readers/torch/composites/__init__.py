"""PyTorch reader: operators that are written in other operators, by family. `table` lists them."""
