"""Language models of GGUF files: metadata -> `CausalLMConfig`, and tensors with their names.

Keys of the metadata are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and
names of tensors those of llama.cpp.

reader        reads the metadata by the row of its architecture
table         a row for each architecture: what differs from Llama
tensor_names, differences
              what rows consist of: names of tensors, and changes of Llama's config
tensors       the tensors of a file, read when they are used
"""
