"""TIR functions without a kernel -> scheduled loops, with math functions as polynomials."""
