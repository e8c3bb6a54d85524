"""Loops of what has no kernel: a generic schedule, and functions as polynomials."""
