"""What LLVM makes of the kernels, read from their assembly, for CPUs that need not be here.

For every target and layer: accesses to the stack, moves between registers and loads, per product
instruction, in the innermost loops. The sums of a tile are in registers only as long as LLVM finds
it so; nothing but these counts shows on every machine that it does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from tvm.target import Target
from tvm.tirx import PrimFunc

from relayquant.analysis.speed.peak import build_peak, choose_peak_isa, count_sums
from relayquant.codegen.kernels.attention.masked import (
    MaskedAttention,
    make_masked_attention,
)
from relayquant.codegen.kernels.floating.bf16 import make_bf16_conv2d, read_bf16_conv2d
from relayquant.codegen.kernels.floating.convolution.direct import make_conv2d
from relayquant.codegen.kernels.floating.convolution.plan import FloatConv2d
from relayquant.codegen.kernels.floating.convolution.winograd import make_winograd
from relayquant.codegen.kernels.floating.gathered import (
    MOST_VECTORS,
    GatheredProduct,
    make_product,
)
from relayquant.codegen.kernels.floating.planar import PlanarProduct, make_planar
from relayquant.codegen.kernels.floating.row_norm import RowNorm, make_row_norm
from relayquant.codegen.kernels.floating.softmax import Softmax, make_softmax
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, choose_float_isa
from relayquant.codegen.kernels.grouped.plan import GroupedDense
from relayquant.codegen.kernels.grouped.product import build_grouped_dense
from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d
from relayquant.codegen.kernels.integer.convolution.winograd import build_winograd
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope
from relayquant.codegen.kernels.integer.pool import MaxPool2d, PoolWindow, build_max_pool2d
from relayquant.codegen.kernels.integer.specs import Conv2d, Dense
from relayquant.codegen.kernels.isa.arm import NEON_BYTES, NEON_PAIRS
from relayquant.codegen.kernels.isa.arm_bf16 import BFMMLA
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_bf16, select_isa
from relayquant.codegen.kernels.isa.target import Architecture, find_architecture, resolve_target

pytestmark = pytest.mark.optimized


@dataclass(frozen=True)
class Syntax:
    """How the assembly of an architecture is read, one pattern for a kind of line."""

    label: re.Pattern[str]
    jump: re.Pattern[str]  #: group 1: where to
    product: re.Pattern[str]  #: multiplies and adds activations and weights
    stack: re.Pattern[str]  #: a vector goes to the stack or comes from it
    move: re.Pattern[str]  #: from vector register to vector register
    load: re.Pattern[str]  #: a vector comes from memory, alone or as an operand


@dataclass(frozen=True)
class Bound:
    """The most there may be of each for one product instruction."""

    stack: float
    moves: float
    loads: float


SYNTAX = {
    Architecture.X86: Syntax(
        label=re.compile(r"(\.L\w+):"),
        jump=re.compile(r"\s+j\w+\s+(\.L\w+)"),
        product=re.compile(r"\s+(?:\{vex\}\s+)?v?(?:pdpbusd|pdpwssd|pmaddwd|pmaddubsw)\s"),
        # Nothing has a frame pointer: %rbp is a register like others.
        stack=re.compile(r"\s+(?!prefetch).*\(%rsp\b.*%[xyz]mm|\s+.*%[xyz]mm\d+, .*\(%rsp\b"),
        move=re.compile(r"\s+v?mov(?:ap[sd]|up[sd]|dq[au]\d*)\s+%([xyz])mm\d+, %\1mm\d+\s*$"),
        load=re.compile(
            r"\s+(?!prefetch)[^#]*\(%r(?!sp\b)\w+[^)]*\)(?:\{\w+\})?, .*%[xyz]mm\d+\s*$"
        ),
    ),
    Architecture.AARCH64: Syntax(
        label=re.compile(r"(\.L\w+):"),
        jump=re.compile(r"\s+(?:b(?:\.\w+)?|cbn?z|tbn?z)\s.*?(\.L\w+)\s*$"),
        product=re.compile(r"\s+(?:smmla|sdot|smlal2?|smull2?)\s"),
        stack=re.compile(r"\s+(?:ldu?r|stu?r|ldp|stp)\s+[qd]\d+.*\[sp\b"),
        move=re.compile(r"\s+f?mov\s+v\d+\.\w+, v\d+\.\w+\s*$"),
        load=re.compile(r"\s+(?:ldu?r|ldp|ld1r?)\s+\{?\s*[qdv]\d+(?!.*\[sp\b)"),
    ),
}

#: name -> target. A CPU is represented by those with the same instructions and another timing.
TARGETS: dict[str, dict[str, str]] = {
    mcpu: {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}
    for mcpu in (
        "x86-64",
        "x86-64-v2",
        "x86-64-v3",
        "x86-64-v4",
        "haswell",
        "alderlake",
        "arrowlake",
        "znver1",
        "znver2",
        "znver3",
        "znver4",
        "znver5",
        "skylake-avx512",
        "cascadelake",
        "cooperlake",
        "icelake-server",
        "sapphirerapids",
        "graniterapids",
    )
}
ARM_TARGETS: dict[str, dict[str, str]] = {
    mcpu: {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu}
    for mcpu in (
        "cortex-a53",
        "cortex-a72",
        "cortex-a76",
        "cortex-a510",
        "cortex-a710",
        "cortex-x2",
        "neoverse-n1",
        "neoverse-n2",
        "neoverse-v1",
        "neoverse-v2",
        "apple-m1",
    )
}

SMALL, SAME = Epilogue(is_small=True), (1, 1, 1, 1)
ADDED = Epilogue(residual=Residual("uint8", 3, 0.5), is_small=True)
BENT = Epilogue(slope=Slope(-100, None, 1.1, rounds=True), is_small=True)
LAYERS: dict[str, Conv2d] = {
    "3x3": Conv2d(1, 14, 14, 256, 256, (3, 3), padding=SAME, epilogue=SMALL),
    "1x1": Conv2d(1, 14, 14, 384, 64, (1, 1), epilogue=SMALL),
    "1x1, added": Conv2d(1, 56, 56, 64, 256, (1, 1), epilogue=ADDED),
    "1x1, slope": Conv2d(1, 56, 56, 64, 256, (1, 1), epilogue=BENT),
    "1x1, short": Conv2d(1, 112, 112, 16, 96, (1, 1), epilogue=SMALL),
    "first": Conv2d(1, 224, 224, 3, 64, (7, 7), (2, 2), (3, 3, 3, 3), epilogue=SMALL),
    "rows": Dense(128, 768, 3072, epilogue=SMALL).as_conv2d(),
    "one row": Dense(1, 2048, 1000, epilogue=SMALL).as_conv2d(),
    "depthwise": Conv2d(1, 14, 14, 384, 384, (3, 3), padding=SAME, groups=384, epilogue=SMALL),
}

#: in blocks where there are 32 registers, and like "depthwise" elsewhere
BLOCK_LAYER = Conv2d(1, 14, 14, 64, 64, (3, 3), (2, 2), SAME, groups=64, epilogue=SMALL)
#: the same, of two groups of output rows
SPLIT_LAYER = Conv2d(1, 16, 14, 32, 32, (3, 3), (2, 2), SAME, groups=32, epilogue=SMALL)
#: of an odd number of vectors of channels
ODD_LAYER = Conv2d(1, 56, 56, 24, 144, (1, 1), epilogue=SMALL)
#: of channels that leave half a vector empty: two pixels share each
HALVED_LAYERS = {
    "1x1, halved": Conv2d(1, 56, 56, 96, 24, (1, 1), epilogue=SMALL),
    "1x1, halved, added": Conv2d(1, 56, 56, 144, 24, (1, 1), epilogue=ADDED),
    "3x3, halved": Conv2d(1, 28, 28, 64, 24, (3, 3), padding=SAME, epilogue=SMALL),
}
BLOCK_CPUS = ("znver4", "znver5", "sapphirerapids", "cascadelake", "skylake-avx512")

#: those that differ most there: a map of few pixels, few channels, many of both
ARM_LAYERS = ("3x3", "1x1", "rows")
#: which have no product of bytes: sums of a word or of a row, and of constant weights
WORD_CPUS = ("cortex-a53", "cortex-a72")
WORD_ISAS = (NEON_BYTES, NEON_PAIRS)

#: name of the instruction set -> bound of a layer that is not in `EXCEPTIONS`.
BOUNDS = {
    "vnni512": Bound(stack=0.0, moves=0.05, loads=0.65),
    "vnni256": Bound(stack=0.05, moves=0.05, loads=0.75),
    "avx512bw": Bound(stack=0.05, moves=0.05, loads=0.65),
    "avx2": Bound(stack=0.05, moves=0.05, loads=0.75),
    "avx512bw 7 bits": Bound(stack=0.05, moves=0.05, loads=0.35),
    "avx2 7 bits": Bound(stack=0.05, moves=0.05, loads=0.4),
    # The product overwrites one of its operands, and no load repeats a word in all lanes.
    "sse2": Bound(stack=0.05, moves=0.4, loads=0.75),
    "smmla": Bound(stack=0.0, moves=0.0, loads=0.35),
    "sdot": Bound(stack=0.0, moves=0.0, loads=0.2),
    "neon": Bound(stack=0.0, moves=0.0, loads=0.1),
    "neon bytes": Bound(stack=0.0, moves=0.0, loads=0.2),
    "neon pairs": Bound(stack=0.0, moves=0.0, loads=0.2),
}
#: Every product of "one row" has weights of its own. Depthwise products have an operand made of
#: four rows, and short reductions are unrolled together with the rest of their tile.
EXCEPTIONS = {
    # Tiles of 8 results, of which a core with two loads for each product loses nothing.
    ("znver4", "1x1, added"): Bound(0.0, 0.05, 0.75),
    ("znver4", "1x1, slope"): Bound(0.0, 0.05, 0.75),
    ("znver4", "1x1, short"): Bound(0.0, 0.25, 0.9),
    ("znver4", "first"): Bound(0.0, 0.05, 0.75),
    # Sums are kept while the next are computed. Moves take no time of Zen 5's units.
    ("znver5", "1x1, short"): Bound(0.0, 0.5, 0.8),
    ("znver5", "1x1, added"): Bound(0.05, 0.1, 0.7),
    ("znver5", "1x1, slope"): Bound(0.07, 0.1, 0.7),
    # Three vectors of weights, and two words for three products.
    ("znver5", "1x1, halved"): Bound(0.0, 0.0, 0.8),
    ("znver5", "1x1, halved, added"): Bound(0.0, 0.0, 0.8),
    ("znver5", "3x3, halved"): Bound(0.0, 0.0, 0.85),
    ("vnni512", "1x1, short"): Bound(0.0, 0.25, 0.85),
    ("vnni512", "1x1, odd"): Bound(0.0, 0.2, 0.7),
    ("vnni512", "one row"): Bound(0.0, 0.05, 1.3),
    # Weights are loaded for each column. Words move along, and sums start as copies of the bias.
    ("vnni512", "depthwise"): Bound(0.0, 0.67, 1.2),
    ("vnni512", "depthwise/2"): Bound(0.0, 0.5, 1.5),
    ("vnni512", "depthwise/2, split"): Bound(0.0, 0.5, 1.85),
    ("vnni256", "1x1, short"): Bound(0.05, 0.25, 0.75),
    ("vnni256", "one row"): Bound(0.05, 0.05, 1.55),
    # Shared by threads, which leaves it to LLVM to keep two more values.
    ("vnni256", "depthwise"): Bound(0.75, 0.45, 0.8),
    ("avx512bw", "one row"): Bound(0.05, 0.05, 1.3),
    ("avx512bw", "depthwise"): Bound(0.05, 0.1, 0.4),
    ("avx512bw", "depthwise/2"): Bound(0.0, 0.05, 1.25),
    ("avx512bw", "depthwise/2, split"): Bound(0.0, 0.05, 1.45),
    ("avx2", "one row"): Bound(0.05, 0.05, 1.55),
    ("avx2", "depthwise"): Bound(1.3, 0.15, 0.55),
    # Two instructions that count as products; the vector of ones takes a register.
    ("avx2 7 bits", "1x1, short"): Bound(0.25, 0.05, 0.4),
    ("avx2 7 bits", "first"): Bound(0.25, 0.05, 0.4),
    ("avx2 7 bits", "one row"): Bound(0.05, 0.05, 0.8),
    ("avx2 7 bits", "depthwise"): Bound(0.6, 0.1, 0.45),
    ("avx512bw 7 bits", "one row"): Bound(0.05, 0.05, 0.65),
    ("avx512bw 7 bits", "depthwise"): Bound(0.05, 0.1, 0.3),
    ("neon", "depthwise"): Bound(0.0, 0.15, 0.2),
    ("neon", "depthwise/2"): Bound(0.0, 0.2, 0.45),
    ("sse2", "1x1, short"): Bound(0.4, 0.4, 0.9),
    ("sse2", "one row"): Bound(0.05, 0.05, 1.55),
    ("sse2", "depthwise"): Bound(1.1, 1.5, 0.55),
}
#: Of products of transformed activations and weights: tiles of few sums, as the reduction is short.
WINOGRAD_BOUNDS = {
    "vnni512": Bound(stack=0.0, moves=0.0, loads=0.65),
    "vnni256": Bound(stack=0.0, moves=0.0, loads=1.0),
    "avx512bw": Bound(stack=0.0, moves=0.0, loads=0.65),
    "avx2": Bound(stack=0.0, moves=0.0, loads=0.75),
    "sse2": Bound(stack=0.0, moves=0.4, loads=0.75),
}
#: Stack accesses of a transform of 36 vectors, by the number of registers.
WINOGRAD_STACK = {32: 20, 16: 60}
#: CPU -> bound of products with grouped weights. Of x86 every product reads a word of a row; where
#: the instruction cannot repeat it in all lanes, by a load of its own.
GROUPED_BOUNDS = {
    # Two panels share the loads of a row. Where the sum of a group begins is copied for the second.
    "znver5": Bound(stack=0.0, moves=1 / 16, loads=0.8),
    # A single row meets four panels, for which LLVM moves three sums of a group.
    "znver4": Bound(stack=0.0, moves=0.05, loads=1.3),
    "cascadelake": Bound(stack=0.0, moves=0.05, loads=1.3),
    "alderlake": Bound(stack=0.0, moves=0.0, loads=1.55),
    "skylake-avx512": Bound(stack=0.0, moves=0.0, loads=1.2),
    "haswell": Bound(stack=0.05, moves=0.05, loads=1.4),
    "x86-64": Bound(stack=0.0, moves=0.5, loads=1.3),
    "neoverse-n1": Bound(stack=0.0, moves=0.1, loads=0.5),
    "neoverse-v2": Bound(stack=0.0, moves=0.1, loads=0.5),
    "cortex-a53": Bound(stack=0.0, moves=0.0, loads=0.45),
    "cortex-a72": Bound(stack=0.0, moves=0.0, loads=0.45),
}
#: Multiplies and adds floats.
FLOAT_PRODUCT = re.compile(r"\s+(?:vfmadd\d+ps|fmla)\s")
FLOAT_ADDED = FloatEpilogue(bias=True, residual=True, low=0.0)
FLOAT_LAYERS = {
    "1x1, added": FloatConv2d(1, 56, 56, 64, 256, (1, 1), epilogue=FLOAT_ADDED),
    "3x3": FloatConv2d(1, 14, 14, 256, 256, (3, 3), padding=SAME, epilogue=FLOAT_ADDED),
    # Its rows meet in one set of the cache.
    "3x3/2": FloatConv2d(1, 84, 84, 512, 512, (3, 3), (2, 2), SAME, epilogue=FLOAT_ADDED),
}
#: CPU -> bound of float products: two vectors of weights, and a word for each row of the tile.
FLOAT_BOUNDS = {
    "znver4": Bound(stack=0.0, moves=0.0, loads=0.58),
    "sapphirerapids": Bound(stack=0.0, moves=0.0, loads=0.62),  # tiles of 9 rows
    "haswell": Bound(stack=0.0, moves=0.0, loads=0.67),
    "neoverse-n1": Bound(stack=0.0, moves=0.0, loads=0.6),
    "cortex-a53": Bound(stack=0.0, moves=0.0, loads=0.6),
}
NORMS = {
    "layer": RowNorm(
        (None,), 768, 1e-5, is_centred=True, bias=True, keeps_result=False, rows=(None,)
    ),
    "rms": RowNorm((None,), 768, 1e-5, rows=(None,)),
}
#: Those that round a vector to integers by one instruction; SSE2 takes it apart for a call.
NORM_CPUS = ("znver4", "haswell", "cortex-a53", "cortex-a76", "neoverse-v2")
#: Arithmetic of float32, by vectors and by single numbers.
FLOAT_VECTOR = re.compile(r"\s+(?:v(?:add|sub|mul|div)ps|f(?:add|sub|mul|div)\s+v\d+\.4s)\b")
FLOAT_SCALAR = re.compile(r"\s+(?:v(?:add|sub|mul|div)ss|f(?:add|sub|mul|div)\s+s\d+)\b")
#: instruction set -> a CPU that has it and no better one.
REPRESENTATIVE = {select_isa(Target(config)).name: name for name, config in TARGETS.items()}


def find_innermost_loops(text: str, syntax: Syntax) -> list[list[str]]:
    """Lines from a label to a jump back to it, without a smaller such range inside.

    A range that other lines enter below its first is a part of a larger loop.
    """
    lines, labels, jumps, loops = text.splitlines(), {}, [], []
    for number, line in enumerate(lines):
        if match := syntax.label.match(line):
            labels[match.group(1)] = number
        elif match := syntax.jump.match(line):
            jumps.append((number, match.group(1)))
            if match.group(1) in labels:
                loops.append((labels[match.group(1)], number))
    entries = [(number, labels[label]) for number, label in jumps if label in labels]
    loops = [
        (first, last)
        for first, last in loops
        if not any(first < to <= last and not first <= at <= last for at, to in entries)
    ]
    inner = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last for a, b in loops if (a, b) != (first, last))
    ]
    return [lines[first : last + 1] for first, last in inner]


def count_per_product(text: str, syntax: Syntax) -> Bound:
    """Of all innermost loops with products; there is at least one."""
    loops = find_innermost_loops(text, syntax)
    lines = [line for lines in loops if any(map(syntax.product.match, lines)) for line in lines]
    products = sum(bool(syntax.product.match(line)) for line in lines)
    assert products, "no innermost loop with products"

    def per_product(pattern: re.Pattern[str]) -> float:
        return sum(bool(pattern.match(line)) for line in lines) / products

    return Bound(per_product(syntax.stack), per_product(syntax.move), per_product(syntax.load))


def compile_kernel(func: PrimFunc, target: Target) -> str:
    module = tvm.IRModule({str(func.attrs["global_symbol"]): func})
    return tvm.compile(module, target=target).mod.inspect_source("asm")


LOOP = """
.L1:
	vmovups	(%rdi), %zmm0
