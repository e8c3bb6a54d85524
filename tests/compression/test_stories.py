"""A trained Llama of llama2.c is read as its own program reads it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from scipy.special import log_softmax
from tiny_llama import bind_weights, take_function
from tvm import relax

import relayquant as rq
from relayquant.demo.llama import compute_angles, export_llama, make_mask, read_weights

#: The likeliest tokens behind token 1, as the program run.c of llama2.c prints them.
GREEDY = [461, 461, 401, 401, 401, 461, 378, 455, 473, 456, 435, 299, 362]


def test_stories__the_likeliest_tokens_are_those_of_llama2_c(shared_data):
    sizes, params = read_weights(shared_data("more/stories260K.bin"))
    model = take_function(bind_weights(export_llama(sizes), params), "prefill")
    tokens = [1]
    for _ in GREEDY:
        rest = (*compute_angles(sizes, 0, len(tokens)), make_mask(len(tokens)))
        scores = rq.reference.run(model, (np.array([tokens], "int32"), *rest))[0]
        tokens.append(int(scores[0, -1].argmax()))
    assert tokens[1:] == GREEDY


@pytest.mark.slow
def test_stories__what_four_bits_cost(shared_data):
    """Fitting to text that the model wrote takes back divergence from float on other text of its
    own, and more if products make up for what weights before them have changed; though 768 tokens
    are few.
    """
    sizes, params = read_weights(shared_data("more/stories260K.bin"))
    mod = bind_weights(export_llama(sizes), params)
    machine, rng = relax.VirtualMachine(rq.compile(mod), tvm.cpu()), np.random.default_rng(0)

    def prepare(tokens):
        rest = (*compute_angles(sizes, 0, len(tokens)), make_mask(len(tokens)))
        return np.array([tokens], "int32"), *rest

    def write(length):
        tokens = [1]
        scores, cache = machine["prefill"](*map(tvm.runtime.tensor, prepare(tokens)))
        while len(tokens) < length:
            share = np.exp(scores.numpy()[0, -1].astype("float64"))
            tokens.append(int(rng.choice(len(share), p=share / share.sum())))
            given = np.array([tokens[-1:]], "int32"), *compute_angles(sizes, len(tokens) - 1, 1)
            scores, cache = machine["decode"](*map(tvm.runtime.tensor, given), tuple(cache))
        return tokens

    texts = [prepare(write(96)) for _ in range(12)]

    def score(q):
        """Logarithms of probabilities."""
        model = take_function(q, "prefill")
        rows = np.concatenate([rq.reference.run(model, text)[0] for text in texts[8:]], axis=1)
        return log_softmax(rows[0].astype("float64"), axis=-1)

    expected = score(mod)

    def diverge(q):
        return (np.exp(expected) * (expected - score(q))).sum(axis=-1).mean()

    balanced, best = (
        rq.compress_weights(mod, None, texts[:8], function="prefill", effort=effort)
        for effort in ("balanced", "best")
    )
    assert diverge(best) < diverge(balanced) < diverge(rq.compress_weights(mod))
