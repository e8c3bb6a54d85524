"""First stage, ONNX: a model becomes a Relax module with every tensor name kept.

Built on TVM's frontend. Operators that it would turn into opaque `call_tir`, or get wrong, are
converted by `relayquant.importers.onnx_operators`.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import tvm
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from tvm import relax

from relayquant import _tvm
from relayquant.arguments import check_arguments
from relayquant.errors import ModelError, format_count, suggest_name
from relayquant.importers.files import DEFAULT_MAX_BYTES, PathLike, check_file
from relayquant.importers.names import MARK, SourceNode, name_values
from relayquant.importers.onnx_bodies import Body, find_body, has_body
from relayquant.importers.onnx_control_flow import CONTROL_FLOW
from relayquant.importers.onnx_fold import fold_node, settle_sizes
from relayquant.importers.onnx_functions import MAX_NODES, check_expansion
from relayquant.importers.onnx_inputs import Inputs, fix_inputs
from relayquant.importers.onnx_operators import FOREIGN, OPERATORS
from relayquant.importers.onnx_rewrite import rewrite_integer_nodes
from relayquant.importers.refusal import Refusal, describe_failure
from relayquant.storage.files import reading

_FRONTEND = _tvm.load_onnx_frontend()

#: Broadcasting works as in numpy from here on; older models carry axis attributes that TVM ignores.
MIN_OPSET = 7

#: Names of the domain of ONNX's own operators. Those of others are known as `FOREIGN` ones alone:
#: an operator of another domain is another one, whatever its name.
STANDARD = ("", "ai.onnx")

#: Operators of ONNX that TVM takes for those of another domain.
EXPANDED = (("", "Attention"),)

#: Largest input or weight that is taken for meant, in elements.
MAX_ELEMENTS = 2**40


@check_arguments
def import_onnx(
    model_or_path: onnx.ModelProto | PathLike,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    *,
    inputs: Inputs | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Import an ONNX model, weights bound as constants.

    Parameters of main are named as the inputs, values as the tensors of the graph. A value that
    TVM adds on the way is named after the tensor it leads to ("conv1_out.1"). Function attribute
    `relayquant.sources` is a JSON text: value name -> {"node": node name, "op": operator type,
    "constants": names of its weights and biases}.

    Args:
        model_or_path: A ModelProto (not changed) or a file. External data must lie in the file's
            folder.
        shapes: Input name -> shape; an int fixes a dimension, a str names a symbolic one.
        inputs: Input name -> its value (a number or an array), which makes it a constant: main has
            no such parameter, and an If on it becomes the branch that is taken.
        max_bytes: Refuse larger models, external data included.

    Returns:
        The module and {} (no parameter is left unbound).

    Raises:
        ModelError: the file is unreadable or invalid, an operator is not supported or cannot be
        converted;
            the message names nodes and operators.
    """
    if isinstance(model_or_path, onnx.ModelProto):
        return _import_model(model_or_path, shapes or {}, inputs or {}, max_bytes)
    with reading(model_or_path, "ONNX model", ModelError):
        model = _read_model(model_or_path, max_bytes)
        return _import_model(model, shapes or {}, inputs or {}, max_bytes)


def _import_model(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[int | str]],
    inputs: Inputs,
    max_bytes: int,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    opset = _check_model(model)
    if len(model.functions):
        check_expansion(model, max_bytes)
        model = onnx.inliner.inline_local_functions(model)
    try:
        nodes, constants = rewrite_integer_nodes(model.graph)
    except ValueError as error:
        raise ModelError(f"Cannot convert the model: {error}.{_find_fault(model)}") from error
    fixed = fix_inputs(model.graph, inputs)
    graph = _GraphView(
        nodes,
        [*constants, *fixed],
        _fix_shapes(model.graph, shapes, inputs),
        model.graph.output,
    )
    importer = _Importer(graph)
    try:
        with _tvm.FRONTEND_LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mod = importer.convert(opset)
    except Exception as error:
        text = str(error) if isinstance(error, ModelError) else f"Cannot convert the model: {error}"
        raise ModelError(f"{text.rstrip('.')}.{_find_fault(model)}") from error
    return name_values(mod, importer.sources), {}


@dataclass(frozen=True)
class _GraphView:
    """The parts of a GraphProto that the frontend reads, so that inputs change without copying
    weights.
    """

    node: Sequence[onnx.NodeProto]
    initializer: Sequence[onnx.TensorProto]
    input: Sequence[onnx.ValueInfoProto]
    output: Sequence[onnx.ValueInfoProto]


# -- reading ---------------------------------------------------------------------------------------