.L2:
	vpdpbusd	(%rdi){1to16}, %zmm1, %zmm2
	vpdpbusd	%zmm0, %zmm1, %zmm2
	vmovdqu64	%zmm2, 64(%rsp)
	vpaddd	64(%rsp), %zmm2, %zmm2
	vmovdqa64	%zmm2, %zmm3
	prefetcht0	(%rdi)
	vmovups	%zmm2, (%rdi)
	jne	.L2
	jne	.L1
"""


def test_count_per_product__reads_the_innermost_loop():
    assert count_per_product(LOOP, SYNTAX[Architecture.X86]) == Bound(1.0, 0.5, 0.5)


def as_int8(spec: Conv2d) -> Conv2d:
    """The layer with activations as the backend for Arm has them."""
    return replace(spec, in_dtype="int8", epilogue=replace(spec.epilogue, dtype="int8"))


ROWS = [
    *((name, target, layer, LAYERS[layer]) for name, target in TARGETS.items() for layer in LAYERS),
    *(
        (name, target, layer, as_int8(LAYERS[layer]))
        for name, target in ARM_TARGETS.items()
        for layer in ARM_LAYERS
    ),
    ("znver5", TARGETS["znver5"], "1x1, odd", ODD_LAYER),
    *(("znver5", TARGETS["znver5"], layer, spec) for layer, spec in HALVED_LAYERS.items()),
    *((name, TARGETS[name], "depthwise/2", BLOCK_LAYER) for name in BLOCK_CPUS),
    *((name, TARGETS[name], "depthwise/2, split", SPLIT_LAYER) for name in BLOCK_CPUS),
    *(
        (name, ARM_TARGETS[name], layer, as_int8(spec))
        for name in WORD_CPUS
        for layer, spec in (("depthwise", LAYERS["depthwise"]), ("depthwise/2", BLOCK_LAYER))
    ),
]


@pytest.mark.sample(60)
@pytest.mark.parametrize(
    ("name", "config", "layer", "spec"), ROWS, ids=[f"{row[0]}-{row[2]}" for row in ROWS]
)
def test_innermost_loops__are_products(name, config, layer, spec):
    """Products on vectors; `test_tiled` counts the instructions of products on tiles."""
    target = resolve_target(config)
    check_layer(spec, name, layer, select_vectors(target), target)


@pytest.mark.parametrize("spec", [LAYERS["1x1, short"], ODD_LAYER], ids=["even", "odd"])
def test_innermost_loops__stores_are_between_products_on_zen5(spec):
    """Before the first store of a tile and behind the last there are products, of the next tile."""
    target = resolve_target(TARGETS["znver5"])
    text = compile_kernel(build_conv2d(spec, select_isa(target), "layer"), target)
    syntax, store = SYNTAX[Architecture.X86], re.compile(r"\s+vmov\w+\s+%[xyz]mm\d+, [^%]*\(%r")
    (loop,) = (
        lines
        for lines in find_innermost_loops(text, syntax)
        if any(map(syntax.product.match, lines))
    )
    stores = [i for i, line in enumerate(loop) if store.match(line)]
    products = [i for i, line in enumerate(loop) if syntax.product.match(line)]
    assert products[0] < stores[0] < stores[-1] < products[-1]
    before = sum(stores[0] < i for i in products) / len(products)
    assert 0.25 <= before <= 0.95


@pytest.mark.parametrize("layer", HALVED_LAYERS)
def test_innermost_loops__words_of_two_pixels_are_joined_by_one_instruction(layer):
    target, syntax = resolve_target(TARGETS["znver5"]), SYNTAX[Architecture.X86]
    text = compile_kernel(build_conv2d(HALVED_LAYERS[layer], select_isa(target), "layer"), target)
    shuffle = re.compile(r"\s+v(?:insert|perm|shuf|pblend|blend|unpck|punpck|align|palign)")
    counts = []
    for lines in find_innermost_loops(text, syntax):
        counts.append(sum(bool(syntax.product.match(line)) for line in lines))
        if counts[-1]:
            shuffles = [line.split()[0] for line in lines if shuffle.match(line)]
            assert shuffles == ["vinserti64x4"] * (counts[-1] // 3)
    assert max(counts) >= 6  # a loop has at least two joined words of three products each


@pytest.mark.parametrize("name", [*TARGETS, *ARM_TARGETS])
def test_isa__pixels_share_vectors_only_where_it_was_timed(name):
    """Elsewhere there is nothing to choose from."""
    isa = select_isa(resolve_target({**TARGETS, **ARM_TARGETS}[name]))
    for each in (isa, isa.companion, isa.for_convolution("uint8"), isa.for_activations("int16")):
        is_timed = name == "znver5" and each.activation == "uint8"
        assert [form.sharing for form in each.forms] == [1, 2][: 1 + is_timed]


@pytest.mark.sample(4)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ["haswell", "znver2", "skylake-avx512"])
def test_innermost_loops__of_small_weights(name, layer):
    target, spec = resolve_target(TARGETS[name]), LAYERS[layer]
    isa = select_isa(target).for_weights(np.zeros(spec.weight_shape, "int8"))
    assert isa.name.endswith("7 bits")
    check_layer(spec, name, layer, isa, target)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layer", ARM_LAYERS)
@pytest.mark.parametrize("isa", WORD_ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", WORD_CPUS)
def test_innermost_loops__of_constant_weights(name, isa, layer):
    check_layer(as_int8(LAYERS[layer]), name, layer, isa, resolve_target(ARM_TARGETS[name]))


def select_vectors(target: Target) -> Isa:
    """The instruction set for products that are not on tiles."""
    isa = select_isa(target)
    return isa if isa.unit is None else isa.companion


def check_layer(spec: Conv2d, name: str, layer: str, isa: Isa, target: Target) -> None:
    """The counts of `spec`, row `layer` of the table, for CPU `name` are within the bounds."""
    exception = EXCEPTIONS.get((name, layer), EXCEPTIONS.get((isa.name, layer)))
    bound = exception or BOUNDS[isa.name]
    syntax = SYNTAX[find_architecture(target)]
    found = count_per_product(compile_kernel(build_conv2d(spec, isa, "layer"), target), syntax)
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= bound.loads


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TARGETS)
def test_innermost_loops__of_winograd(name):
    """Sums stay in registers, and of the transforms what can."""
    target = resolve_target(TARGETS[name])
    isa, syntax = select_vectors(target), SYNTAX[find_architecture(target)]
    text = compile_kernel(build_winograd(LAYERS["3x3"], isa, "layer"), target)
    found, bound = count_per_product(text, syntax), WINOGRAD_BOUNDS[isa.name]
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= bound.loads
    for loop in find_innermost_loops(text, syntax):
        assert sum(bool(syntax.stack.match(line)) for line in loop) <= WINOGRAD_STACK[isa.registers]


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED_BOUNDS)
def test_innermost_loops__of_grouped_weights(name):
    """Codes of 4 bits in groups of 32, unpacked in registers: tiles of all heights."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    spec, bound = GroupedDense((None,), 1024, 1024, 4, 32), GROUPED_BOUNDS[name]
    syntax = SYNTAX[find_architecture(target)]
    text = compile_kernel(build_grouped_dense(spec, select_isa(target), "grouped"), target)
    found = count_per_product(text, syntax)
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= bound.loads


