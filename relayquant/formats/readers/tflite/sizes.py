"""TensorFlow Lite reader: sizes that a file leaves open (-1 in shape_signature), and `shapes=`.

TVM's converter takes the size of an operand from the file, which has 1 for an open one. With
`shapes=`, an operand has the shape of its value instead. A symbolic size has no number there, so
the model is converted with a few numbers in its place: the module holds if all give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relayquant.base import _tvm
from relayquant.errors import ModelError, warn_user
from relayquant.formats.readers.given_shapes import (
    GivenShapes,
    check_given_names,
    check_given_shape,
)
from relayquant.formats.readers.names import SourceNode
from relayquant.formats.readers.refusal import FIX_SIZES, Refusal
from relayquant.ir.reference.frame import Frame
from relayquant.ir.rewrite.expressions import list_bindings

#: Numbers in place of a symbolic size. Of two neighbours one is no multiple of any stride; 1 is
#: repeated by operators; and windows fit into the last. Each size has all of them in another order.
TRIED = (1, 2, 1000)
ORDERS = tuple(permutations(TRIED))


@dataclass(frozen=True)
class OpenSizes:
    """The sizes of one conversion.

    Attributes:
        shapes: Input -> its shape. Empty if all sizes come from the file.
        numbers: Symbolic size -> the number that operators see.
    """

    shapes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    numbers: Mapping[tirx.Var, int] = field(default_factory=dict)

    def see(self, tensor: Any, name: str, value: relax.Expr | None) -> Any:
        """Return a tensor of the file as an operator sees it, with the shape of its value."""
        if not self.shapes:
            return tensor
        if value is not None:
            return SizedTensor(tensor, name, value, self.numbers)
        return OpenTensor(tensor, name) if -1 in read_signature(tensor) else tensor


class OpenTensor:
    """A result, before it is computed, whose size the file leaves open."""

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor, self.name = tensor, name

    def ShapeAsNumpy(self) -> np.ndarray:
        raise Refusal(
            f"it needs the size of its result {self.name!r}, which the file leaves open",
            "Convert the model to TFLite with fixed sizes",
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class SizedTensor(OpenTensor):
    """An operand with the shape of its value."""

    def __init__(
        self, tensor: Any, name: str, value: relax.Expr, numbers: Mapping[tirx.Var, int]
    ) -> None:
        super().__init__(tensor, name)
        self.value, self.numbers = value, numbers

    def ShapeAsNumpy(self) -> np.ndarray:
        ty = self.value.ty
        if not isinstance(ty, relax.TensorType):
            return self.tensor.ShapeAsNumpy()
        frame = Frame(tvm.IRModule(), symbols=dict(self.numbers))
        found = [] if ty.shape is None else list(map(frame.evaluate_number, ty.shape.values))
        if ty.shape is None or None in found:
            raise Refusal(
                f"it needs the size of its operand {self.name!r}, which is known at run time only",
                FIX_SIZES,
            )
        return np.array(found[: self.tensor.ShapeLength()], "int32")  # complex: without the pair


def read_signature(tensor: Any) -> list[int]:
    """Return a tensor's sizes with -1 for those that the file leaves open."""
    for found in (tensor.ShapeSignatureAsNumpy(), tensor.ShapeAsNumpy()):
        if isinstance(found, np.ndarray) and found.size:
            return found.tolist()
    return []


def list_inputs(model: Any) -> dict[str, list[int]]:
    """Return name -> sizes of the inputs of the model."""
    graph = model.Subgraphs(0)
    name = _tvm.load_tflite_frontend().get_tensor_name
    indices = [graph.Inputs(at) for at in range(graph.InputsLength())]
    return {name(graph, index): read_signature(graph.Tensors(index)) for index in indices}


def choose_sizes(model: Any, shapes: GivenShapes | None) -> list[OpenSizes]:
    """Return the sizes of each conversion: one, or more if `shapes` has names.

    A warning names the inputs that `shapes` lacks and whose open sizes are read as 1.

    Raises:
        ModelError: `shapes` contradicts the file.
    """
    inputs = list_inputs(model)
    if not shapes:
        warn_of_open_sizes(inputs)
        return [OpenSizes()]
    check_given_names(shapes, inputs)
    for name, wanted in shapes.items():
        known = [None if size == -1 else size for size in inputs[name]]
        check_given_shape(name, wanted, known)
    warn_of_open_sizes({name: each for name, each in inputs.items() if name not in shapes})
    names = sorted({size for each in shapes.values() for size in each if isinstance(size, str)})
    if len(names) > len(ORDERS):
        raise ModelError(
            f"shapes= has {len(names)} names of sizes ({', '.join(names)}); allowed for TensorFlow "
            f"Lite: {len(ORDERS)}. Give the others numbers.",
            code="RQ101",
        )
    made = []
    for at in range(len(TRIED) if names else 1):
        sizes = {name: tirx.Var(name, "int64") for name in names}
        full = {
            name: tuple(sizes.get(size, size) if isinstance(size, str) else size for size in each)
            for name, each in shapes.items()
        }
        numbers = {sizes[name]: order[at] for name, order in zip(names, ORDERS, strict=False)}
        made.append(OpenSizes(full, numbers))
    return made


def warn_of_open_sizes(inputs: Mapping[str, Sequence[int]]) -> None:
    """Warn that sizes which the file leaves open are read as 1, as LiteRT does."""
    found = {name: tuple(sizes) for name, sizes in inputs.items() if -1 in sizes}
    if not found:
        return
    name, sizes = next(iter(found.items()))
    fixed = tuple(8 if size == -1 else size for size in sizes)
    named = tuple(f"n{at}" if size == -1 else size for at, size in enumerate(sizes))
    warn_user(
        f"The file leaves sizes of inputs open, which are read as 1: "
        f"{', '.join(f'{name!r} {sizes}' for name, sizes in found.items())}. For others: "
        f"shapes={{{name!r}: {fixed}}}, or a name for any size: shapes={{{name!r}: {named}}}.",
        code="RQ202",
    )


def check_same(mods: Sequence[tvm.IRModule], sources: Mapping[str, SourceNode]) -> None:
    """Raise ModelError unless the model is the same for all numbers in place of symbolic sizes."""
    for other in mods[1:]:
        if structural_equal(mods[0], other, map_free_vars=True):
            continue
        pairs = zip(*(list_bindings(mod["main"]) for mod in (mods[0], other)), strict=False)
        names = (one.var.name for one, two in pairs if str(one) != str(two))
        name = next((each for each in names if each in sources), "")
        kind = f"{sources[name].op} (output {name!r})" if name else "an operator"
        raise ModelError(
            f"The TensorFlow Lite model cannot have symbolic sizes: {kind} is another one for each "
            f"size. {FIX_SIZES}.",
            code="RQ202",
        )
