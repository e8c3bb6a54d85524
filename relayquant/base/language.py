"""Names of a language model's functions, for those who write, find and call them. Loads nothing."""

from __future__ import annotations

#: "prefill" takes many tokens at once, "decode" the next one.
PREFILL, DECODE = "prefill", "decode"
LANGUAGE_FUNCTIONS = (PREFILL, DECODE)