@pytest.mark.slow
def test_innermost_loops__of_grouped_weights_fetch_codes_ahead():
    """A line for each that is read, of several rows; a single row, which waits for memory all the
    time, fetches the codes and scales of all its streams: four, or one far ahead.
    """
    syntax = SYNTAX[Architecture.X86]

    def count(rows: int, cpu: str = "znver4") -> list[int]:
        target = resolve_target(TARGETS[cpu])
        spec = GroupedDense((rows,), 1024, 1024, 4, 32)
        text = compile_kernel(build_grouped_dense(spec, select_isa(target), "grouped"), target)
        return [
            sum("prefetcht0" in line for line in loop)
            for loop in find_innermost_loops(text, syntax)
            if any(map(syntax.product.match, loop))
        ]

    # 12 rows and 4; 16 outputs of 32 codes of 4 bits are 4 lines
    assert count(16) == [4, 4]
    assert count(1) == [20]
    assert count(1, "znver5") == [5]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layer", FLOAT_LAYERS)
@pytest.mark.parametrize("name", FLOAT_BOUNDS)
def test_innermost_loops__of_floats(name, layer):
    """Tiles stay in registers while what they read and write next is fetched."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    syntax = replace(SYNTAX[find_architecture(target)], product=FLOAT_PRODUCT)
    func = make_conv2d(FLOAT_LAYERS[layer], choose_float_isa(target), "layer")
    text, bound = compile_kernel(func, target), FLOAT_BOUNDS[name]
    found = count_per_product(text, syntax)
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= bound.loads
    fetches = [line for line in text.splitlines() if re.match(r"\s+(?:prefetch|prfm)", line)]
    assert len(fetches) >= 14  # a line of results and of the residual for each row of 6, and more


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FLOAT_BOUNDS)
def test_innermost_loops__of_masked_attention(name):
    """Both products are tiles like those of all float products."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    syntax = replace(SYNTAX[find_architecture(target)], product=FLOAT_PRODUCT)
    spec, isa = MaskedAttention((16,), 512, 512, 128, 128, 0.1), choose_float_isa(target)
    found = count_per_product(compile_kernel(make_masked_attention(spec, isa), target), syntax)
    bound = FLOAT_BOUNDS[name]
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= bound.loads


