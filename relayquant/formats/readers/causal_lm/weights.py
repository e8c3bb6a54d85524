"""What both functions of a language model share: joined weights, constants, and the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax

from relayquant.base.grouping import GroupedWeight
from relayquant.formats.readers.causal_lm.config import CausalLMConfig, LayerConfig, Rotary
from relayquant.formats.readers.causal_lm.mixers import LATENT
from relayquant.formats.readers.causal_lm.options import CausalLMOptions
from relayquant.formats.readers.causal_lm.tensors import StoredTensor, join_tensors
from relayquant.ir.ledger import LedgerRow
from relayquant.ir.state import StateValue

Expr = relax.Expr

#: Matrices that stay in float: they choose experts, or are small.
CONSTANTS = ("router", "share", "conv", "delta_conv")
#: The weights of all experts of a layer.
EXPERTS = ("experts_gate", "experts_up", "experts_down")


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
        if config.token_width:
            products["token_in"] = join_products(tensors, "", ("token_in",))
        if not config.is_tied:
            products["classifier"] = join_products(tensors, "", ("classifier",))
        tables = {
            name: tensors[f"{name}.weight"]
            for name in ("embedding", "positions", "token_table")
            if f"{name}.weight" in tensors
        }
        network = Network(config, options, length, products, tables)
        for name, tensor in tensors.items():
            part = name.split(".")[-2]
            if part in CONSTANTS or (len(tensor.shape) == 1 and not is_product_bias(config, name)):
                network.constants[name] = relax.const(tensor.read_floats())
            elif part in (*EXPERTS, *LATENT):
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
            for rotary in (layer.rotary, layer.rotary and layer.rotary.of_keys):
                if rotary is not None and rotary not in network.angles:
                    network.angles[rotary] = make_angles(rotary, length)
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
    own = config.list_products(layer)
    parts = ("q", "k", "v", "attention_gate")
    found: list[tuple[str, ...]] = [tuple(part for part in parts if part in own), ("out",)]
    if layer.mixer is not None:
        found = [*layer.mixer.groups]
    elif config.latent is not None:
        found = config.latent.groups
    if layer.experts is None or layer.experts.is_beside:
        found += [("gate", "up") if config.is_gated else ("up",), ("down",)]
    elif layer.experts.shared:
        found += [("shared_gate", "shared_up"), ("shared_down",)]
    if config.token_width:
        found += [("token_gate",), ("token_out",)]
    return found


def is_product_bias(config: CausalLMConfig, name: str) -> bool:
    """Return whether a tensor is the bias of a product that all rows share."""
    place, _, suffix = name.rpartition(".")
    part = place.rpartition(".")[2]
    return suffix == "bias" and part in config.biases and part not in (*EXPERTS, *CONSTANTS)


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
    positions = np.arange(length)[:, None]
    angles = positions * np.array(rotary.frequencies)
    growth = 1 + rotary.growth * np.log1p(positions // rotary.growth_length)
    factor = rotary.magnitude * growth
    return (
        relax.const((factor * np.cos(angles)).astype("float32")),
        relax.const((factor * np.sin(angles)).astype("float32")),
    )


def list_states(network: Network) -> list[StateValue]:
    """Return the state: keys and values of each layer with attention, with scales if they are int8,
    and then what other layers keep, "rows.0".
    """
    config, options = network.config, network.options
    states: list[StateValue] = []
    others: list[StateValue] = []
    for i, layer in enumerate(config.layers):
        if layer.mixer is not None:
            own = layer.mixer.list_states(config.width)
            others += [
                StateValue(f"{name}.{i}", (options.sequences, *sizes), "float32")
                for name, sizes in own.items()
            ]
            continue
        if layer.source is not None:
            continue
        groups, width = config.groups_of(layer), config.head_width_of(layer)
        shape = (options.sequences, groups, network.length, width)
        for kind in ("keys",) if config.latent else ("keys", "values"):
            states.append(StateValue(f"{kind}.{i}", shape, options.cache))
            if options.cache == "int8":
                states.append(StateValue(f"{kind}.{i}.scale", (*shape[:3], 1), "float32"))
    return states + others
