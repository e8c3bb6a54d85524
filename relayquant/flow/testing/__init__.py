"""Test tools for authors of patterns: a row -> drawn models, and a check that all stages agree
on them.
"""
