"""Tiny random language models of `transformers`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def draw_model(config, kind=transformers.AutoModelForCausalLM):
    """A model with random weights: also norms, biases and what chooses experts, which are ones and
    zeros at first.
    """
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.ndim == 1:
                value += torch.randn(value.shape) * 0.2
            else:
                value.copy_(torch.randn(value.shape) * 1.5 / value.shape[-1] ** 0.5)
    return model
