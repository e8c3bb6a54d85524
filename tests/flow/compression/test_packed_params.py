"""`compress_weights` on what `relax.frontend.nn` exports for servers: weights in one tuple, keys
and values in TVM's paged cache, which stays as it is.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.runtime import ShapeTuple

import relayquant as rq
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.errors import ConfigError, ModelError

WIDTH, HEADS, GROUPS, VOCABULARY = 64, 4, 2, 96
TOKENS = [3, 17, 90, 5]
HEAD = WIDTH // HEADS
ROWS = rq.QSpec("int8", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_ROW, is_dynamic=True)


class Layer(nn.Module):
    """One layer of a Llama, and its classifier."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids):
        return self.embedding(ids)

    def prefill(self, x, cache: PagedKVCache):
        _, rows, _ = x.shape
        qkv = op.reshape(self.qkv(self.norm(x)), (1, rows, HEADS + 2 * GROUPS, HEAD))
        seen = cache.attention_with_fused_qkv(0, qkv, HEADS, HEAD**-0.5)
        return self.head(x + self.out(op.reshape(seen, (1, rows, WIDTH)))), cache

    def create_cache(self, max_batch_size, max_total, chunk, page, sliding):
        return TIRPagedKVCache(
            "mha", max_batch_size, max_total, chunk, page, sliding, relax.ShapeExpr([0, 1]), 1,
            HEADS, GROUPS, HEAD, HEAD, 0, 0, RopeMode.NORMAL, 1, 10000, {}, relax.prim_value(0),
            HEAD, False, "float32", resolve_target(),
        )  # fmt: skip


def export(mode: str) -> tuple[tvm.IRModule, list[tuple[str, np.ndarray]]]:
    model, way = Layer(), {"param_mode": mode, "effect_mode": "none"}
    model.to("float32")
    cache = nn.spec.Object(object_type=PagedKVCache)
    sizes = dict.fromkeys(("max_batch_size", "max_total", "chunk", "page", "sliding"), int)
    functions = {
        "embed": {"ids": nn.spec.Tensor(["n"], "int32"), "$": way},
        "prefill": {"x": nn.spec.Tensor([1, "n", WIDTH], "float32"), "cache": cache, "$": way},
        "create_cache": {**sizes, "$": {"param_mode": "none", "effect_mode": "none"}},
    }
    mod, params, *_ = model.export_tvm(spec=functions, allow_extern=False)
    rng = np.random.default_rng(0)
    values = [rng.normal(0, 0.2, [*map(int, p.shape)]).astype("float32") for _, p in params]
    return mod, [(name, value) for (name, _), value in zip(params, values, strict=True)]


def run(mod: tvm.IRModule) -> np.ndarray:
    """Scores of a text of three tokens, and of one more behind it."""
    vm = relax.VirtualMachine(rq.compile(mod), tvm.cpu())
    state = {
        name: tvm.get_global_func(f"vm.builtin.kv_state_{name}")
        for name in ("add_sequence", "begin_forward", "end_forward")
    }
    cache = vm["create_cache"](*(ShapeTuple([size]) for size in (1, 32, 32, 16, 0)))
    state["add_sequence"](cache, 0)
    scores = []
    for tokens in (TOKENS[:3], TOKENS[3:]):
        x = vm["embed"](tvm.runtime.tensor(np.array(tokens, "int32")))
        state["begin_forward"](cache, ShapeTuple([0]), ShapeTuple([len(tokens)]))
        values, cache = vm["prefill"](tvm.runtime.tensor(x.numpy()[None]), cache)
        state["end_forward"](cache)
        scores.append(values.numpy()[0])
    return np.concatenate(scores)


def compute(weights: dict[str, np.ndarray]) -> np.ndarray:
    """The same in float64: halves of a head are turned by the angle of their position."""
    x = weights["embedding.weight"][TOKENS].astype("float64")
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights["norm.weight"]
    qkv = (norm @ weights["qkv.weight"].T).reshape(len(TOKENS), -1, HEAD)
    q, k, v = np.split(qkv, [HEADS, HEADS + GROUPS], axis=1)
    angle = np.outer(np.arange(len(TOKENS)), 10000 ** -(np.arange(0, HEAD, 2) / HEAD))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def turn(x):
        low, high = np.split(x, 2, -1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    k, v = (np.repeat(part, HEADS // GROUPS, axis=1) for part in (turn(k), v))
    score = np.einsum("qhd,khd->hqk", turn(q), k) / np.sqrt(HEAD)
    share = np.exp(score) * np.tri(len(TOKENS))
    seen = np.einsum("hqk,khd->qhd", share / share.sum(-1, keepdims=True), v)
    return (x + seen.reshape(-1, WIDTH) @ weights["out.weight"].T) @ weights["head.weight"].T


@pytest.fixture(scope="module")
def packed():
    return export("packed")


@pytest.mark.slow
def test_packed__is_as_float_with_a_paged_cache(packed):
    mod, params = packed
    q = rq.compress_weights(mod, params, bits=8, activation=ROWS)
    assert [row.quantized for row in rq.ledger(q).rows] == [True] * 4
    expected = compute(dict(params))
    assert np.abs(run(q) - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.slow
def test_packed__is_the_same_as_plain(packed):
    """A parameter for each weight, or all in one tuple: the same functions come out."""
    plain = rq.compress_weights(*export("plain"))
    for params in (packed[1], dict(packed[1])):
        mod = rq.compress_weights(packed[0], params)
        for name in ("embed", "prefill"):
            tvm.ir.assert_structural_equal(mod[name], plain[name])


@pytest.mark.slow
def test_packed__refuses_values_in_another_order(packed):
    """Files sort names: what is taken by place has to be what the functions call it."""
    mod, params = packed
    with pytest.raises(ModelError, match=r"'\w+.weight' at place \d, where \w+ reads"):
        rq.compress_weights(mod, dict(params[::-1]))
    with pytest.raises(ModelError, match=r"holds 4 values, 'packed_params' of .* has 5 members"):
        rq.compress_weights(mod, params[:-1])


@pytest.mark.slow
def test_data__refuses_a_function_with_a_paged_cache(packed):
    x = np.zeros((1, 3, WIDTH), "float32")
    with pytest.raises(ConfigError, match="'cache' of function 'prefill' is not a tensor"):
        rq.compress_weights(*packed, [{"x": x, "cache": x}], function="prefill")
