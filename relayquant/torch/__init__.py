"""PyTorch modules in, integer modules out; training with quantization; models that only run.
PyTorch is an extra.

Around the data flow. PyTorch is imported when a function of this package is called.
"""

from relayquant.config import BatchNorm, Ranges, Unseen
from relayquant.formats.readers import import_torch as load
from relayquant.torch.conversion import convert, convert_to_reference
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.define_by_run import prepare
from relayquant.torch.exported import quantize
from relayquant.torch.exporting import export
from relayquant.torch.training import from_module, prepare_qat

__all__ = [
    "BatchNorm",
    "PrepareCustomConfig",
    "Ranges",
    "Unseen",
    "convert",
    "convert_to_reference",
    "export",
    "from_module",
    "load",
    "prepare",
    "prepare_qat",
    "quantize",
]
