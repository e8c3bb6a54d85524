"""Calls of every operator that a row takes, with each of its attributes away from its default.

The operators are read from the rows and their attributes from TVM, so that a new row is covered by
the tests of every stage that draw from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import CallPattern

from relayquant.base.qtypes import Role
from relayquant.flow.testing.draw import DRAWN, ModelBuilder, shape_of
from relayquant.ir.ops import BUILTIN_OPS, QuantOp
from relayquant.ir.ops.chain import ELEMENTWISE, ChainPattern
from relayquant.ir.rewrite.attributes import find_constructor, read_attributes
from relayquant.stages.preparation import prepare_module

#: attribute -> values away from its default, of all operators or of one. What is not here is drawn
#: by its type, and what has other operands too is in CALLS.
VALUES: dict[str, list[Any]] = {
    "out_dtype": ["float64", "float16"],
    "strides": [2],
    "dilation": [2],
    "padding": [1],
    "pool_size": [3],
    "axis": [1, -2],
    "relax.mean.axis": [[1], [-1, 0], None],
    "relax.max.axis": [[1], None],
    "relax.min.axis": [[0], None],
    "relax.nn.prelu.axis": [0, -2],
    "axes": [[1, 0, 2], [0, -1, 1]],
    "repeats": [[1, 3], [2, 1, 2]],
    "pad_width": [[1, 0, 0, 2]],
    "pad_mode": ["reflect", "replicate", "circular"],
    "pad_value": [0.7, -3.0],
    "mode": ["wrap", "clip", "nan"],
    "method": ["linear", "cubic"],
    "coordinate_transformation_mode": ["align_corners", "half_pixel"],
    "alpha": [0.3, 1.5, -0.4],
    "rounding_method": ["round", "ceil", "round_prefer_floor"],
    "dtype": ["float64", "float16"],
    "relax.argsort.dtype": ["int64"],
    "relax.topk.dtype": ["int64"],
    "ret_type": ["indices", "both"],
    "subscripts": ["ij,jk->ki", "ij,jk->j"],
    "relax.repeat.repeats": [3],
    "relax.repeat.axis": [1, -2, None],
    "indices_or_sections": [3, [1, 2]],
    "relax.split.axis": [0, -2],
    "relax.stack.axis": [1, -1],
    "output_size": [[3], [6]],
    "num_groups": [1, 4],
    "channel_axis": [0, 2, -2],
    "relax.nn.group_norm.axes": [[2], [2, 3], [-1, -2]],
    "relax.nn.instance_norm.axes": [[2], [2, 3], [-1, -2]],
    "relax.nn.layer_norm.axes": [[0], [-2]],
    "relax.nn.rms_norm.axes": [[0], [-2]],
    "relax.nn.attention.scale": [0.3],
    "causal_mask": ["TopLeft", "BottomRight"],
    "window_size": [2],
}


def draw_conv(make: Callable[..., relax.Expr], rank: int, weight: tuple[int, ...], **attrs):
    """A convolution of four channels."""
    sizes = (8,) * rank
    shape = (1, *sizes, 4) if attrs.get("data_layout", "").endswith("C") else (1, 4, *sizes)
    return lambda b: make(b.activation(*shape), b.constant(*weight), **attrs)


def draw_pool(make: Callable[..., relax.Expr], rank: int, **attrs: Any):
    """A pool of windows of two or more, which touch the padding."""
    return lambda b: make(b.activation(1, 4, *(7,) * rank), (2,) * rank, **attrs)


def draw_resize(shape: tuple[int, ...] = (1, 4, 6, 6), **attrs: Any):
    given = {
        "method": "nearest_neighbor",
        "coordinate_transformation_mode": "asymmetric",
        "rounding_method": "floor",
        **attrs,
    }
    return lambda b: op.image.resize2d(b.activation(*shape), (9, 4), **given)


def draw_attention_bias(b: ModelBuilder, **given: Any) -> relax.Expr:
    operands = [b.activation(1, 4, 2, 8) for _ in range(3)]
    return op.nn.attention(*operands, b.constant(1, 2, 4, 4), **given)


#: operator -> a call whose attributes are varied, where that of `check_pattern` does not do
BASES: dict[str, Callable[[ModelBuilder], relax.Expr]] = {
    "relax.nn.conv1d": draw_conv(op.nn.conv1d, 1, (5, 4, 3)),
    "relax.nn.conv2d": draw_conv(op.nn.conv2d, 2, (5, 4, 3, 3)),
    "relax.nn.conv2d_transpose": draw_conv(op.nn.conv2d_transpose, 2, (4, 5, 3, 3)),
    "relax.nn.avg_pool2d": draw_pool(op.nn.avg_pool2d, 2, strides=2, padding=1),
    "relax.nn.max_pool1d": draw_pool(op.nn.max_pool1d, 1, strides=2),
    "relax.nn.max_pool2d": draw_pool(op.nn.max_pool2d, 2, strides=2),
    "relax.nn.prelu": lambda b: op.nn.prelu(b.activation(4, 4), b.constant(4)),
    "relax.image.resize2d": draw_resize(),
    "relax.gather_elements": lambda b: op.gather_elements(
        b.activation(4, 4), relax.const(np.arange(16).reshape(4, 4) * 7 % 4, "int64")
    ),
    "relax.index_tensor": lambda b: op.index_tensor(
        b.activation(4, 4), relax.Tuple([relax.const([1, 3], "int64")])
    ),
    "relax.squeeze": lambda b: op.squeeze(b.activation(2, 1, 1, 4)),
    "relax.topk": lambda b: op.topk(b.activation(2, 6), 2, ret_type="values"),
    "relax.einsum": lambda b: op.einsum([b.activation(2, 6), b.constant(6, 3)], "ij,jk->ik"),
    "relax.flip": lambda b: op.flip(b.activation(2, 6), 0),
    "relax.repeat": lambda b: op.repeat(b.activation(2, 6), 2, 0),
    "relax.split": lambda b: op.split(b.activation(6, 6), 2, 1),
    "relax.stack": lambda b: op.stack([b.activation(2, 6), b.constant(2, 6)], 0),
    "relax.strided_slice": lambda b: op.strided_slice(b.activation(4, 6), [1], [1], [5], [2]),
    "relax.astype": lambda b: op.astype(b.activation(2, 6), "int32"),
    "relax.full": lambda b: op.full((2, 6), relax.const(1.5), "float32"),
    "relax.full_like": lambda b: op.full_like(b.activation(2, 6), relax.const(1.5)),
    "relax.ones": lambda b: op.ones((2, 6), "float32"),
    "relax.zeros": lambda b: op.zeros((2, 6), "float32"),
    "relax.nn.conv3d": draw_conv(op.nn.conv3d, 3, (5, 4, 3, 3, 3)),
    "relax.nn.conv1d_transpose": draw_conv(op.nn.conv1d_transpose, 1, (4, 5, 3)),
    "relax.nn.conv3d_transpose": draw_conv(op.nn.conv3d_transpose, 3, (4, 5, 3, 3, 3)),
    "relax.nn.max_pool3d": draw_pool(op.nn.max_pool3d, 3, strides=2),
    "relax.nn.avg_pool1d": draw_pool(op.nn.avg_pool1d, 1, strides=2, padding=1),
    "relax.nn.avg_pool3d": draw_pool(op.nn.avg_pool3d, 3, strides=2, padding=1),
    "relax.nn.adaptive_avg_pool1d": lambda b: op.nn.adaptive_avg_pool1d(b.activation(1, 4, 7), 2),
    "relax.nn.adaptive_avg_pool2d": lambda b: op.nn.adaptive_avg_pool2d(
        b.activation(1, 4, 7, 6), 2
    ),
    "relax.nn.attention": lambda b: op.nn.attention(*(b.activation(1, 4, 2, 8) for _ in range(3))),
    "relax.nn.attention_bias": draw_attention_bias,
    "relax.nn.batch_norm": lambda b: op.nn.batch_norm(
        b.activation(4, 4), *(b.constant(4) for _ in range(3)),
        relax.const(np.float32([1, 2, 3, 4])), axis=1, training=False,
    ),
    "relax.clip": lambda b: op.clip(b.activation(2, 6), -0.5, 0.5),
    "relax.where": lambda b: op.where(
        relax.const(np.eye(2, 6, dtype=bool)), b.activation(2, 6), b.constant(2, 6)
    ),
    "relax.collapse_sum_to": lambda b: op.collapse_sum_to(b.activation(2, 6), (1, 6)),
    "relax.broadcast_to": lambda b: op.broadcast_to(b.activation(2, 6), (3, 2, 6)),
    "relax.reshape": lambda b: op.reshape(b.activation(2, 6), (3, 4)),
    "relax.shape_to_tensor": lambda b: op.shape_to_tensor(relax.ShapeExpr([2, 3])),
    "relax.tensor_to_shape": lambda b: op.tensor_to_shape(relax.const(np.int64([2, 3]))),
    "relax.tril": lambda b: op.tril(b.activation(6, 6)),
    "relax.triu": lambda b: op.triu(b.activation(6, 6)),
    "relax.nn.group_norm": lambda b: op.nn.group_norm(
        b.activation(4, 4, 4, 4), b.constant(4), b.constant(4), 2, 1, [3]
    ),
    "relax.nn.instance_norm": lambda b: op.nn.instance_norm(
        b.activation(4, 4, 4, 4), b.constant(4), b.constant(4), 1, [3]
    ),
    "relax.nn.layer_norm": lambda b: op.nn.layer_norm(
        b.activation(4, 4), b.constant(4), b.constant(4), [-1]
    ),
    "relax.nn.rms_norm": lambda b: op.nn.rms_norm(b.activation(4, 4), b.constant(4), [1]),
    "relax.nn.pixel_shuffle": lambda b: op.nn.pixel_shuffle(b.activation(1, 36, 2, 3), 2),
}  # fmt: skip

#: operator -> (attributes, a call that has others than their defaults)
CALLS: dict[str, tuple[tuple[str, Callable[[ModelBuilder], relax.Expr]], ...]] = {
    "relax.nn.conv1d": (
        ("data_layout kernel_layout",
         draw_conv(op.nn.conv1d, 1, (3, 4, 5), data_layout="NWC", kernel_layout="WIO")),
        ("groups", draw_conv(op.nn.conv1d, 1, (6, 2, 3), groups=2)),
    ),
    "relax.nn.conv2d": (
        ("data_layout kernel_layout",
         draw_conv(op.nn.conv2d, 2, (3, 3, 4, 5), data_layout="NHWC", kernel_layout="HWIO")),
        ("kernel_layout",
         draw_conv(op.nn.conv2d, 2, (5, 3, 3, 4), data_layout="NHWC", kernel_layout="OHWI")),
        ("groups", draw_conv(op.nn.conv2d, 2, (6, 2, 3, 3), groups=2)),
    ),
    "relax.nn.conv2d_transpose": (
        ("output_padding", draw_conv(
            op.nn.conv2d_transpose, 2, (4, 5, 3, 3), strides=2, output_padding=1)),
        ("groups", draw_conv(op.nn.conv2d_transpose, 2, (4, 3, 3, 3), groups=2)),
    ),
    "relax.nn.avg_pool2d": (
        ("layout", lambda b: op.nn.avg_pool2d(b.activation(1, 7, 7, 4), 2, layout="NHWC")),
    ),
    "relax.nn.max_pool1d": (
        ("layout", lambda b: op.nn.max_pool1d(b.activation(1, 7, 4), 2, layout="NWC")),
    ),
    "relax.nn.max_pool2d": (
        ("layout", lambda b: op.nn.max_pool2d(b.activation(1, 7, 7, 4), 2, layout="NHWC")),
    ),
    "relax.image.resize2d": (
        ("layout", draw_resize((1, 6, 6, 4), layout="NHWC")),
        ("roi extrapolation_value", draw_resize(
            coordinate_transformation_mode="tf_crop_and_resize", roi=(0.2, 0.1, 1.2, 1.4),
            extrapolation_value=0.7)),
    ),
    "relax.gather_nd": (
        ("batch_dims", lambda b: op.gather_nd(
            b.activation(4, 6, 3), relax.const(np.array([[2], [5], [0], [2]]), "int64"),
            batch_dims=1)),
    ),
    "relax.nn.attention_bias": tuple(
        (next(iter(given)), partial(draw_attention_bias, **given))
        for given in ({"scale": 0.3}, {"causal_mask": "TopLeft"}, {"window_size": 2})
    ),
}  # fmt: skip


def draw_more_calls() -> Iterator[tuple[str, tuple[tuple[str, Any], ...]]]:
    """As CALLS, of operators on volumes and rows: those whose layouts have other letters."""
    for name, letters, kernel in (
        ("conv3d", "DHW", (5, 4)), ("conv1d_transpose", "W", (4, 5)),
        ("conv3d_transpose", "DHW", (4, 5)),
    ):  # fmt: skip
        make, rank, is_transposed = getattr(op.nn, name), len(letters), kernel[0] == 4
        spatial, first = (3,) * rank, ("IO" if is_transposed else "OI") + letters
        moved = (*spatial, *kernel) if is_transposed else (kernel[0], *spatial, kernel[1])
        layout = f"{letters}IO" if is_transposed else f"O{letters}I"
        grouped = (4, 3, *spatial) if is_transposed else (6, 2, *spatial)
        wider = (
            "output_padding",
            draw_conv(make, rank, (*kernel, *spatial), strides=2, output_padding=1),
        )
        yield f"relax.nn.{name}", (
            ("data_layout kernel_layout", draw_conv(
                make, rank, moved, data_layout=f"N{letters}C", kernel_layout=layout)),
            ("groups", draw_conv(make, rank, grouped, groups=2, kernel_layout=first)),
            ("out_layout", draw_conv(make, rank, (*kernel, *spatial), out_layout=f"N{letters}C")),
            *([wider] * is_transposed),
        )  # fmt: skip
    for name, letters in (
        ("max_pool3d", "DHW"), ("avg_pool1d", "W"), ("avg_pool3d", "DHW"),
        ("adaptive_avg_pool1d", "W"), ("adaptive_avg_pool2d", "HW"),
    ):  # fmt: skip
        make, sizes = getattr(op.nn, name), (5, 6, 7)[: len(letters)]

        def draw(b: ModelBuilder, shape: Any, make: Any = make, **given: Any) -> relax.Expr:
            return make(b.activation(*shape), 2, **given)

        last = f"N{letters}C"
        yield (
            f"relax.nn.{name}",
            (
                ("layout", partial(draw, shape=(1, *sizes, 4), layout=last)),
                ("out_layout", partial(draw, shape=(1, 4, *sizes), out_layout=last)),
            ),
        )


CALLS |= dict(draw_more_calls())


def move_channels(x: relax.Expr, last: bool) -> relax.Expr:
    """N C ... -> N ... C, or back."""
    rank = x.ty.ndim
    return op.permute_dims(
        x, [0, *range(2, rank), 1] if last else [0, rank - 1, *range(1, rank - 1)]
    )


def in_out_layout(make: Callable[..., relax.Expr], layout: str, *rest: Any, **attrs: Any):
    """make(data, ..., out_layout=...), and the same with a transpose behind it."""

    def draw(b: ModelBuilder) -> tuple[relax.Expr, relax.Expr]:
        data = b.activation(1, 4, *(7,) * (len(layout) - 2))
        args = [b.constant(*arg) if isinstance(arg, tuple) else arg for arg in rest]
        usual = b.emit(make(data, *args, **attrs), "usual")
        return make(data, *args, **attrs, out_layout=layout), move_channels(usual, last=True)

    return draw


def draw_transposed_nhwc(b: ModelBuilder) -> tuple[relax.Expr, relax.Expr]:
    """A transposed convolution of NHWC data with HWIO weights, and in TVM's usual layouts."""
    data, weight = b.activation(1, 4, 4, 4), b.constant(4, 5, 3, 3)
    turned = relax.const(np.transpose(weight.value.numpy(), (2, 3, 0, 1)))
    usual = op.nn.conv2d_transpose(b.emit(move_channels(data, last=False)), weight)
    return (
        op.nn.conv2d_transpose(data, turned, data_layout="NHWC", kernel_layout="HWIO"),
        move_channels(b.emit(usual), last=True),
    )


