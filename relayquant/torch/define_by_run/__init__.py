"""Models that only run: PyTorch code that no graph holds is calibrated by calling it, and its
regions, whose operators always follow one another, become integer modules.

In front of the data flow. The code runs under `recording`, which writes down the operators it
calls (`call_sites`, `tape`); `regions` cuts what was recorded where control flow may part;
`quantized_regions` makes a Relax module of each part and quantizes it; `executing` runs the code
again with these. PyTorch is imported when `prepare` is called.
"""

from relayquant.config import Unseen
from relayquant.torch.define_by_run.entry import prepare

__all__ = ["Unseen", "prepare"]
