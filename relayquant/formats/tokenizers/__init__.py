"""Tokenizer files -> `Tokenizer`: text to tokens and back, for language models."""

from relayquant.formats.tokenizers.load import load_tokenizer
from relayquant.formats.tokenizers.tokenizer import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]
