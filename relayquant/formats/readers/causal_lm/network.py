"""Config and tensors of a language model -> a module with the functions prefill and decode.

    prefill(tokens, positions, picked, state...) -> scores of the picked rows, state...
    decode(tokens, positions, state...) -> scores, state...

Both read one set of weights. Matrices of floats are parameters, so that `compress_weights` finds
them. Matrices in blocks, norms, biases and tables of angles are constants that both share.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax, tirx

from relayquant.base.language import DECODE, PREFILL
from relayquant.formats.readers.causal_lm.config import (
    CausalLMConfig,
    ExpertConfig,
    HiddenFunction,
    LayerConfig,
)
from relayquant.formats.readers.causal_lm.mixing import mix_rows
from relayquant.formats.readers.causal_lm.options import CausalLMOptions
from relayquant.formats.readers.causal_lm.parts import FunctionParts, number
from relayquant.formats.readers.causal_lm.tensors import CausalLMParams, StoredTensor
from relayquant.formats.readers.causal_lm.weights import Network, list_states
from relayquant.ir.float_precision import BF16_ROWS_ATTR
from relayquant.ir.ledger import Ledger, attach_ledger
from relayquant.ir.rewrite.function import define_function
from relayquant.ir.state import with_state

Expr = relax.Expr

#: Less than any share.
LEAST = -1e30
#: function -> operator
ACTIVATIONS = {
    HiddenFunction.SILU: relax.op.nn.silu,
    HiddenFunction.GELU: relax.op.nn.gelu,
    HiddenFunction.GELU_TANH: relax.op.nn.gelu_tanh,
    HiddenFunction.RELU: relax.op.nn.relu,
}


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


class FunctionBuilder(FunctionParts):
    """Builds one function. B sequences, `rows` new tokens each."""

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
        vectors = self.find_token_vectors(x) if config.token_width else None
        for i, layer in enumerate(config.layers):
            name = f"layers.{i}"
            x = self.compute_layer(name, i, layer, x)
            if vectors is not None:
                x = self.add_token_vector(name, i, x, vectors)
            if config.has_layer_scales:
                scale = self.network.constants[f"{name}.scale.weight"]
                x = self.emit(relax.op.multiply(x, scale), f"{name}.rescaled")
        return x

    def find_token_vectors(self, x: Expr) -> Expr:
        """Return the vectors of each token for all layers, (B, rows, layers, token_width)."""
        config = self.config
        shape = (self.sequences, self.rows, len(config.layers), config.token_width)
        own = self.take_rows("token_table", self.tokens)
        own = self.emit(relax.op.reshape(own, shape), "token.rows")
        own = self.emit(relax.op.multiply(own, number(config.token_width**0.5)), "token.scaled")
        seen = self.multiply("token_in", x)["token_in"]
        seen = self.emit(relax.op.multiply(seen, number(config.width**-0.5)), "token.seen")
        seen = self.emit(relax.op.reshape(seen, shape), "token.seen.rows")
        both = relax.op.add(self.normalize("token_norm", seen), own)
        both = self.emit(both, "token.both")
        return self.emit(relax.op.multiply(both, number(0.5**0.5)), "token.vectors")

    def add_token_vector(self, name: str, i: int, x: Expr, vectors: Expr) -> Expr:
        """Add what a layer makes of a token's vector."""
        own = relax.op.strided_slice(vectors, [2], [i], [i + 1])
        own = self.emit(relax.op.squeeze(self.emit(own, f"{name}.own"), [2]), f"{name}.vector")
        gate = self.multiply(f"{name}.token_gate", x)["token_gate"]
        gate = self.emit(ACTIVATIONS[self.config.activation](gate), f"{name}.token.opened")
        h = self.emit(relax.op.multiply(gate, own), f"{name}.token.gated")
        h = self.multiply(f"{name}.token_out", h)["token_out"]
        h = self.normalize(f"{name}.token_post_norm", h)
        return self.emit(relax.op.add(x, h), f"{name}.token.added")

    def compute_layer(self, name: str, i: int, layer: LayerConfig, x: Expr) -> Expr:
        """Return x (B, rows, width) with attention and the feed-forward network added."""
        config = self.config
        h = self.normalize(f"{name}.attention_norm", x) if config.has_pre_norms else x
        attended = mix_rows(self, name, i, layer, h)
        if config.has_post_norms:
            attended = self.normalize(f"{name}.post_attention_norm", attended)
        if not config.is_parallel:
            x = self.add(f"{name}.attended", x, attended)
            h = self.normalize(f"{name}.ffn_norm", x) if config.has_pre_norms else x
        if layer.experts is None:
            computed = self.feed_forward(name, h)
        elif layer.experts.is_beside:
            computed = self.mix_beside(name, layer.experts, x, h)
        else:
            computed = self.mix(name, layer.experts, h, h)
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

    def mix_beside(self, name: str, experts: ExpertConfig, x: Expr, h: Expr) -> Expr:
        """Return what the feed-forward network makes of h, plus what experts make of x."""
        dense = self.normalize(f"{name}.dense_norm", self.feed_forward(name, h))
        own = self.normalize(f"{name}.pre_experts_norm", x)
        routed = self.normalize(f"{name}.router_norm", x)
        routed = relax.op.multiply(routed, number(self.config.width**-0.5))
        routed = self.emit(routed, f"{name}.routed")
        mixed = self.normalize(f"{name}.mixed_norm", self.mix(name, experts, own, routed))
        return self.emit(relax.op.add(dense, mixed), f"{name}.beside")

    def mix(self, name: str, experts: ExpertConfig, h: Expr, routed: Expr) -> Expr:
        """Return the sum of what each row's experts compute, times their shares. The router reads
        `routed`.
        """
        shares, chosen = self.choose(name, experts, routed)
        rows = self.emit(relax.op.expand_dims(h, 2), f"{name}.expert_rows")
        quantized: dict[int, tuple[Expr, Expr]] = {}
        parts = {
            part: self.multiply_by_chosen(
                f"{name}.experts_{part}", rows, chosen, experts.count, quantized
            )
            for part in ("gate", "up")
        }
        if experts.limit:
            hidden = self.limit_gate(f"{name}.experts_", parts["gate"], parts["up"], experts)
        else:
            hidden = self.gate(f"{name}.experts_", parts["gate"], parts["up"])
        found = self.multiply_by_chosen(f"{name}.experts_down", hidden, chosen, experts.count, {})
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
        share = relax.op.sigmoid if experts.is_sigmoid else relax.op.nn.softmax
        all_shares = self.emit(share(scores), f"{name}.shares")
        ranked = all_shares
        if experts.has_choice:
            choice = self.network.constants[f"{name}.choice.bias"]
            ranked = self.emit(relax.op.add(all_shares, choice), f"{name}.ranked")
        if experts.chosen_groups < experts.groups:
            ranked = self.leave_out_groups(name, experts, ranked)
        best = self.emit(
            relax.op.topk(ranked, experts.chosen, -1, "both", True, "int32"), f"{name}.best"
        )
        shares = self.emit(best[0], f"{name}.best.shares")
        chosen = self.emit(best[1], f"{name}.chosen")
        if ranked is not all_shares:
            at = self.emit(relax.op.astype(chosen, "int64"), f"{name}.chosen.wide")
            taken = relax.op.gather_elements(all_shares, at, 2)
            shares = self.emit(taken, f"{name}.chosen.shares")
        if experts.is_normalized:
            total = self.emit(relax.op.sum(shares, -1, keepdims=True), f"{name}.best.sum")
            if experts.sum_shift:
                shifted = relax.op.add(total, number(experts.sum_shift))
                total = self.emit(shifted, f"{name}.best.shifted")
            shares = self.emit(relax.op.divide(shares, total), f"{name}.best.normalized")
        if experts.scale != 1:
            scaled = relax.op.multiply(shares, number(experts.scale))
            shares = self.emit(scaled, f"{name}.best.scaled")
        if experts.is_beside:
            scale = self.network.constants[f"{name}.share_scale.weight"]
            own = self.emit(relax.op.take(scale, chosen, 0, mode="clip"), f"{name}.share_scale")
            shares = self.emit(relax.op.multiply(shares, own), f"{name}.best.rescaled")
        return shares, chosen

    def leave_out_groups(self, name: str, experts: ExpertConfig, ranked: Expr) -> Expr:
        """Return the numbers by which experts are chosen, the least ones outside of the groups that
        are chosen first.
        """
        count, size = experts.groups, experts.count // experts.groups
        place = f"{name}.groups"
        split = relax.op.reshape(ranked, (self.sequences, self.rows, count, size))
        split = self.emit(split, place)
        best = min(experts.group_best, size)
        found = self.emit(relax.op.topk(split, best, -1, "values"), f"{place}.best")
        total = self.emit(relax.op.sum(found, -1), f"{place}.sums")
        kept = self.emit(relax.op.topk(total, experts.chosen_groups, -1, "values"), f"{place}.kept")
        last = experts.chosen_groups - 1
        least = self.emit(relax.op.strided_slice(kept, [2], [last], [last + 1]), f"{place}.least")
        is_kept = self.emit(relax.op.greater_equal(total, least), f"{place}.are_kept")
        is_kept = self.emit(relax.op.expand_dims(is_kept, -1), f"{place}.columns")
        left = self.emit(relax.op.where(is_kept, split, number(LEAST)), f"{place}.left")
        shape = (self.sequences, self.rows, experts.count)
        return self.emit(relax.op.reshape(left, shape), f"{place}.ranked")

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
