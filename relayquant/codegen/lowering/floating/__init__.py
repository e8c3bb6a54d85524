"""Float operators -> calls of float kernels. `lower` tries the rules."""
