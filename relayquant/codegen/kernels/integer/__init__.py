"""Integer kernels: specification and instruction set -> PrimFunc and packed constants."""
