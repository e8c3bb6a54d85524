"""What every room stands on: values that describe numbers, checks of arguments, events, plain data,
files, and the call of compiled functions.
"""
