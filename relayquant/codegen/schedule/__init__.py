"""Operators without a kernel -> fused and scheduled loops, with math functions as polynomials."""
