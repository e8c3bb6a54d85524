"""ONNX models of some nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

#: What the oldest ONNX Runtime of the tests reads.
IR_VERSION = 10
#: Domain -> its version. Those that are not here have version 1.
VERSIONS = {"ai.onnx.ml": 3}


def make_onnx(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | Iterable[str] | str = "y",
    constants: Mapping[str, Any] | Iterable[onnx.TensorProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    """A model of nodes, with the domains that they are of.

    Args:
        inputs: Name -> what `describe` takes.
        outputs: The same, or a name or names of values that the file does not describe.
        constants: Name -> array or number, or tensors.
    """
    if isinstance(outputs, Mapping):
        ends = [describe(*each) for each in outputs.items()]
    else:
        names = [outputs] if isinstance(outputs, str) else outputs
        ends = [onnx.ValueInfoProto(name=name) for name in names]
    if isinstance(constants, Mapping):
        constants = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    starts = [describe(*each) for each in inputs.items()]
    graph = helper.make_graph(nodes, "model", starts, ends, [*constants])
    domains = dict.fromkeys(node.domain for node in nodes if node.domain)
    opsets = [helper.make_opsetid(name, VERSIONS.get(name, 1)) for name in domains]
    opsets.insert(0, helper.make_opsetid("", opset))
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def describe(name: str, of: Any) -> onnx.ValueInfoProto:
    """A value of an array's dtype and shape, of a (dtype, shape), or of float32 and a shape.

    A dtype is numpy's, or ONNX's number of it. A shape is None, or has numbers and names.
    """
    dtype, shape = "float32", of
    if isinstance(of, np.ndarray | np.generic):
        dtype, shape = of.dtype, of.shape
    elif isinstance(of, tuple) and len(of) == 2 and isinstance(of[1], tuple | list | None):
        dtype, shape = of
    is_known = isinstance(dtype, int)
    element = dtype if is_known else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, shape)
