"""Elementwise functions of one value, one row each.

The rows define the numpy forms of Relax operators, the tables for 8-bit data, the chains that
become one table, and the names in ONNX and Relay. A new function needs one new row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

Array = np.ndarray[Any, Any]
UnaryFunction = Callable[..., Array]

#: Klambauer et al. 2017, https://arxiv.org/abs/1706.02515
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@dataclass(frozen=True)
class Unary:
    """One function: its numpy form and its names.

    `function` takes a float array and keeps its dtype. The `attributes` of the Relax operator are
    keyword arguments with defaults.
    """

    name: str
    function: UnaryFunction
    relax: str = ""  #: Relax operator without "relax.", or "" if there is none
    onnx: str = ""  #: ONNX operator
    relay: str = ""  #: Relay operator with the same meaning
    formula: str = ""  #: if there is no Relay operator: rows and ARITHMETIC in postfix form
    attributes: tuple[str, ...] = ()
    #: the smallest argument; quantization noise makes smaller ones, and a table clamps them to it
    low: float | None = None
    is_in_relay_qnn: bool = False  #: Relay has the operator on integers too
    #: runs as a table on 8-bit data; False: there is a better form, or the result is not float
    is_table: bool = True

    @property
    def op(self) -> str:
        """The operator's name in the IR."""
        return f"relax.{self.relax}"

    def evaluate(self, args: list[Any], attrs: Any) -> Array:
        """Evaluate a call of the Relax operator in numpy."""
        return self.function(args[0], **{name: getattr(attrs, name) for name in self.attributes})

    def tabulate(self, x: Array, **attributes: Any) -> Array:
        """Compute float32 values for a table, evaluated in float64. The result has no NaN.

        float32 library functions differ by an ulp between machines. float64 functions that are
        rounded to float32 differ only within about 2^-29 of a rounding boundary.
        """
        x = np.asarray(x).astype("float64")
        with np.errstate(all="ignore"):
            x = x if self.low is None else np.maximum(x, self.low)
            return np.asarray(self.function(x, **attributes)).astype("float32")


def round_to_even(x: Array) -> Array:
    return x if x.dtype.kind in "iu" else np.rint(x)  # without this, integers would become floats


def gelu(x: Array) -> Array:
    return x * (0.5 + 0.5 * special.erf(x * x.dtype.type(0.5**0.5)))


def gelu_tanh(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"""
    return 0.5 * x * (1 + np.tanh(x.dtype.type((2 / np.pi) ** 0.5) * (x + 0.044715 * x * x * x)))


def elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def selu(x: Array) -> Array:
    return SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(np.minimum(x, 0)))


def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """Compute log(1 + exp(beta x)) / beta without overflow. Beyond the threshold, return x."""
    scaled = x * beta
    return np.where(scaled > threshold, x, np.logaddexp(0, scaled) / beta)


def hard_sigmoid(x: Array) -> Array:
    return np.clip(x + 3, 0, 6) / 6


#: binary operators that a formula may use
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
    # tables without a Relax operator: frontends write these as several operators, which form a
    # chain
    Unary("elu", elu),
    Unary("hardsigmoid", hard_sigmoid),
    Unary("hardswish", lambda x: x * hard_sigmoid(x), is_in_relay_qnn=True),
    Unary("mish", lambda x: x * np.tanh(softplus(x))),
    # part of a table only inside a chain: a single one is merged into the operator before it
    Unary(
        "relu", lambda x: np.maximum(x.dtype.type(0), x), "nn.relu", "Relu", "nn.relu",
        is_table=False,
    ),
    # infinite or undefined for usual inputs, or not used in networks
    Unary("tan", np.tan, "tan", "Tan", "tan", is_table=False),
    Unary("asin", np.arcsin, "asin", "Asin", "asin", is_table=False),
    Unary("acos", np.arccos, "acos", "Acos", "acos", is_table=False),
    Unary("atanh", np.arctanh, "atanh", "Atanh", "atanh", is_table=False),
    Unary("acosh", np.arccosh, "acosh", "Acosh", "acosh", is_table=False),
    # input or result is not float
    Unary("isfinite", np.isfinite, "isfinite", relay="isfinite", is_table=False),
    Unary("isinf", np.isinf, "isinf", "IsInf", "isinf", is_table=False),
    Unary("isnan", np.isnan, "isnan", "IsNaN", "isnan", is_table=False),
    Unary("logical_not", np.logical_not, "logical_not", "Not", "logical_not", is_table=False),
    Unary("bitwise_not", np.bitwise_not, "bitwise_not", relay="bitwise_not", is_table=False),
)  # fmt: skip

#: rows with a Relax operator, by the operator's name in the IR
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
    """Evaluate a formula with apply(name, operands, is_last) for each operator in it."""
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
