"""
Language models: weights of four bits
=====================================

What limits a language model on a CPU is the bytes of its weights. ``compress_weights`` brings them
to 8, 4, 3 or 2 bits, with a scale for each group of neighbours, in every function of a module, and
needs no data. This page takes a Llama of two functions, ``prefill`` for a text and ``decode`` for
one token more, from module to generated text.
"""

# %%
# A module with two functions
# ---------------------------
# ``relayquant.demo.llama`` holds a Llama as a ``relax.frontend.nn`` module. With the path of a file
# of llama2.c (``stories260K.bin``) this page takes its weights; without, random ones of that shape.

import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import relayquant as rq
from relayquant.demo import llama

if len(sys.argv) > 1:
    sizes, params = llama.read_weights(Path(sys.argv[1]))
else:
    sizes = llama.LlamaSizes(layers=1)
    params = llama.draw_weights(sizes)
mod = llama.export_llama(sizes)

# %%
# Four bits
# ---------
# A weight that both functions read is held once, and so is the table that is the embedding and the
# classifier; tables keep 8 bits unless ``embedding_bits`` says otherwise. ``activation`` makes
# integers of the rows of data when the model runs, one scale for each row; without it, products are
# float.

rows = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)
small = rq.compress_weights(mod, params, bits=4, group_size=32, activation=rows)
for row in rq.ledger(small).rows[:7]:
    print(row.name, row.op, row.dtype, row.rule)

# %%
# Text
# ----
# ``compile`` makes kernels for the products of both functions: weights stay packed in memory.

machine = relax.VirtualMachine(rq.compile(small), tvm.cpu())


def make_tensors(tokens: list[int], first: int) -> list[tvm.runtime.Tensor]:
    """Tokens, and cosines and sines of their positions."""
    angles = llama.compute_angles(sizes, first, len(tokens))
    return [tvm.runtime.tensor(a) for a in (np.array([tokens], "int32"), *angles)]


def generate(prompt: list[int], length: int) -> list[int]:
    """The prompt and the likeliest tokens behind it."""
    mask = tvm.runtime.tensor(llama.make_mask(len(prompt)))
    scores, cache = machine["prefill"](*make_tensors(prompt, 0), mask)
    tokens = [*prompt]
    while len(tokens) < length:
        tokens.append(int(scores.numpy()[0, -1].argmax()))
        position = len(tokens) - 1
        scores, cache = machine["decode"](*make_tensors(tokens[-1:], position), tuple(cache))
    return tokens


tokens = generate([1, 403, 407, 261, 378], 24)
print("tokens:", tokens)

# %%
# How close is it?
# ----------------
# ``rq.reference.run`` executes a function of any module in numpy; here ``prefill`` of both, as the
# model of a module of its own.


def score(module: tvm.IRModule, values: dict[str, np.ndarray]) -> np.ndarray:
    """Scores of every token of the text."""
    main = module["prefill"].with_attr("global_symbol", "main")
    inputs = [np.array([tokens], "int32"), *llama.compute_angles(sizes, 0, len(tokens))]
    inputs += [llama.make_mask(len(tokens)), *(values[p.name] for p in main.params[4:])]
    return rq.reference.run(tvm.IRModule({"main": main}), inputs)[0]


expected, found = score(mod, params), score(small, {})
same = (expected.argmax(-1) == found.argmax(-1)).mean()
print(f"the likeliest next token is that of float at {same:.0%} of the positions")
