"""Target -> instruction set with its vector primitives."""
