"""Times: of whole models in several engines, of kernels, and the peak of this machine."""