#: As CALLS, where TVM compiles no such call: (call, an equal one that it compiles)
PAIRS: dict[str, tuple[tuple[str, Callable[[ModelBuilder], tuple]], ...]] = {
    "relax.nn.conv1d": (("out_layout", in_out_layout(op.nn.conv1d, "NWC", (5, 4, 3))),),
    "relax.nn.conv2d": (("out_layout", in_out_layout(op.nn.conv2d, "NHWC", (5, 4, 3, 3))),),
    "relax.nn.conv2d_transpose": (
        ("out_layout", in_out_layout(op.nn.conv2d_transpose, "NHWC", (4, 5, 3, 3))),
        ("data_layout kernel_layout", draw_transposed_nhwc),
    ),
    "relax.nn.avg_pool2d": (("out_layout", in_out_layout(op.nn.avg_pool2d, "NHWC", 2)),),
    "relax.nn.max_pool1d": (("out_layout", in_out_layout(op.nn.max_pool1d, "NWC", 2)),),
    "relax.nn.max_pool2d": (("out_layout", in_out_layout(op.nn.max_pool2d, "NHWC", 2)),),
}


def read_operators(row: QuantOp) -> Iterator[str]:
    """Names of the operators that a row takes."""
    if isinstance(row.pattern, ChainPattern):
        yield from ELEMENTWISE
        return
    pending: list[Any] = [row.pattern.root]  # pyright: ignore[reportAttributeAccessIssue]
    while pending:
        node = pending.pop()
        if isinstance(node, CallPattern):
            yield node.op.expr.name
            pending += list(node.args)


