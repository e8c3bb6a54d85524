"""Kernels on float32, built from the same blocks."""
