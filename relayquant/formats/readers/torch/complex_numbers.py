"""PyTorch reader: complex numbers, as their real and imaginary parts, and Fourier transforms.

TVM has no complex numbers. `PART_COMPOSITES` write arithmetic by operators on the parts, and are
traced by PyTorch like `composites`. What remains makes parts, takes them or moves them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from tvm import relax

from relayquant.formats.readers.fourier import count_values, emit_transform
from relayquant.formats.readers.refusal import Refusal
from relayquant.formats.readers.torch.arguments import read_arguments

ADVICE = (
    "Write real and imaginary parts as two tensors here: torch.view_as_real(z) has both, and "
    "torch.complex(a, b) joins them"
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The parts of complex numbers. An imaginary part of None is zeros."""

    real: relax.Expr
    imag: relax.Expr | None = None


#: Operators that treat both parts alike.
PARTWISE = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "reshape.default", "permute.default", "transpose.int", "t.default"),
        *("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "expand.default"),
        *("slice.Tensor", "select.int", "index.Tensor", "index_select.default", "gather.default"),
        *("clone.default", "alias.default", "detach.default", "lift_fresh_copy.default"),
        *("cat.default", "stack.default", "flip.default", "repeat.default", "copy.default"),
        *("split_with_sizes.default", "split.Tensor", "slice_scatter.default"),
        *("select_scatter.default", "neg.default", "sum.default", "sum.dim_IntList"),
        *("mean.default", "mean.dim", "tril.default", "triu.default", "cumsum.default"),
    )
)

#: Of these, operators whose further operands are indices.
INDEXED = ("aten.index.Tensor", "aten.index_select.default", "aten.gather.default")


def is_complex(node: Any) -> bool:
    """Whether a node gives complex numbers, or a tuple that begins with them."""
    value = node.meta.get("val")
    first = next(iter(value), None) if isinstance(value, list | tuple) else value
    return getattr(first, "is_complex", bool)()