#: Relax's own. Operators of the dialect have tests of their attributes in `tests/ir/dialect`.
OPERATORS = sorted(
    name
    for name in {name for row in BUILTIN_OPS for name in read_operators(row)}
    if not name.startswith("relax.qnn.")
)


def draw_base(name: str, b: ModelBuilder) -> relax.Call:
    """A call of an operator."""
    if name in BASES:
        return b.builder.normalize(BASES[name](b))
    if name in DRAWN:
        return b.builder.normalize(DRAWN[name](b, [Role.ACTIVATION, Role.WEIGHT]))
    make, operator = op, tvm.ir.Op.get(name)
    for part in name.split(".")[1:]:
        make = getattr(make, part)
    return b.builder.normalize(make(*(b.activation(2, 6) for _ in operator.arguments)))


def draw_values(name: str, attribute: str, value: Any) -> list[Any]:
    """Values of an attribute other than its own."""
    for key in (f"{name}.{attribute}", attribute):
        if key in VALUES:
            return VALUES[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [0.3 - value]
    if isinstance(value, int):
        return [value + 1]
    raise LookupError(f"VALUES or CALLS should say what {name} may have for {attribute}: {value!r}")


def draw_calls(
    name: str, b: ModelBuilder
) -> Iterator[tuple[str, tuple[relax.Expr, relax.Expr | None]]]:
    """(what is varied, (call, an equal one or None)): each attribute away from its default."""
    for what, draw in CALLS.get(name, ()):
        yield what, (draw(b), None)
    for what, draw in PAIRS.get(name, ()):
        yield what, draw(b)
    special = (*CALLS.get(name, ()), *PAIRS.get(name, ()))
    done = {attribute for names, _ in special for attribute in names.split()}
    for attribute, value in read_attributes(draw_base(name, ModelBuilder(0))).items():
        for other in draw_values(name, attribute, value) if attribute not in done else ():
            call = draw_base(name, b)
            make = find_constructor(call)
            assert make is not None
            varied = make(*call.args, **{**read_attributes(call), attribute: other})
            yield f"{attribute}={other}", (varied, None)


def emit_end(b: ModelBuilder, value: relax.Expr, weight: relax.Expr | None) -> relax.Expr:
    """A product with what a call gives."""
    if str(value.ty.dtype) != "float32":
        value = b.emit(op.astype(value, "float32"), "wide")
    if not value.ty.ndim:
        value = b.emit(op.reshape(value, (1,)), "one")
    return b.emit(op.matmul(value, weight or b.constant(shape_of(value)[-1], 3)), "end")


def build_models(name: str) -> tuple[ModelBuilder, dict[str, str], tvm.IRModule, tvm.IRModule]:
    """What is varied -> its value's name; a module with the calls, and one that TVM compiles."""
    b = ModelBuilder(0)
    values: dict[str, str] = {}
    ends: list[list[relax.Expr]] = [[], []]
    for what, (call, equal) in draw_calls(name, b):
        value = b.emit(call, "value")
        values[what] = value.name
        ends[0].append(emit_end(b, value, None))
        same = ends[0][-1]
        if equal is not None:
            weight = b.bindings[-1].value.args[1]
            same = emit_end(b, b.emit(equal, "equal"), weight)
        ends[1].append(same)

    def build(results: list[relax.Expr]) -> tvm.IRModule:
        out = relax.Var("out", relax.TupleType([end.ty for end in results]))
        block = relax.DataflowBlock([*b.bindings, relax.VarBinding(out, relax.Tuple(results))])
        main = relax.Function(b.inputs, relax.SeqExpr([block], out), out.ty)
        mod = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
        return relax.transform.DeadCodeElimination()(mod)

    return b, values, *(build(results) for results in ends)


def pick_result(mod: tvm.IRModule, index: int) -> tvm.IRModule:
    """The canonical form of the module with one of its results."""
    main = mod["main"]
    *bindings, last = main.body.blocks[0].bindings
    result = last.value.fields[index]
    out = relax.Var("out", result.ty)
    block = relax.DataflowBlock([*bindings, relax.VarBinding(out, result)])
    func = relax.Function(main.params, relax.SeqExpr([block], out), out.ty)
    picked = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return prepare_module(relax.transform.DeadCodeElimination()(picked))


def run_tvm(mod: tvm.IRModule, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Results of a float module, compiled by TVM's default pipeline."""
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    arrays = [tvm.runtime.tensor(inputs[param.name]) for param in mod["main"].params]
    return [value.numpy() for value in machine["main"](*arrays)]


#: those with attributes
VARIED = [name for name in OPERATORS if read_attributes(draw_base(name, ModelBuilder(0)))]
