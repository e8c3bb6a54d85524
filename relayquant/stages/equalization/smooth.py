"""SmoothQuant before planning: float module + samples -> the same function with scaled channels, so
that activations, which have one scale per tensor, have fewer outliers.

    matmul(layer_norm(x, g, b), w) -> matmul(layer_norm(x, g / s, b / s), s * w)
    matmul(p, matmul(x, v)) @ o -> matmul(p, matmul(x, v / s)) @ (s * o)
    matmul(x @ q, transpose(x @ k)) -> matmul(x @ (q / s), transpose(x @ (s * k)))

There is one power of two s per channel that a product sums over. The function stays the same, bit
for bit, since a power of two changes no mantissa. No operator is added: constants before the
product absorb 1 / s. If no constant can absorb it, the value is declined with the reason. On
request, the value is multiplied in front of its products instead:

    matmul(x, w), add(x, y) -> matmul(x * (1 / s), s * w), add(x, y)

`smooth_products` uses only this form, so that no other value changes.

Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (https://arxiv.org/abs/2211.10438), equation 4: s = max |x|^alpha / max |w|^(1 - alpha).

Measured on a keyword-spotting transformer of 12 blocks, SQNR of the outputs:

    effort        without    alpha 0.5
    "fast"        29.9 dB    30.4 dB
    "balanced"    31.1 dB    30.4 dB

"balanced" fits ranges and weights to the unscaled data. All answers agree with float in every case.
The layer norms of this model follow residual sums, which are read too, so only the factors of
attention are scaled. For these reasons no level of effort uses SmoothQuant. It is for models with a
few very large channels, which `ModelType.TRANSFORMER` selects.

MiniLM-L6 is one of them. Mean cosine of its embeddings to float (static int8 products, 500
sentences):

    without                                                    0.9940
    alpha 0.9, multiplications where no constant absorbs       0.9981
    alpha 0.9, multiplications in front of all products        0.9987
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from relayquant.codegen.eager import EagerModule
from relayquant.errors import ConfigError
from relayquant.ir.rewrite import Emitter, Graph, expose_values, rewrite_main
from relayquant.ir.rewrite.expressions import with_operands
from relayquant.ir.rewrite.graph import call_name, constant_value, tensor_shape
from relayquant.stages.equalization.absorb import Channels, Edit, absorb
from relayquant.stages.equalization.channels import (
    MATMUL,
    STEPS,
    ChannelStatistics,
    divide_range,
    estimate_noise,
    find_products,
)
from relayquant.stages.equalization.cross_layer import Declined


@dataclass(frozen=True, eq=False)
class SmoothingSite:
    """Two factors of matrix products that are scaled against each other by channel.

    Attributes:
        left, left_channels: The activation, and the channel of each of its elements.
        left_edits: Constants to divide by the scales in order to divide the activation.
        right_edits: Constants to multiply by the scales in order to multiply the other factor: the
            weights of all products that read `left`, or the constants of the other activation.
        right, right_channels: The other factor if it is an activation.

    A site without `left_edits` needs a multiplication.
    """

    left: relax.Var
    left_channels: Channels
    left_edits: tuple[Edit, ...]
    right_edits: tuple[Edit, ...]
    right: relax.Var | None = None
    right_channels: Channels | None = None

    @property
    def is_inserted(self) -> bool:
        """Whether no constant divides `left`, so that its products read a quotient of it."""
        return not self.left_edits and self.right is None


#: constants of a module, by the value whose operator reads them and the operand index
Constants = dict[tuple[relax.Var, int], np.ndarray]


def smooth_activations(
    mod: tvm.IRModule,
    batches: Iterable[Mapping[str, np.ndarray]],
    alpha: float = 0.5,
    *,
    absorbs: bool = True,
    inserts: bool = False,
) -> tuple[tvm.IRModule, tuple[Declined, ...]]:
    """Scale activations of matrix products where an estimate says that the products become more
    exact.

    Returns the prepared module with the scales, and the values that were declined, with reasons.

    Args:
        mod: A prepared module.
        batches: A few samples, {input: array}; run in numpy.
        alpha: Share of the difficulty that moves to the weights (the second factor), 0 to 1.
        absorbs: Whether constants absorb the scales where they can.
        inserts: Whether values are multiplied if no constant absorbs their scales.

    Raises:
        ConfigError: alpha is not within 0 and 1.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"alpha is {alpha!r}; allowed: 0 <= alpha <= 1, for instance 0.5.", code="RQ101"
        )
    graph = Graph(mod)
    sites, declined = find_sites(graph, absorbs=absorbs, inserts=inserts)
    if not sites:
        return mod, tuple(declined)
    measured = measure_sites(mod, sites, batches)
    constants: Constants = {
        (edit.var, edit.operand): read_constant(graph, edit)
        for site in sites
        for edit in (*site.left_edits, *site.right_edits)
    }
    inverses: dict[relax.Var, np.ndarray] = {}
    changed = False
    # Backwards, because a later site scales the columns of weights whose rows belong to an earlier
    # one.
    for site in reversed(sites):
        left = measured[site.left]
        if site.right is not None:
            right = measured[site.right]
            scales = choose_scales(left.largest, right.largest, alpha)
            before, after = (
                estimate_product_noise(left.divide(s), right.divide(1 / s))
                for s in (np.ones_like(scales), scales)
            )
        else:
            weight = np.concatenate([constants[e.var, e.operand] for e in site.right_edits], axis=1)
            scales = choose_scales(left.largest, np.abs(weight).max(axis=1), alpha)
            before = estimate_noise(weight, left)
            after = estimate_noise(weight * scales[:, None], left.divide(scales))
        # A multiplication that is asked for by name does not depend on the estimate. The estimate
        # assumes independent errors of channels. On MiniLM-L6 it would decline the value that gains
        # most.
        if not site.is_inserted and not after < before:
            declined.append(Declined(site.left.name, "scaling would not make it more exact"))
            continue
        changed = True
        if site.is_inserted:
            inverses[site.left] = (1 / scales).astype("float32")
        for edits, factors in ((site.left_edits, 1 / scales), (site.right_edits, scales)):
            for edit in edits:
                factor = factors[edit.channels].astype("float32")
                constants[edit.var, edit.operand] = constants[edit.var, edit.operand] * factor
    if not changed:
        return mod, tuple(declined)
    return replace_constants(mod, constants, inverses), tuple(declined)


