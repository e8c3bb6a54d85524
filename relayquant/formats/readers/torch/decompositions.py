"""PyTorch reader: decomposes a program into operators that convert one by one. A part of `program`.

This module writes out steps that PyTorch does inside an operator and TVM's frontend does not.
PyTorch traces these functions, so types and shapes are its own. Each function returns
NotImplemented for a case that converts unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from relayquant.formats.readers.torch.complex_numbers import PART_COMPOSITES, split_complex
from relayquant.formats.readers.torch.composites.products import write_grouped_product
from relayquant.formats.readers.torch.composites.table import COMPOSITES
from relayquant.formats.readers.torch.upsampling import OPEN_UPSAMPLES

Decomposition = Callable[..., Any]

#: Operators on numbers of one type, by their names in torch.ops.aten. PyTorch converts operands to
#: a type that can hold both. The frontend uses the type of the first operand.
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
#: The same, for operators whose result is a float also for integers.
FLOATING = (
    *("div.Tensor", "div.Scalar", "atan2.default", "reciprocal.default"),
    *("exp.default", "expm1.default", "log.default", "log2.default", "log10.default"),
    *("log1p.default", "sqrt.default", "rsqrt.default", "erf.default", "sigmoid.default"),
    *("sin.default", "cos.default", "tan.default", "asin.default", "acos.default", "atan.default"),
    *("sinh.default", "cosh.default", "tanh.default"),
    *("asinh.default", "acosh.default", "atanh.default"),
)
#: Operators on truth values: any number except 0 is true.
TRUTH = ("any.dim", "any.dims", "all.default", "all.dim", "all.dims")
#: Operators that scale their second operand by `alpha`.
SCALING = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")


#: Operators whose decompositions round more often than PyTorch's kernels, which compute narrow
#: floats in float32.
COMPUTED_WIDE = (
    *("addbmm.default", "addmv.default", "hypot.default", "_cdist_forward.default"),
    *("scaled_dot_product_attention.default", "sinc.default"),
)
#: Operators that round a number to the type of narrow floats beside it. Others compute with it as
#: a float32.
ROUNDED_NUMBERS = ("pow", "fmod", "remainder")


def make_decompositions() -> Any:
    """Return PyTorch's decompositions into core operators, extended by this module."""
    import torch  # pyright: ignore[reportMissingImports]

    table = torch.export.default_decompositions()
    aten = torch.ops.aten

    def put(name: str, make: Callable[[Any, Decomposition], Decomposition]) -> None:
        """Set an operator's entry to `make(operator, previous entry)`."""
        packet, overload = name.split(".")
        operator = getattr(getattr(aten, packet), overload)
        own: Decomposition = give_nothing
        if operator in table:  # `get` does not see entries that are made on demand.
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
    put("upsample_bicubic2d.vec", keep)
    for name in OPEN_UPSAMPLES:
        put(name, keep_open)
    put("softplus.default", keep)
    for name in COMPUTED_WIDE:
        put(name, compute_wide)
    for name in PART_COMPOSITES:
        put(name, lambda _, own, write=PART_COMPOSITES[name]: split_complex(own, write))
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        operator = torch.ops.transformers.grouped_mm_fallback.default
        table[operator] = write_grouped_product  # how `transformers` exports experts in float32
    return table


def give_nothing(*_args: Any, **_kwargs: Any) -> Any:
    """The previous entry of an operator that is not in the table."""
    return NotImplemented


