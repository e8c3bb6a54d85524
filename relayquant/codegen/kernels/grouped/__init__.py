"""Kernels of products with grouped weights: codes of few bits, a scale for each group of a row."""
