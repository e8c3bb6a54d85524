"""Exported PyTorch program -> the same in operators that convert one by one: what PyTorch does
within an operator, and TVM's frontend does not, written out. A part of `program`.

PyTorch traces these functions, so that types and shapes behind them are its own. Each gives
NotImplemented for what converts as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from relayquant.formats.readers.torch.composites import COMPOSITES

Decomposition = Callable[..., Any]

#: Operators of numbers of one type, by their names in torch.ops.aten: PyTorch converts operands to
#: the type that can hold both, where the frontend takes that of the first.
PROMOTING = (
    *("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "mul.Tensor", "mul.Scalar"),
    *("maximum.default", "minimum.default", "clamp.default", "clamp.Tensor"),
    *("remainder.Tensor", "remainder.Scalar", "fmod.Tensor", "fmod.Scalar"),
    *("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar"),
    *("div.Tensor_mode", "div.Scalar_mode"),
    *(
        f"bitwise_{name}.{kind}"
        for name in ("and", "or", "xor")
        for kind in ("Tensor", "Scalar", "Scalar_Tensor")
    ),
    *(
        f"{name}.{kind}"
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    ),
)
#: The same of operators whose result is a float also of integers.
FLOATING = (
    *("div.Tensor", "div.Scalar", "atan2.default", "reciprocal.default"),
    *("exp.default", "expm1.default", "log.default", "log2.default", "log10.default"),
    *("log1p.default", "sqrt.default", "rsqrt.default", "erf.default", "sigmoid.default"),
    *("sin.default", "cos.default", "tan.default", "asin.default", "acos.default", "atan.default"),
    *("sinh.default", "cosh.default", "tanh.default"),
    *("asinh.default", "acosh.default", "atanh.default"),
)
#: Operators on truth values: any number but 0 is true.
TRUTH = ("any.dim", "any.dims", "all.default", "all.dim", "all.dims")
#: Operators that scale their second operand by `alpha`.
SCALING = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")


def make_decompositions() -> Any:
    """PyTorch's table of decompositions into core operators, with those of this module."""
    import torch  # pyright: ignore[reportMissingImports]

    table = torch.export.default_decompositions()
    aten = torch.ops.aten

    def put(name: str, make: Callable[[Any, Decomposition], Decomposition]) -> None:
        """`make(operator, what the table has)` for an operator."""
        packet, overload = name.split(".")
        operator = getattr(getattr(aten, packet), overload)
        own: Decomposition = give_nothing
        if operator in table:  # `get` does not see what is made only when it is asked for
            own = table[operator]
        table[operator] = make(operator, own)

    for name in PROMOTING:
        put(name, promote)
    for name in FLOATING:
        put(name, promote_to_float)
    for name in SCALING:
        put(name, scale_operand)
    for name in TRUTH:
        put(name, read_truth)
    for name in COMPOSITES:
        put(name, lambda _, own, write=COMPOSITES[name]: try_both(write, own))
    put("where.self", promote_where)
    put("cat.default", promote_cat)
    put("scaled_dot_product_attention.default", attend)
    put("view.default", view_copy)
    return table


def give_nothing(*_args: Any, **_kwargs: Any) -> Any:
    """Of an operator that the table does not have."""
    return NotImplemented


def try_both(write: Decomposition, own: Decomposition) -> Decomposition:
    """`write`, or `own` of what it does not write."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        result = write(*args, **kwargs)
        return own(*args, **kwargs) if result is NotImplemented else result

    return decompose


def find_type(operands: Iterable[Any], *, is_float: bool = False) -> Any:
    """The dtype of a result by PyTorch's own promotion of tensors, of tensors without dimensions,
    which do not raise the type of others of their kind, and of numbers. Names of modes are ignored.

    Args:
        is_float: Whether the result of integers is a float.
    """
    from torch._prims_common import (  # pyright: ignore[reportMissingImports]
        ELEMENTWISE_TYPE_PROMOTION_KIND as Kind,
    )
    from torch._prims_common import elementwise_dtypes  # pyright: ignore[reportMissingImports]

    values = [operand for operand in operands if not isinstance(operand, str)]
    kind = Kind.INT_TO_FLOAT if is_float else Kind.DEFAULT
    return elementwise_dtypes(*values, type_promotion_kind=kind)[1]


def convert_operands(operator: Any, own: Decomposition, dtype: Any, args: Any, kwargs: Any) -> Any:
    """operator(a, b) -> operator(a.to(dtype), b.to(dtype)); `own` where all have the dtype.

    A size that is known at run time becomes a tensor.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if any(isinstance(each, torch.SymInt) for each in (*args, *kwargs.values())):
        args = [hold_size(each, dtype) for each in args]
        kwargs = {name: hold_size(each, dtype) for name, each in kwargs.items()}
        return operator.overloadpacket(*args, **kwargs)  # the overload for tensors

    if all(not isinstance(each, torch.Tensor) or each.dtype == dtype for each in args):
        has_mode = kwargs.get("rounding_mode") is not None
        if not has_mode or all(isinstance(each, torch.Tensor) for each in args):
            return own(*args, **kwargs)
        # The frontend makes a float of the number, or an integer next to a float.
        args = [
            each if isinstance(each, torch.Tensor) else torch.full((), each, dtype=dtype)
            for each in args
        ]
        return operator(*args, **kwargs)
    args = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in args]
    return operator(*args, **kwargs)


