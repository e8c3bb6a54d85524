"""Calibration: calibration graph + data -> quantization parameters."""
