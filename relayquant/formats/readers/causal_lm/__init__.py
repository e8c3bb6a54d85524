"""Causal language models: a model's metadata and tensors -> a module with prefill and decode.

A source (`sources`: a GGUF file, a folder, a model in memory) gives metadata and tensors. A row of
`architectures` or `gguf` reads its settings, `names` translates its names. `config` describes the
network, and `network` builds it.
"""

from relayquant.formats.readers.causal_lm.options import CausalLMOptions

__all__ = ["CausalLMOptions"]
