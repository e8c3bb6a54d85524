"""The bottom layer: types that describe numbers, argument checks, events, plain data, files, and
calls of compiled functions.
"""
