"""Epilogue chains: integer, float and eager kernels take the same operators."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.codegen.eager import EagerModule
from relayquant.codegen.eager.steps.product import ProductStep
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.lowering.engine import BlockView, KernelTable
from relayquant.codegen.lowering.floating.context import TAKES
from relayquant.codegen.lowering.integer.epilogue import UNBIASED_TAKES, follow_product
from relayquant.codegen.lowering.kernel_call import KernelContext
from relayquant.codegen.rewrites.layout import convert_layout
from relayquant.ir.dialect import qnn
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, follow_epilogue
from relayquant.ir.rewrite.expressions import FunctionGraph, op_name

TARGET = resolve_target("llvm -mcpu=cascadelake")
PRODUCTS = ("relax.nn.conv2d", "relax.qnn.conv2d", "relax.matmul", "relax.qnn.dense")
SUMS_AND_BOUNDS = ("relax.add", "relax.qnn.add", "relax.nn.relu", "relax.clip")

#: Of each product, whether its kernel adds a bias and a residual; sums and bounds in no kernel.
Taken = tuple[list[tuple[bool, bool]], int]


def summarize(graph: Graph | FunctionGraph, chains: list[EpilogueChain]) -> Taken:
    inside = {var for chain in chains for var in chain.vars}
    outside = [
        var
        for var, value in graph.values.items()
        if op_name(value) in SUMS_AND_BOUNDS and var not in inside
    ]
    return [(chain.bias is not None, chain.residual is not None) for chain in chains], len(outside)


def take_float(mod: tvm.IRModule) -> Taken:
    graph = FunctionGraph(convert_layout(mod)["main"])
    chains: list[EpilogueChain] = []
    for var, value in graph.values.items():
        if op_name(value) in PRODUCTS:
            chain = EpilogueChain((var,), var.ty.ndim - 1, int(var.ty.shape.values[-1]))
            chains.append(follow_epilogue(graph, chain, TAKES))
    return summarize(graph, chains)


def take_eager(mod: tvm.IRModule) -> Taken:
    steps = EagerModule(mod).programs["main"].steps
    owners = [getattr(step.run, "__self__", None) for step in steps]
    chains = [owner.chain for owner in owners if isinstance(owner, ProductStep)]
    return summarize(FunctionGraph(mod["main"]), chains)


def make_context(mod: tvm.IRModule) -> KernelContext:
    graph = Graph(mod)
    block = BlockView(FunctionGraph(graph.func), graph.bindings, KernelTable(mod))
    return KernelContext(graph, block, select_isa(TARGET))


def take_integer(mod: tvm.IRModule) -> Taken:
    qmod = rq.quantize(mod, None, draw_batches(mod, 4), effort="fast", guard=rq.config.Guard.OFF)
    context = make_context(convert_layout(qmod))
    chains = [
        follow_product(context, var, int(var.ty.shape.values[-1]))
        for var in context.graph.values
        if context.graph.op_name(var) in PRODUCTS
    ]
    return summarize(context.graph, chains)


def with_stem(body):
    """`body` gets the result of a convolution, and a residual of the same shape: the largest of
    neighbouring values of that result. So the residual is quantized, too.
    """

    def with_residual(emit, x):
        stem = emit.conv_bias("stem", x)
        return body(emit, stem, emit("t", op.nn.max_pool2d(stem, (3, 3), padding=1)))

    return with_residual


HALF = relax.const(0.5, "float32")
STEM, BARE, BIAS, BOTH = (True, False), (False, False), (True, False), (True, True)
#: What stands behind a convolution -> what its kernel adds, and that of the stem.
MODELS = {
    "nothing": (lambda e, x: e.conv("c", x), [BARE]),
    "bias": (lambda e, x: e.conv_bias("c", x), [BIAS]),
    "relu": (lambda e, x: e("r", op.nn.relu(e.conv("c", x))), [BARE]),
    "bias and clip": (lambda e, x: e("r", op.clip(e.conv_bias("c", x), -0.5, 0.5)), [BIAS]),
    "one number": (lambda e, x: e("b", op.add(e.conv("c", x), HALF)), [BIAS]),
    "residual": (
        with_stem(lambda e, x, y: e("s", op.add(e.conv("c", x), y))), [STEM, (False, True)],
    ),
    "bias, residual and relu": (
        with_stem(lambda e, x, y: e("r", op.nn.relu(e("s", op.add(e.conv_bias("c", x), y))))),
        [STEM, BOTH],
    ),
    "residual first": (
        with_stem(lambda e, x, y: e("s", op.add(y, e.conv_bias("c", x)))), [STEM, BOTH],
    ),
    "dense": (
        lambda e, x: e("r", op.nn.relu(e("b", op.add(
            e.dense("c", e("m", op.mean(x, [2, 3])), 5), e.constant(5),
        )))),
        [BIAS],
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", MODELS)
def test_epilogue_chains__integer_float_and_eager_kernels_take_the_same(case):
    body, expected = MODELS[case]

    def body_and_end(emit, x):
        """Another product, since what a model returns is dequantized before it is bounded."""
        y = body(emit, x)
        return emit.conv("end", y) if y.ty.ndim == 4 else emit.dense("end", y, 4)

    mod, expected = build_model(body_and_end, MAP), [*expected, BARE]
    assert take_float(mod) == (expected, 0)
    assert take_eager(mod) == (expected, 0)
    assert take_integer(mod) == (expected, 0)


def test_epilogue_chains__a_value_that_others_read_ends_them():
    def body(emit, x):
        biased = emit.conv_bias("c", x)
        return relax.Tuple([biased, emit("r", op.nn.relu(biased))])

    mod = build_model(body, MAP)
    assert take_float(mod) == take_eager(mod) == ([BIAS], 1)
    assert take_integer(mod)[0] == [BIAS]


def sums_model(*readers) -> tvm.IRModule:
    """int32 sums (2, 4) of a dense layer of int8 data, and what reads them in turn."""
    scale, zero = relax.const(np.float32([0.5])), relax.const(np.int32([0]))
    weight = relax.const(np.arange(12, dtype="int8").reshape(4, 3))

    def body(emit, x):
        y = emit("sums", qnn.dense(x, weight, zero, zero, scale, scale))
        for i, reader in enumerate(readers):
            y = emit(f"reader{i}", reader(y))
        return y

    return build_model(body, (2, 3), dtype="int8")


def follow(mod: tvm.IRModule, channels: int = 4, **options):
    context = make_context(mod)
    return follow_product(context, context.graph.vars["sums"], channels, **options)


def requantize(y: relax.Expr) -> relax.Expr:
    scale, zero = relax.const(np.float32([0.5])), relax.const(np.int32([0]))
    return qnn.requantize(y, scale, zero, relax.const(np.float32([64.0])), zero, out_dtype="int8")


def dequantize(y: relax.Expr) -> relax.Expr:
    scale, zero = relax.const(np.float32([0.5])), relax.const(np.int32([0]))
    return qnn.dequantize(y, scale, zero)


@pytest.mark.parametrize("bounds", [(0, 2**31 - 1), (-40, 60)])
@pytest.mark.parametrize("readers", [(), (dequantize,), (requantize,)])
def test_epilogue__bounds_of_sums(bounds, readers):
    mod = sums_model(lambda y: op.clip(y, *bounds), *readers)
    x = np.random.default_rng(0).integers(-9, 9, (2, 3)).astype("int8")
    assert rq.verify(mod, [x]).is_equal


def test_follow_product__bounds_are_those_of_all_clips_and_of_the_dtype():
    chain = follow(sums_model(requantize, lambda y: op.clip(y, -5, 300)))
    assert (chain.epilogue.low, chain.epilogue.high) == (-5, 127)
    assert chain.epilogue.is_small


@pytest.mark.parametrize(
    ("readers", "length"),
    [
        ([lambda y: op.add(y, relax.const(np.ones((1, 4), "int32")))], 2),
        # A sum of more dimensions is no result of the kernel: its buffer has two.
        ([lambda y: op.add(y, relax.const(np.ones((1, 1, 4), "int32")))], 1),
        ([lambda y: op.add(y, relax.const(np.ones((2, 1), "int32")))], 1),
        ([lambda y: op.clip(y, 0, 9)], 2),
        ([lambda y: op.clip(y, 0, 9), dequantize], 3),
        ([lambda y: op.clip(y, 0, 9), requantize], 2),
        ([lambda y: op.clip(y, 0, 9), lambda y: op.add(y, relax.const(np.int32(1)))], 2),
        ([dequantize, lambda y: op.clip(y, 0, 9)], 2),
        ([requantize, lambda y: op.add(y, relax.const(np.ones(4, "int8")))], 2),
        ([requantize, requantize], 2),
        ([requantize, lambda y: op.clip(y, 0, 9), lambda y: op.clip(y, 1, 3)], 3),
    ],
)
def test_follow_product__takes_what_its_epilogue_computes(readers, length):
    assert len(follow(sums_model(*readers)).vars) == length


def test_follow_product__products_of_two_values_have_no_bias():
    mod = sums_model(lambda y: op.add(y, relax.const(np.int32(1))), requantize)
    assert len(follow(mod).vars) == 3
    assert len(follow(mod, channels=1, takes=UNBIASED_TAKES).vars) == 1
