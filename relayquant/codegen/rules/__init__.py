"""Operators -> calls of integer kernels, with the operators after a product in the kernel's
epilogue.
"""