def try_both(write: Decomposition, own: Decomposition) -> Decomposition:
    """Decompose with `write`, or with `own` where `write` returns NotImplemented."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        result = write(*args, **kwargs)
        return own(*args, **kwargs) if result is NotImplemented else result

    return decompose


def compute_wide(_operator: Any, own: Decomposition) -> Decomposition:
    """Compute a decomposition of narrow floats in float32, and round its result once."""
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(*args: Any, **kwargs: Any) -> Any:
        dtype = find_type([each for each in args if isinstance(each, torch.Tensor)])
        if dtype not in (torch.float16, torch.bfloat16):
            return own(*args, **kwargs)
        result = own(*map(widen, args), **{name: widen(each) for name, each in kwargs.items()})
        return result if result is NotImplemented else result.to(dtype)

    return decompose


def widen(value: Any) -> Any:
    """Convert a tensor of floats to float32. Others are unchanged."""
    import torch  # pyright: ignore[reportMissingImports]

    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float32) if is_float else value


def round_number(value: Any, dtype: Any) -> Any:
    """Round a number to a narrow type of floats. A tensor becomes one of float32."""
    if isinstance(value, int | float):
        return float(np.array(value, str(dtype).removeprefix("torch.")))
    return widen(value)


def find_type(operands: Iterable[Any], *, is_float: bool = False) -> Any:
    """Return the dtype of a result by PyTorch's type promotion.

    Tensors, tensors without dimensions and numbers are promoted separately: tensors without
    dimensions do not raise the type of tensors of the same kind. Names of modes are ignored.

    Args:
        is_float: Whether the result for integers is a float.
    """
    from torch._prims_common import (  # pyright: ignore[reportMissingImports]
        ELEMENTWISE_TYPE_PROMOTION_KIND as Kind,
    )
    from torch._prims_common import elementwise_dtypes  # pyright: ignore[reportMissingImports]

    values = [operand for operand in operands if not isinstance(operand, str)]
    kind = Kind.INT_TO_FLOAT if is_float else Kind.DEFAULT
    return elementwise_dtypes(*values, type_promotion_kind=kind)[1]


def convert_operands(operator: Any, own: Decomposition, dtype: Any, args: Any, kwargs: Any) -> Any:
    """Convert operator(a, b) to operator(a.to(dtype), b.to(dtype)). `own` if all have the dtype.

    A run-time size becomes a tensor.
    """
    import torch  # pyright: ignore[reportMissingImports]

    if any(isinstance(each, torch.SymInt) for each in (*args, *kwargs.values())):
        args = [hold_size(each, dtype) for each in args]
        kwargs = {name: hold_size(each, dtype) for name, each in kwargs.items()}
        return operator.overloadpacket(*args, **kwargs)  # the overload for tensors

    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if is_narrow and str(operator).split(".")[1] in ROUNDED_NUMBERS:
        rounded = [
            each if isinstance(each, torch.Tensor) else round_number(each, dtype) for each in args
        ]
        if any(new is not old and new != old for new, old in zip(rounded, args, strict=True)):
            return operator(*rounded, **kwargs)
    if all(not isinstance(each, torch.Tensor) or each.dtype == dtype for each in args):
        has_mode = kwargs.get("rounding_mode") is not None
        if not has_mode or all(isinstance(each, torch.Tensor) for each in args):
            return own(*args, **kwargs)
        # The frontend turns the number into a float, or an integer next to a float. Beside a narrow
        # float, PyTorch computes with it as a float32.
        wide = torch.float32 if is_narrow else dtype
        args = [
            each.to(wide) if isinstance(each, torch.Tensor) else torch.full((), each, dtype=wide)
            for each in args
        ]
        return operator(*args, **kwargs).to(dtype)
    args = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in args]
    return operator(*args, **kwargs)


def hold_size(value: Any, dtype: Any) -> Any:
    """Convert a run-time size, or a number beside one, to a tensor. Others are unchanged."""
    import torch  # pyright: ignore[reportMissingImports]

    is_number = isinstance(value, int | float | torch.SymInt)
    return torch.full((), value, dtype=dtype) if is_number else value


def promote(operator: Any, own: Decomposition) -> Decomposition:
    """Convert op(int, float) to op(float, float), and other types alike."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return convert_operands(operator, own, find_type([*args, *kwargs.values()]), args, kwargs)

    return decompose


