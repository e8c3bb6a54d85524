"""A Llama of random weights as an ONNX file, float or with MatMulNBits, for the table of language
models: one token behind a cache of keys and values, or a text without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from relayquant.base.packing import pack_codes


@dataclass(frozen=True)
class Llama:
    """Sizes, and what a run takes: `rows` tokens behind `seen` others."""

    rows: int
    seen: int
    width: int = 2048
    hidden: int = 5632
    layers: int = 4
    heads: int = 16
    group: int = 32  #: weights that share a scale
    vocabulary: int = 8192

    @property
    def head(self) -> int:
        return self.width // self.heads


class LlamaGraph:
    """Nodes and constants as they are made. `group`: of products, 4 bits; None: they are float."""

    def __init__(self, llama: Llama, group: int | None) -> None:
        self.llama, self.group = llama, group
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def call(self, op: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        name = f"{op}_{len(self.nodes)}"
        node = helper.make_node(op, inputs, [name], name, domain=domain, **attributes)
        self.nodes.append(node)
        return name

    def constant(self, value: object, dtype: str = "float32") -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def draw(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, "float32") / np.float32(np.sqrt(shape[-1]))

    def product(self, x: str, units: int, features: int) -> str:
        """x by a weight (units, features), in groups the one that the float one rounds to."""
        weight = self.draw(units, features)
        if self.group is None:
            return self.call("MatMul", x, self.constant(weight.T))
        groups = weight.reshape(units, -1, self.group)
        scale = np.abs(groups).max(-1, keepdims=True) / 7
        codes = pack_codes(np.clip(np.rint(groups / scale) + 8, 0, 15), 4)
        form = {"K": features, "N": units, "bits": 4, "block_size": self.group}
        operands = self.constant(codes, "uint8"), self.constant(scale.reshape(-1))
        return self.call("MatMulNBits", x, *operands, domain="com.microsoft",
                         accuracy_level=4, **form)  # fmt: skip

    def norm(self, x: str) -> str:
        square = self.call("ReduceMean", self.call("Mul", x, x), axes=[-1], keepdims=1)
        root = self.call("Sqrt", self.call("Add", square, self.constant(1e-5)))
        weight = self.constant(np.ones(self.llama.width))
        return self.call("Mul", self.call("Div", x, root), weight)

    def part_heads(self, x: str) -> str:
        shape = self.constant([1, self.llama.rows, self.llama.heads, self.llama.head], "int64")
        return self.call("Transpose", self.call("Reshape", x, shape), perm=[0, 2, 1, 3])

    def rotate(self, x: str) -> str:
        half = self.llama.head // 2
        low, high = (
            self.call("Slice", x, *(self.constant([v], "int64") for v in (a, b, 3)))
            for a, b in ((0, half), (half, 2 * half))
        )
        turned = self.call("Concat", self.call("Neg", high), low, axis=-1)
        return self.call("Add", self.call("Mul", x, "cos"), self.call("Mul", turned, "sin"))

    def layer(self, x: str, number: int, mask: str | None) -> tuple[str, ...]:
        """The result, keys and values."""
        llama, width = self.llama, self.llama.width
        h = self.norm(x)
        q, k, v = (self.part_heads(self.product(h, width, width)) for _ in range(3))
        q, k = self.rotate(q), self.rotate(k)
        if llama.seen:
            k, v = (
                self.call("Concat", f"{name}{number}", new, axis=2)
                for name, new in (("k", k), ("v", v))
            )
        score = self.call("MatMul", q, self.call("Transpose", k, perm=[0, 1, 3, 2]))
        score = self.call("Mul", score, self.constant(llama.head**-0.5))
        if mask is not None:
            score = self.call("Add", score, mask)
        mixed = self.call("MatMul", self.call("Softmax", score, axis=-1), v)
        shape = self.constant([1, llama.rows, width], "int64")
        mixed = self.call("Reshape", self.call("Transpose", mixed, perm=[0, 2, 1, 3]), shape)
        x = self.call("Add", x, self.product(mixed, width, width))
        h = self.norm(x)
        gate, up = (self.product(h, llama.hidden, width) for _ in range(2))
        gated = self.call("Mul", self.call("Mul", gate, self.call("Sigmoid", gate)), up)
        return self.call("Add", x, self.product(gated, width, llama.hidden)), k, v


def llama_inputs(llama: Llama) -> dict[str, np.ndarray]:
    """Inputs by name, in order."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 6, (llama.rows, llama.head // 2))
    arrays = {"tokens": rng.integers(0, llama.vocabulary, (1, llama.rows))}
    for name, function in (("cos", np.cos), ("sin", np.sin)):
        arrays[name] = np.concatenate([function(angle)] * 2, -1).astype("float32")
    if llama.seen:
        shape = 1, llama.heads, llama.seen, llama.head
        for number in range(llama.layers):
            arrays |= {f"{n}{number}": rng.standard_normal(shape, "float32") for n in "kv"}
    else:
        arrays["mask"] = np.triu(np.full((llama.rows, llama.rows), -1e9, "float32"), 1)
    return arrays


def save_llama(llama: Llama, group: int | None, path: Path) -> None:
    """Writes the model."""
    graph, arrays = LlamaGraph(llama, group), llama_inputs(llama)
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    mask = "mask" if "mask" in arrays else None
    table = graph.constant(graph.draw(llama.vocabulary, llama.width))
    x, results = graph.call("Gather", table, "tokens"), []
    for number in range(llama.layers):
        x, *cache = graph.layer(x, number, mask)
        results += cache
    results.insert(0, graph.product(graph.norm(x), llama.vocabulary, llama.width))
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
    made = helper.make_graph(graph.nodes, "llama", inputs, outputs, graph.constants)
    opsets = [helper.make_opsetid("", 17)]
    if group is not None:
        opsets.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(helper.make_model(made, opset_imports=opsets, ir_version=9), path)
