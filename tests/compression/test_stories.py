"""A trained Llama of llama2.c is read as its own program reads it."""

from __future__ import annotations

import numpy as np
from tiny_llama import take_function

import relayquant as rq
from relayquant.compression.find import bind_weights
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
