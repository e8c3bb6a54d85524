"""Scheduled TIR -> the same TIR with exp, tanh, erf and sigmoid as polynomials that run in vectors.

LLVM calls the C library once per element for these functions, also in vectorized loops, while
arithmetic stays in vectors. `nearbyint` and `rsqrt` get a form that TVM can vectorize: it would
split a vectorized loop with them into scalars, although CPUs have vector instructions. Errors
against exact values, over all float32: exp 2e-7 relative (subnormal results become 0), sigmoid
2e-7, erf 3e-7, tanh 5e-7 absolute. NaN gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call
from tvm.target import Target

from relayquant.codegen.kernels.curve import (
    ERF_COEFFICIENTS,
    ERF_FACTOR,
    ERF_LIMIT,
    clamp,
    horner,
    invert,
    split_horner,
)
from relayquant.codegen.kernels.isa.base import Expr

#: e^r on -ln(2)/2 .. ln(2)/2 is 1 + r + r^2 * P(r): Cephes, expf.c (Moshier 1989).
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
#: ln(2) in two parts. The first has so few bits that its product with an exponent is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.44269504088896341
#: Below the first bound, e^x is subnormal or 0. Above the second, it is infinite.
EXP_LOW, EXP_HIGH = -87.3365447, 89.0

#: tanh(x) is x * P(x^2) / Q(x^2) up to the limit, beyond which it rounds to 1: Eigen, ptanh.
TANH_LIMIT = 7.90531110763549805
TANH_NUMERATOR = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
TANH_DENOMINATOR = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def number(value: float) -> Expr:
    return tirx.FloatImm("float32", value)


def bind(value: Expr, make: Callable[[tirx.Var], Expr]) -> Expr:
    """Build `make(value)` with `value` computed once."""
    var = tirx.Var("t", str(value.ty))
    return tirx.Let(var, value, make(var))


def round_even(x: Expr) -> Expr:
    """Call the LLVM intrinsic of `tirx.nearbyint`: round half to even."""
    return tirx.call_llvm_pure_intrin(str(x.ty), "llvm.nearbyint", x)


def invert_root(x: Expr) -> Expr:
    """Compute 1 / sqrt(x), as TVM does for `tirx.rsqrt` in LLVM."""
    return tirx.FloatImm(str(x.ty), 1) / tirx.sqrt(x)


def expand_exp(x: tirx.Var) -> Expr:
    """Compute e^x as 2^n * e^r with n = rne(x / ln 2) and the remainder r.

    2^n is the product of two factors, since n may be 128.
    """

    def power_of_two(exponent: Expr) -> Expr:
        bits = tirx.shift_left(exponent + 127, tirx.IntImm("int32", 23))
        return tirx.reinterpret("float32", bits)

    def scale(n: tirx.Var, mantissa: Expr) -> Expr:
        half = tirx.shift_right(n, tirx.IntImm("int32", 1))
        return bind(half, lambda h: mantissa * power_of_two(h) * power_of_two(n - h))

    def from_rounded(rounded: tirx.Var) -> Expr:
        # NaN enters here. `rounded` must not be NaN, since it is cast to an integer.
        bounded = clamp(x, EXP_LOW, EXP_HIGH)
        rest = bounded - rounded * number(LN2_HIGH) - rounded * number(LN2_LOW)
        return bind(
            rest,
            lambda r: bind(
                tirx.Cast("int32", rounded),
                lambda n: scale(n, horner(r, EXP_COEFFICIENTS) * (r * r) + r + number(1)),
            ),
        )

    finite = tirx.max(tirx.min(x, number(EXP_HIGH)), number(EXP_LOW))
    value = bind(round_even(finite * number(LOG2_E)), from_rounded)
    return tirx.Select(x < number(EXP_LOW), number(0), value)


def expand_tanh(x: tirx.Var) -> Expr:
    """Compute x * P(x^2) / Q(x^2), with x clamped to the limit and the result to -1 .. 1."""
    value = bind(
        clamp(x, -TANH_LIMIT, TANH_LIMIT),
        lambda b: bind(
            b * b, lambda s: b * horner(s, TANH_NUMERATOR) / horner(s, TANH_DENOMINATOR)
        ),
    )
    return bind(value, lambda v: clamp(v, -1, 1))


def expand_erf(x: tirx.Var) -> Expr:
    """Compute erf as `emit_erf` does."""

    def from_square(square: tirx.Var) -> Expr:
        most = number(ERF_LIMIT**2)
        place = tirx.Select(square > most, most, square) * number(ERF_FACTOR) - number(1)
        return bind(place, lambda at: bind(at * at, lambda second: from_place(at, second)))

    def from_place(at: tirx.Var, second: tirx.Var) -> Expr:
        return bind(x * split_horner(at, second, ERF_COEFFICIENTS), lambda v: clamp(v, -1, 1))

    return bind(x * x, from_square)


def expand_sigmoid(x: tirx.Var) -> Expr:
    """Compute 1 / (1 + e^-x)."""
    return bind(
        number(0) - x,
        lambda negative: number(1) / (number(1) + expand_exp(negative)),
    )


def avoid_division(name: str, argument: Expr) -> Expr:
    """erf(x / number) -> erf(x * (1 / number)), which is as exact: erf is flat where x is large.

    As in GELU, of whose time the division is a third.
    """
    if name != "tirx.erf" or not isinstance(argument, tirx.Div):
        return argument
    factor = invert(argument.b.value) if isinstance(argument.b, tirx.FloatImm) else None
    return argument if factor is None else argument.a * number(factor)


def call_sigmoid(x: Expr) -> Expr:
    """Compute 1 / (1 + e^-x) by the C library."""
    power = tirx.call_pure_extern("float32", "expf", number(0) - x)
    return number(1) / (number(1) + power)


EXPANSIONS: dict[str, Callable[[tirx.Var], Expr]] = {
    "tirx.exp": expand_exp,
    "tirx.tanh": expand_tanh,
    "tirx.erf": expand_erf,
    "tirx.sigmoid": expand_sigmoid,
}


#: Functions that TVM would split into scalars -> a form that it keeps in vectors, equal bit for
#: bit.
VECTOR_FORMS: dict[str, Callable[[Expr], Expr]] = {
    "tirx.nearbyint": round_even,
    "tirx.rsqrt": invert_root,
}
#: Functions and types for which TVM's form has no digits near 0 -> the C library's function.
C_FUNCTIONS = {
    ("tirx.tanh", "float64"): "tanh",
    ("tirx.tanh", "float32"): "tanhf",  # where it is not expanded
    ("tirx.atanh", "float64"): "atanh",
    ("tirx.atanh", "float32"): "atanhf",
}
#: The functions of `EXPANSIONS` -> the same of one float32 by the C library.
STEADY_FORMS: dict[str, Callable[[Expr], Expr]] = {
    "tirx.exp": lambda x: tirx.call_pure_extern("float32", "expf", x),
    "tirx.tanh": lambda x: tirx.call_pure_extern("float32", "tanhf", x),
    "tirx.erf": lambda x: tirx.call_pure_extern("float32", "erff", x),
    "tirx.sigmoid": call_sigmoid,
}
FLOATS = ("float32", "float64")


def may_bind(value: Expr) -> bool:
    """Whether a variable may stand for `value`: it binds none itself, and holds no bfloat16.

    TVM turns bfloat16 into integers, but not in what a variable stands for: the numbers are wrong,
    or LLVM crashes.
    """
    found: list[Expr] = []

    def note(expr: Expr) -> None:
        if isinstance(expr, tirx.Let) or str(expr.ty).startswith("bfloat16"):
            found.append(expr)

    tvm_ffi.structural_walk(value, (tvm.ir.Expr, note))
    return not found


def expand_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Expand the float32 calls of functions in `EXPANSIONS`, and rewrite those in `VECTOR_FORMS`
    and `C_FUNCTIONS`.

    A call whose argument contains an expanded call or bfloat16 is not expanded. TVM's LLVM
    generator replaces bound variables by their values when it simplifies. Here a variable is read
    some hundred times, so chains would grow by that factor at each step. The schedule gives each
    step a separate block.
    """

    def expand(call: Call) -> Expr:
        name = str(getattr(call.op, "name", ""))
        if name in VECTOR_FORMS and str(call.ty) in FLOATS:
            return VECTOR_FORMS[name](call.args[0])
        make = EXPANSIONS.get(name)
        if make is not None and str(call.ty) == "float32" and may_bind(call.args[0]):
            return bind(avoid_division(name, call.args[0]), make)
        function = C_FUNCTIONS.get((name, str(call.ty)))
        if function is not None:
            return tirx.call_pure_extern(str(call.ty), function, call.args[0])
        return call

    body = tvm_ffi.structural_map(func.body, (tirx.For, call_steady))
    return func.with_body(tvm_ffi.structural_map(body, (Call, expand)))


