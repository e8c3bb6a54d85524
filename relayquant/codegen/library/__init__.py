"""Lowered or compiled module -> what a shared library holds: constants, a description, states."""
