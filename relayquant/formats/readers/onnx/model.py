"""ONNX reader: a model -> a Relax module with all tensor names kept.

It is built on TVM's frontend. `operators.table` lists the operators that TVM would turn into opaque
`call_tir`, or convert wrongly.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import tvm
from tvm import relax

from relayquant.base import _tvm
from relayquant.base.arguments import check_arguments
from relayquant.base.storage.files import DEFAULT_MAX_BYTES, PathLike, reading
from relayquant.errors import ModelError, format_count
from relayquant.formats.readers.names import MARK, SourceNode, name_values
from relayquant.formats.readers.onnx.control_flow import CONTROL_FLOW
from relayquant.formats.readers.onnx.foreign.table import find_foreign
from relayquant.formats.readers.onnx.graph.bodies import Body, find_body, has_body
from relayquant.formats.readers.onnx.graph.file import (
    check_model,
    find_fault,
    fix_shapes,
    name_sizes,
    read_model,
)
from relayquant.formats.readers.onnx.graph.fixed_sizes import fix_sizes, name_squeezed_axes
from relayquant.formats.readers.onnx.graph.fold import find_array, fold_node, settle_sizes
from relayquant.formats.readers.onnx.graph.functions import MAX_NODES, check_expansion
from relayquant.formats.readers.onnx.graph.halves import widen_halves
from relayquant.formats.readers.onnx.graph.inference import (
    STANDARD,
    SizeNames,
    check_node,
    find_schema,
    infer_outputs,
    settle_shape,
)
from relayquant.formats.readers.onnx.graph.inputs import Inputs, fix_inputs
from relayquant.formats.readers.onnx.graph.narrow import WIDENED
from relayquant.formats.readers.onnx.graph.outputs import (
    check_outputs,
    drop_unnamed,
    drop_unread,
    list_read,
)
from relayquant.formats.readers.onnx.graph.positions import check_positions
from relayquant.formats.readers.onnx.graph.rewrite import name_node, rewrite_integer_nodes
from relayquant.formats.readers.onnx.graph.symbolic import (
    emit_tensor,
    find_tensors,
    fold_sizes,
    is_sizes,
)
from relayquant.formats.readers.onnx.operators.broadcast import spread_operands
from relayquant.formats.readers.onnx.operators.frontend import FRONTEND
from relayquant.formats.readers.onnx.operators.table import OPERATORS
from relayquant.formats.readers.refusal import Refusal, describe_failure
from relayquant.ir.rewrite.element_types import ELEMENT_TYPES, is_too_narrow
from relayquant.ir.rewrite.graph import tensor_dtype

#: ONNX operators that TVM confuses with operators of another domain.
EXPANDED = (("", "Attention"),)


@check_arguments
def import_onnx(
    model_or_path: onnx.ModelProto | PathLike,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    *,
    inputs: Inputs | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import an ONNX model with weights bound as constants.

    Parameters of main have the names of the inputs, values the names of the tensors. A value that
    TVM adds in between is named after the tensor it leads to ("conv1_out.1"). The function
    attribute `relayquant.sources` is a JSON text: value name -> {"node": node name, "op": operator
    type, "constants": names of its weights and biases}.

    Args:
        model_or_path: A ModelProto (not changed) or a file. External data must be in the file's
            folder.
        shapes: Input name -> shape. An int fixes a dimension, a str names a symbolic one.
        inputs: Input name -> value (a number or an array), which makes the input a constant. main
            has no such parameter, and an If that depends on it becomes the branch that is taken.
        max_bytes: Refuse larger models, external data included.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file is unreadable or invalid, or an operator is not supported or cannot be
            converted. Names nodes and operators.
    """
    if isinstance(model_or_path, onnx.ModelProto):
        return _import_model(model_or_path, shapes or {}, inputs or {}, max_bytes)
    with reading(model_or_path, "ONNX model", ModelError):
        model = read_model(model_or_path, max_bytes)
        return _import_model(model, shapes or {}, inputs or {}, max_bytes)


def _import_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int | str]],
    inputs: Inputs,
    max_bytes: int,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    opset = check_model(model)
    if len(model.functions):
        check_expansion(model, max_bytes)
        model = onnx.inliner.inline_local_functions(model)
    model = widen_halves(model)
    try:
        nodes, constants = rewrite_integer_nodes(model.graph, opset)
    except ValueError as error:
        raise ModelError(
            f"Cannot convert the model: {error}.{find_fault(model)}", code="RQ202"
        ) from error
    fixed = fix_inputs(model.graph, inputs)
    weights = [*constants, *fixed]
    given = fix_shapes(model.graph, shapes, inputs)
    sized = name_sizes(fix_sizes(nodes, weights, given, opset))
    declared = [*model.graph.output, *model.graph.value_info]
    nodes = name_squeezed_axes(nodes, weights, sized, declared, opset)
    graph = _GraphView(nodes, weights, sized, model.graph.output)
    importer = _Importer(graph)
    try:
        with _tvm.FRONTEND_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mod = importer.convert(opset)
    except Exception as error:
        text = str(error) if isinstance(error, ModelError) else f"Cannot convert the model: {error}"
        raise ModelError(f"{text.rstrip('.')}.{find_fault(model)}", code="RQ202") from error
    return name_values(mod, importer.sources), {}


