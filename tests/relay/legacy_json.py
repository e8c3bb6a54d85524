"""Writes the node graph in which TVM before 0.20 saved modules as JSON, for small test modules."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from relayquant.relay.tensors import encode_tensor


class LegacyJson:
    """Methods add a node and give its index."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = [{"type_key": ""}]
        self.tensors: list[str] = []

    def add(self, key: str, **attrs: Any) -> int:
        node: dict[str, Any] = {"type_key": key}
        if attrs:
            node["attrs"] = {name: str(value) for name, value in attrs.items()}
        self.nodes.append(node)
        return len(self.nodes) - 1

    def text(self, value: str, key: str = "runtime.String") -> int:
        self.nodes.append({"type_key": key, "repr_str": value})
        return len(self.nodes) - 1

    def array(self, items: Sequence[int]) -> int:
        self.nodes.append({"type_key": "Array", "data": list(items)})
        return len(self.nodes) - 1

    def map(self, items: Sequence[int], keys: Sequence[str] | None = None) -> int:
        node: dict[str, Any] = {"type_key": "Map", "data": list(items)}
        self.nodes.append(node if keys is None else {**node, "keys": list(keys)})
        return len(self.nodes) - 1

    def ints(self, *values: int) -> int:
        return self.array([self.add("IntImm", dtype="int32", span=0, value=v) for v in values])

    def type(self, shape: Sequence[int], dtype: str = "float32") -> int:
        return self.add("relay.TensorType", dtype=dtype, shape=self.ints(*shape), span=0)

    def var(self, name: str, kind: int = 0) -> int:
        vid = self.add("relay.Id", name_hint=self.text(name))
        return self.add("relay.Var", type_annotation=kind, vid=vid, span=0)

    def constant(self, array: np.ndarray) -> int:
        self.tensors.append(base64.b64encode(encode_tensor(array)).decode())
        return self.add("relay.Constant", data=len(self.tensors) - 1, span=0)

    def call(self, op: str | int, args: Sequence[int], attrs: int = 0) -> int:
        callee = self.text(op, "Op") if isinstance(op, str) else op
        return self.add("relay.Call", op=callee, args=self.array(args), attrs=attrs, span=0)

    def function(self, params: Sequence[int], body: int, result: int = 0) -> int:
        attrs = self.add("DictAttrs", __dict__=self.map([], []))
        return self.add(
            "relay.Function",
            params=self.array(params),
            body=body,
            ret_type=result,
            type_params=self.array([]),
            attrs=attrs,
        )

    def global_var(self, name: str) -> int:
        return self.add("GlobalVar", name_hint=self.text(name), span=0)

    def module(self, functions: Sequence[tuple[int, int]]) -> str:
        """The file of a module of (global variable, function)."""
        items = [index for pair in functions for index in pair]
        return self.file(self.add("IRModule", functions=self.map(items)))

    def file(self, root: int) -> str:
        document = {"root": root, "nodes": self.nodes, "b64ndarrays": self.tensors}
        return json.dumps({**document, "attrs": {"tvm_version": "0.19.0"}}, indent=2)


def conv_module() -> str:
    """relu(conv2d(x, w) + b), with a let, a tuple, an `if` and a call of another function."""
    graph = LegacyJson()
    kind = graph.type((1, 2, 4, 4))
    x = graph.var("data", kind)
    w = graph.constant(np.linspace(-1, 1, 36, dtype="float32").reshape(2, 2, 3, 3))
    attrs = graph.add(
        "relay.attrs.Conv2DAttrs",
        strides=graph.ints(1, 1),
        padding=graph.ints(1, 1, 1, 1),
        dilation=graph.ints(1, 1),
        groups=1,
        channels=graph.add("IntImm", dtype="int32", span=0, value=2),
        kernel_size=graph.ints(3, 3),
        data_layout=graph.text("NCHW"),
        kernel_layout=graph.text("OIHW"),
        out_layout=graph.text(""),
        out_dtype="",
    )
    conv = graph.call("nn.conv2d", [x, w], attrs)
    b = graph.constant(np.array([0.5, -0.5], "float32"))
    biased = graph.call("nn.bias_add", [conv, b], graph.add("relay.attrs.BiasAddAttrs", axis=1))
    y = graph.var("y", kind)
    helper = graph.function([y], graph.call("nn.relu", [y]), kind)
    name = graph.global_var("helper")
    kept = graph.var("kept", kind)
    pair = graph.add("relay.Tuple", fields=graph.array([kept, x]))
    first = graph.add("relay.TupleGetItem", tuple_value=pair, index=0)
    both = graph.add(
        "relay.If",
        cond=graph.constant(np.array(True)),
        true_branch=graph.call("add", [first, x]),
        false_branch=x,
    )
    body = graph.add("relay.Let", var=kept, value=graph.call(name, [biased]), body=both)
    main = graph.function([x], body, kind)
    return graph.module([(graph.global_var("main"), main), (name, helper)])
