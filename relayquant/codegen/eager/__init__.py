"""Float functions run step by step, without compiling them: for calibration and analysis, which run
each function a few hundred times and then never again.

Convolutions and products with weights run on the float kernels, with the bias, residual and clip
behind them; simulated quantization of whole tensors on one kernel for all shapes; everything else
in numpy. Kernels depend on little but channels, so that few of them serve a network, and they are
shared by all modules of a process. Arrays keep their logical layout, but lie in memory as the
kernels want them, channels last: no value is transposed between one convolution and the next.
"""

from relayquant.codegen.eager.incremental import Recording, Replay
from relayquant.codegen.eager.module import EagerModule

__all__ = ["EagerModule", "Recording", "Replay"]