def _read_model(path: PathLike, max_bytes: int) -> onnx.ModelProto:
    path = check_file(path, max_bytes)
    with reading(path, "ONNX model", ModelError):
        model = onnx.load(str(path), load_external_data=False)
    if not model.HasField("graph"):
        raise ModelError(f"{str(path)!r} is not an ONNX model: it holds no graph.")
    external = {
        name: _external_file(path, tensor, name)
        for name, tensor in _model_tensors(model)
        if uses_external_data(tensor)
    }
    if external:
        extra = sum(file.stat().st_size for file in set(external.values()))
        check_file(path, max_bytes, extra_bytes=extra)
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except Exception as error:
            raise ModelError(f"External data of {str(path)!r} cannot be read: {error}") from error
    return model


def _model_tensors(model: onnx.ModelProto) -> Iterable[tuple[str, onnx.TensorProto]]:
    for part in (model.graph, *model.functions):
        yield from _all_tensors(part)


def _all_tensors(
    graph: onnx.GraphProto | onnx.FunctionProto,
) -> Iterable[tuple[str, onnx.TensorProto]]:
    for tensor in graph.initializer if isinstance(graph, onnx.GraphProto) else ():
        yield tensor.name, tensor
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield f"{node.name}.{attribute.name}", attribute.t
            for tensor in attribute.tensors:
                yield f"{node.name}.{attribute.name}", tensor
            for inner in (attribute.g, *attribute.graphs):
                yield from _all_tensors(inner)


def _external_file(model_path: Path, tensor: onnx.TensorProto, name: str) -> Path:
    """The file of a tensor's data, which must lie in the folder of the model (or below)."""
    folder = model_path.parent.resolve()
    try:
        location = ExternalDataInfo(tensor).location
        file = (folder / location).resolve()
        is_there = file.is_file()
    except (ValueError, OSError, RuntimeError) as error:
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} does not say where its data is: {error}."
        ) from error
    if not file.is_relative_to(folder):
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} wants its data from {location!r}, outside of "
            "the "
            "model's folder. That is not followed; move the data beside the model."
        )
    if not is_there:
        raise ModelError(
            f"Tensor {name!r} of {str(model_path)!r} has its data in {location!r}, which is "
            "missing."
        )
    return file


def _check_model(model: onnx.ModelProto) -> int:
    """The model's opset; raises ModelError unless it is a valid model that was read with its
    data.
    """
    for name, tensor in _model_tensors(model):
        if uses_external_data(tensor):
            raise ModelError(
                f"Tensor {name!r} has its data in another file. Pass the path of the model instead "
                "of the "
                "ModelProto, or load it with onnx.load(path)."
            )
    _check_names(model.graph)
    _check_sizes(model.graph)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 1))
    if opset < MIN_OPSET:
        raise ModelError(
            f"The model uses opset {opset}; supported: {MIN_OPSET} and later. Convert it: "
            "onnx.version_converter.convert_version(model, 13)."
        )
    seen: set[str] = set()
    for name in (name for node in model.graph.node for name in node.output if name):
        if name in seen:
            raise ModelError(f"The model is not valid ONNX: two nodes compute tensor {name!r}.")
        seen.add(name)
    return opset


def _check_names(graph: onnx.GraphProto) -> None:
    """Raise ModelError for a name that is no text: protobuf gives bytes that are not UTF-8 as they
    are.
    """
    for at, node in enumerate(graph.node):
        names = (node.name, node.op_type, node.domain, *node.input, *node.output)
        names = (*names, *(attribute.name for attribute in node.attribute))
        if not all(isinstance(name, str) for name in names):
            raise ModelError(f"Node number {at} of the model has a name that is not UTF-8.")
    values = (*graph.initializer, *graph.input, *graph.output)
    if not all(isinstance(value.name, str) for value in values):
        raise ModelError("The model is not valid ONNX: a tensor has a name that is not UTF-8.")


def _check_sizes(graph: onnx.GraphProto) -> None:
    """Raise ModelError for dimensions below 0, and for inputs that no memory holds."""
    shapes = [(tensor.name, list(tensor.dims)) for tensor in graph.initializer]
    for info in graph.input:
        sizes = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        shapes.append((info.name, [0 if size == -1 else size for size in sizes]))
    for name, sizes in shapes:
        if any(size < 0 for size in sizes):
            raise ModelError(f"Tensor {name!r} has the shape {tuple(sizes)}; no size is below 0.")
        if math.prod(size or 1 for size in sizes) > MAX_ELEMENTS:
            raise ModelError(
                f"Tensor {name!r} has the shape {tuple(sizes)}, more than {MAX_ELEMENTS} elements. "
                "Is the file damaged?"
            )


