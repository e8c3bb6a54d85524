"""Config and tensors of a language model -> a module with the functions prefill and decode.

    prefill(tokens, positions, picked, state...) -> scores of the picked rows, state...
    decode(tokens, positions, state...) -> scores, state...

Both read one set of weights. Matrices of floats are parameters, so that `compress_weights` finds
them. Matrices in blocks, norms, biases and tables of angles are constants that both share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from relayquant.base.grouping import GroupedWeight
from relayquant.base.language import DECODE, PREFILL
from relayquant.errors import format_count
from relayquant.formats.readers.causal_lm.config import (
    CausalLMConfig,
    ExpertConfig,
    HiddenFunction,
    LayerConfig,
    NormKind,
    Rotary,
)
from relayquant.formats.readers.causal_lm.options import CausalLMOptions
from relayquant.formats.readers.causal_lm.tensors import (
    CausalLMParams,
    StoredTensor,
    join_tensors,
)
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.grouped import GROUPED_FORMS
from relayquant.ir.float_precision import BF16_ROWS_ATTR
from relayquant.ir.ledger import Ledger, LedgerRow, attach_ledger
from relayquant.ir.rewrite.function import define_function
from relayquant.ir.state import StateValue, with_state

Expr = relax.Expr

#: function -> operator
ACTIVATIONS = {
    HiddenFunction.SILU: relax.op.nn.silu,
    HiddenFunction.GELU: relax.op.nn.gelu,
    HiddenFunction.GELU_TANH: relax.op.nn.gelu_tanh,
    HiddenFunction.RELU: relax.op.nn.relu,
}
#: Parts of a layer's experts: what stays in float because it chooses, and the weights of all.
ROUTERS = ("router", "share")
EXPERTS = ("experts_gate", "experts_up", "experts_down")


def build_network(
    config: CausalLMConfig, options: CausalLMOptions, tensors: Mapping[str, StoredTensor]
) -> tuple[tvm.IRModule, CausalLMParams]:
    """Build the module of a language model.

    Args:
        tensors: Name -> tensor, the names and shapes of `config.shapes`.

    Returns:
        The module, and the matrices of floats, which are read when they are used.

    Raises:
        ConfigError: the options ask for more than the model allows.
        ModelError: a tensor cannot be read.
    """
    network = Network.make(config, options, tensors)
    rows = {PREFILL: tirx.Var("rows", "int64"), DECODE: tirx.IntImm("int64", 1)}
    # A builder of its own for each function: values of the same name are called the same in both.
    functions = {name: FunctionBuilder(network, name, each).build() for name, each in rows.items()}
    mod = with_state(tvm.IRModule(functions), list_states(network))
    if network.ledger:
        mod = attach_ledger(mod, Ledger(tuple(network.ledger), effort="weights"))
    return mod, CausalLMParams(network.floats)


@dataclass(frozen=True, eq=False)
class JoinedProduct:
    """A product that computes one or several results of the same data.

    Attributes:
        name: "layers.0.qkv".
        sizes: Part -> number of its outputs, in order.
        weight: The joined weights.
        bias: (outputs,), or None.
    """

    name: str
    sizes: Mapping[str, int]
    weight: StoredTensor
    bias: StoredTensor | None


@dataclass(frozen=True, eq=False)
class Network:
    """What both functions share.

    Attributes:
        length: Longest sequence.
        products: Layer ("0", "" for the classifier) and first part -> its products.
        vectors: Name -> constant: norms, biases, tables.
        grouped: Name of a product or table -> weight and its constants.
        floats: Name of a parameter -> its tensor.
    """

    config: CausalLMConfig
    options: CausalLMOptions
    length: int
    products: Mapping[str, Sequence[JoinedProduct]]
    tables: Mapping[str, StoredTensor]
    constants: dict[str, Expr] = field(default_factory=dict)
    grouped: dict[str, tuple[GroupedWeight, list[Expr]]] = field(default_factory=dict)
    floats: dict[str, StoredTensor] = field(default_factory=dict)
    angles: dict[Rotary, tuple[Expr, Expr]] = field(default_factory=dict)
    ledger: list[LedgerRow] = field(default_factory=list)

    @staticmethod
    def make(
        config: CausalLMConfig, options: CausalLMOptions, tensors: Mapping[str, StoredTensor]
    ) -> Network:
        """Join weights, and read what becomes a constant."""
        length = options.choose_length(config.max_length)
        products: dict[str, list[JoinedProduct]] = {}
        for i, layer in enumerate(config.layers):
            for group in list_products(config, layer):
                products[f"layers.{i}.{group[0]}"] = join_products(tensors, f"layers.{i}.", group)
        if not config.is_tied:
            products["classifier"] = join_products(tensors, "", ("classifier",))
        tables = {
            name: tensors[f"{name}.weight"]
            for name in ("embedding", "positions")
            if f"{name}.weight" in tensors
        }
        network = Network(config, options, length, products, tables)
        for name, tensor in tensors.items():
            part = name.split(".")[-2]
            if part in ROUTERS or (len(tensor.shape) == 1 and not is_product_bias(config, name)):
                network.constants[name] = relax.const(tensor.read_floats())
            elif part in EXPERTS:
                network.hold(name.removesuffix(".weight"), tensor)
        for own in products.values():
            for product in own:
                network.hold(product.name, product.weight)
                if product.bias is not None:
                    network.constants[f"{product.name}.bias"] = relax.const(
                        product.bias.read_floats()
                    )
        for name, tensor in tables.items():
            network.hold(name, tensor)
        for layer in config.layers:
            if layer.rotary is not None and layer.rotary not in network.angles:
                network.angles[layer.rotary] = make_angles(layer.rotary, length)
        return network

    def hold(self, name: str, tensor: StoredTensor) -> None:
        """Keep a matrix: floats as a parameter, blocks as constants."""
        if tensor.is_float:
            self.floats[f"{name}.weight"] = tensor
            return
        weight = tensor.read()
        assert isinstance(weight, GroupedWeight)
        parts = (weight.codes, weight.scale, weight.zero_point)
        self.grouped[name] = weight, [relax.const(tvm.runtime.tensor(part)) for part in parts]


def list_products(config: CausalLMConfig, layer: LayerConfig) -> list[tuple[str, ...]]:
    """Return the products of a layer that all rows share: those of the same data together."""
    found: list[tuple[str, ...]] = [("q", "k", "v"), ("out",)]
    if layer.experts is None:
        found += [("gate", "up") if config.is_gated else ("up",), ("down",)]
    elif layer.experts.shared:
        found += [("shared_gate", "shared_up"), ("shared_down",)]
    return found


def is_product_bias(config: CausalLMConfig, name: str) -> bool:
    """Return whether a tensor is the bias of a product that all rows share."""
    place, _, suffix = name.rpartition(".")
    part = place.rpartition(".")[2]
    return suffix == "bias" and part in config.biases and part not in EXPERTS


def join_products(
    tensors: Mapping[str, StoredTensor], prefix: str, parts: Sequence[str]
) -> list[JoinedProduct]:
    """Make one product of neighbours that are stored alike, in the order of `parts`."""
    runs: list[list[str]] = []
    for part in parts:
        kind = tensors[f"{prefix}{part}.weight"].kind
        if runs and tensors[f"{prefix}{runs[-1][0]}.weight"].kind == kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    found = []
    for run in runs:
        weights = [tensors[f"{prefix}{part}.weight"] for part in run]
        biases = [tensors.get(f"{prefix}{part}.bias") for part in run]
        bias = None
        if any(biases):
            # A part without a bias has zeros.
            bias = join_tensors(
                [each or make_zeros(w.shape[0]) for each, w in zip(biases, weights, strict=True)]
            )
        name = prefix + ("_".join(run) if len(run[0]) > 1 else "".join(run))
        sizes = {part: weight.shape[0] for part, weight in zip(run, weights, strict=True)}
        found.append(JoinedProduct(name, sizes, join_tensors(weights), bias))
    return found


def make_zeros(size: int) -> StoredTensor:
    return StoredTensor((size,), "floats", lambda: np.zeros(size, "float32"))


def make_angles(rotary: Rotary, length: int) -> tuple[Expr, Expr]:
    """Return cosines and sines of all positions, float32 (length, frequencies)."""
    angles = np.arange(length)[:, None] * np.array(rotary.frequencies)
    return (
        relax.const((rotary.magnitude * np.cos(angles)).astype("float32")),
        relax.const((rotary.magnitude * np.sin(angles)).astype("float32")),
    )


def list_states(network: Network) -> list[StateValue]:
    """Return the state: keys and values of each layer, with scales if they are int8."""
    config, options = network.config, network.options
    shape = (options.sequences, config.groups, network.length, config.head_width)
    states = []
    for i in range(len(config.layers)):
        for kind in ("keys", "values"):
            states.append(StateValue(f"{kind}.{i}", shape, options.cache))
            if options.cache == "int8":
                states.append(StateValue(f"{kind}.{i}.scale", (*shape[:3], 1), "float32"))
    return states


class FunctionBuilder:
    """Builds one function. B sequences, `rows` new tokens each."""

    def __init__(self, network: Network, name: str, rows: tirx.PrimExpr) -> None:
        self.network, self.config, self.builder = network, network.config, relax.BlockBuilder()
        self.name, self.rows = name, rows
        self.sequences = network.options.sequences

        def variable(name: str, shape: Sequence[int | tirx.PrimExpr], dtype: str) -> relax.Var:
            return relax.Var(name, relax.TensorType(list(shape), dtype))

        self.tokens = variable("tokens", (self.sequences, rows), "int32")
        self.positions = variable("positions", (self.sequences,), "int32")
        picked = tirx.Var("picked", "int64")
        self.picked = variable("picked", (self.sequences, picked), "int32")
        self.state = {
            each.name: variable(each.name, each.shape, each.dtype) for each in list_states(network)
        }
        self.weights = {
            name: variable(name, tensor.shape, "float32") for name, tensor in network.floats.items()
        }
        self.inputs = [self.tokens, self.positions]
        if name == PREFILL:
            self.inputs.append(self.picked)
        self.inputs += self.state.values()

    def build(self) -> relax.Function:
        """Build the function."""
        params = [*self.inputs, *self.weights.values()]
        attrs = {"num_input": len(self.inputs), "global_symbol": self.name}
        if isinstance(self.rows, tirx.Var):
            attrs[BF16_ROWS_ATTR] = self.rows.name
        return define_function(self.builder, params, self.compute, attrs=attrs)

    def compute(self) -> Expr:
        """Return the scores and the new state."""
        results = [self.compute_scores(self.compute_layers())]
        results += [self.emit(value, name) for name, value in self.state.items()]
        return self.builder.emit_output(relax.Tuple(results))

    def emit(self, expr: Expr, name: str) -> relax.Var:
        return self.builder.emit(expr, name)

    # --- Layers ---------------------------------------------------------------------------------

    def compute_layers(self) -> Expr:
        """Return (B, rows, width) behind the last layer, and replace the state."""
        config = self.config
        x = self.take_rows("embedding", self.tokens)
        if config.embedding_scale != 1:
            x = self.emit(relax.op.multiply(x, number(config.embedding_scale)), "embedded")
        if config.has_positions:
            at = relax.op.arange(0, self.rows, 1, "int32")
            at = relax.op.add(relax.op.expand_dims(self.positions, 1), self.emit(at, "places"))
            x = self.emit(
                relax.op.add(x, self.take_rows("positions", self.emit(at, "at"))), "placed"
            )
        for i, layer in enumerate(config.layers):
            x = self.compute_layer(f"layers.{i}", i, layer, x)
        return x

    def compute_layer(self, name: str, i: int, layer: LayerConfig, x: Expr) -> Expr:
        """Return x (B, rows, width) with attention and the feed-forward network added."""
        config = self.config
        h = self.normalize(f"{name}.attention_norm", x) if config.has_pre_norms else x
        attended = self.attend(name, i, layer, h)
        if config.has_post_norms:
            attended = self.normalize(f"{name}.post_attention_norm", attended)
        if not config.is_parallel:
            x = self.add(f"{name}.attended", x, attended)
            h = self.normalize(f"{name}.ffn_norm", x) if config.has_pre_norms else x
        computed = self.mix(name, layer.experts, h) if layer.experts else self.feed_forward(name, h)
        if config.has_post_norms:
            computed = self.normalize(f"{name}.post_ffn_norm", computed)
        if config.is_parallel:
            computed = self.emit(relax.op.add(attended, computed), f"{name}.both")
        return self.add(f"{name}.computed", x, computed)

    def add(self, name: str, x: Expr, change: Expr) -> Expr:
        """Add what a layer computes."""
        if self.config.residual_scale != 1:
            scale = number(self.config.residual_scale)
            change = self.emit(relax.op.multiply(change, scale), f"{name}.scaled")
        return self.emit(relax.op.add(x, change), name)

    def attend(self, name: str, i: int, layer: LayerConfig, h: Expr) -> Expr:
        """Return the attention over the cache, after new keys and values are written to it."""
        config = self.config
        parts = self.multiply(f"{name}.q", h)
        if config.has_row_norms:
            parts |= {part: self.normalize(f"{name}.{part}_norm", parts[part]) for part in "qk"}
        heads = {
            part: self.emit(
                relax.op.reshape(
                    parts[part],
                    (
                        self.sequences,
                        self.rows,
                        config.heads if part == "q" else config.groups,
                        config.head_width,
                    ),
                ),
                f"{name}.{part}.heads",
            )
            for part in ("q", "k", "v")
        }
        for part in ("q", "k"):
            if config.has_head_norms:
                heads[part] = self.normalize(f"{name}.{part}_norm", heads[part])
            if layer.rotary is not None:
                angles = self.network.angles[layer.rotary]
                turned = qnn.rotate(heads[part], *angles, self.positions)
                heads[part] = self.emit(turned, f"{name}.{part}.turned")
        cached = [
            operand
            for part, kind in (("k", "keys"), ("v", "values"))
            for operand in self.update_cache(f"{kind}.{i}", heads[part])
        ]
        window = layer.window if layer.window < self.network.length else 0
        sinks = self.network.constants.get(f"{name}.sinks.weight")
        attended = self.emit(
            qnn.cached_attention(
                heads["q"], *cached, self.positions, config.query_scale, window,
                config.attention_cap, () if sinks is None else sinks.value.numpy().tolist(),
            ),
            f"{name}.attention",
        )  # fmt: skip
        width = config.heads * config.head_width
        flat = relax.op.reshape(attended, (self.sequences, self.rows, width))
        return self.multiply(f"{name}.out", self.emit(flat, f"{name}.seen"))["out"]

    def update_cache(self, name: str, rows: Expr) -> tuple[Expr, Expr]:
        """Write rows (B, rows, groups, head) to the cache. Returns the cache and its scales."""
        values: dict[str, Expr] = {name: rows}
        if self.network.options.cache == "int8":
            pair = self.emit(qnn.quantize_rows(rows), f"{name}.rows")
            values = {name: self.emit(pair[0], f"{name}.rows.q")}
            values[f"{name}.scale"] = self.emit(pair[1], f"{name}.rows.scale")
        for slot, value in values.items():
            updated = qnn.update_cache(self.state[slot], value, self.positions)
            self.state[slot] = self.emit(updated, f"{slot}.next")
        return self.state[name], self.state.get(f"{name}.scale", number(1.0))

    def feed_forward(self, name: str, h: Expr, kind: str = "") -> Expr:
        """Return down(activation(gate(h)) * up(h)), or down(activation(up(h))). `kind` is what the
        names of the parts begin with.
        """
        up, down = f"{kind}up", f"{kind}down"
        if self.config.is_gated:
            parts = self.multiply(f"{name}.{kind}gate", h)
            h = self.gate(f"{name}.{kind}", parts[f"{kind}gate"], parts[up])
        else:
            computed = self.multiply(f"{name}.{up}", h)[up]
            h = self.emit(ACTIVATIONS[self.config.activation](computed), f"{name}.hidden")
        return self.multiply(f"{name}.{down}", h)[down]

    def gate(self, name: str, gate: Expr, up: Expr) -> Expr:
        """Return activation(gate) * up."""
        opened = self.emit(ACTIVATIONS[self.config.activation](gate), f"{name}gated")
        return self.emit(relax.op.multiply(opened, up), f"{name}hidden")

    def limit_gate(self, name: str, gate: Expr, up: Expr, experts: ExpertConfig) -> Expr:
        """Return g * sigmoid(slope * g) * (u + 1), of limited g and u."""
        limit = experts.limit
        gate = self.emit(relax.op.minimum(gate, number(limit)), f"{name}gate.limited")
        up = self.emit(relax.op.clip(up, -limit, limit), f"{name}up.limited")
        steep = self.emit(relax.op.multiply(gate, number(experts.slope)), f"{name}gate.steep")
        share = self.emit(relax.op.sigmoid(steep), f"{name}gate.share")
        opened = self.emit(relax.op.multiply(gate, share), f"{name}gated")
        moved = self.emit(relax.op.add(up, number(1.0)), f"{name}up.moved")
        return self.emit(relax.op.multiply(opened, moved), f"{name}hidden")

    def mix(self, name: str, experts: ExpertConfig, h: Expr) -> Expr:
        """Return the sum of what each row's experts compute, times their shares."""
        shares, chosen = self.choose(name, experts, h)
        rows = self.emit(relax.op.expand_dims(h, 2), f"{name}.expert_rows")
        quantized: dict[int, tuple[Expr, Expr]] = {}
        parts = {
            part: self.multiply_by_chosen(
                f"{name}.experts_{part}", rows, chosen, experts, quantized
            )
            for part in ("gate", "up")
        }
        if experts.limit:
            hidden = self.limit_gate(f"{name}.experts_", parts["gate"], parts["up"], experts)
        else:
            hidden = self.gate(f"{name}.experts_", parts["gate"], parts["up"])
        found = self.multiply_by_chosen(f"{name}.experts_down", hidden, chosen, experts, {})
        weighted = relax.op.multiply(
            found, self.emit(relax.op.expand_dims(shares, -1), f"{name}.best.columns")
        )
        mixed = self.emit(relax.op.sum(self.emit(weighted, f"{name}.weighted"), 2), f"{name}.mixed")
        if not experts.shared:
            return mixed
        computed = self.feed_forward(name, h, "shared_")
        if experts.has_share:
            share = self.multiply_by_constant(f"{name}.share", h)
            share = self.emit(relax.op.sigmoid(share), f"{name}.share.sigmoid")
            computed = self.emit(relax.op.multiply(computed, share), f"{name}.shared")
        return self.emit(relax.op.add(mixed, computed), f"{name}.joined")

    def choose(self, name: str, experts: ExpertConfig, h: Expr) -> tuple[Expr, Expr]:
        """Return shares float32 and numbers int32 of the experts of each row, (B, rows, chosen)."""
        scores = self.multiply_by_constant(f"{name}.router", h)
        bias = self.network.constants.get(f"{name}.router.bias")
        if bias is not None:
            scores = self.emit(relax.op.add(scores, bias), f"{name}.router.biased")
        all_shares = self.emit(relax.op.nn.softmax(scores, -1), f"{name}.shares")
        best = self.emit(
            relax.op.topk(all_shares, experts.chosen, -1, "both", True, "int32"), f"{name}.best"
        )
        shares = self.emit(best[0], f"{name}.best.shares")
        if experts.is_normalized:
            total = self.emit(relax.op.sum(shares, -1, keepdims=True), f"{name}.best.sum")
            shares = self.emit(relax.op.divide(shares, total), f"{name}.best.normalized")
        return shares, self.emit(best[1], f"{name}.chosen")

    def multiply_by_constant(self, name: str, x: Expr) -> Expr:
        """Return x w^T for a weight that stays in float."""
        turned = relax.op.permute_dims(self.network.constants[f"{name}.weight"])
        return self.emit(relax.op.matmul(x, self.emit(turned, f"{name}.t")), name)

    def multiply_by_chosen(
        self,
        name: str,
        x: Expr,
        chosen: Expr,
        experts: ExpertConfig,
        rows: dict[int, tuple[Expr, Expr]],
    ) -> Expr:
        """Return x (B, rows, chosen or 1, inputs) times the weights of the chosen experts, plus the
        biases of these.
        """
        if name in self.network.grouped:
            size = self.network.grouped[name][0].group_size
            if size not in rows:
                rows[size] = self.quantize(x, size, name)
            constants, attributes = self.read_blocks(name, "expert_dense")
            product = qnn.grouped_expert_dense(
                *rows[size], chosen, *constants, **attributes, experts=experts.count
            )
        else:
            weight = self.weights[f"{name}.weight"]
            product = qnn.expert_dense(x, chosen, weight, experts.count)
        product = self.emit(product, name)
        bias = self.network.constants.get(f"{name}.bias")
        if bias is None:
            return product
        each = relax.const(bias.value.numpy().reshape(experts.count, -1))
        own = self.emit(relax.op.take(each, chosen, 0, mode="clip"), f"{name}.bias")
        return self.emit(relax.op.add(product, own), f"{name}.biased")

    def compute_scores(self, x: Expr) -> Expr:
        """Return scores of the picked rows, (B, picked, vocabulary)."""
        config = self.config
        if self.name == PREFILL:
            at = self.emit(relax.op.astype(self.picked, "int64"), "picked.wide")
            at = self.emit(relax.op.expand_dims(at, -1), "picked.at")
            x = self.emit(relax.op.gather_nd(x, at, batch_dims=1), "picked.rows")
        x = self.normalize("final_norm", x)
        if config.is_tied:
            scores = self.emit(self.multiply_by("embedding", x, {}), "scores")
        else:
            scores = self.multiply("classifier", x)["classifier"]
        if config.score_scale != 1:
            scores = self.emit(relax.op.multiply(scores, number(config.score_scale)), "scaled")
        if config.score_cap:
            share = self.emit(relax.op.divide(scores, number(config.score_cap)), "share")
            share = self.emit(relax.op.tanh(share), "share.tanh")
            scores = self.emit(relax.op.multiply(share, number(config.score_cap)), "capped")
        return scores

    # --- Parts ----------------------------------------------------------------------------------

    def normalize(self, name: str, x: Expr) -> Expr:
        """Normalize the last axis."""
        weight = self.network.constants[f"{name}.weight"]
        if self.config.norm is NormKind.RMS:
            normed = relax.op.nn.rms_norm(x, weight, [-1], self.config.epsilon)
        else:
            bias = self.network.constants.get(f"{name}.bias")
            if bias is None:
                bias = relax.const(np.zeros(int(x.ty.shape[-1]), "float32"))
            normed = relax.op.nn.layer_norm(x, weight, bias, [-1], self.config.epsilon)
        return self.emit(normed, name)

    def multiply(self, name: str, x: Expr) -> dict[str, Expr]:
        """Multiply by all weights of a group of siblings. Returns part -> (B, rows, outputs)."""
        products, found = self.network.products[name], {}
        rows: dict[int, tuple[Expr, Expr]] = {}  # by the size of a group
        for product in products:
            y = self.emit(self.multiply_by(product.name, x, rows), product.name)
            bias = self.network.constants.get(f"{product.name}.bias")
            if bias is not None:
                y = self.emit(relax.op.add(y, bias), f"{product.name}.biased")
            if len(product.sizes) == 1:
                found[next(iter(product.sizes))] = y
                continue
            at = 0
            for part, size in product.sizes.items():
                cut = relax.op.strided_slice(y, [2], [at], [at + size])
                found[part] = self.emit(cut, f"{product.name}.{part}")
                at += size
        return found

    def multiply_by(self, name: str, x: Expr, rows: dict[int, tuple[Expr, Expr]]) -> Expr:
        """Return x w^T for one weight. `rows` has what x is quantized to so far, by group size."""
        if name not in self.network.grouped:
            turned = self.emit(relax.op.permute_dims(self.weights[f"{name}.weight"]), f"{name}.t")
            return relax.op.matmul(x, turned)
        size = self.network.grouped[name][0].group_size
        if size not in rows:
            rows[size] = self.quantize(x, size, name)
        constants, attributes = self.read_blocks(name, "matmul")
        return qnn.grouped_dense(*rows[size], *constants, **attributes)

    def quantize(self, x: Expr, size: int, name: str) -> tuple[Expr, Expr]:
        """Quantize rows to int8, with a scale for each group of `size` as the weight has them. A
        single scale for a row loses too much: some elements of a row are far larger than others.
        """
        *lead, features = x.ty.shape
        groups = int(features) // size
        split = self.emit(relax.op.reshape(x, (*lead, groups, size)), f"{name}.groups")
        pair = self.emit(qnn.quantize_rows(split), f"{name}.rows")
        codes = self.emit(relax.op.reshape(pair[0], (*lead, features)), f"{name}.rows.q")
        scales = self.emit(relax.op.reshape(pair[1], (*lead, groups)), f"{name}.rows.scale")
        return codes, scales

    def take_rows(self, name: str, indices: Expr) -> Expr:
        """Return rows of a table."""
        if name not in self.network.grouped:
            table = self.weights[f"{name}.weight"]
            return self.emit(relax.op.take(table, indices, 0, mode="clip"), name)
        constants, attributes = self.read_blocks(name, "take")
        return self.emit(qnn.grouped_take(indices, *constants, **attributes), name)

    def read_blocks(self, name: str, op: str) -> tuple[list[Expr], dict[str, Any]]:
        """Return the last operands of an operator with grouped weights and its attributes, and note
        it.
        """
        weight, constants = self.network.grouped[name]
        form, value = weight.format, f"{self.name}.{name}"
        levels = f" with {format_count(len(form.levels), 'level')}" if form.levels else ""
        self.network.ledger.append(
            LedgerRow(
                value,
                op,
                True,
                GROUPED_FORMS[op],
                f"int{form.bits}",
                scheme="symmetric" if form.is_symmetric else "affine",
                rule=f"blocks of the file, as groups of {weight.group_size}{levels}",
                values=(value,),
                is_dynamic=op != "take",
            )
        )
        return constants, weight.attributes


def number(value: float) -> Expr:
    return relax.const(value, "float32")
