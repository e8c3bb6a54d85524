"""Quantization-aware training: `entry` has the calls, `trainable` the module that trains."""
