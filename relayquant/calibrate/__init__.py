"""Choosing quantization parameters: observers, data sets, and the runner that drives them."""
