"""Module -> the same in forms that kernels and loop nests are made for: layout, types, sizes."""