@pytest.mark.sample(2)
@pytest.mark.parametrize("vectors", range(1, MOST_VECTORS + 1))
@pytest.mark.parametrize("name", ["haswell", "sapphirerapids", "znver5", "neoverse-n1"])
def test_innermost_loops__of_gathered_floats(name, vectors):
    """Sums and the addresses of the rows stay in registers."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    isa, architecture = choose_float_isa(target), find_architecture(target)
    syntax = replace(SYNTAX[architecture], product=FLOAT_PRODUCT)
    func = make_product(GatheredProduct(isa.lanes, vectors), isa, "product")
    loops = find_innermost_loops(compile_kernel(func, target), syntax)

    def count(loop: list[str]) -> int:
        return sum(bool(syntax.product.match(line)) for line in loop)

    tile = max(loops, key=count)
    assert count(tile) >= 10
    assert not [line for line in tile if "(%rsp" in line or "[sp" in line]


@pytest.mark.sample(2)
@pytest.mark.parametrize("outputs", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["haswell", "sapphirerapids", "znver5", "neoverse-n1"])
def test_innermost_loops__of_planar_floats(name, outputs):
    """Sums and the addresses of the pixels stay in registers."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    isa, architecture = choose_float_isa(target), find_architecture(target)
    spec = PlanarProduct.choose(outputs, isa)
    if spec is None:
        assert 2 * outputs > isa.lanes
        return
    syntax = replace(SYNTAX[architecture], product=FLOAT_PRODUCT)
    loops = find_innermost_loops(compile_kernel(make_planar(spec, isa, "product"), target), syntax)
    tile = max(loops, key=lambda loop: sum(bool(FLOAT_PRODUCT.match(line)) for line in loop))
    assert sum(bool(FLOAT_PRODUCT.match(line)) for line in tile) >= outputs * spec.vectors
    assert not [line for line in tile if "(%rsp" in line or "[sp" in line]


