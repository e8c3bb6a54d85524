"""Kernels of attention: queries, keys and values -> rows, without scores of all pairs in memory."""