def promote_to_float(operator: Any, own: Decomposition) -> Decomposition:
    """Convert int / int to float / float, and log(int) to log(float)."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        return convert_operands(operator, own, find_type(args, is_float=True), args, kwargs)

    return decompose


def promote_where(operator: Any, own: Decomposition) -> Decomposition:
    """Convert where(c, int, float) to where(c, float, float)."""

    def decompose(condition: Any, this: Any, other: Any) -> Any:
        dtype = find_type([this, other])
        if this.dtype == dtype == other.dtype:
            return own(condition, this, other)
        return operator(condition, this.to(dtype), other.to(dtype))

    return decompose


def promote_cat(operator: Any, own: Decomposition) -> Decomposition:
    """Convert cat(int, float) to cat(float, float). Empty vectors are left out, because PyTorch
    ignores them.
    """

    def decompose(tensors: Any, *args: Any) -> Any:
        dtype = find_type(tensors)
        kept = [each for each in tensors if each.dim() != 1 or each.shape[0] != 0] or tensors[:1]
        if len(kept) == len(tensors) and all(each.dtype == dtype for each in tensors):
            return own(tensors, *args)
        return operator([each.to(dtype) for each in kept], *args)

    return decompose


def scale_operand(operator: Any, own: Decomposition) -> Decomposition:
    """Convert add(a, b, alpha=s) to add(a, b * s), with the common type of a and b. For narrow
    floats PyTorch rounds the numbers, computes in float32 and rounds the sum.
    """

    import torch  # pyright: ignore[reportMissingImports]

    def decompose(this: Any, other: Any, *args: Any, alpha: Any = 1) -> Any:
        alpha = args[0] if args else alpha
        if alpha == 1:
            return own(this, other)
        dtype = find_type([this, other])
        if dtype in (torch.float16, torch.bfloat16):
            first, second, factor = (round_number(each, dtype) for each in (this, other, alpha))
            return operator(first, second * factor).to(dtype)
        if isinstance(other, torch.Tensor):
            return operator(this, (other.to(dtype) * alpha).to(dtype))
        return operator(this, bool(other * alpha) if dtype == torch.bool else other * alpha)

    return decompose


def read_truth(operator: Any, own: Decomposition) -> Decomposition:
    """Convert any(x) to any(x != 0). Bytes give bytes, as in PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(data: Any, *args: Any, **kwargs: Any) -> Any:
        if data.dtype == torch.bool:
            return own(data, *args, **kwargs)
        result = operator(data.ne(0), *args, **kwargs)
        return result.to(data.dtype) if data.dtype == torch.uint8 else result

    return decompose


def attend(_operator: Any, own: Decomposition) -> Decomposition:
    """Convert attention to softmax(q @ k^T * scale + penalty) @ v, and 0 for rows without a key.

    PyTorch's decomposition scales queries and keys each, and seeks rows without a key among all
    scores. Here they are sought in the mask, which layers share. A key that a mask hides has a
    finite penalty, so that no row of scores is infinite as a whole.
    """
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(query: Any, key: Any, value: Any, mask: Any = None, *args: Any, **kwargs: Any):
        dropout, causal = (*args, *(0.0, False)[len(args) :])
        dropout, causal = kwargs.get("dropout_p", dropout), kwargs.get("is_causal", causal)
        if dropout:
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
        if mask is None:
            result = torch.matmul(torch.softmax(scores, -1), value)
        else:
            lowest = torch.finfo(scores.dtype).min
            is_truth = mask.dtype == torch.bool
            penalty = torch.where(mask, 0.0, lowest) if is_truth else mask.clamp(min=lowest)
            has_keys = (mask if is_truth else mask > -torch.inf).any(-1, keepdim=True)
            mixed = torch.matmul(torch.softmax(scores + penalty.to(scores.dtype), -1), value)
            result = torch.where(has_keys, mixed, 0.0)
        return result

    return decompose


def keep(_operator: Any, _own: Decomposition) -> Decomposition:
    """Keep an operator: PyTorch's decomposition has NaN as the gradient of large numbers."""
    return give_nothing


def keep_open(_operator: Any, own: Decomposition) -> Decomposition:
    """Keep an operator with a run-time size. PyTorch's decomposition computes with it in float."""
    import torch  # pyright: ignore[reportMissingImports]

    def decompose(data: Any, size: Any, *args: Any) -> Any:
        sizes = (*data.shape[2:], *(size or ()))
        is_open = any(isinstance(each, torch.SymInt) for each in sizes)
        return NotImplemented if is_open else own(data, size, *args)

    return decompose


def find_release() -> tuple[int, ...]:
    """Return (major, minor) of the installed PyTorch."""
    import torch  # pyright: ignore[reportMissingImports]

    return tuple(map(int, torch.__version__.split(".")[:2]))
