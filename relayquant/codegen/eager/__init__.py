"""Float functions -> results, step by step without compiling; for calibration and analysis.

Calibration and analysis run each function only a few hundred times. Convolutions and products with
weights run on the float kernels, together with the bias, residual and clip after them. Simulated
quantization of whole tensors, gelu, and chains of arithmetic such as hard swish run on one kernel
for all shapes; softmax and layer norm on one for each length of rows. Everything else runs in
numpy. Kernels depend on no other size, so a network needs five or so, and all modules of a process
share them. Arrays keep their logical layout, but their memory order is the kernels' order, channels
last: no value is transposed between one convolution and the next.
"""

from relayquant.codegen.eager.incremental import IncrementalFunction, ParameterUpdate, Recording
from relayquant.codegen.eager.module import EagerModule

__all__ = ["EagerModule", "IncrementalFunction", "ParameterUpdate", "Recording"]
