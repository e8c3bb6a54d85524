"""Graph and data -> quantization parameters: observers, and the runner that drives them."""
