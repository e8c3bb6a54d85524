"""The description of a causal language model: what distinguishes one network from another.

`architectures` and `gguf` make it from a model's metadata, and `network` builds from it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.causal_lm.mixers import Joined, LatentAttention, Mixer, take_turns

#: Most layers and most elements along an axis that are believed of a file.
MOST_LAYERS, MOST_SIZE = 4096, 1 << 31


class NormKind(enum.Enum):
    """Normalization before attention and the feed-forward network."""

    RMS = "rms"
    LAYER = "layer"


class HiddenFunction(enum.Enum):
    """Function inside the feed-forward network."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: pair i of a head is turned by position * frequencies[i].

    Attributes:
        frequencies: One for each pair. The first 2 * len(frequencies) elements of a head are
            turned, element i together with element i + len(frequencies).
        magnitude: Factor of cosines and sines.
        growth, growth_length: Queries at position p are multiplied by 1 + growth * log(1 + p //
            growth_length) in addition. 0: by nothing.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    growth: float = 0.0
    growth_length: int = 1

    @property
    def of_keys(self) -> Rotary:
        """The rotary positions of keys."""
        return replace(self, growth=0.0)


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts, instead of one feed-forward network.

    The experts of a row h are those with the largest shares p = softmax(router(h)), or p =
    sigmoid(router(h)). With a choice, they are those with the largest p + choice. With groups of
    experts, they are in the groups whose largest ones have the largest sums:

        sum over the chosen e of p[e] * down_e(activation(gate_e(h)) * up_e(h))

    With a limit l and a = 1.702 (GPT-OSS), what `down_e` reads is, with g = min(gate_e(h), l) and
    u = clip(up_e(h), -l, l):

        g * sigmoid(a * g) * (u + 1)

    Attributes:
        count, chosen, hidden: Number of experts, of those that a row chooses, and of elements
            inside each.
        is_normalized: Whether the shares of the chosen are divided by their sum.
        is_sigmoid, has_choice: Whether shares are sigmoids, and whether a learned number for each
            expert is added to choose.
        is_beside: Whether the layer has a feed-forward network, too (Gemma 4). Experts and router
            each have a norm for the x that they read. The results of network and experts are
            normalized and added. A learned number of each expert multiplies its share:

                dense_norm(down(...)) + mixed_norm(experts(pre_experts_norm(x)))
                router(router_norm(x) / sqrt(width))
        groups, chosen_groups: Number of groups, and number of groups that a row chooses first.
        group_best: Number of a group's experts that are added up for its choice.
        sum_shift: What is added to the sum before shares are divided by it.
        scale: Factor of the shares.
        shared: Elements inside a network that every row has in addition. 0: there is none.
        has_share: Whether its result is multiplied by sigmoid(share(h)).
        limit, slope: Bound l and slope a. 0: there is no bound.
    """

    count: int
    chosen: int
    hidden: int
    is_normalized: bool = True
    shared: int = 0
    has_share: bool = False
    limit: float = 0.0
    slope: float = 1.702
    is_sigmoid: bool = False
    has_choice: bool = False
    is_beside: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    sum_shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count < MOST_SIZE:
            raise ModelError(
                f"A row of the model chooses {self.chosen} of "
                f"{format_count(self.count, 'expert')}; allowed: 1 to all of them.",
                code="RQ204",
            )
        groups = self.groups
        if not 1 <= self.chosen_groups <= groups <= self.count or self.count % groups:
            raise ModelError(
                f"A row of the model chooses {self.chosen_groups} of "
                f"{format_count(groups, 'group')} of "
                f"{format_count(self.count, 'expert')}; allowed: 1 to all, of equal sizes.",
                code="RQ204",
            )
        numbers = (self.slope, self.scale, self.sum_shift)
        if not (all(map(math.isfinite, numbers)) and 0 <= self.limit < math.inf):
            raise ModelError(
                f"Values inside of the model's experts are limited to {self.limit} with a slope of "
                f"{self.slope}, and their shares have a factor of {self.scale} and a shift of "
                f"{self.sum_shift}; allowed: finite numbers, and a limit from 0 on.",
                code="RQ204",
            )
        sizes = (self.count * self.hidden, self.shared + 1)
        if not all(1 <= size < MOST_SIZE for size in sizes):
            raise ModelError(
                f"Each expert of the model has {format_count(self.hidden, 'element')}, and the "
                f"shared one {self.shared}; allowed: 1 to {MOST_SIZE - 1} in all together.",
                code="RQ204",
            )


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between layers.

    Attributes:
        rotary: Rotary positions. None: this layer has none.
        window: Number of latest tokens that attention sees, itself included. 0: all.
        experts: The mixture of experts. None: this layer has one feed-forward network.
        mixer: What the layer has instead of attention. None: it has attention.
        groups, head_width, hidden: As in `CausalLMConfig`, where this layer differs. 0: as there.
        source: Number of the layer before whose keys and values this one reads. None: its own.
        has_values: Whether it has a product for values. Otherwise they are keys before their norm.
    """

    rotary: Rotary | None = None
    window: int = 0
    experts: ExpertConfig | None = None
    mixer: Mixer | None = None
    groups: int = 0
    head_width: int = 0
    hidden: int = 0
    source: int | None = None
    has_values: bool = True


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig:
    """A causal language model of the family of GPT and Llama.

    A layer is, with norms and biases where the model has them:

        h = attention_norm(x)
        x = x + out(attention(q(h), k(h), v(h)))
        x = x + down(activation(gate(h)) * up(h)), h = ffn_norm(x)

    Attributes:
        architecture: Name of the architecture in its source, for messages.
        vocabulary, width, hidden: Number of tokens, of elements between layers, and of elements
            inside the feed-forward network.
        heads, groups, head_width: Number of query heads, of heads of keys and values, and elements
            of a head.
        max_length: Most tokens that the model was made for.
        layers: One for each layer.
        norm, epsilon: Normalization, and what it adds to the variance.
        norm_shift: Added to the stored weights of norms (Gemma stores w of 1 + w).
        activation, is_gated: Feed-forward network. Without a gate it is down(activation(up(h))).
        is_parallel: Whether attention and the feed-forward network read the same norm, and both
            are added to x.
        has_head_norms: Whether each query and key head is normalized before it is turned.
        has_row_norms: Whether queries and keys are, all heads together.
        has_value_norms: Whether each value head is normalized, without a weight.
        has_pre_norms: Whether what attention and the feed-forward network read is normalized.
        has_post_norms: Whether results of attention and the feed-forward network are normalized.
        has_norm_biases: Whether norms of the kind LAYER have a bias.
        has_sinks: Whether each query head has one more score, a learned number (see
            `qnn.cached_attention`).
        has_gates: Whether results of attention are multiplied by sigmoid(attention_gate(h)).
        latent: Attention to one latent vector of each token. Then `groups` is 1, and `head_width`
            the width of a row of the cache. None: to keys and values.
        has_layer_scales: Whether what leaves a layer is multiplied by a learned number.
        token_width: Elements of a vector that each layer has for each token (Gemma 4). With rows e
            of the embedding and rows t of a table, and P elements, v is

                (token_norm(token_in(e) / sqrt(width)) + sqrt(P) * t) / sqrt(2)

            and a layer ends with

                x = x + token_post_norm(token_out(activation(token_gate(x)) * v))

            0: there is none.
        has_positions: Whether a learned vector of the position is added to the embedding.
        biases: Products with a bias: "q", "k", "v", "out", "gate", "up", "down", "classifier",
            "router", and "experts_gate", "experts_up", "experts_down", one expert after the other.
        query_scale: Factor of the attention scores.
        attention_cap, score_cap: Soft caps c * tanh(s / c) of attention scores and of scores. 0:
            none.
        embedding_scale, residual_scale, score_scale: Factors of the embedding, of what a layer
            adds, and of the scores.
        is_tied: Whether the classifier is the embedding.
    """

    architecture: str
    vocabulary: int
    width: int
    hidden: int
    heads: int
    groups: int
    head_width: int
    max_length: int
    layers: tuple[LayerConfig, ...]
    norm: NormKind = NormKind.RMS
    epsilon: float = 1e-5
    norm_shift: float = 0.0
    activation: HiddenFunction = HiddenFunction.SILU
    is_gated: bool = True
    is_parallel: bool = False
    has_head_norms: bool = False
    has_row_norms: bool = False
    has_value_norms: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    has_norm_biases: bool = True
    has_sinks: bool = False
    has_gates: bool = False
    latent: LatentAttention | None = None
    has_layer_scales: bool = False
    token_width: int = 0
    has_positions: bool = False
    biases: frozenset[str] = frozenset()
    query_scale: float = 1.0
    attention_cap: float = 0.0
    score_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float = 1.0
    is_tied: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "hidden", "heads", "groups", "head_width", "max_length")
        for name in sizes:
            if not 1 <= getattr(self, name) < MOST_SIZE:
                raise ModelError(
                    f"The model's {name} is {getattr(self, name)}; allowed: 1 to {MOST_SIZE - 1}.",
                    code="RQ204",
                )
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ModelError(
                f"The model has {format_count(len(self.layers), 'layer')}; allowed: 1 to "
                f"{MOST_LAYERS}.",
                code="RQ204",
            )
        if all(layer.mixer for layer in self.layers):
            raise ModelError(
                "No layer of the model has attention; allowed: models with one at least.",
                code="RQ202",
            )
        for i, layer in enumerate(self.layers):
            self.check_layer(i, layer)
        numbers = (
            self.epsilon, self.query_scale, self.attention_cap, self.score_cap,
            self.embedding_scale, self.residual_scale, self.score_scale,
        )  # fmt: skip
        if not all(map(math.isfinite, numbers)) or min(self.attention_cap, self.score_cap) < 0:
            raise ModelError(
                f"A number of the model is not finite or below 0: {numbers}.", code="RQ204"
            )

    def groups_of(self, layer: LayerConfig) -> int:
        """Return the heads of keys and values of a layer."""
        return layer.groups or self.groups

    def head_width_of(self, layer: LayerConfig) -> int:
        """Return the elements of a head of a layer."""
        return layer.head_width or self.head_width

    def check_layer(self, number: int, layer: LayerConfig) -> None:
        """Raise ModelError unless the sizes of a layer fit together."""
        groups, sizes = self.groups_of(layer), (layer.groups, layer.head_width, layer.hidden)
        if not all(0 <= size < MOST_SIZE for size in sizes) or self.heads % groups:
            raise ModelError(
                f"Layer {number} of the model has {format_count(self.heads, 'head')} and "
                f"{format_count(groups, 'head')} of keys and values; allowed: a divisor.",
                code="RQ204",
            )
        if layer.source is not None:
            source = self.layers[layer.source] if 0 <= layer.source < number else None
            fits = source and self.groups_of(source) == groups
            if not fits or self.head_width_of(source) != self.head_width_of(layer):
                raise ModelError(
                    f"Layer {number} of the model reads keys and values of layer {layer.source}; "
                    "allowed: a layer before with heads of the same width and number.",
                    code="RQ204",
                )
        self.check_rotary(layer.rotary, self.head_width_of(layer))

    def check_rotary(self, rotary: Rotary | None, width: int) -> None:
        """Raise ModelError unless heads of this width can have the rotary positions."""
        if rotary is None:
            return
        turned = 2 * len(rotary.frequencies)
        if turned > width:
            raise ModelError(
                f"The model turns {format_count(turned, 'element')} of heads of {width}.",
                code="RQ204",
            )
        if not math.isfinite(rotary.growth) or rotary.growth_length < 1:
            raise ModelError(
                f"Queries of the model grow by {rotary.growth} each "
                f"{format_count(rotary.growth_length, 'position')}; allowed: a finite number, and "
                "positions from 1 on.",
                code="RQ204",
            )
        if rotary.growth and turned != width:
            raise ModelError(
                "The model's queries grow with their position, and rotary positions turn a part "
                "of each head; allowed: of one model only one of both.",
                code="RQ202",
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor: "embedding.weight", "layers.0.q.weight", ... A weight is
        (outputs, inputs).
        """
        found: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, self.width)}
        if self.has_positions:
            found["positions.weight"] = (self.max_length, self.width)
        if self.token_width:
            all_layers = len(self.layers) * self.token_width
            found["token_table.weight"] = (self.vocabulary, all_layers)
            found["token_in.weight"] = (all_layers, self.width)
            found["token_norm.weight"] = (self.token_width,)

        def add(name: str, kind: str, shape: tuple[int, ...]) -> None:
            found[f"{name}.weight"] = shape
            is_norm = self.norm is NormKind.LAYER and self.has_norm_biases and kind == "norm"
            if is_norm or kind in self.biases:
                found[f"{name}.bias"] = shape[:1]

        for i, layer in enumerate(self.layers):
            for kind, shape in self.list_products(layer).items():
                add(f"layers.{i}.{kind}", kind, shape)
            for kind, size in self.list_norms(layer).items():
                add(f"layers.{i}.{kind}", "norm", (size,))
            if layer.mixer is not None:
                constants = layer.mixer.list_constants(self.width)
                found |= {f"layers.{i}.{name}": shape for name, shape in constants.items()}
            elif self.has_sinks:
                found[f"layers.{i}.sinks.weight"] = (self.heads,)
            if self.has_layer_scales:
                found[f"layers.{i}.scale.weight"] = (1,)
            if layer.experts is not None and layer.experts.is_beside:
                found[f"layers.{i}.share_scale.weight"] = (layer.experts.count,)
            if layer.experts is not None and layer.experts.has_choice:
                found[f"layers.{i}.choice.bias"] = (layer.experts.count,)
        add("final_norm", "norm", (self.width,))
        if not self.is_tied:
            add("classifier", "classifier", (self.vocabulary, self.width))
        return found

    def list_products(self, layer: LayerConfig) -> dict[str, tuple[int, int]]:
        """Return part -> (outputs, inputs) of a layer's matrices."""
        if layer.mixer is not None:
            found = dict(layer.mixer.list_products(self.width))
        elif self.latent is not None:
            found = self.latent.list_products(self.width, self.heads)
        else:
            width = self.head_width_of(layer)
            heads, groups = self.heads * width, self.groups_of(layer) * width
            found = {"q": (heads, self.width)}
            if layer.source is None:
                found["k"] = (groups, self.width)
            if layer.source is None and layer.has_values:
                found["v"] = (groups, self.width)
            found["out"] = (self.width, heads)
            if self.has_gates:
                found["attention_gate"] = (heads, self.width)
        if layer.experts is not None:
            found |= self.list_experts(layer.experts)
            if not layer.experts.is_beside:
                return found
        hidden = layer.hidden or self.hidden
        found |= {"up": (hidden, self.width), "down": (self.width, hidden)}
        if self.token_width:
            found["token_gate"] = (self.token_width, self.width)
            found["token_out"] = (self.width, self.token_width)
        return found | ({"gate": (hidden, self.width)} if self.is_gated else {})

    def list_joined(self, layer: LayerConfig) -> Joined:
        """Return what sources may have as one tensor, by rows that take turns."""
        if layer.mixer is not None:
            return layer.mixer.list_joined()
        if self.latent is not None:
            return self.latent.list_joined(self.heads)
        if not self.has_gates:
            return {}
        q, gate = take_turns((self.head_width, self.head_width), self.heads)
        return {"q_gate": {"q": q, "attention_gate": gate}}

    def list_norms(self, layer: LayerConfig) -> dict[str, int]:
        """Return name -> size of a layer's norms."""
        norms: dict[str, int] = {}
        if self.has_pre_norms:
            norms["attention_norm"] = self.width
            if not self.is_parallel:
                norms["ffn_norm"] = self.width
        if layer.mixer is None and self.has_head_norms:
            norms["q_norm"] = self.head_width_of(layer)
            if layer.source is None:
                norms["k_norm"] = self.head_width_of(layer)
        if layer.mixer is None and self.has_row_norms:
            sizes = {"q_norm": self.heads, "k_norm": self.groups}
            norms |= {name: count * self.head_width for name, count in sizes.items()}
        if layer.mixer is None and self.latent is not None:
            norms |= self.latent.list_norms()
        if self.has_post_norms:
            norms |= {"post_attention_norm": self.width, "post_ffn_norm": self.width}
        if layer.experts is not None and layer.experts.is_beside:
            names = ("dense_norm", "pre_experts_norm", "mixed_norm", "router_norm")
            norms |= dict.fromkeys(names, self.width)
        if self.token_width:
            norms["token_post_norm"] = self.width
        return norms

    def list_experts(self, experts: ExpertConfig) -> dict[str, tuple[int, int]]:
        """Return the shapes of a layer's experts. Those of all are one matrix, expert by expert."""
        inner, outer = (experts.count * size for size in (experts.hidden, self.width))
        found = {
            "router": (experts.count, self.width),
            "experts_gate": (inner, self.width),
            "experts_up": (inner, self.width),
            "experts_down": (outer, experts.hidden),
        }
        if experts.shared:
            found |= {
                "shared_gate": (experts.shared, self.width),
                "shared_up": (experts.shared, self.width),
                "shared_down": (self.width, experts.shared),
            }
        if experts.has_share:
            found["share"] = (1, self.width)
        return found
