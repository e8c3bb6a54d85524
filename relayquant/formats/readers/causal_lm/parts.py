"""Parts that the layers of a function are made of: products, norms, rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tvm import relax, tirx

from relayquant.base.language import PREFILL
from relayquant.errors import format_count
from relayquant.formats.readers.causal_lm.config import NormKind
from relayquant.formats.readers.causal_lm.weights import Network, list_states
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.grouped import GROUPED_FORMS
from relayquant.ir.ledger import LedgerRow

Expr = relax.Expr


class FunctionParts:
    """A function while it is built. B sequences, `rows` new tokens each."""

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

    def emit(self, expr: Expr, name: str) -> relax.Var:
        return self.builder.emit(expr, name)

    @cached_property
    def counts(self) -> Expr:
        """Number of each sequence's new tokens, int64 (B,). Negative ones are none."""
        is_token = relax.op.greater_equal(self.tokens, relax.const(0, "int32"))
        ones = self.emit(relax.op.astype(self.emit(is_token, "is_token"), "int64"), "ones")
        return self.emit(relax.op.sum(ones, 1), "counts")

    def normalize(self, name: str, x: Expr, epsilon: float | None = None) -> Expr:
        """Normalize the last axis. `epsilon`: None for that of the model."""
        epsilon = self.config.epsilon if epsilon is None else epsilon
        weight = self.network.constants[f"{name}.weight"]
        if self.config.norm is NormKind.RMS:
            normed = relax.op.nn.rms_norm(x, weight, [-1], epsilon)
        else:
            bias = self.network.constants.get(f"{name}.bias")
            if bias is None:
                bias = relax.const(np.zeros(int(x.ty.shape[-1]), "float32"))
            normed = relax.op.nn.layer_norm(x, weight, bias, [-1], epsilon)
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

    def multiply_by_constant(self, name: str, x: Expr) -> Expr:
        """Return x w^T for a weight that stays in float."""
        turned = relax.op.permute_dims(self.network.constants[f"{name}.weight"])
        return self.emit(relax.op.matmul(x, self.emit(turned, f"{name}.t")), name)

    def multiply_by_chosen(
        self,
        name: str,
        x: Expr,
        chosen: Expr,
        count: int,
        rows: dict[int, tuple[Expr, Expr]],
    ) -> Expr:
        """Return x (B, rows, chosen or 1, inputs) times the weights of the chosen ones of `count`
        experts, plus the biases of these.
        """
        if name in self.network.grouped:
            size = self.network.grouped[name][0].group_size
            if size not in rows:
                rows[size] = self.quantize(x, size, name)
            constants, attributes = self.read_blocks(name, "expert_dense")
            product = qnn.grouped_expert_dense(
                *rows[size], chosen, *constants, **attributes, experts=count
            )
        else:
            weight = self.weights[f"{name}.weight"]
            product = qnn.expert_dense(x, chosen, weight, count)
        product = self.emit(product, name)
        bias = self.network.constants.get(f"{name}.bias")
        if bias is None:
            return product
        each = relax.const(bias.value.numpy().reshape(count, -1))
        own = self.emit(relax.op.take(each, chosen, 0, mode="clip"), f"{name}.bias")
        return self.emit(relax.op.add(product, own), f"{name}.biased")


def number(value: float) -> Expr:
    return relax.const(value, "float32")