@pytest.mark.parametrize("layer", FLOAT_LAYERS)
@pytest.mark.parametrize("name", ["znver4", "znver5", "cooperlake"])
def test_innermost_loops__of_bfloat16_on_x86(name, layer):
    """Sums stay in registers. A word is an operand of its products, or loaded once for all."""
    target = resolve_target(TARGETS[name])
    syntax = replace(SYNTAX[Architecture.X86], product=re.compile(r"\s+vdpbf16ps\s"))
    spec = read_bf16_conv2d(FLOAT_LAYERS[layer])
    text = compile_kernel(make_bf16_conv2d(spec, select_bf16(target)), target)
    found = count_per_product(text, syntax)
    assert (found.stack, found.moves) == (0, 0)
    assert found.loads <= 0.65


@pytest.mark.parametrize("layer", ["1x1, added", "3x3"])
@pytest.mark.parametrize("name", ["neoverse-n2", "neoverse-v1", "apple-m2"])
def test_innermost_loops__of_bfloat16_on_arm(name, layer):
    """As many instructions are products as of smmla."""
    target = resolve_target({**ARM_TARGETS["neoverse-n2"], "mcpu": name})
    syntax = replace(SYNTAX[Architecture.AARCH64], product=re.compile(r"\s+bfmmla\s"))
    spec = read_bf16_conv2d(FLOAT_LAYERS[layer])
    text = compile_kernel(make_bf16_conv2d(spec, BFMMLA), target)
    found = count_per_product(text, syntax)
    assert (found.stack, found.moves) == (0, 0)
    assert found.loads <= 0.36
    (loop,) = (
        [line for line in loop if re.match(r"\t[a-z]", line)]
        for loop in find_innermost_loops(text, syntax)
        if any(map(syntax.product.match, loop))
    )
    assert sum(bool(syntax.product.match(line)) for line in loop) >= 0.63 * len(loop)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FLOAT_BOUNDS)
