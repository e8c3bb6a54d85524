"""ONNX reader: activations named by an attribute of another operator: gates of LSTM, GRU and RNN,
and activations fused into a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tvm import relax

from relayquant.formats.readers.elu import emit_elu, scalar
from relayquant.formats.readers.onnx.operators.conversion import Attrs, Builder, Operands
from relayquant.formats.readers.refusal import Refusal

#: Emits the activation of a value, given alpha and beta.
Apply = Callable[[relax.BlockBuilder, relax.Expr, float, float], relax.Expr]


@dataclass(frozen=True)
class Activation:
    """An activation as defined in ONNX's operator LSTM.

    Attributes:
        name: Name in ONNX.
        apply: Emits the activation.
        parameters: The parameters that it takes ("alpha", "beta") -> default. None if the model
            must give the parameter, because the specification has no default or one that differs
            from ONNX Runtime's.
    """

    name: str
    apply: Apply
    parameters: Mapping[str, float | None] = field(default_factory=dict)

    def choose_parameters(self, given: Mapping[str, list[float]]) -> tuple[float, float]:
        """Return (alpha, beta), removed from the front of the given lists. 0 for a parameter that
        the activation does not take.

        Raises:
            Refusal: a parameter without a default is missing.
        """
        values = {"alpha": 0.0, "beta": 0.0}
        for key, default in self.parameters.items():
            value = given[key].pop(0) if given[key] else default
            if value is None:
                raise Refusal(
                    f"activation {self.name!r} has no {key}, for which runtimes take different "
                    "values; give it"
                )
            values[key] = float(value)
        return values["alpha"], values["beta"]


def find_activation(name: str) -> Activation:
    """Find an activation by name, in any case.

    Raises:
        Refusal: there is no such activation.
    """
    for activation in ACTIVATIONS:
        if activation.name.lower() == name.lower():
            return activation
    known = ", ".join(activation.name for activation in ACTIVATIONS)
    raise Refusal(f"activation {name!r} is not known; allowed: {known}")


def affine(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """alpha * x + beta"""
    product = bb.emit(relax.op.multiply(x, scalar(alpha, x)))
    return bb.emit(relax.op.add(product, scalar(beta, x)))


def hard_sigmoid(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """clip(alpha * x + beta, 0, 1)"""
    return bb.emit(relax.op.clip(affine(bb, x, alpha, beta), 0.0, 1.0))


def scaled_tanh(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """alpha * tanh(beta * x)"""
    inner = bb.emit(relax.op.multiply(x, scalar(beta, x)))
    return bb.emit(relax.op.multiply(bb.emit(relax.op.tanh(inner)), scalar(alpha, x)))


def thresholded_relu(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """x where x >= alpha, else 0"""
    above = bb.emit(relax.op.greater_equal(x, scalar(alpha, x)))
    return bb.emit(relax.op.where(above, x, scalar(0.0, x)))


def softsign(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """x / (1 + |x|)"""
    size = bb.emit(relax.op.add(bb.emit(relax.op.abs(x)), scalar(1.0, x)))
    return bb.emit(relax.op.divide(x, size))


def softplus(bb: Builder, x: relax.Expr, alpha: float, beta: float) -> relax.Expr:
    """log(1 + exp(x)), which is x where it rounds to x"""
    return bb.emit(relax.op.nn.softplus(x, 1.0, 40.0 if str(x.ty.dtype) == "float64" else 20.0))


def convert_softplus(bb: Builder, inputs: Operands, attrs: Attrs, opset: int) -> relax.Expr:
    """Convert Softplus to R.nn.softplus."""
    return softplus(bb, inputs[0], 0.0, 0.0)


ACTIVATIONS: tuple[Activation, ...] = (
    Activation("Relu", lambda bb, x, alpha, beta: bb.emit(relax.op.nn.relu(x))),
    Activation("Tanh", lambda bb, x, alpha, beta: bb.emit(relax.op.tanh(x))),
    Activation("Sigmoid", lambda bb, x, alpha, beta: bb.emit(relax.op.sigmoid(x))),
    Activation("Affine", affine, {"alpha": None, "beta": None}),
    Activation(
        "LeakyRelu",
        lambda bb, x, alpha, beta: bb.emit(relax.op.nn.leakyrelu(x, alpha)),
        {"alpha": 0.01},
    ),
    Activation("ThresholdedRelu", thresholded_relu, {"alpha": None}),
    Activation("ScaledTanh", scaled_tanh, {"alpha": None, "beta": None}),
    Activation("HardSigmoid", hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    Activation("Elu", lambda bb, x, alpha, beta: emit_elu(bb, x, alpha), {"alpha": 1.0}),
    Activation("Softsign", softsign),
    Activation("Softplus", softplus),
)
