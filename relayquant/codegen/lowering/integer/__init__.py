"""Operators -> calls of integer kernels that include an epilogue. `lower` tries the rules."""