def test_innermost_loops__of_float_winograd(name):
    """Sums stay in registers, and of the transforms, which multiply floats too, what can."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    isa = choose_float_isa(target)
    syntax = replace(SYNTAX[find_architecture(target)], product=FLOAT_PRODUCT)
    spec = FloatConv2d(1, 56, 56, 64, 64, (3, 3), padding=SAME, epilogue=FLOAT_ADDED)
    text = compile_kernel(make_winograd(spec, isa, "layer"), target)
    products = []
    for loop in find_innermost_loops(text, syntax):
        if any(re.match(r"\s+(?:prefetch|prfm)", line) for line in loop):
            products += loop
        stack = sum(bool(syntax.stack.match(line)) for line in loop)
        assert stack <= WINOGRAD_STACK[32 if isa.lanes == 16 else 16]
    found, bound = count_per_product("\n".join(products), syntax), FLOAT_BOUNDS[name]
    assert found.stack <= bound.stack
    assert found.moves <= bound.moves
    assert found.loads <= 0.75  # tiles of as many rows as share a chunk's evenly


@pytest.mark.parametrize("name", ["znver4", "sapphirerapids", "haswell"])
def test_innermost_loops__of_padded_pools(name):
    """The places of a window's rows are computed once for a row of results."""
    target = resolve_target(TARGETS[name])
    window = PoolWindow(1, 112, 112, 64, (3, 3), (2, 2), (1, 1, 1, 1))
    text = compile_kernel(build_max_pool2d(MaxPool2d(window)), target)
    loop = max(find_innermost_loops(text, SYNTAX[Architecture.X86]), key=len)
    maxima = sum("pmaxub" in line for line in loop)
    assert maxima >= 8
    assert sum(line.startswith("\t") for line in loop) <= 4.5 * maxima