def call_steady(loop: tirx.For) -> tirx.For:
    """In a vectorized loop, call the C library for what is the same in all its passes.

    TVM visits a product of two such numbers twice, and refuses a variable that is bound in it.
    """
    if loop.kind != tirx.ForKind.VECTORIZED:
        return loop
    moving = {loop.loop_var}

    def note(realize: s_tir.SBlockRealize) -> None:
        pairs = zip(realize.block.iter_vars, realize.iter_values, strict=True)
        moving.update(axis.var for axis, value in pairs if reads(value))

    def reads(value: Expr) -> bool:
        found: list[tirx.Var] = []
        tvm_ffi.structural_walk(value, (tirx.Var, found.append))
        return not moving.isdisjoint(found)

    def call_c(call: Call) -> Expr:
        make = STEADY_FORMS.get(str(getattr(call.op, "name", "")))
        if make is None or str(call.ty) != "float32" or reads(call.args[0]):
            return call
        return make(call.args[0])

    tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, note))
    return tvm_ffi.structural_map(loop, (Call, call_c))


def create_math_pass(target: Target) -> Any:
    """Make a pass that applies `expand_math` to every TIR function.

    Only LLVM targets are changed.
    """

    def expand(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        return expand_math(func) if target.kind.name == "llvm" else func

    return tirx.transform.prim_func_pass(expand, opt_level=0, name="relayquant.ExpandMath")
