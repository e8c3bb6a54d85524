"""Weights: their parameters, and the choice of their integers."""