@pytest.mark.sample(4)
@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("name", NORM_CPUS)
def test_innermost_loops__of_row_norms(name, form):
    """Sums, scales and integers of a row are computed by vectors that stay in registers."""
    target = resolve_target({**TARGETS, **ARM_TARGETS}[name])
    syntax = SYNTAX[find_architecture(target)]
    text = compile_kernel(make_row_norm(NORMS[form]), target)
    loops = [
        lines for lines in find_innermost_loops(text, syntax) if any(map(FLOAT_VECTOR.match, lines))
    ]
    # the whole vectors of the squares, of the largest element and of the integers, at least
    assert len(loops) >= 3
    lines = [line for loop in loops for line in loop]
    assert not any(map(FLOAT_SCALAR.match, lines))
    assert not any(map(syntax.stack.match, lines))


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", ["znver5", "sapphirerapids", "cascadelake", "haswell"])
def test_softmax__passes_on_whole_vectors(name, width):
    """From powers to their sum no vector is taken apart, which takes 16 instructions or more.

    LLVM does so for rows of 64 and 128 on vectors of 512 bits. The other cases are controls.
    """
    target = resolve_target(TARGETS[name])
    func = make_softmax(Softmax((96, width), 1), isa_lanes=select_isa(target).lanes)
    single = re.compile(r"\s+v?(?:pextr|pinsr|insertps|extractps|movq?\s+%xmm\d+, %r)")
    found = sum(bool(single.match(line)) for line in compile_kernel(func, target).splitlines())
    assert found <= 5