def _find_fault(model: onnx.ModelProto) -> str:
    """What ONNX's own checker says against a model that could not be converted; "" if nothing.

    Its word alone is no reason to refuse: it also complains of faults that do no harm, such as an
    output without a shape.
    """
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        return f" The model is not valid ONNX: {' '.join(str(error).split())}"
    return ""


def _fix_shapes(
    graph: onnx.GraphProto,
    shapes: Mapping[str, Sequence[int | str]],
    constants: Iterable[str],
) -> list[onnx.ValueInfoProto]:
    """Copies of the graph's inputs, `constants` excepted, with the wanted shapes; every unnamed
    dimension, and one of -1, as PaddlePaddle writes it, gets a name of its own.
    """
    weights = {*constants, *(tensor.name for tensor in graph.initializer)}
    inputs = [info for info in graph.input if info.name not in weights]
    names = [info.name for info in inputs]
    for name in shapes:
        if name not in names:
            raise ModelError(f"shapes= names an input {name!r}. {suggest_name(name, names)}")
    fixed = []
    for info in inputs:
        if not info.type.HasField("tensor_type"):
            raise ModelError(
                f"Input {info.name!r} is no tensor (sequences, maps and optionals are not "
                "supported)."
            )
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(info)
        shape = copy.type.tensor_type.shape
        for dim in shape.dim:
            if dim.dim_value == -1:
                dim.ClearField("value")
        wanted = shapes.get(info.name)
        if wanted is not None:
            known = copy.type.tensor_type.HasField("shape")
            if known and len(shape.dim) != len(wanted):
                raise ModelError(
                    f"shapes= gives input {info.name!r} the shape {tuple(wanted)}; the model has "
                    f"{format_count(len(shape.dim), 'dimension')} there."
                )
            if not known:
                for _ in wanted:
                    shape.dim.add()
            for dim, size in zip(shape.dim, wanted, strict=True):
                if isinstance(size, str):
                    if dim.dim_value:
                        raise ModelError(
                            f"shapes= makes a dimension of input {info.name!r} symbolic ({size!r}) "
                            "that the "
                            f"model fixes to {dim.dim_value}."
                        )
                    dim.dim_param = size
                elif size > 0:
                    if dim.dim_value and dim.dim_value != size:
                        raise ModelError(
                            f"shapes= gives input {info.name!r} the shape {tuple(wanted)}, but the "
                            "model "
                            f"fixes a dimension to {dim.dim_value} where {size} is wanted."
                        )
                    dim.dim_value = size
                else:
                    raise ModelError(
                        f"shapes= gives input {info.name!r} the dimension {size}; allowed: "
                        "positive "
                        "integers and names."
                    )
        elif not copy.type.tensor_type.HasField("shape"):
            raise ModelError(
                f"Input {info.name!r} has no shape in the model. Give one: "
                f"shapes={{{info.name!r}: ('N', 3, 224, 224)}}."
            )
        for i, dim in enumerate(shape.dim):
            if not dim.dim_value and not dim.dim_param.strip():
                dim.dim_param = f"{info.name}_dim{i}"
        fixed.append(copy)
    return fixed


# -- conversion ------------------------------------------------------------------------------------


