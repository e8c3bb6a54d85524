"""Kernels on integers: specification and instruction set -> PrimFunc, packed constants."""
