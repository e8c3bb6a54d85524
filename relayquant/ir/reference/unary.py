"""Functions of one value, element by element: one row each, for all that names them.

From these rows derive the numpy meaning of Relax's operators, the tables that take their place on
8 bits, the chains that become one table, and what ONNX and Relay call them. Adding a function is
adding a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

Array = np.ndarray[Any, Any]
UnaryFunction = Callable[..., Array]


@dataclass(frozen=True)
class Unary:
    """One function: what it computes, and its names.

    `function` takes an array of floats, and the `attributes` of the Relax operator by name, which
    have defaults; it keeps the dtype.
    """

    name: str
    function: UnaryFunction
    relax: str = ""  #: Relax operator without "relax."; "": there is none
    onnx: str = ""  #: ONNX operator
    relay: str = ""  #: Relay operator of the same meaning
    formula: str = ""  #: for what has no such operator: other rows and ARITHMETIC, in postfix form
    attributes: tuple[str, ...] = ()
    #: the smallest argument; a table takes a smaller one, which quantization noise makes, as this
    low: float | None = None
    is_in_relay_qnn: bool = False  #: Relay has it on integers as well
    is_table: bool = True  #: runs as a table on 8 bits; False: a better form, or no float result

    @property
    def op(self) -> str:
        """Name of the operator in the IR."""
        return f"relax.{self.relax}"

    def evaluate(self, args: list[Any], attrs: Any) -> Array:
        """The numpy meaning of a call of the Relax operator."""
        return self.function(args[0], **{name: getattr(attrs, name) for name in self.attributes})

    def tabulate(self, x: Array, **attributes: Any) -> Array:
        """float32 values for a table, evaluated in float64; never NaN.

        float32 library functions differ by an ulp between machines; float64 ones rounded to
        float32 do so only within about 2^-29 of a rounding boundary.
        """
        x = np.asarray(x).astype("float64")
        with np.errstate(all="ignore"):
            x = x if self.low is None else np.maximum(x, self.low)
            return np.asarray(self.function(x, **attributes)).astype("float32")


def round_to_even(x: Array) -> Array:
    return x if x.dtype.kind in "iu" else np.rint(x)  # which would make floats of integers


def gelu(x: Array) -> Array:
    return x * (0.5 + 0.5 * special.erf(x * x.dtype.type(0.5**0.5)))


def gelu_tanh(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"""
    return 0.5 * x * (1 + np.tanh(x.dtype.type((2 / np.pi) ** 0.5) * (x + 0.044715 * x * x * x)))


def elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def selu(x: Array) -> Array:
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + exp(beta x)) / beta, without overflow; x beyond the threshold."""
    scaled = x * beta
    return np.where(scaled > threshold, x, np.logaddexp(0, scaled) / beta)


def hard_sigmoid(x: Array) -> Array:
    return np.clip(x + 3, 0, 6) / 6


#: operators of two values that a formula may use
ARITHMETIC = ("add", "multiply", "divide")

_GELU = "x 1.4142135623730951 divide erf 1 add x multiply 0.5 multiply"
_GELU_TANH = (
    "x x multiply x multiply 0.044715 multiply x add 0.7978845608028654 multiply tanh 1 add "
    "x multiply 0.5 multiply"
)

UNARY: tuple[Unary, ...] = (
    Unary("sigmoid", special.expit, "sigmoid", "Sigmoid", "sigmoid", is_in_relay_qnn=True),
    Unary("tanh", np.tanh, "tanh", "Tanh", "tanh", is_in_relay_qnn=True),
    Unary("exp", np.exp, "exp", "Exp", "exp", is_in_relay_qnn=True),
    Unary("sqrt", np.sqrt, "sqrt", "Sqrt", "sqrt", low=0.0, is_in_relay_qnn=True),
    Unary(
        "rsqrt", lambda x: 1 / np.sqrt(x), "rsqrt", relay="rsqrt", formula="1 x sqrt divide",
        low=0.0, is_in_relay_qnn=True,
    ),
    Unary("erf", special.erf, "erf", "Erf", "erf", is_in_relay_qnn=True),
    Unary("log", np.log, "log", "Log", "log", low=0.0, is_in_relay_qnn=True),
    Unary("abs", np.abs, "abs", "Abs", "abs", is_in_relay_qnn=True),
    Unary("negative", np.negative, "negative", "Neg"),
    Unary("sign", np.sign, "sign", "Sign", "sign"),
    Unary("floor", np.floor, "floor", "Floor", "floor"),
    Unary("ceil", np.ceil, "ceil", "Ceil", "ceil"),
    Unary("trunc", np.trunc, "trunc", relay="trunc", formula="x sign x abs floor multiply"),
    Unary("round", round_to_even, "round", "Round"),
    Unary("sin", np.sin, "sin", "Sin", "sin"),
    Unary("cos", np.cos, "cos", "Cos", "cos"),
    Unary("atan", np.arctan, "atan", "Atan", "atan"),
    Unary("asinh", np.arcsinh, "asinh", "Asinh", "asinh"),
    Unary("sinh", np.sinh, "sinh", "Sinh"),
    Unary("cosh", np.cosh, "cosh", "Cosh"),
    Unary("gelu", gelu, "nn.gelu", formula=_GELU),
    Unary("gelu_tanh", gelu_tanh, "nn.gelu_tanh", formula=_GELU_TANH),
    Unary("silu", lambda x: x * special.expit(x), "nn.silu", formula="x sigmoid x multiply"),
    Unary("selu", selu, "nn.selu", "Selu"),
    Unary(
        "softplus", softplus, "nn.softplus", "Softplus", attributes=("beta", "threshold")
    ),
    Unary("square", np.square, "square", formula="x x multiply"),
    # tables without an operator of Relax: frontends spell these out, which makes them chains
    Unary("elu", elu),
    Unary("hardsigmoid", hard_sigmoid),
    Unary("hardswish", lambda x: x * hard_sigmoid(x), is_in_relay_qnn=True),
    Unary("mish", lambda x: x * np.tanh(softplus(x))),
    # part of a table only within a chain: alone it is merged into the operator before it
    Unary(
        "relu", lambda x: np.maximum(x, x.dtype.type(0)), "nn.relu", "Relu", "nn.relu",
        is_table=False,
    ),
    # not finite, or without a result, for inputs that a range holds; or met in no network
    Unary("tan", np.tan, "tan", "Tan", "tan", is_table=False),
    Unary("asin", np.arcsin, "asin", "Asin", "asin", is_table=False),
    Unary("acos", np.arccos, "acos", "Acos", "acos", is_table=False),
    Unary("atanh", np.arctanh, "atanh", "Atanh", "atanh", is_table=False),
    Unary("acosh", np.arccosh, "acosh", "Acosh", "acosh", is_table=False),
    # of other dtypes than float, in or out
    Unary("isfinite", np.isfinite, "isfinite", relay="isfinite", is_table=False),
    Unary("isinf", np.isinf, "isinf", "IsInf", "isinf", is_table=False),
    Unary("isnan", np.isnan, "isnan", "IsNaN", "isnan", is_table=False),
    Unary("logical_not", np.logical_not, "logical_not", "Not", "logical_not", is_table=False),
    Unary("bitwise_not", np.bitwise_not, "bitwise_not", relay="bitwise_not", is_table=False),
)  # fmt: skip

#: those that Relax has, by the name of the operator in the IR
RELAX_UNARY: dict[str, Unary] = {row.op: row for row in UNARY if row.relax}

#: Name -> float32 function for `build_table`.
UNARY_FUNCTIONS: dict[str, UnaryFunction] = {
    row.name: row.tabulate for row in UNARY if row.is_table or row.name == "relu"
}


def evaluate_formula(
    formula: str,
    x: Any,
    apply: Callable[[str, list[Any], bool], Any],
    number: Callable[[float], Any],
) -> Any:
    """The value of a formula: apply(name, operands, is_last) of each operator in it."""
    stack: list[Any] = []
    words = formula.split()
    for at, word in enumerate(words, 1):
        if word == "x":
            stack.append(x)
        elif word[0].isdigit():
            stack.append(number(float(word)))
        else:
            count = 2 if word in ARITHMETIC else 1
            operands = [stack.pop() for _ in range(count)][::-1]
            stack.append(apply(word, operands, at == len(words)))
    return stack.pop()