class _Failed(BaseException):
    """Carries a conversion error past a handler of the frontend that prints every Exception it
    sees.
    """

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class _Importer(_FRONTEND.ONNXGraphImporter):
    """TVM's importer, with exact names, one error per model and operators of our own.

    Attributes:
        sources: Value -> the node that computes it.
    """

    def __init__(self, graph: _GraphView) -> None:
        super().__init__({}, {}, keep_params_in_input=False, sanitize=False)
        self.sources: dict[str, SourceNode] = {}
        self._graph = graph
        self._count = self._depth = 0
        self._is_in_body = False
        self._domain = ""  # of the node that is being converted
        # What a body computes may get the name of an output of its If, and no other that is taken.
        self._names: dict[str, str] = {}
        self._taken = {*(info.name for info in (*graph.input, *graph.initializer))}
        self._taken.update(
            name for node in graph.node if node.op_type != "If" for name in node.output
        )

    def convert(self, opset: int) -> tvm.IRModule:
        """The module of the graph."""
        # Where TVM sees an If among the nodes it makes no dataflow block; here none is left.
        return self.from_onnx(replace(self._graph, node=()), opset)

    def _check_for_unsupported_ops(self, graph: _GraphView) -> None:
        self._check_nodes(self._graph.node)

    def _check_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Raise ModelError that names all operators which are not supported; bodies are checked
        when they are built.
        """
        standard = {*_FRONTEND._get_convert_map(), *OPERATORS, *CONTROL_FLOW, "Constant"}
        missing: dict[str, list[str]] = {}
        for node in nodes:
            known = standard if node.domain in STANDARD else FOREIGN.get(node.domain, {})
            if node.op_type not in known and not has_body(node, self.opset):
                name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                missing.setdefault(name, []).append(_node_name(node))
        if missing:
            lines = [f"{op} (nodes {', '.join(map(repr, at))})" for op, at in missing.items()]
            raise ModelError(
                f"Not supported, "
                f"{format_count(len(missing), 'operator')} of the model: {'; '.join(lines)}. "
                "Replace them before the export, or convert the model with a TVM frontend of your "
                "own."
            )

    def _construct_nodes(self, graph: _GraphView) -> None:
        self._construct_all(self._graph.node)
        for info in self._graph.output:
            value = self._nodes.get(info.name)
            if isinstance(value, relax.Expr) and isinstance(value.ty, relax.ShapeType):
                self._nodes[info.name] = self.bb.emit(relax.op.shape_to_tensor(value))

    def _construct_all(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            self._count += 1
            try:
                if self._count > MAX_NODES:
                    raise Refusal(
                        "the model has more operators once loops are unrolled than are supported: "
                        f"{MAX_NODES}",
                        "Loops of fewer steps have fewer",
                    )
                self._construct_node(node)
            except (_Failed, Exception) as error:
                cause = error.cause if isinstance(error, _Failed) else error
                if isinstance(cause, ModelError):
                    raise cause from cause.__cause__  # of a node in a body, which it names
                raise ModelError(
                    f"Node {_node_name(node)!r} (operator {node.op_type}, opset {self.opset}) "
                    f"cannot be converted: {self._describe_failure(node, cause)}"
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
        if flow is not None:
            inputs = [operands.get(name) for name in node.input]
            build = functools.partial(self._build_body, node)
            values = flow(self.bb, inputs, self._parse_attr(node.attribute), build)
        else:
            values = fold_node(node, operands, self.opset)
            if values is None:
                inputs = [operands.get(name) for name in node.input]
                body = find_body(node, inputs, self.opset) if self._wants_body(node) else None
                if body is None:
                    self._domain = node.domain
                    super()._construct_nodes(_GraphView([node], (), (), ()))
                else:
                    self._construct_body(node, body)
                self._name_outputs(node)
                return
        for name, value in zip(node.output, values, strict=False):
            self._nodes[name] = value

    def _wants_body(self, node: onnx.NodeProto) -> bool:
        """Whether a node is built from the operators that ONNX defines it by: where TVM has none of
        that name, or another one.
        """
        if node.domain not in STANDARD or node.op_type in OPERATORS:
            return False
        is_missing = node.op_type not in _FRONTEND._get_convert_map()
        return is_missing or (node.domain, node.op_type) in EXPANDED

    def _construct_body(self, node: onnx.NodeProto, body: Body) -> None:
        """The nodes of a body, whose values have no names of their own."""
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
        """The outputs of a branch or loop body, which sees the values around it and of which
        nothing else is seen from there.
        """
        self._check_nodes(body.node)
        outer, outer_names = self._nodes, self._names
        self._nodes = outer | {
            info.name: value for info, value in zip(body.input, operands, strict=True)
        }
        if node.op_type == "If":  # its outputs are those of the branch
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
            own = OPERATORS if self._domain in STANDARD else FOREIGN[self._domain]
            convert = own.get(op_name)
            if convert is not None:
                converted = convert(self.bb, inputs, attrs, opset)
                if converted is not None:
                    return self.bb.normalize(converted)
            return super()._convert_operator(op_name, inputs, attrs, opset)
        except Exception as error:
            raise _Failed(error) from error

    def _name_outputs(self, node: onnx.NodeProto) -> None:
        """Bind each output of the node to a value of its name, constants and shapes excepted."""
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
        """The name of a value: that of its tensor, with a number behind it where a body is built
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
        """Names of the constant operands of a node, the highest rank first."""
        operands = {name: self._nodes[name] for name in node.input if name in self._nodes}
        ranks = {
            name: value.ty.ndim
            for name, value in operands.items()
            if isinstance(value, tvm.ir.GenericConst)
        }
        return tuple(sorted(ranks, key=lambda name: -ranks[name]))


def _node_name(node: onnx.NodeProto) -> str:
    """Node names are optional in ONNX; its first output names a nameless node."""
    return node.name or next((name for name in node.output if name), "")
