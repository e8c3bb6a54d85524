"""Instruction sets, and which of them a target has."""
