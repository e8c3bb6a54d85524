"""A language model of `transformers` in memory -> a module with prefill and decode. Its code is not
traced: its config and its tensors say all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tvm

from relayquant.base.arguments import check_arguments
from relayquant.errors import ModelError
from relayquant.formats.readers.causal_lm import CausalLMOptions
from relayquant.formats.readers.causal_lm.sources import import_tensors
from relayquant.formats.readers.causal_lm.tensors import FLOATS, StoredTensor


@check_arguments
def load_causal_lm(
    model: Any, options: CausalLMOptions | None = None
) -> tuple[tvm.IRModule, Mapping[str, np.ndarray]]:
    """Make a module of a language model, a `transformers` model such as `LlamaForCausalLM`.

    Args:
        model: The model, with float tensors. It is not changed.
        options: Length, number of sequences, and dtype of the cache. None: the defaults.

    Returns:
        The module with the functions prefill and decode, and the matrices, float32, each made when
        it is accessed.

    Raises:
        ModelError: `model` has no config, or its architecture is not supported.
        ConfigError: the options ask for more than the model allows.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)) or not hasattr(model, "state_dict"):
        raise ModelError(
            f"load_causal_lm takes a model of transformers, such as "
            f"AutoModelForCausalLM.from_pretrained(...), and was given a {type(model).__name__}.",
            code="RQ201",
        )
    tensors = {
        name: StoredTensor(tuple(tensor.shape), FLOATS, partial(read_tensor, tensor))
        for name, tensor in model.state_dict().items()
    }
    return import_tensors(config.to_dict(), tensors, options or CausalLMOptions())  # pyright: ignore[reportOptionalMemberAccess]


def read_tensor(tensor: Any) -> np.ndarray:
    """Return a tensor as float32, a view if it is float32."""
    return tensor.detach().float().cpu().numpy()
