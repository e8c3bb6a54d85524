"""A trained Llama of llama2.c: read as its own program reads it, and what few bits cost on text
that it wrote itself.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tiny_llama import ROWS, take_function
from tvm import relax

import relayquant as rq
from relayquant.compression.find import bind_weights
from relayquant.demo.llama import compute_angles, export_llama, make_mask, read_weights

#: The likeliest tokens behind token 1, as the program run.c of llama2.c prints them.
GREEDY = [461, 461, 401, 401, 401, 461, 378, 455, 473, 456, 435, 299, 362]


class Stories:
    """The model, compiled, and how it writes."""

    def __init__(self, path):
        self.sizes, params = read_weights(path)
        self.mod = bind_weights(export_llama(self.sizes), params)

    def inputs(self, tokens):
        rest = (*compute_angles(self.sizes, 0, len(tokens)), make_mask(len(tokens)))
        return np.array([tokens], "int32"), *rest

    def open(self, mod):
        return relax.VirtualMachine(rq.compile(mod), tvm.cpu())

    def write(self, machine, length, choose):
        """Token 1 and those behind it; `choose` takes scores."""
        tokens, cache = [1], None
        while len(tokens) < length:
            if cache is None:
                scores, cache = machine["prefill"](*map(tvm.runtime.tensor, self.inputs(tokens)))
            else:
                angles = compute_angles(self.sizes, len(tokens) - 1, 1)
                given = (np.array([tokens[-1:]], "int32"), *angles)
                scores, cache = machine["decode"](*map(tvm.runtime.tensor, given), tuple(cache))
            tokens.append(int(choose(scores.numpy()[0, -1])))
        return tokens

    def score(self, machine, texts):
        """Logarithms of probabilities at every position of texts."""
        scores = [
            machine["prefill"](*map(tvm.runtime.tensor, self.inputs(t)))[0].numpy() for t in texts
        ]
        rows = np.concatenate(scores, axis=1)[0].astype("float64")
        rows -= rows.max(axis=-1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))


@pytest.fixture
def stories(shared_data):
    return Stories(shared_data("more/stories260K.bin"))


def test_stories__the_likeliest_tokens_are_those_of_llama2_c(stories):
    tokens = [1]
    for _ in GREEDY:
        model = take_function(stories.mod, "prefill")
        scores = rq.reference.run(model, stories.inputs(tokens))[0]
        tokens.append(int(scores[0, -1].argmax()))
    assert tokens[1:] == GREEDY


@pytest.mark.slow
def test_stories__what_few_bits_cost(stories):
    """8 bits write what float writes; of 4 bits, fitting to text of the model itself takes back a
    fifth of the divergence at least.
    """
    rng = np.random.default_rng(0)

    def draw(scores):
        share = np.exp(scores - scores.max())
        return rng.choice(len(share), p=share / share.sum())

    float_machine = stories.open(stories.mod)
    texts = [stories.write(float_machine, 160, draw) for _ in range(24)]
    data, held = [stories.inputs(text) for text in texts[:18]], texts[18:]
    expected = stories.score(float_machine, held)

    def diverge(q):
        found = stories.score(stories.open(q), held)
        return (np.exp(expected) * (expected - found)).sum(axis=-1).mean()

    eight = rq.compress_weights(stories.mod, None, data, bits=8, function="prefill")
    assert stories.write(stories.open(eight), 200, np.argmax) == stories.write(
        float_machine, 200, np.argmax
    )
    for activation in (None, ROWS):
        given = {"activation": activation, "bits": 4}
        plain = rq.compress_weights(stories.mod, **given)
        fitted = rq.compress_weights(stories.mod, None, data, function="prefill", **given)
        assert diverge(fitted) < 0.8 * diverge(plain)
