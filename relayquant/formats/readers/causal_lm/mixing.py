"""What mixes the rows of a sequence: attention, and layers with a state of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from relayquant.formats.readers.causal_lm.config import LayerConfig
from relayquant.formats.readers.causal_lm.mixers import DeltaNet, LatentAttention, ShortConvolution
from relayquant.formats.readers.causal_lm.parts import FunctionParts, number
from relayquant.ir.dialect import qnn

Expr = relax.Expr

#: What is added to a sum of squares before its root divides queries and keys.
LEAST_SQUARE = 1e-6


def mix_rows(parts: FunctionParts, name: str, i: int, layer: LayerConfig, h: Expr) -> Expr:
    """Return what a layer computes of rows h (B, rows, width) and of those before, the same shape.
    The layer's state is replaced.
    """
    if layer.mixer is None and parts.config.latent is not None:
        return attend_latent(parts, name, i, layer, parts.config.latent, h)
    if layer.mixer is None:
        return attend(parts, name, i, layer, h)
    return MIXERS[type(layer.mixer)](parts, name, i, layer.mixer, h)


# --- Attention ----------------------------------------------------------------------------------


def attend(parts: FunctionParts, name: str, i: int, layer: LayerConfig, h: Expr) -> Expr:
    """Return the attention over the cache, after new keys and values are written to it."""
    config = parts.config
    found = parts.multiply(f"{name}.q", h)
    if not layer.has_values and layer.source is None:
        found["v"] = found["k"]
    if config.has_row_norms:
        found |= {part: parts.normalize(f"{name}.{part}_norm", found[part]) for part in "qk"}
    heads = {
        part: split_heads(parts, name, layer, part, found[part]) for part in "qkv" if part in found
    }
    for part in ("q", "k"):
        if part not in heads:
            continue
        if config.has_head_norms:
            heads[part] = parts.normalize(f"{name}.{part}_norm", heads[part])
        if layer.rotary is not None:
            rotary = layer.rotary if part == "q" else layer.rotary.of_keys
            turned = qnn.rotate(heads[part], *parts.network.angles[rotary], parts.positions)
            heads[part] = parts.emit(turned, f"{name}.{part}.turned")
    if config.has_value_norms and "v" in heads:
        ones = relax.const(np.ones(config.head_width_of(layer), "float32"))
        normed = relax.op.nn.rms_norm(heads["v"], ones, [-1], config.epsilon)
        heads["v"] = parts.emit(normed, f"{name}.v.normed")
    if layer.source is None:
        cached = [
            operand
            for part, kind in (("k", "keys"), ("v", "values"))
            for operand in update_cache(parts, f"{kind}.{i}", heads[part])
        ]
    else:
        slots = (f"{kind}.{layer.source}" for kind in ("keys", "values"))
        cached = [operand for slot in slots for operand in read_cache(parts, slot)]
    window = layer.window if layer.window < parts.network.length else 0
    sinks = parts.network.constants.get(f"{name}.sinks.weight")
    attended = parts.emit(
        qnn.cached_attention(
            heads["q"], *cached, parts.positions, config.query_scale, window,
            config.attention_cap, () if sinks is None else sinks.value.numpy().tolist(),
        ),
        f"{name}.attention",
    )  # fmt: skip
    width = config.heads * config.head_width_of(layer)
    flat = relax.op.reshape(attended, (parts.sequences, parts.rows, width))
    seen = parts.emit(flat, f"{name}.seen")
    if config.has_gates:
        share = parts.emit(relax.op.sigmoid(found["attention_gate"]), f"{name}.share")
        seen = parts.emit(relax.op.multiply(seen, share), f"{name}.gated")
    return parts.multiply(f"{name}.out", seen)["out"]


def split_heads(parts: FunctionParts, name: str, layer: LayerConfig, part: str, x: Expr) -> Expr:
    """Return rows of heads, (B, rows, heads, width)."""
    config = parts.config
    count = config.heads if part == "q" else config.groups_of(layer)
    shape = (parts.sequences, parts.rows, count, config.head_width_of(layer))
    return parts.emit(relax.op.reshape(x, shape), f"{name}.{part}.heads")


def attend_latent(
    parts: FunctionParts, name: str, i: int, layer: LayerConfig, latent: LatentAttention, h: Expr
) -> Expr:
    """Return the attention over the latent vectors, after new ones are written to the cache."""
    heads, found = parts.config.heads, parts.multiply(f"{name}.latent", h)
    if latent.query_rank:
        g = parts.normalize(f"{name}.q_latent_norm", found["q_latent"], latent.epsilon)
        found |= parts.multiply(f"{name}.q_plain", g)
    found["latent"] = parts.normalize(f"{name}.latent_norm", found["latent"], latent.epsilon)
    sizes = {
        "k_turned": (1, latent.turned), "latent": (1, latent.rank),
        "q_turned": (heads, latent.turned), "q_plain": (heads, latent.plain),
    }  # fmt: skip
    for part, size in sizes.items():
        shape = (parts.sequences, parts.rows, *size)
        found[part] = parts.emit(relax.op.reshape(found[part], shape), f"{name}.{part}.heads")
    each = relax.const(np.arange(heads, dtype="int32")[None, None])
    each = relax.op.broadcast_to(each, (parts.sequences, parts.rows, heads))
    each = parts.emit(each, f"{name}.each")
    plain = parts.multiply_by_chosen(f"{name}.latent_keys", found["q_plain"], each, heads, {})
    rows = {}
    for part, pair in (
        ("q", (found["q_turned"], plain)),
        ("k", (found["k_turned"], found["latent"])),
    ):
        row = parts.emit(relax.op.concat(list(pair), -1), f"{name}.{part}.row")
        if layer.rotary is not None:
            turned = qnn.rotate(row, *parts.network.angles[layer.rotary], parts.positions)
            row = parts.emit(turned, f"{name}.{part}.turned")
        rows[part] = row
    cached = update_cache(parts, f"keys.{i}", rows["k"])
    attended = qnn.cached_attention(
        rows["q"], *cached, *cached, parts.positions, parts.config.query_scale
    )
    attended = parts.emit(attended, f"{name}.attention")
    seen = relax.op.strided_slice(attended, [3], [latent.turned], [latent.width])
    seen = parts.emit(seen, f"{name}.latents")
    values = parts.multiply_by_chosen(f"{name}.latent_values", seen, each, heads, {})
    flat = (parts.sequences, parts.rows, heads * latent.values)
    return parts.multiply(
        f"{name}.out", parts.emit(relax.op.reshape(values, flat), f"{name}.seen")
    )["out"]


def update_cache(parts: FunctionParts, name: str, rows: Expr) -> tuple[Expr, Expr]:
    """Write rows (B, rows, groups, head) to the cache. Returns the cache and its scales."""
    values: dict[str, Expr] = {name: rows}
    if parts.network.options.cache == "int8":
        pair = parts.emit(qnn.quantize_rows(rows), f"{name}.rows")
        values = {name: parts.emit(pair[0], f"{name}.rows.q")}
        values[f"{name}.scale"] = parts.emit(pair[1], f"{name}.rows.scale")
    for slot, value in values.items():
        updated = qnn.update_cache(parts.state[slot], value, parts.positions)
        parts.state[slot] = parts.emit(updated, f"{slot}.next")
    return read_cache(parts, name)


def read_cache(parts: FunctionParts, name: str) -> tuple[Expr, Expr]:
    """Return the cache with what was written, and its scales."""
    return parts.state[name], parts.state.get(f"{name}.scale", number(1.0))


# --- State that is replaced ---------------------------------------------------------------------


def mix_by_convolution(
    parts: FunctionParts, name: str, i: int, mixer: ShortConvolution, h: Expr
) -> Expr:
    """Return out(b * convolution(a * c)) with a, b, c = in(h)."""
    split = parts.emit(
        relax.op.split(parts.multiply(f"{name}.conv_in", h)["conv_in"], 3, -1), f"{name}.gates"
    )
    a, b, c = (parts.emit(split[at], f"{name}.gates.{at}") for at in range(3))
    rows = parts.emit(relax.op.multiply(a, c), f"{name}.rows")
    seen = convolve(parts, f"{name}.conv", f"rows.{i}", rows)
    gated = parts.emit(relax.op.multiply(b, seen), f"{name}.conv.gated")
    return parts.multiply(f"{name}.conv_out", gated)["conv_out"]


def mix_by_delta(parts: FunctionParts, name: str, i: int, mixer: DeltaNet, h: Expr) -> Expr:
    """Return out(rms_norm(what the heads remember) * silu(gate(h)))."""
    found = parts.multiply(f"{name}.delta_in", h)
    rows = convolve(parts, f"{name}.delta_conv", f"rows.{i}", found["delta_in"])
    rows = parts.emit(relax.op.nn.silu(rows), f"{name}.delta.rows")
    heads, at = {}, 0
    for part, size in zip("qkv", mixer.sizes, strict=True):
        cut = parts.emit(relax.op.strided_slice(rows, [2], [at], [at + size]), f"{name}.{part}")
        kind = (mixer.value_heads, mixer.value_width)
        if part != "v":
            kind = (mixer.key_heads, mixer.key_width)
        shape = (parts.sequences, parts.rows, *kind)
        heads[part] = parts.emit(relax.op.reshape(cut, shape), f"{name}.{part}.heads")
        at += size
    for part in "qk":
        heads[part] = normalize_head(parts, f"{name}.{part}", heads[part], part == "q")
    strength = parts.emit(relax.op.sigmoid(found["delta_strength"]), f"{name}.delta.share")
    decay = find_decay(parts, name, found["delta_decay"])
    slot = f"memory.{i}"
    pair = parts.emit(
        qnn.gated_delta(
            *heads.values(), decay, strength, parts.state[slot], parts.positions, parts.counts,
            mixer.is_tiled,
        ),
        f"{name}.delta",
    )  # fmt: skip
    parts.state[slot] = parts.emit(pair[1], f"{slot}.next")
    gain = parts.network.constants[f"{name}.delta_gain.weight"]
    read = parts.emit(pair[0], f"{name}.delta.read")
    read = relax.op.nn.rms_norm(read, gain, [-1], parts.config.epsilon)
    flat = (parts.sequences, parts.rows, mixer.sizes[2])
    read = parts.emit(read, f"{name}.delta.normed")
    read = parts.emit(relax.op.reshape(read, flat), f"{name}.delta.flat")
    gate = parts.emit(relax.op.nn.silu(found["delta_gate"]), f"{name}.delta.gate")
    gated = parts.emit(relax.op.multiply(read, gate), f"{name}.delta.gated")
    return parts.multiply(f"{name}.delta_out", gated)["delta_out"]


def normalize_head(parts: FunctionParts, name: str, rows: Expr, is_query: bool) -> Expr:
    """Return x / sqrt(sum(x^2) + e) of each head of width K; of queries divided by sqrt(K).

    It is the norm x / sqrt(sum(x^2) / K + e / K) times a weight.
    """
    width = int(rows.ty.shape[-1])
    weight = np.full(width, 1 / width if is_query else width**-0.5, "float32")
    normed = relax.op.nn.rms_norm(rows, relax.const(weight), [-1], LEAST_SQUARE / width)
    return parts.emit(normed, f"{name}.normed")


def find_decay(parts: FunctionParts, name: str, x: Expr) -> Expr:
    """Return exp(rate * softplus(x + shift)) of each head."""
    constants = parts.network.constants
    x = parts.emit(relax.op.add(x, constants[f"{name}.delta_shift.bias"]), f"{name}.delta.shifted")
    x = parts.emit(relax.op.nn.softplus(x), f"{name}.delta.softplus")
    x = parts.emit(
        relax.op.multiply(x, constants[f"{name}.delta_rate.weight"]), f"{name}.delta.log"
    )
    return parts.emit(relax.op.exp(x), f"{name}.delta.decay")


def convolve(parts: FunctionParts, name: str, slot: str, x: Expr) -> Expr:
    """Return sum over k of w[:, k] * x[t - K + 1 + k] for rows x (B, rows, C), of which the state
    has the K - 1 last ones, (B, K - 1, C).
    """
    weight = parts.network.constants[f"{name}.weight"].value.numpy()
    kernel = weight.shape[1]
    before = parts.emit(forget(parts, parts.state[slot]), f"{slot}.kept")
    rows = parts.emit(relax.op.concat([before, x], 1), f"{slot}.all")
    products: list[Expr] = []
    for k in range(kernel):
        own = parts.emit(relax.op.strided_slice(rows, [1], [k], [parts.rows + k]), f"{name}.{k}")
        product = relax.op.multiply(own, relax.const(weight[:, k]))
        products.append(parts.emit(product, f"{name}.{k}.product"))
    total = products[0]
    for k, product in enumerate(products[1:], 1):
        total = parts.emit(relax.op.add(total, product), f"{name}.{k}.sum")
    at = relax.op.expand_dims(parts.counts, 1)
    at = relax.op.add(at, relax.const(np.arange(kernel - 1)[None], "int64"))
    at = parts.emit(relax.op.expand_dims(parts.emit(at, f"{slot}.last"), -1), f"{slot}.at")
    parts.state[slot] = parts.emit(relax.op.gather_nd(rows, at, batch_dims=1), f"{slot}.next")
    bias = parts.network.constants.get(f"{name}.bias")
    return total if bias is None else parts.emit(relax.op.add(total, bias), f"{name}.biased")


def forget(parts: FunctionParts, state: Expr) -> Expr:
    """Return the state of sequences that go on, and zeros for those that begin at position 0."""
    shape = (parts.sequences, *[1] * (len(state.ty.shape) - 1))
    goes_on = parts.emit(relax.op.greater(parts.positions, relax.const(0, "int32")), "goes_on")
    goes_on = parts.emit(relax.op.reshape(goes_on, shape), "goes_on.each")
    return relax.op.where(goes_on, state, number(0.0))


#: Kind of a mixer -> (parts, name and number of the layer, mixer, rows) -> what it computes.
MIXERS: dict[type, Callable[[FunctionParts, str, int, Any, Expr], Expr]] = {
    ShortConvolution: mix_by_convolution,
    DeltaNet: mix_by_delta,
}
