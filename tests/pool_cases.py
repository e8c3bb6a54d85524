"""Pools drawn from the schemas of ONNX's operators, and what ONNX Runtime computes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper
from onnx_models import make_onnx

OPSET = 22
#: what a pool is drawn from: one draw for each attribute of its schema, None leaves it out
DRAWS = {
    "kernel_shape": lambda rng, sizes: [rng.randint(1, 4) for _ in sizes],
    "strides": lambda rng, sizes: rng.choice([None, [rng.randint(1, 4) for _ in sizes]]),
    "dilations": lambda rng, sizes: rng.choice([None, None, [rng.randint(1, 3) for _ in sizes]]),
    "pads": lambda rng, sizes: rng.choice([None, [rng.randint(0, 3) for _ in 2 * sizes]]),
    "auto_pad": lambda rng, _: rng.choice([None, None, "SAME_UPPER", "SAME_LOWER", "VALID"]),
    "ceil_mode": lambda rng, _: rng.choice([None, 0, 1, 1]),
    "count_include_pad": lambda rng, _: rng.choice([None, 0, 1, 1]),
    "storage_order": lambda rng, _: rng.choice([None, 0, 1]),
    "p": lambda rng, _: rng.choice([None, 1, 2, 3]),
}


@dataclass(frozen=True)
class PoolCase:
    """One pool of (2, 3, *sizes), and its attributes."""

    op: str
    sizes: tuple[int, ...]
    attributes: dict = field(hash=False)

    def __str__(self) -> str:
        return f"{self.op} {self.sizes} {self.attributes}"

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def get(self, name: str) -> list[int]:
        """Numbers of an attribute, one for each axis, two of `pads`."""
        neutral = 0 if name == "pads" else 1
        return self.attributes.get(name) or [neutral] * (1 + (name == "pads")) * self.rank

    @property
    def free(self) -> list[int]:
        """Elements along each axis of padded data that the first window leaves."""
        befores, afters = self.get("pads")[: self.rank], self.get("pads")[self.rank :]
        windows = zip(self.get("kernel_shape"), self.get("dilations"), strict=True)
        padded = map(sum, zip(self.sizes, befores, afters, strict=True))
        return [size - (k - 1) * d - 1 for size, (k, d) in zip(padded, windows, strict=True)]

    @property
    def ends_beyond(self) -> bool:
        """Whether some last window ends beyond the padding, and counts padding."""
        afters, strides = self.get("pads")[self.rank :], self.get("strides")
        ends = [
            # the next window begins in the data, if what is left of it is more than padding
            n % stride and n - n % stride + stride < n + (kernel - 1) * dilation + 1 - after
            for n, stride, kernel, dilation, after in zip(
                self.free, strides, self.get("kernel_shape"), self.get("dilations"), afters,
                strict=True,
            )
        ]  # fmt: skip
        return all(map(self.attributes.get, ("ceil_mode", "count_include_pad"))) and any(ends)


def draw_case(op: str, seed: int) -> PoolCase:
    """A pool with the attributes of the operator's schema that ONNX Runtime takes, and computes as
    ONNX says: it forgets dilations in automatic pads.
    """
    rng = random.Random(f"{op} {seed}")
    sizes = tuple(rng.randint(3, 9) for _ in range(rng.choice([1, 2, 2, 3])))
    drawn = {
        name: DRAWS[name](rng, sizes) for name in sorted(onnx.defs.get_schema(op, OPSET).attributes)
    }
    given = {name: value for name, value in drawn.items() if value is not None}
    kernel = given["kernel_shape"]
    if "auto_pad" in given:
        given.pop("pads", None)
        if given["auto_pad"] != "VALID":
            given.pop("dilations", None)
            strides = given.get("strides", kernel)
            given["kernel_shape"] = [max(k, s) for k, s in zip(kernel, strides, strict=True)]
    elif "pads" in given:
        given["pads"] = [min(p, k - 1) for p, k in zip(given["pads"], kernel * 2, strict=True)]
    return PoolCase(op, sizes, given)


def make_model(case: PoolCase, is_between: bool = False) -> onnx.ModelProto:
    """The pool of x to y; between two convolutions that change nothing, if asked."""
    names = ("before", "after") if is_between else ("x", "y")
    nodes = [helper.make_node(case.op, [names[0]], [names[1]], **case.attributes)]
    if is_between:
        convolutions = (["x", "one"], ["before"]), (["after", "one"], ["y"])
        first, last = (helper.make_node("Conv", *tensors) for tensors in convolutions)
        nodes = [first, *nodes, last]
    one = np.eye(3, dtype="float32").reshape(3, 3, *[1] * case.rank)
    constants = {"one": one} if is_between else {}
    return make_onnx(nodes, {"x": [2, 3, *case.sizes]}, {"y": None}, constants, OPSET)


def draw_data(case: PoolCase, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(batch, 3, *case.sizes)).astype("float32")
