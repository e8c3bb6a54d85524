"""Architectures of `transformers`: config.json -> `CausalLMConfig`, and names of tensors.

reader        reads config.json by the row of its architecture
table         a row for each architecture: what differs from Llama
settings, tensor_names, differences
              what rows consist of: settings, names of tensors, and changes of Llama's config
"""