@dataclass(frozen=True)
class _GraphView:
    """The parts of a GraphProto that the frontend reads. Inputs can be changed without a copy of
    the weights.
    """

    node: Sequence[onnx.NodeProto]
    initializer: Sequence[onnx.TensorProto]
    input: Sequence[onnx.ValueInfoProto]
    output: Sequence[onnx.ValueInfoProto]


# -- reading ---------------------------------------------------------------------------------------


class _Failed(BaseException):
    """Carries a conversion error past a handler of the frontend that prints every Exception."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class _Importer(FRONTEND.ONNXGraphImporter):
    """TVM's importer, with exact names, one error per model and relayquant's own conversions.

    Attributes:
        sources: Value -> the node that computes it.
    """

    def __init__(self, graph: _GraphView) -> None:
        super().__init__({}, {}, keep_params_in_input=False, sanitize=False)
        self.sources: dict[str, SourceNode] = {}
        self._graph = graph
        self._count = self._depth = 0
        self._is_in_body = self._has_block = False
        self._read = {*list_read(graph.node), *(info.name for info in graph.output)}
        self._node = onnx.NodeProto()  # the node that is being converted
        # A value in a body may get the name of an output of its If, but no other name that is
        # taken.
        self._names: dict[str, str] = {}
        self._taken = {*(info.name for info in (*graph.input, *graph.initializer))}
        self._taken.update(
            name for node in graph.node if node.op_type != "If" for name in node.output
        )

    def convert(self, opset: int) -> tvm.IRModule:
        """Convert the graph to a module."""
        # TVM makes no dataflow block if it sees an If among the nodes. No If is left here.
        try:
            return self.from_onnx(replace(self._graph, node=()), opset)
        except BaseException:
            if self._has_block:  # TVM leaves it open, and warns on standard error.
                self.bb._end_block()
            raise

    def _parse_graph_input(self, graph: _GraphView) -> None:
        """Make the parameters. TVM takes a size of 0 for a free one."""
        super()._parse_graph_input(graph)
        for info in graph.input:
            try:
                check_element_type(self._nodes[info.name])
            except Refusal as error:
                text = f"Input {info.name!r} cannot be read: {error}. Declare it as one of these"
                raise ModelError(f"{text}, and cast it.", code="RQ202") from None
            dims = info.type.tensor_type.shape.dim
            is_zero = [dim.HasField("dim_value") and not dim.dim_value for dim in dims]
            if any(is_zero):
                var = self._nodes[info.name]
                sizes = [0 if each else n for each, n in zip(is_zero, var.ty.shape, strict=True)]
                var = relax.Var(var.name, relax.TensorType(sizes, tensor_dtype(var)))
                self._nodes[info.name] = self._inputs[info.name] = var

    def _check_for_unsupported_ops(self, graph: _GraphView) -> None:
        self._check_nodes(self._graph.node)

    def _check_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Raise ModelError with the names of all unsupported operators. Bodies are checked when
        they are built.
        """
        standard = {*FRONTEND._get_convert_map(), *OPERATORS, *CONTROL_FLOW, "Constant"}
        missing: dict[str, list[str]] = {}
        for node in nodes:
            is_standard = node.domain in STANDARD and node.op_type in standard
            is_known = is_standard or find_foreign(node) is not None
            if not is_known and not has_body(node, self.opset):
                name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                missing.setdefault(name, []).append(name_node(node))
        if missing:
            lines = [f"{op} (nodes {', '.join(map(repr, at))})" for op, at in missing.items()]
            raise ModelError(
                f"Not supported, "
                f"{format_count(len(missing), 'operator')} of the model: {'; '.join(lines)}. "
                "Replace them before the export, or convert the model with your own TVM frontend.",
                code="RQ202",
            )

    def _construct_nodes(self, graph: _GraphView) -> None:
        self._has_block = True
        self._construct_all(self._graph.node)
        for info in self._graph.output:
            value = self._nodes.get(info.name)
            if value is not None and is_sizes(value):
                value = self._nodes[info.name] = emit_tensor(self.bb, value)
            check_output(info, value)

    def _construct_all(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            self._count += 1
            try:
                if self._count > MAX_NODES:
                    raise Refusal(
                        "its unrolled loops give the model too many operators; supported: up to "
                        f"{MAX_NODES}",
                        "Use loops with fewer steps",
                    )
                self._construct_node(node)
            except (_Failed, Exception) as error:
                cause = error.cause if isinstance(error, _Failed) else error
                if isinstance(cause, ModelError):
                    # an error of a node in a body, which names that node
                    raise cause from cause.__cause__
                raise ModelError(
                    f"Node {name_node(node)!r} (operator {node.op_type}, opset {self.opset}) "
                    f"cannot be converted: {self._describe_failure(node, cause)}",
                    code="RQ202",
                ) from cause

    def _describe_failure(self, node: onnx.NodeProto, cause: BaseException) -> str:
        missing = next((name for name in node.input if name and name not in self._nodes), "")
        if missing:
            return (
                f"tensor {missing!r} is used before any node computes it; supported: nodes in the "
                "order of the values they read. Sort them"
            )
        operands = {name: self._nodes[name] for name in node.input if name}
        return describe_failure(cause, operands, self.bb.lookup_binding)

    def _construct_node(self, node: onnx.NodeProto) -> None:
        flow = CONTROL_FLOW.get(node.op_type) if node.domain in STANDARD else None
        operands = {name: self._nodes[name] for name in node.input if name}
        is_chosen = flow is not None and node.op_type == "If" and not self._takes_branch(node)
        if flow is not None:
            if is_chosen and not self._depth:
                self._taken.update(node.output)
            inputs = [operands.get(name) for name in node.input]
            build = functools.partial(self._build_body, node)
            values = flow(self.bb, inputs, self._parse_attr(node.attribute), build)
        else:
            schema = find_schema(node, self.opset)
            if not self._is_in_body:
                node = drop_unread(node, schema, self._read, self.opset)
            is_onnx = node.domain in STANDARD and find_foreign(node) is None
            if is_onnx and node.op_type != "Constant":
                check_node(node, self.opset)
            if schema is not None:
                check_positions(node, schema, [operands.get(name) for name in node.input])
            values = fold_node(node, operands, self.opset)
            if values is None:
                values = fold_sizes(node, operands, self.opset)
            if values is None:
                self._convert_node(node, schema, operands)
                self._name_outputs(node)
                return
        for name, value in zip(node.output, values, strict=False):
            self._nodes[name] = value
        if is_chosen:
            self._name_outputs(node)

    def _takes_branch(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is an If that becomes one of its branches."""
        return node.op_type == "If" and find_array(self._nodes[node.input[0]]) is not None

    def _convert_node(
        self,
        node: onnx.NodeProto,
        schema: onnx.defs.OpSchema | None,
        operands: Mapping[str, relax.Expr],
    ) -> None:
        """Convert a node and return its outputs, each with a shape."""
        inputs = [operands.get(name) for name in node.input]
        names = SizeNames()
        inferred: Mapping[str, onnx.TypeProto] = {}
        if schema is not None:
            inferred = infer_outputs(node, schema, operands, self.opset, names)
        body = find_body(node, inputs, self.opset) if self._wants_body(node) else None
        if body is not None:
            self._construct_body(node, body)
        else:
            self._node = node = drop_unnamed(node, schema)
            sizes = {name: operands[name] for name in find_tensors(node, operands)}
            self._nodes.update({name: emit_tensor(self.bb, sizes[name]) for name in sizes})
            super()._construct_nodes(_GraphView([node], (), (), ()))
            self._nodes.update(sizes)
        for name in node.output:
            if name:
                value, known = self._nodes[name], inferred.get(name)
                check_element_type(value)
                self._nodes[name] = settle_shape(self.bb, value, known, names, name)

    def _wants_body(self, node: onnx.NodeProto) -> bool:
        """Return whether a node is built from its ONNX function body, because TVM has no operator
        of this name, or a different one.
        """
        if node.domain not in STANDARD or node.op_type in OPERATORS:
            return False
        is_missing = node.op_type not in FRONTEND._get_convert_map()
        return is_missing or (node.domain, node.op_type) in EXPANDED

    def _construct_body(self, node: onnx.NodeProto, body: Body) -> None:
        """Convert the nodes of a body. Its values have no names of their own."""
        self._check_nodes(body.nodes)
        self._count += len(body.nodes)
        outer, opset, is_in_body = self._nodes, self.opset, self._is_in_body
        self._nodes = {name: outer[name] for name in node.input if name}
        self.opset, self._is_in_body = body.opset, True
        try:
            for inner in body.nodes:
                self._construct_node(inner)
            results = {name: self._nodes[name] for name in node.output if name}
        finally:
            self._nodes, self.opset, self._is_in_body = outer, opset, is_in_body
        self._nodes.update(results)

    def _build_body(
        self, node: onnx.NodeProto, body: onnx.GraphProto, operands: Sequence[relax.Expr]
    ) -> list[relax.Expr]:
        """Build a branch or loop body and return its outputs. The body sees outer values. Its inner
        values are not visible outside.
        """
        self._check_nodes(body.node)
        outer, outer_names = self._nodes, self._names
        self._nodes = outer | {
            info.name: value for info, value in zip(body.input, operands, strict=True)
        }
        if self._takes_branch(node):  # its outputs are the branch's outputs
            given = zip((info.name for info in body.output), node.output, strict=True)
            self._names = outer_names | {
                inner: outer_names.get(name, name) for inner, name in given
            }
        self._depth += 1
        try:
            self._parse_graph_initializers(body)
            self._construct_all(body.node)
            return [self._nodes[info.name] for info in body.output]
        finally:
            self._nodes, self._names = outer, outer_names
            self._depth -= 1

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        try:
            foreign = find_foreign(self._node)
            if foreign is None:
                convert = OPERATORS.get(op_name)
                inputs[:] = spread_operands(self.bb, op_name, inputs)
            else:
                foreign.check_types(inputs)
                convert, attrs = foreign.convert, foreign.select_attributes(attrs)
            converted = None if convert is None else convert(self.bb, inputs, attrs, opset)
            if converted is None:
                converted = super()._convert_operator(op_name, inputs, attrs, opset)
            else:
                converted = self.bb.normalize(converted)
            check_outputs(self._node.output, converted)
            return converted
        except Exception as error:
            raise _Failed(error) from error

    def _name_outputs(self, node: onnx.NodeProto) -> None:
        """Bind each output of the node to a value with its name, except constants and shapes."""
        for name in node.output:
            if not name:
                continue
            value = self._nodes[name] = settle_sizes(self._nodes[name])
            if self._is_in_body:
                if isinstance(value, tvm.ir.Call | relax.TupleGetItem):
                    self._nodes[name] = self.bb.emit(value)
                continue
            shown = self._choose_name(name)
            self.sources[shown] = SourceNode(node.name, node.op_type, self._find_constants(node))
            is_tensor = isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)
            if is_tensor and not isinstance(value, tvm.ir.GenericConst):
                var = relax.DataflowVar(MARK + shown, value.ty)
                self.bb.emit_normalized(relax.VarBinding(var, self.bb.normalize(value)))
                self._nodes[name] = var

    def _choose_name(self, name: str) -> str:
        """Choose the name of a value: its tensor's name, with a number appended if a body is built
        more than once.
        """
        if not self._depth:
            return name
        base = shown = self._names.get(name, name)
        for count in itertools.count(1):
            if shown not in self._taken:
                break
            shown = f"{base}.{count}"
        self._taken.add(shown)
        return shown

    def _find_constants(self, node: onnx.NodeProto) -> tuple[str, ...]:
        """Return the names of the constant operands of a node, the highest rank first."""
        operands = {name: self._nodes[name] for name in node.input if name in self._nodes}
        ranks = {
            name: value.ty.ndim
            for name, value in operands.items()
            if isinstance(value, tvm.ir.GenericConst)
        }
        return tuple(sorted(ranks, key=lambda name: -ranks[name]))


def check_element_type(value: Any) -> None:
    """Raise Refusal for a value, computed when the model runs, whose elements have so few bits that
    no code computes them.
    """
    dtype = "" if isinstance(value, tvm.ir.GenericConst) else tensor_dtype(value)
    if is_too_narrow(dtype):
        raise Refusal(f"its elements are {dtype}; supported: {ELEMENT_TYPES}")


def check_output(info: onnx.ValueInfoProto, value: Any) -> None:
    """Raise ModelError for an output whose type differs from the declared type. 4-bit integers are
    stored in 8 bits.
    """
    declared = info.type.tensor_type.elem_type
    if not declared or declared in WIDENED or not isinstance(value, relax.Expr):
        return
    name = onnx.TensorProto.DataType.Name(declared).lower()
    wanted = str(onnx.helper.tensor_dtype_to_np_dtype(declared))
    if tensor_dtype(value) not in ("", wanted):
        raise ModelError(
            f"The model is not valid ONNX: output {info.name!r} is declared as {name}, and "
            f"computed as {tensor_dtype(value)}. Declare the type that is computed.",
            code="RQ502",
        )
