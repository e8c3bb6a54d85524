"""Models that no graph can hold: calibrate PyTorch code by calling it, and convert its regions.

A region is a sequence of operators that always follow one another. Each becomes an integer module.
The code runs under `recording`, which records the called operators (`call_sites`, `tape`).
`regions` cuts the record where control flow can branch. `quantized_regions` makes a Relax module of
each region and quantizes it. `executing` runs the code again with these modules. PyTorch is
imported when `prepare` is called.
"""

from relayquant.config import Unseen
from relayquant.torch.define_by_run.entry import prepare

__all__ = ["Unseen", "prepare"]