def find_conversion(importer: Any, node: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return the conversion of a node: `convert`, unless complex numbers take another one.

    Raises:
        Refusal: the operator is not supported for complex numbers.
    """
    name = str(node.target)
    if name == "aten.select.int" and is_last_axis(node):
        return functools.partial(convert_part, importer)
    is_check = node.meta.get("val") is None
    if is_check or not any(map(is_complex, (node, *node.all_input_nodes))):
        return convert
    if name.removeprefix("aten.") in COMPLEX_OPERATORS:
        return convert
    if name == "aten._to_copy.default":
        return functools.partial(convert_copy, importer)
    if name in PARTWISE or node.target is operator.getitem:
        return functools.partial(convert_parts, importer, convert)
    raise Refusal(
        "it takes or gives complex numbers; supported: Fourier transforms, sums, products, "
        "quotients, abs, angle, exp, log, and moves",
        ADVICE,
    )


def is_last_axis(node: Any) -> bool:
    """Whether a node selects from view_as_real(z) along its last axis: z.real or z.imag."""
    operand, dim, index = read_arguments(node, "self", "dim", "index")
    if not str(operand.target).startswith("aten.view_as_real") or not isinstance(index, int):
        return False
    return dim % operand.meta["val"].dim() == operand.meta["val"].dim() - 1


def convert_part(importer: Any, node: Any, *_more: Any) -> relax.Expr:
    """Convert select(view_as_real(z), -1, index) to a part of z."""
    viewed, _, index = read_arguments(node, "self", "dim", "index")
    pair = importer.env[viewed.args[0]]
    return find_zeros(importer, pair) if index % 2 else pair.real


def find_zeros(importer: Any, pair: Pair) -> relax.Expr:
    """Return the imaginary part of a pair as a tensor."""
    if pair.imag is not None:
        return pair.imag
    return importer.block_builder.emit(relax.op.zeros_like(pair.real))


def convert_parts(importer: Any, convert: Callable[..., Any], node: Any, *more: Any) -> Pair:
    """Convert a node for real parts, and for imaginary ones."""
    kept = {each: importer.env[each] for each in node.all_input_nodes}
    is_indexed = str(node.target) in INDEXED
    pairs = {each: pair for each, pair in kept.items() if isinstance(pair, Pair)}
    for each, value in kept.items():
        is_tensor = isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)
        if is_tensor and not is_indexed:
            pairs[each] = Pair(value)  # real numbers among complex ones
    emit, values = importer.block_builder.emit, []
    is_real = all(pair.imag is None for pair in pairs.values())
    try:
        for at in range(1 if is_real else 2):
            importer.env.update(
                {
                    each: find_zeros(importer, pair) if at else pair.real
                    for each, pair in pairs.items()
                }
            )
            value = convert(node, *more)
            values.append(emit(value) if isinstance(value, relax.Expr) else value)
    finally:
        importer.env.update(kept)
    return Pair(values[0], None if is_real else values[1])


def convert_copy(importer: Any, node: Any, *_more: Any) -> Any:
    """Convert a cast: each part is cast. A cast to real numbers drops the imaginary part."""
    operand, dtype = read_arguments(node, "self", "dtype")
    value, dtype = importer.env[operand], dtype or operand.meta["val"].dtype
    pair = value if isinstance(value, Pair) else Pair(value, None)
    wanted = name_parts(node) if dtype.is_complex else str(dtype).removeprefix("torch.")
    parts = [pair.real] if pair.imag is None or not dtype.is_complex else [pair.real, pair.imag]
    parts = [importer.block_builder.emit(relax.op.astype(part, wanted)) for part in parts]
    return Pair(*parts) if dtype.is_complex else parts[0]


def name_parts(node: Any) -> str:
    """Return the dtype of a node's parts: "float32" or "float64"."""
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    parts = {"complex64": "float32", "complex128": "float64"}
    if dtype not in parts:
        raise Refusal(f"{node.name} is {dtype}; supported: complex64 and complex128", ADVICE)
    return parts[dtype]


def convert_complex(node: Any, importer: Any) -> Pair:
    """Convert complex(a, b) of tensors of one shape."""
    real, imag = (importer.env[each] for each in node.args)
    name_parts(node)
    return Pair(real, imag)


def convert_view_as_real(node: Any, importer: Any) -> relax.Expr:
    """Convert view_as_real(z) to the parts along a new last axis."""
    return join_parts(importer, importer.env[node.args[0]], force=True)


def convert_view_as_complex(node: Any, importer: Any) -> Pair:
    """Convert view_as_complex(x) to the two values along the last axis."""
    name_parts(node)
    return split_parts(importer, importer.env[node.args[0]])


def convert_conj(node: Any, importer: Any) -> Pair:
    """Convert conj(z)."""
    pair = importer.env[node.args[0]]
    if pair.imag is None:
        return pair
    return Pair(pair.real, importer.block_builder.emit(relax.op.negative(pair.imag)))


def convert_negation(node: Any, importer: Any) -> relax.Expr:
    """Convert the imaginary part of conj(z), which is real."""
    return importer.block_builder.emit(relax.op.negative(importer.env[node.args[0]]))


def join_parts(importer: Any, pair: Pair, *, force: bool = False) -> relax.Expr:
    """Emit (..., 2) of a pair, or (..., 1) of one without an imaginary part unless `force`."""
    emit = importer.block_builder.emit
    if pair.imag is None and not force:
        return emit(relax.op.expand_dims(pair.real, -1))
    return emit(relax.op.stack([pair.real, find_zeros(importer, pair)], -1))


def split_parts(importer: Any, data: relax.Expr) -> Pair:
    """Emit the parts of (..., 2)."""
    emit, axis = importer.block_builder.emit, len(data.ty.shape.values) - 1
    real, imag = (
        emit(relax.op.squeeze(emit(relax.op.strided_slice(data, [axis], [at], [at + 1])), [axis]))
        for at in range(2)
    )
    return Pair(real, imag)


def convert_fourier(node: Any, importer: Any) -> Any:
    """Convert a transform along axes: of real numbers, to real numbers, or of complex ones."""
    name = str(node.target).split(".")[1]
    operand, axes, norm = read_arguments(node, "self", "dim", "normalization")
    given = importer.env[operand]
    data = join_parts(importer, given if isinstance(given, Pair) else Pair(given, None))
    axes = [axis % operand.meta["val"].dim() for axis in axes]
    sizes, inverse, onesided = [count_values(data, axis) for axis in axes], False, False
    if name == "_fft_c2r":
        (sizes[-1],), inverse, onesided = read_arguments(node, "last_dim_size"), True, True
    elif name == "_fft_c2c":
        inverse = not read_arguments(node, "forward")[0]
    else:
        (onesided,) = read_arguments(node, "onesided")
    steps = list(zip(axes, sizes, strict=True))
    emit = importer.block_builder.emit
    for at, (axis, size) in enumerate(steps if inverse else reversed(steps)):
        is_halved = onesided and at == (len(steps) - 1 if inverse else 0)
        data = emit(
            emit_transform(
                importer.block_builder, data, axis, size, inverse=inverse, onesided=is_halved
            )
        )
    # A normalization of 0, 1 or 2 divides by 1, the root of the count or the count.
    factor = math.prod(sizes) ** (bool(inverse) - norm / 2)
    if factor != 1:
        data = emit(relax.op.multiply(data, relax.const(factor, data.ty.dtype)))
    if name == "_fft_c2r":
        return emit(relax.op.squeeze(data, [-1]))
    return split_parts(importer, data)


#: operator name in TVM's frontend -> its conversion, for operators that complex numbers alone have
COMPLEX_OPERATORS: dict[str, Callable[..., Any]] = {
    "complex.default": convert_complex,
    "view_as_real.default": convert_view_as_real,
    "view_as_complex.default": convert_view_as_complex,
    "_conj.default": convert_conj,
    "_neg_view.default": convert_negation,
    **{f"_fft_{kind}.default": convert_fourier for kind in ("r2c", "c2r", "c2c")},
}


def split_number(value: Any) -> tuple[Any, Any]:
    """Return the real and the imaginary part of a tensor or number; 0 for a real one."""
    import torch  # pyright: ignore[reportMissingImports]

    if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
        return value.real, value.imag
    return value, 0


def make_complex(real: Any, imag: Any, *operands: Any) -> Any:
    """Make complex numbers of two parts, in the dtype of a result of the operands. 0 is zeros."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype
    dtype = dtype.to_real()
    shape = torch.broadcast_shapes(*(each.shape for each in (real, imag) if hasattr(each, "shape")))
    return torch.complex(
        *(
            each.to(dtype).expand(shape)
            if isinstance(each, torch.Tensor)
            else torch.full(shape, each, dtype=dtype)
            for each in (real, imag)
        )
    )


def times(first: Any, second: Any) -> Any:
    """Return a product, of which 0 leaves nothing."""
    if any(isinstance(each, int | float) and each == 0 for each in (first, second)):
        return 0
    return first * second


def write_add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    """Write a + alpha * b by parts."""
    (a, b), (c, d) = split_number(first), split_number(second)
    e, f = split_number(alpha)
    return make_complex(a + times(c, e) - times(d, f), b + times(d, e) + times(c, f), first, second)


def write_sub(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    """Write a - alpha * b by parts."""
    return write_add(first, second, alpha=-alpha)


def write_mul(first: Any, second: Any) -> Any:
    """Write (a + bi) (c + di) by parts."""
    (a, b), (c, d) = split_number(first), split_number(second)
    return make_complex(times(a, c) - times(b, d), times(a, d) + times(b, c), first, second)


def write_div(first: Any, second: Any) -> Any:
    """Write a quotient by parts. A complex divisor is scaled first: its square could overflow."""
    import torch  # pyright: ignore[reportMissingImports]

    (a, b), (c, d) = split_number(first), split_number(second)
    if isinstance(d, int):
        return make_complex(a / c, b / c if isinstance(b, torch.Tensor) else 0, first, second)
    c, d = (
        each if isinstance(each, torch.Tensor) else torch.full((), each, dtype=torch.float64)
        for each in (c, d)
    )
    size = torch.maximum(c.abs(), d.abs())
    c, d = c / size, d / size
    square = (c * c + d * d) * size
    real, imag = times(a, c) + times(b, d), times(b, c) - times(a, d)
    return make_complex(real / square, imag / square, first, second)


def write_reciprocal(data: Any) -> Any:
    """Write 1 / z."""
    return write_div(1, data)


def write_pow(data: Any, exponent: Any) -> Any:
    """Write a power by an integer from 1 on as products."""
    if not isinstance(exponent, int | float) or exponent not in (1, 2, 3, 4):
        return NotImplemented
    return functools.reduce(write_mul, [data] * int(exponent))


def write_abs(data: Any) -> Any:
    """Write |z|."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.hypot(data.real, data.imag)


def write_angle(data: Any) -> Any:
    """Write the angle of z."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.atan2(data.imag, data.real)


def write_exp(data: Any) -> Any:
    """Write exp(a + bi) as exp(a) (cos b + i sin b)."""
    size, angle = data.real.exp(), data.imag
    return make_complex(size * angle.cos(), size * angle.sin(), data)


def write_log(data: Any) -> Any:
    """Write log(z) as log|z| + i angle(z)."""
    return make_complex(write_abs(data).log(), write_angle(data), data)


def write_matmul(first: Any, second: Any) -> Any:
    """Write a product of complex matrices by parts."""
    (a, b), (c, d) = split_number(first), split_number(second)
    return make_complex(a.matmul(c) - b.matmul(d), a.matmul(d) + b.matmul(c), first, second)


def write_where(condition: Any, first: Any, second: Any) -> Any:
    """Write where(c, z, w) by parts."""
    import torch  # pyright: ignore[reportMissingImports]

    (a, b), (c, d) = split_number(first), split_number(second)
    return make_complex(torch.where(condition, a, c), torch.where(condition, b, d), first, second)


def write_pad(data: Any, pad: Any, value: Any = 0) -> Any:
    """Write padding with a number by parts."""
    import torch  # pyright: ignore[reportMissingImports]

    values = zip(split_number(data), split_number(value), strict=True)
    return make_complex(
        *(torch.constant_pad_nd(part, pad, number) for part, number in values), data
    )


def write_conj(data: Any) -> Any:
    """Write conj(z)."""
    return make_complex(data.real, -data.imag, data)


#: Name of an operator in torch.ops.aten -> function that writes it for complex operands.
PART_COMPOSITES: dict[str, Callable[..., Any]] = {
    **{f"add.{kind}": write_add for kind in ("Tensor", "Scalar")},
    **{f"sub.{kind}": write_sub for kind in ("Tensor", "Scalar")},
    **{f"mul.{kind}": write_mul for kind in ("Tensor", "Scalar")},
    **{f"div.{kind}": write_div for kind in ("Tensor", "Scalar")},
    "reciprocal.default": write_reciprocal,
    "pow.Tensor_Scalar": write_pow,
    "abs.default": write_abs,
    "angle.default": write_angle,
    "exp.default": write_exp,
    "log.default": write_log,
    **{f"{name}.default": write_matmul for name in ("mm", "bmm")},
    "where.self": write_where,
    "constant_pad_nd.default": write_pad,
    "conj_physical.default": write_conj,
}


def write_polar(size: Any, angle: Any) -> Any:
    """Write polar(r, phi) as r (cos phi + i sin phi)."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.complex(size * angle.cos(), size * angle.sin())


def write_full(size: Any, value: Any, **kwargs: Any) -> Any:
    """Write a tensor of one complex number by parts."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = kwargs.pop("dtype", None) or (torch.complex64 if isinstance(value, complex) else None)
    if dtype is None or not dtype.is_complex:
        return NotImplemented
    return torch.complex(
        *(torch.full(size, part, dtype=dtype.to_real(), **kwargs) for part in split_number(value))
    )


def split_complex(own: Callable[..., Any], write: Callable[..., Any]) -> Callable[..., Any]:
    """Decompose with `write` if an operand is complex, else with `own`."""
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(*args: Any, **kwargs: Any) -> Any:
        is_any = any(
            isinstance(each, complex) or (isinstance(each, torch.Tensor) and each.is_complex())
            for each in args
        )
        result = write(*args, **kwargs) if is_any else NotImplemented
        return own(*args, **kwargs) if result is NotImplemented else result

    return decompose


def split_constants(program: Any) -> None:
    """Replace the complex parameters, buffers and constants of a decomposed program by tensors of
    their parts, (..., 2). The program is changed, its tensors are not.
    """
    import torch  # pyright: ignore[reportMissingImports]

    view = torch.ops.aten.view_as_complex.default
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    graph, held = program.graph, {**program.constants, **program.state_dict}
    parts = {
        name: torch.view_as_real(value.detach().resolve_conj()).resolve_neg()
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and value.is_complex()
    }
    for name in ("_constants", "_state_dict"):
        tensors = getattr(program, name)
        setattr(program, name, {key: parts.get(key, value) for key, value in tensors.items()})
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        if targets.get(node.name) in parts:
            with graph.inserting_before(first):
                whole = graph.call_function(view, (node,))
            node.replace_all_uses_with(
                whole, delete_user_cb=lambda user, own=whole: user is not own
            )
            whole.meta = {**node.meta}
            node.meta = {**node.meta, "val": torch.view_as_real(node.meta["val"].resolve_conj())}
