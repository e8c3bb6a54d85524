"""PyTorch modules in, integer modules out; PyTorch is an extra.

In front of the data flow. PyTorch is imported when a function of this package is called.
"""

from relayquant.importers import import_torch as load
from relayquant.torch.exported import export, quantize

__all__ = ["export", "load", "quantize"]
