"""Float module -> the same function with channels that are easier to quantize."""
