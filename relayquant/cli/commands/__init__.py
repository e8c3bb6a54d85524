"""One module for each command. Its `run` gets the parsed options and the output to print to."""
