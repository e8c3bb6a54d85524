"""Operators -> calls of kernels, with what follows in one epilogue."""