def choose_scales(left: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
    """Return powers of two next to left^alpha / right^(1 - alpha), float64 (C,); 1 if one of the
    two is 0.

    left, right: Largest magnitude of each channel of both factors, (C,).
    """
    return np.exp2(np.rint(divide_range(left, right, alpha)))


def estimate_product_noise(left: ChannelStatistics, right: ChannelStatistics) -> float:
    """Estimate the mean square error of left @ right if both are rounded to 8 bits with one
    scale each, up to a common factor.
    """
    steps = [statistics.largest.max(initial=0.0) / STEPS for statistics in (left, right)]
    of_left = steps[0] ** 2 * right.mean_square.sum()
    return float(of_left + steps[1] ** 2 * left.mean_square.sum())


def replace_constants(
    mod: tvm.IRModule, constants: Constants, inverses: Mapping[relax.Var, np.ndarray]
) -> tvm.IRModule:
    """Replace constants that are operands. Products by constants may read the product of a value
    and its inverse scales (C,) instead of the value.
    """
    scaled: dict[relax.Var, relax.Expr] = {}

    def scale(emitter: Emitter, left: relax.Var) -> relax.Expr:
        if left not in scaled:
            inverse = relax.const(inverses[left], "float32")
            value = relax.op.multiply(emitter.get(left), inverse)
            scaled[left] = emitter.emit(value, f"{left.name}.smooth")
        return scaled[left]

    def visit(emitter: Emitter, binding: relax.VarBinding) -> relax.Expr:
        value = emitter.get(binding.value)
        found = {at: array for (var, at), array in constants.items() if var.same_as(binding.var)}
        if not found:
            return value
        args = [
            relax.const(found[at], "float32") if at in found else arg
            for at, arg in enumerate(value.args)
        ]
        left = binding.value.args[0]
        if left in inverses and call_name(value) == MATMUL and 1 in found:
            args[0] = scale(emitter, left)
        return with_operands(value, args)

    return rewrite_main(mod, visit)


def read_constant(graph: Graph, edit: Edit) -> np.ndarray:
    """Return the constant of an edit. `find_sites` names no other operands."""
    value = constant_value(graph.values[edit.var].args[edit.operand])
    if value is None:
        raise TypeError(f"Operand {edit.operand} of {edit.var.name!r} is not a constant.")
    return value


def measure_sites(
    mod: tvm.IRModule, sites: Iterable[SmoothingSite], batches: Iterable[Mapping[str, np.ndarray]]
) -> dict[relax.Var, ChannelStatistics]:
    """Return channel statistics of the activations of all sites."""
    channels: dict[relax.Var, Channels] = {}
    for site in sites:
        channels[site.left] = site.left_channels
        if site.right is not None and site.right_channels is not None:
            channels[site.right] = site.right_channels
    largest = {var: np.zeros(ids.size) for var, ids in channels.items()}
    squares = {var: np.zeros(ids.size) for var, ids in channels.items()}
    counts = dict.fromkeys(channels, 0)
    values = EagerModule(expose_values(mod, [var.name for var in channels]))
    params = [param.name for param in Graph(mod).func.params]
    for batch in batches:
        results = values.run("main", [batch[name] for name in params])
        for (var, ids), array in zip(channels.items(), results, strict=False):
            others = tuple(axis for axis, size in enumerate(ids.shape) if size == 1)
            peak = np.maximum(array.max(axis=others, initial=0), -array.min(axis=others, initial=0))
            largest[var] = np.maximum(largest[var], peak.ravel())
            squares[var] += np.square(array, dtype="float64").sum(axis=others).ravel()
            counts[var] += array.size // ids.size
    return {
        var: ChannelStatistics(largest[var], squares[var] / max(counts[var], 1)) for var in channels
    }


# --- What is scaled ---------------------------------------------------------------------------


def find_sites(
    graph: Graph, *, absorbs: bool = True, inserts: bool = False
) -> tuple[list[SmoothingSite], list[Declined]]:
    """Return the activations of matrix products whose channels can be scaled, in topological order,
    and the ones whose channels cannot.

    Inputs of the model are left out, because `inputs` scales them.

    Args:
        absorbs: Whether to find sites whose scales constants absorb.
        inserts: Whether to add sites that need a multiplication. Without `absorbs` all sites do.
    """
    sites, declined = [], []
    for binding in graph.bindings:
        found: list[SmoothingSite | Declined | None] = []
        if absorbs:
            found += find_weighted_site(graph, binding.var), find_product_site(graph, binding.var)
        if inserts and (not absorbs or isinstance(found[0], Declined)):
            inserted = find_inserted_site(graph, binding.var)
            found[:1] = [inserted or next(iter(found), None)]
        for site in found:
            if isinstance(site, SmoothingSite):
                sites.append(site)
            elif site is not None:
                declined.append(site)
    return sites, declined


def find_weighted_site(graph: Graph, left: relax.Var) -> SmoothingSite | Declined | None:
    """Return the site of `left` and the constant weights of all its readers. None if no product
    with a constant weight reads it.
    """
    readers = graph.users[left]
    products = find_products(graph, left)
    if not products:
        return None
    others = [user for user in readers if user not in products]
    if others:
        kind = graph.op_name(others[0]).removeprefix("relax.")
        return Declined(left.name, f"{others[0].name} ({kind}) reads it too, and has no weight")
    if left in graph.outputs:
        return Declined(left.name, "the model returns it")
    channels = number_last(left)
    if channels is None:
        return Declined(left.name, "its shape is not known")
    edits = absorb(graph, left, channels)
    if isinstance(edits, Declined):
        return edits
    return SmoothingSite(left, channels, edits, edit_weights(products, channels))


def find_inserted_site(graph: Graph, left: relax.Var) -> SmoothingSite | None:
    """Return the site of `left` with a multiplication in front of its products with constant
    weights. None if there are no products or its channels are not known.
    """
    products, channels = find_products(graph, left), number_last(left)
    if not products or channels is None:
        return None
    return SmoothingSite(left, channels, (), edit_weights(products, channels))


def edit_weights(products: Iterable[relax.Var], channels: Channels) -> tuple[Edit, ...]:
    """Return edits for the weights of products. The rows of the weights are the channels of the
    data.
    """
    rows = np.arange(channels.size).reshape(-1, 1)
    return tuple(Edit(product, 1, rows) for product in products)


def number_last(var: relax.Var) -> Channels | None:
    """Number the channels along the last axis; None if its size is not known."""
    shape = tensor_shape(var) or ()
    return number_channels(shape, (len(shape) - 1,))


def find_product_site(graph: Graph, product: relax.Var) -> SmoothingSite | Declined | None:
    """Return the site of the two activations that `product` multiplies. None if it does not
    multiply activations.
    """
    call = graph.call_of(product)
    if call is None or graph.op_name(product) != MATMUL:
        return None
    left, right = call.args
    if not all(isinstance(arg, relax.Var) and arg in graph.values for arg in (left, right)):
        return None
    shape, other = tensor_shape(left), tensor_shape(right)
    if shape is None or other is None or not 3 <= len(shape) == len(other) or left.same_as(right):
        return Declined(product.name, "its factors have no batch of their own, or are the same")
    rank = len(shape)
    # (batch, head, token, channel): each head has separate channels.
    is_head = rank == 4 and shape[1] == other[1] and isinstance(shape[1], int)
    heads = (1,) if is_head else ()
    channels = (
        number_channels(shape, (*heads, rank - 1)),
        number_channels(other, (*heads, rank - 2)),
    )
    if channels[0] is None or channels[1] is None:
        return Declined(product.name, "the size of what it sums over is known only at run time")
    edits = []
    for side, ids in zip((left, right), channels, strict=True):
        if not graph.has_one_user(side):
            return Declined(side.name, "several operators read it, or the model returns it")
        found = absorb(graph, side, ids)
        if isinstance(found, Declined):
            return found
        edits.append(found)
    return SmoothingSite(left, channels[0], edits[0], edits[1], right, channels[1])


def number_channels(shape: tuple[int | str, ...], axes: tuple[int, ...]) -> Channels | None:
    """Number 0, 1, 2, ... along these axes of a value, with size 1 along all others. None if a
    size is symbolic.
    """
    sizes = [1] * len(shape)
    for axis in axes:
        size = shape[axis] if shape else "?"
        if isinstance(size, str):
            return None
        sizes[axis] = size
    return np.arange(np.prod(sizes, dtype="int64")).reshape(sizes)
