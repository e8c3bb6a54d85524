"""Operators without a kernel -> loop nests of our own, where those of TVM are wrong or slow."""
