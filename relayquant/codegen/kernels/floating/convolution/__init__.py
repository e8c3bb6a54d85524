"""Convolutions of float32: specification -> plan -> kernel in NHWC."""