def hold_size(value: Any, dtype: Any) -> Any:
    """s -> tensor of s, of a size that is known at run time; anything else as it is."""
    import torch  # pyright: ignore[reportMissingImports]

    return torch.full((), value, dtype=dtype) if isinstance(value, torch.SymInt) else value


def promote(operator: Any, own: Decomposition) -> Decomposition:
    """op(int, float) -> op(float, float), and the same of all other types."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return convert_operands(operator, own, find_type([*args, *kwargs.values()]), args, kwargs)

    return decompose


def promote_to_float(operator: Any, own: Decomposition) -> Decomposition:
    """int / int -> float / float; log(int) -> log(float)."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return convert_operands(operator, own, find_type(args, is_float=True), args, kwargs)

    return decompose


def promote_where(operator: Any, own: Decomposition) -> Decomposition:
    """where(c, int, float) -> where(c, float, float)."""

    def decompose(condition: Any, this: Any, other: Any) -> Any:
        dtype = find_type([this, other])
        if this.dtype == dtype == other.dtype:
            return own(condition, this, other)
        return operator(condition, this.to(dtype), other.to(dtype))

    return decompose


def promote_cat(operator: Any, own: Decomposition) -> Decomposition:
    """cat(int, float) -> cat(float, float); without vectors of no elements, which fit anything."""

    def decompose(tensors: Any, *args: Any) -> Any:
        dtype = find_type(tensors)
        kept = [each for each in tensors if each.dim() != 1 or each.shape[0] != 0] or tensors[:1]
        if len(kept) == len(tensors) and all(each.dtype == dtype for each in tensors):
            return own(tensors, *args)
        return operator([each.to(dtype) for each in kept], *args)

    return decompose


def scale_operand(operator: Any, own: Decomposition) -> Decomposition:
    """add(a, b, alpha=s) -> add(a, b * s), of the type that a and b have together."""

    import torch  # pyright: ignore[reportMissingImports]

    def decompose(this: Any, other: Any, *args: Any, alpha: Any = 1) -> Any:
        alpha = args[0] if args else alpha
        if alpha == 1:
            return own(this, other)
        dtype = find_type([this, other])
        if isinstance(other, torch.Tensor):
            return operator(this, (other.to(dtype) * alpha).to(dtype))
        return operator(this, bool(other * alpha) if dtype == torch.bool else other * alpha)

    return decompose


def read_truth(operator: Any, own: Decomposition) -> Decomposition:
    """any(x) -> any(x != 0)."""
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(data: Any, *args: Any, **kwargs: Any) -> Any:
        if data.dtype == torch.bool:
            return own(data, *args, **kwargs)
        return operator(data.ne(0), *args, **kwargs)

    return decompose


def attend(_operator: Any, own: Decomposition) -> Decomposition:
    """Attention without a mask, or causal -> softmax(q @ k^T * scale) @ v.

    PyTorch's form looks for rows of the scores that are masked as a whole, of which there are none.
    """
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(query: Any, key: Any, value: Any, mask: Any = None, *args: Any, **kwargs: Any):
        dropout, causal = (*args, *(0.0, False)[len(args) :])
        dropout, causal = kwargs.get("dropout_p", dropout), kwargs.get("is_causal", causal)
        if mask is not None or dropout:
            return own(query, key, value, mask, *args, **kwargs)
        scale = kwargs.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if kwargs.get("enable_gqa"):
            readers = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(readers, -3) for each in (key, value))
        scores = torch.matmul(query, key.transpose(-2, -1)) * scale
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        result = torch.matmul(torch.softmax(scores, -1), value)
        return result if takes_views() else order_as(result, query)

    return decompose


def find_release() -> tuple[int, ...]:
    """(major, minor) of the PyTorch that is installed."""
    import torch  # pyright: ignore[reportMissingImports]

    return tuple(map(int, torch.__version__.split(".")[:2]))


def takes_views() -> bool:
    """Whether PyTorch asks the table for views: 2.10 does not, 2.13 does."""
    return find_release() >= (2, 13)


def order_as(data: Any, other: Any) -> Any:
    """The same values in memory in the order of another tensor: attention's result lies as its
    queries do, and views of it were exported so.
    """
    import torch  # pyright: ignore[reportMissingImports]

    axes = sorted(range(other.dim()), key=other.stride, reverse=True)
    if axes == list(range(other.dim())):
        return data
    places = [axes.index(axis) for axis in range(other.dim())]
    return data.permute(axes).clone(memory_format=torch.contiguous_format).permute(places)


def view_copy(_operator: Any, own: Decomposition) -> Decomposition:
    """view(x) -> view(copy of x) where x is no longer in order.

    What comes of decompositions lies in memory in another order than what the program was exported
    with (attention of a batch does), and has no such view. Here order is nothing that a value has.
    """
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(data: Any, size: Any) -> Any:
        if data.is_contiguous():
            return own(data, size)
        return data.clone(memory_format=torch.contiguous_format).view(size)

    return decompose
