"""Names of a language model's functions, for those who write, find and call them. Loads nothing."""

from __future__ import annotations

#: "prefill" takes many tokens at once, "decode" the next one.
PREFILL, DECODE = "prefill", "decode"
LANGUAGE_FUNCTIONS = (PREFILL, DECODE)

#: What a text of several beside each other is filled up with: it is not read.
PADDING = -1
#: First parts of the names of state with a row for each token, which later tokens overwrite:
#: "keys.0.scale". Any other state may be of all tokens so far.
CACHES = ("keys", "values")


def goes_back(state: str) -> bool:
    """Whether a state of this name can go on behind any of the tokens that it has read."""
    return state.partition(".")[0] in CACHES
