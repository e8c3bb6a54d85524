"""Operators -> calls of kernels. One module for each family of kernels, all on `engine`."""
