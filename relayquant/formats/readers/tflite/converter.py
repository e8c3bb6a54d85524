"""TensorFlow Lite reader: TVM's converter, extended for all operators.

The extensions are: constants for any operand, value names, integer operators that TVM converts for
floats only, and a check of the result types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base import _tvm
from relayquant.errors import ModelError, RelayQuantError, format_count
from relayquant.formats.readers.names import MARK, SourceNode
from relayquant.formats.readers.refusal import OTHERWISE, NotConstant, Refusal, describe_failure
from relayquant.formats.readers.tflite.control_flow import FLOW, STATE, AssignedVariable
from relayquant.formats.readers.tflite.operators.table import OPERATORS
from relayquant.formats.readers.tflite.options import name_custom_operator
from relayquant.formats.readers.tflite.recurrent import LAYERS, check_floats, convert_layer
from relayquant.formats.readers.tflite.sizes import OpenSizes, read_signature
from relayquant.formats.readers.tflite.tables import SIZES
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import evaluate
from relayquant.ir.rewrite.graph import constant_value, free_vars, tensor_dtype, tensor_shape

FRONTEND = _tvm.load_tflite_frontend()

#: Operators that move the integers as they are stored, whatever the scales of operands and result
#: are, and operators that compare such integers. Each was compared with LiteRT.
MOVED = frozenset(
    {
        "BROADCAST_TO",
        "DEPTH_TO_SPACE",
        "DYNAMIC_UPDATE_SLICE",
        "EMBEDDING_LOOKUP",
        "GATHER",
        "GATHER_ND",
        "MAXIMUM",
        "MINIMUM",
        "PAD",
        "RESHAPE",
        "RESIZE_NEAREST_NEIGHBOR",
        "REVERSE_V2",
        "SELECT",
        "SELECT_V2",
        "SLICE",
        "SPACE_TO_DEPTH",
        "SPLIT",
        "SPLIT_V",
        "SQUEEZE",
        "STRIDED_SLICE",
        "TILE",
        "TOPK_V2",
        "TRANSPOSE",
    }
)

#: Data movement operators for which TFLite's kernels ask for one scale. With several scales, they
#: move the numbers that the integers stand for.
MOVED_OF_ONE_SCALE = frozenset(
    {
        "BATCH_TO_SPACE_ND",
        "EXPAND_DIMS",
        "MIRROR_PAD",
        "PACK",
        "PADV2",
        "SPACE_TO_BATCH_ND",
        "UNPACK",
    }
)

#: Operators that compute with the integers as they are stored. The result would need its operand's
#: scale.
ONE_SCALE = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D", "RESIZE_BILINEAR"})
#: Operators that read complex numbers, which are pairs along a last axis that the file lacks.
COMPLEX = ("CAST", "COMPLEX_ABS", "IMAG", "REAL", "SQUEEZE")

#: Operators that read integers as they are stored: their order, their shape, or the integers, also
#: for arithmetic. What they fill with is the stored integer 0. Each was compared with LiteRT.
STORED = frozenset(
    {
        "ARG_MAX",
        "ARG_MIN",
        "BITCAST",
        "CAST",
        "DILATE",
        "FLOOR_DIV",
        "FLOOR_MOD",
        "HASHTABLE_LOOKUP",
        "MATRIX_DIAG",
        "MATRIX_SET_DIAG",
        "NEG",
        "ONE_HOT",
        "RANK",
        "REVERSE_SEQUENCE",
        "SCATTER_ND",
        "SHAPE",
        "SPARSE_TO_DENSE",
        "STABLEHLO_ADD",
        "STABLEHLO_MAXIMUM",
        "STABLEHLO_MINIMUM",
        "STABLEHLO_MULTIPLY",
        "STABLEHLO_PAD",
    }
)

#: Operators that compute with the real numbers that quantized integers stand for: all of them with
#: 8 bits, most with 16.
ORDERS = ("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
COMPARISONS = ("EQUAL", "NOT_EQUAL", *ORDERS)
SCALED = frozenset(
    {
        *COMPARISONS,
        *("ABS", "ADD", "ATAN2", "AVERAGE_POOL_2D", "BATCH_MATMUL", "CONV_2D", "CONV_3D"),
        *("CONV_3D_TRANSPOSE", "COS", "DEPTHWISE_CONV_2D", "DEQUANTIZE", "DIV", "ELU", "EXP"),
        *("FULLY_CONNECTED", "GELU", "HARD_SWISH", "L2_NORMALIZATION", "L2_POOL_2D"),
        *("LEAKY_RELU", "LOCAL_RESPONSE_NORMALIZATION", "LOG", "LOG_SOFTMAX", "LOGISTIC"),
        *("MAX_POOL_2D", "MEAN", "MUL", "POW", "PRELU", "QUANTIZE", "RELU", "RELU6"),
        *("RELU_0_TO_1", "RELU_N1_TO_1", "RESIZE_BILINEAR", "RSQRT", "SIN", "SOFTMAX", "SQRT"),
        *("SQUARED_DIFFERENCE", "SUB", "SUM", "TAN", "TANH", "TRANSPOSE_CONV"),
    }
)

#: Of these, operators that TFLite's kernels compute of int16 without a scale too.
PLAIN_INT16 = frozenset({"ABS", "ADD", "MUL", *COMPARISONS})

#: Fused activations that TFLite's kernels compute.
CLAMPS = ("NONE", "RELU", "RELU_N1_TO_1", "RELU6")

#: Largest operand and largest result that is computed while the file is read: sizes, indices and
#: small tables. Weights stay operators of the module until `prepare` computes them.
MAX_FOLDED = 4096


class FloatTensor:
    """A quantized tensor as a float operator sees it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def Type(self) -> int:
        from tflite import TensorType

        return TensorType.FLOAT32

    def Quantization(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@dataclass(frozen=True)
class VariableTable:
    """The variables of a model that change in each run, filled while the model is converted.

    Attributes:
        is_changed: Whether the model assigns any variable in each run.
        variables: Container and name -> variable.
        news: The value of each variable behind a run.
    """

    is_changed: bool
    variables: dict[tuple[str, str], AssignedVariable] = field(default_factory=dict)
    news: dict[tuple[str, str], relax.Var] = field(default_factory=dict)


class Converter(FRONTEND.OperatorConverter):
    """TVM's converter of one graph, with relayquant's own conversions.

    Attributes:
        sources: Value -> the operator that makes it.
        found: The variables that change.
        sizes: The shapes of operands.
        prefix: Stands before the names of values of a graph that another graph calls.
        kind: The operator that is being converted.
        in_float: Whether it reads its quantized operands as floats.
        is_raw: Whether it reads them as integers without a scale.
    """

    def __init__(
        self,
        sources: dict[str, SourceNode],
        found: VariableTable,
        sizes: OpenSizes,
        *args: Any,
        prefix: str = "",
    ) -> None:
        from tflite import TensorType

        super().__init__(*args)
        self.sources, self.found, self.sizes, self.prefix = sources, found, sizes, prefix
        self.frontend, self.variables = FRONTEND, found.variables
        #: by index: tensors as they are stored, and their names
        self.stored: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.kind = ""
        self.in_float = self.is_raw = False
        self.number_types = {getattr(TensorType, name) for name in SIZES}
        self.complex_type = TensorType.COMPLEX64
        self.integer_types = {getattr(TensorType, n.upper()): n for n in ("int8", "uint8", "int16")}
        table = OPERATORS | FLOW | dict.fromkeys(LAYERS, convert_layer)
        self.convert_map |= {kind: partial(f, self) for kind, f in table.items()}

    def get_op_code_str(self, op: Any) -> str:
        """Return the type of an operator. The type of a custom one is its name."""
        custom = name_custom_operator(self.model.OperatorCodes(op.OpcodeIndex()))
        return custom or super().get_op_code_str(op)

    # -- operands: a constant may stand wherever a value of the run time may -----------------------

    def get_tensors(self, tensors_idx_list: Any) -> list[Any]:
        indices = () if tensors_idx_list is None else tensors_idx_list
        tensors = [copy(self.read_tensor(int(index))) for index in indices]
        for tensor in tensors:
            at = tensor.tensor_idx
            if at >= 0:
                value = self.find_value(at)
                tensor.tensor = self.sizes.see(tensor.tensor, self.find_name(at), value)
        for tensor in tensors if self.in_float or self.is_raw else ():
            if tensor.qnn_params is not None:
                tensor.qnn_params = None
                tensor.tensor = FloatTensor(tensor.tensor) if self.in_float else tensor.tensor
        return tensors

    def read_tensor(self, index: int) -> Any:
        """Return a tensor as it is stored, without a value for a negative index. TVM alone would
        parse it in each of about 15 calls, a third of the time that a model takes to read.
        """
        if index not in self.stored:
            (tensor,) = super().get_tensors([index])
            # Of one scale, the axis means nothing; TVM takes some axes alone.
            if tensor.qnn_params and not tensor.qnn_params["scale"].ty.ndim:
                tensor.qnn_params["axis"] = 0
            self.stored[index] = tensor
        return self.stored[index]

    def find_name(self, index: int) -> str:
        """Return the name of a tensor of the graph."""
        if index not in self.names:
            self.names[index] = FRONTEND.get_tensor_name(self.subgraph, index)
        return self.names[index]

    def find_value(self, index: int) -> relax.Expr | None:
        """Return the value that an operator or an input assigned to a tensor. None for a tensor
        stored in the file.
        """
        return None if index < 0 else self.exp_tab.exprs.get(self.find_name(index))

    def has_expr(self, input_tensor_idx: int) -> bool:
        """Return whether a value is known at run time only. TVM asks this before it reads a
        constant.
        """
        value = self.find_value(input_tensor_idx)
        return value is not None and constant_value(value) is None

    def get_expr(self, input_tensor_idx: int) -> relax.Expr:
        value = self.find_value(input_tensor_idx)
        if value is not None:
            return value
        (tensor,) = self.get_tensors([input_tensor_idx])
        return self.get_tensor_expr(tensor)

    def get_tensor_value(self, tensor_wrapper: Any, is_sparse: bool = False) -> np.ndarray:
        index = tensor_wrapper.tensor_idx
        if index < 0:
            raise Refusal("it lacks an operand that it needs")
        name = self.find_name(index)
        value = self.find_value(index)
        if value is not None:
            array = constant_value(value)
            if array is None:
                raise NotConstant(f"operand {name!r}")
            # TVM makes pairs of complex numbers of a constant, also of one that is folded.
            is_pairs = self.is_complex(tensor_wrapper) and array.dtype == np.float32
            return np.ascontiguousarray(array).view("complex64")[..., 0] if is_pairs else array
        if self.is_prefetched(index):
            return self.get_prefetched_node(index)
        if tensor_wrapper.tensor.Type() not in self.number_types:
            raise Refusal(f"its operand {name!r} holds no numbers")
        if tensor_wrapper.buffer.DataLength():
            return super().get_tensor_value(tensor_wrapper, is_sparse)
        shape = self._get_tensor_shape_tuple(tensor_wrapper)
        if 0 not in shape:
            raise Refusal(f"its operand {name!r} is neither computed before nor constant")
        return np.zeros(shape, self.get_tensor_type_as_numpy(tensor_wrapper))

    def dequantize(self, expr: relax.Expr, tensor: Any) -> relax.Expr:
        """Return the numbers that integers stand for. Relax reads no int64, as biases of int16
        products are.
        """
        if tensor_dtype(expr) != "int64":
            return super().dequantize(expr, tensor)
        array, limits = constant_value(expr), np.iinfo("int32")
        if array is None:
            raise NotConstant("int64 bias")
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            scale = tensor.qnn_params["scale"].value.numpy().astype("float64")
            return relax.const((array * scale).astype("float32"), "float32")
        return super().dequantize(relax.const(array.astype("int32"), "int32"), tensor)

    # -- operators ---------------------------------------------------------------------------------

    def check_unsupported_ops(self) -> None:
        operators = [*self.list_operators()]
        unknown = Counter(kind for _, kind in operators if kind not in self.convert_map)
        if unknown:
            calls = (f"{kind} ({format_count(n, 'call')})" for kind, n in unknown.items())
            raise ModelError(
                f"Not supported, {format_count(len(unknown), 'operator')} of the model: "
                f"{', '.join(calls)}. {OTHERWISE}.",
                code="RQ202",
            )

    def list_operators(self) -> Iterator[tuple[Any, str]]:
        for index in range(self.subgraph.OperatorsLength()):
            op = self.subgraph.Operators(index)
            yield op, self.get_op_code_str(op)

    def convert_op_to_relax(self) -> None:
        for index, (op, kind) in enumerate(self.list_operators()):
            outputs = [self.find_name(i) for i in as_list(op.OutputsAsNumpy())]
            try:
                self.convert(op, kind, outputs)
            except RelayQuantError:
                raise
            except Exception as error:
                first = outputs[0] if outputs else ""
                raise ModelError(
                    f"Operator {kind} (number {index}, output {first!r}) cannot be converted: "
                    f"{describe_failure(error, self.list_operands(op))}.",
                    code="RQ202",
                ) from error
        if not self.prefix:
            values = self.conversion_state["resource_values"]
            for key in self.variables:
                self.found.news[key] = self.bb.emit_output(values[key])

    def name_call(self, op: Any) -> str:
        """Return an operator's name: its first output, or its type if it has no output."""
        return self.find_name(op.Outputs(0)) if op.OutputsLength() else self.get_op_code_str(op)

    def list_operands(self, op: Any) -> dict[str, relax.Expr | None]:
        """Return the operands of an operator by name. Constants of the file are included with
        their type.
        """
        operands: dict[str, relax.Expr | None] = {}
        for tensor in super().get_tensors(as_list(op.InputsAsNumpy())):
            if tensor.tensor_idx < 0:
                continue
            value = self.find_value(tensor.tensor_idx)
            if value is None and tensor.tensor.Type() in self.number_types:
                value = self._get_tensor_param(tensor)
            operands[self.find_name(tensor.tensor_idx)] = value
        return operands

    def convert(self, op: Any, kind: str, outputs: list[str]) -> None:
        """Convert an operator. Its results get the names of its outputs."""
        self.kind = kind
        self.check_state(op, kind)
        self.check_complex(op, kind)
        self.check_scales(op, kind)
        convert = partial(self.convert_map[kind], op=op)
        if self.is_quantized_call(op, kind):
            value = self.convert_in_float(op, convert)
        else:
            value = self.convert_raw(convert) if self.is_raw_call(op, kind) else convert()
        if value is None:
            return
        value = self.bb.normalize(value)
        if isinstance(value.ty, relax.TupleType):
            fields = [value[i] for i in range(len(value.ty.fields))]
        else:
            fields = [value]
        if len(fields) != len(outputs):
            raise Refusal(f"it has {format_count(len(outputs), 'output')} instead of {len(fields)}")
        for tensor, name, each in zip(self.get_output_tensors(op), outputs, fields, strict=True):
            each = self.bb.normalize(each)
            self.check_result(tensor, name, each)
            folded = self.fold(op, kind, each)
            given = self.name_value(name, each, outputs[0], kind) if folded is None else folded
            self.exp_tab.set_expr(name, given, force_override=True)

    def convert_fused_activation_function(
        self, in_expr: relax.Expr, fused_activation_fn: int
    ) -> relax.Expr:
        """Apply the fused activation. Refusal for one that TFLite's kernels ignore."""
        names = self.activation_fn_type
        name = names.get(fused_activation_fn, str(fused_activation_fn))
        if name not in CLAMPS:
            raise Refusal(f"its fused activation is {name}; supported: {', '.join(CLAMPS)}")
        return super().convert_fused_activation_function(in_expr, fused_activation_fn)

    def check_state(self, op: Any, kind: str) -> None:
        """Raise Refusal for an operator that writes one of its operands and is no layer of
        floats.
        """
        if kind in LAYERS:
            check_floats(self, op)
            return
        tensors = [t for t in self.get_input_tensors(op) if t.tensor_idx >= 0]
        names = [self.find_name(t.tensor_idx) for t in tensors if t.tensor.IsVariable()]
        if names or kind == "SVDF":
            where = f" in {', '.join(map(repr, names))}" if names else ""
            raise Refusal(f"it keeps its state from run to run{where}", STATE)

    def check_complex(self, op: Any, kind: str) -> None:
        """Raise Refusal for an operator that would take pairs of a complex number for numbers."""
        tensors = [t for t in self.get_input_tensors(op) if t.tensor_idx >= 0]
        if kind not in COMPLEX and any(map(self.is_complex, tensors)):
            raise Refusal(f"it reads complex numbers; supported: {', '.join(COMPLEX)}")

    def check_scales(self, op: Any, kind: str) -> None:
        """Raise Refusal for integers without the scale, or with other scales than the operator
        needs.
        """
        tensors = [t for t in self.get_input_tensors(op) if t.tensor_idx >= 0]
        results = self.get_output_tensors(op)
        for tensor in [*tensors, *results] if kind in SCALED else ():
            dtype = self.integer_types.get(tensor.tensor.Type(), "")
            is_plain = dtype == "int16" and kind in PLAIN_INT16
            if dtype and tensor.qnn_params is None and not is_plain:
                name = self.find_name(tensor.tensor_idx)
                raise Refusal(f"its tensor {name!r} is {dtype} without a scale; supported: a scale")
        both = tensors[:1] + results if kind in ONE_SCALE else []
        if all(t.qnn_params for t in both) and not self.have_one_scale(both):
            have, want = (describe_scale(t.qnn_params) for t in both)
            raise Refusal(f"its operand has {have}, its result {want}; supported: the same")

    def is_complex(self, tensor: Any) -> bool:
        return tensor.tensor.Type() == self.complex_type

    def check_result(self, tensor: Any, name: str, value: relax.Expr) -> None:
        """Raise Refusal for a result whose type differs from the file: then TVM's operator
        differs from TFLite's.
        """
        made = tensor_shape(value)
        stored = self.subgraph.Tensors(tensor.tensor_idx)
        shape = tuple(self._get_relax_tensor_shape(stored))
        fixed = [size >= 0 for size in read_signature(stored)]
        fixed += [True] * (len(shape) - len(fixed))
        is_open = not shape and not (tensor.tensor.HasRank() or made == ())
        if made is not None and not is_open:
            same = len(made) == len(shape) and all(
                not is_fixed or not isinstance(a, int) or a == b
                for a, b, is_fixed in zip(made, shape, fixed, strict=False)
            )
            if not same:
                raise Refusal(f"its result {name!r} has shape {made}, the file says {shape}")
        dtype = self._get_relax_tensor_dtype(tensor)
        if tensor_dtype(value) != dtype:
            raise Refusal(f"its result {name!r} is {tensor_dtype(value)}, the file says {dtype}")

    def name_value(self, name: str, value: relax.Expr, node: str, kind: str) -> relax.Expr:
        if constant_value(value) is not None or not isinstance(value.ty, relax.TensorType):
            return value
        name = self.prefix + name
        self.sources[name] = SourceNode(self.prefix + node, kind)
        var = relax.DataflowVar(MARK + name, value.ty)
        self.bb.emit_normalized(relax.VarBinding(var, value))
        return var

    def fold(self, op: Any, kind: str, value: relax.Expr) -> relax.Expr | None:
        """Compute a small result of small constants. None for any other result.

        Files compute sizes this way, and TVM needs their values. Quantized values stay
        quantized.
        """
        tensors = [*self.get_input_tensors(op), *self.get_output_tensors(op)]
        if any(tensor.qnn_params for tensor in tensors) or kind.startswith("RANDOM"):
            return None
        shape = tensor_shape(value)
        if shape is None or any(isinstance(size, str) for size in shape):
            return None
        if np.prod(shape, dtype=float) > MAX_FOLDED or kind in ("RFFT2D", "REAL", "IMAG"):
            return None
        array = compute(self.bb, value)
        return None if array is None else relax.const(array, tensor_dtype(value))

    # -- integers ----------------------------------------------------------------------------------

    def is_quantized_call(self, op: Any, kind: str) -> bool:
        """Return whether an operator with integers is converted as a float operator between
        dequantize and quantize.

        TVM does this itself for some operators of integers. A float operator with weights of
        integers (dynamic range quantization) reads the numbers that these stand for, and
        its data as it is; TFLite's kernels round the data to 8 bits.
        """
        operands = [t for t in self.get_input_tensors(op) if t.tensor_idx >= 0]
        results = self.get_output_tensors(op)
        quantized = [t for t in [*operands, *results] if t.qnn_params is not None]
        if not quantized or kind in STORED or kind in FLOW or self.is_raw_call(op, kind):
            return False
        if not any(t.qnn_params for t in (operands[0], *results)):
            return True
        if kind in MOVED:
            return False
        if kind in MOVED_OF_ONE_SCALE:
            return not self.have_one_scale(quantized)
        return kind not in self._SUPPORTED_QUANTIZED_OPS or kind == "AVERAGE_POOL_2D"

    def is_raw_call(self, op: Any, kind: str) -> bool:
        """Return whether an operator is converted as one of integers without a scale.

        With one scale, MAXIMUM and MINIMUM stay operators between dequantize and quantize, which
        the stages know; PAD needs the zero point. Of int16, TFLite orders the integers, but EQUAL
        and NOT_EQUAL compare what they stand for.
        """
        if kind in STORED or kind == "PAD":
            return kind in STORED
        operands = [t for t in self.get_input_tensors(op) if t.tensor_idx >= 0]
        if kind in ORDERS:
            return self.integer_types.get(operands[0].tensor.Type()) == "int16"
        results = self.get_output_tensors(op)
        scaled = [t for t in [*operands, *results] if t.qnn_params]
        is_short = [self.integer_types.get(t.tensor.Type()) == "int16" for t in results]
        if kind not in MOVED and not (kind == "CONCATENATION" and all(is_short)):
            return False
        return not (results[0].qnn_params and self.have_one_scale(scaled))

    def have_one_scale(self, tensors: Sequence[Any]) -> bool:
        """Return whether quantized tensors have the same scale and zero point."""
        return all(self.has_same_qnn_params(tensors[0], t) for t in tensors[1:])

    def has_same_qnn_params(self, lhs_tensor: Any, rhs_tensor: Any) -> bool:
        """Return whether two tensors have the same scales and zero points. To TVM, scales that
        differ by less than 1e-5 are the same, as two scales of int16 may.
        """
        left, right = (
            [t.qnn_params[name].value.numpy() for name in ("scale", "zero_point")]
            for t in (lhs_tensor, rhs_tensor)
        )
        return np.array_equal(left[1], right[1]) and (
            left[0].shape == right[0].shape and np.allclose(left[0], right[0], rtol=1e-5, atol=0)
        )

    def convert_raw(self, convert: Any) -> relax.Expr:
        """Convert an operator of the integers as they are stored."""
        self.is_raw = True
        try:
            return convert()
        finally:
            self.is_raw = False

    @contextmanager
    def replaced(self, tensor: Any, value: relax.Expr) -> Iterator[None]:
        """Replace the value of a tensor inside the `with` block."""
        name = self.find_name(tensor.tensor_idx)
        kept = self.exp_tab.exprs.get(name)
        self.exp_tab.exprs[name] = value
        try:
            yield
        finally:
            del self.exp_tab.exprs[name]
            if kept is not None:
                self.exp_tab.exprs[name] = kept

    def convert_in_float(self, op: Any, convert: Any) -> relax.Expr:
        """Convert an integer operator to quantize(f(dequantize(x), ...))."""
        results = self.get_output_tensors(op)
        with ExitStack() as stack:
            # An operator may read a tensor twice.
            for tensor in {t.tensor_idx: t for t in self.get_input_tensors(op)}.values():
                if tensor.qnn_params is not None:
                    real = self.bb.emit(self.dequantize(self.get_tensor_expr(tensor), tensor))
                    must_fold = is_small(real) or self.kind in LAYERS
                    array = compute(self.bb, real) if must_fold else None
                    real = real if array is None else relax.const(array, "float32")
                    stack.enter_context(self.replaced(tensor, real))
            self.in_float = True
            stack.callback(setattr, self, "in_float", False)
            value = self.bb.normalize(convert())
        is_tuple = isinstance(value.ty, relax.TupleType)
        fields = [value[i] for i in range(len(value.ty.fields))] if is_tuple else [value]
        fields = [
            field
            if tensor.qnn_params is None
            else self.bb.emit(self.quantize(self.bb.emit(field), tensor))
            for field, tensor in zip(fields, results, strict=True)
        ]
        return relax.Tuple(fields) if is_tuple else fields[0]


def describe_scale(params: Any) -> str:
    """Return the scale and the zero point of a tensor as text."""
    scale, zero = (params[name].value.numpy() for name in ("scale", "zero_point"))
    return f"the scale {scale.ravel()[0]:.6g} and the zero point {zero.ravel()[0]}"


def as_list(indices: Any) -> list[int]:
    """Return tensor indices as a list. For an empty vector, the package returns the number 0."""
    return indices.tolist() if isinstance(indices, np.ndarray) else []


def is_small(value: relax.Expr) -> bool:
    """Return whether a value is small enough to be computed while the file is read."""
    shape = tensor_shape(value)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    return np.prod(shape, dtype=float) <= MAX_FOLDED


def compute(bb: relax.BlockBuilder, value: relax.Expr) -> np.ndarray | None:
    """Compute an operator on constants. None if it reads a named value: an input or a result that
    is not constant.
    """
    frame = Frame(tvm.IRModule())

    def find(expr: relax.Expr) -> Any:
        for var in free_vars(expr):
            source = None if var.name.startswith(MARK) else bb.lookup_binding(var)
            if source is None:
                raise LookupError(var.name)
            if var not in frame.values:
                frame.values[var] = find(source)
        return evaluate(frame, expr, "constant")

    try:
        return np.asarray(find(value))
    except LookupError:
        return None