@pytest.mark.parametrize("name", REPRESENTATIVE.values(), ids=REPRESENTATIVE)
def test_peak__is_products_in_registers(name):
    target = resolve_target(TARGETS[name])
    isa = choose_peak_isa(target)
    sums, syntax = count_sums(isa), SYNTAX[find_architecture(target)]
    text = compile_kernel(build_peak(isa, sums), target)
    (loop,) = (
        lines
        for lines in find_innermost_loops(text, syntax)
        if any(map(syntax.product.match, lines))
    )
    products = sum(bool(syntax.product.match(line)) for line in loop)
    assert products % sums == 0  # none was taken out of the loop
    found = count_per_product(text, syntax)
    assert found.stack == 0
    assert found.loads <= 1 / sums
    vectors = sum("mm" in line for line in loop)
    assert vectors <= (1 + (not isa.is_fused) + found.loads + found.moves) * products


@pytest.mark.parametrize("name", WORD_CPUS)
def test_peak__of_bytes_is_products_in_registers(name):
    """Two accumulators, of 4 channels each: 16 products of a channel, 8 by one instruction."""
    target = resolve_target(ARM_TARGETS[name])
    isa, syntax = choose_peak_isa(target), SYNTAX[Architecture.AARCH64]
    assert isa is NEON_PAIRS
    text = compile_kernel(build_peak(isa, count_sums(isa)), target)
    loops = find_innermost_loops(text, syntax)
    (loop,) = (lines for lines in loops if any(map(syntax.product.match, lines)))
    assert sum(bool(syntax.product.match(line)) for line in loop) == 2 * 4 * 16 // 8
    assert sum(bool(re.match(r"\s+sadalp\s", line)) for line in loop) == 2 * 4
    assert count_per_product(text, syntax).stack == 0
