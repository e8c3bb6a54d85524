"""Operators without a kernel -> loop nests, where the loop nests of TVM are wrong or slow."""
