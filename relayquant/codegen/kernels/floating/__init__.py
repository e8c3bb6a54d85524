"""Kernels on float32, of the same building blocks."""
