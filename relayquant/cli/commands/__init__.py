"""For the command line: a module for each command, whose `run` is told the parsed options and where
to print.
"""
