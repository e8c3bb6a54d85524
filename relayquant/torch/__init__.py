"""PyTorch modules -> integer modules: quantization, training, and models that only run.

PyTorch is an extra. It is imported when a function of this package is called.
"""

from typing import TYPE_CHECKING

from relayquant.base import lazy

if TYPE_CHECKING:
    from relayquant.torch.causal_lm import load_causal_lm
    from relayquant.torch.conversion import convert, convert_to_reference
    from relayquant.torch.custom_config import PrepareCustomConfig
    from relayquant.torch.define_by_run import prepare
    from relayquant.torch.exported import quantize
    from relayquant.torch.exporting import export
    from relayquant.torch.finetuning.entry import finetune
    from relayquant.torch.integer_module import as_module, compare
    from relayquant.torch.training.entry import from_relax, prepare_qat

__all__ = [
    "PrepareCustomConfig",
    "as_module",
    "compare",
    "convert",
    "convert_to_reference",
    "export",
    "finetune",
    "from_relax",
    "load_causal_lm",
    "prepare",
    "prepare_qat",
    "quantize",
]

__getattr__, __dir__ = lazy.gather(
    __name__,
    {
        "relayquant.torch.causal_lm": "load_causal_lm",
        "relayquant.torch.conversion": "convert convert_to_reference",
        "relayquant.torch.custom_config": "PrepareCustomConfig",
        "relayquant.torch.define_by_run": "prepare",
        "relayquant.torch.exported": "quantize",
        "relayquant.torch.exporting": "export",
        "relayquant.torch.finetuning.entry": "finetune",
        "relayquant.torch.integer_module": "as_module compare",
        "relayquant.torch.training.entry": "from_relax prepare_qat",
    },
)
