"""GGUF file -> its parameters in float32 (`parameters`), or its blocks as they are (`blocks`)."""
