"""Relax function -> steps, some of them on kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.base.qtypes import INTEGER_LIMITS
from relayquant.base.runtime import align_array, view_constant
from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import (
    ConstantOperand,
    Operand,
    Variable,
    is_operand,
    make_operand,
)
from relayquant.codegen.eager.steps.affine import AFFINE, AffineStep, read_affine
from relayquant.codegen.eager.steps.call import CallStep
from relayquant.codegen.eager.steps.chains import LINKS, find_chain, make_chain
from relayquant.codegen.eager.steps.exact_parts import split_weight
from relayquant.codegen.eager.steps.product import (
    CONVOLUTIONS,
    INTEGER_CONVOLUTIONS,
    Convolution,
    IntegerProductStep,
    Matmul,
    ProductStep,
)
from relayquant.codegen.eager.steps.recurrent import RecurrentStep
from relayquant.codegen.eager.steps.rounding import ROUND, RoundingStep
from relayquant.codegen.eager.steps.rows import (
    EACH,
    LEAKY_RELU,
    Prelu,
    RowStep,
    make_norm,
    make_prelu,
    make_softmax,
)
from relayquant.codegen.kernels.floating.row_norm import RowNorm
from relayquant.codegen.kernels.floating.softmax import Softmax
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.recurrent import pack_recurrence, plan_recurrence
from relayquant.codegen.lowering.recurrent import RecurrentCall
from relayquant.ir.dialect.qnn.recurrent import RECURRENT_OPERATORS
from relayquant.ir.reference.affine import center_factors
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import execute_binding
from relayquant.ir.rewrite.conv_view import ConvView
from relayquant.ir.rewrite.epilogue_pattern import EpilogueChain, float_takes, follow_epilogue
from relayquant.ir.rewrite.expressions import (
    FunctionGraph,
    is_float32,
    op_name,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.rule import (
    Rule,
    Skip,
    decline,
    fire_first,
    make_rule,
    select_rules,
)

#: A bias may be a variable too, for example in a calibration graph whose biases are parameters.
TAKES = float_takes(GenericConst, relax.Var)


@dataclass(frozen=True, eq=False)
class Step:
    """One value, computed from others in a frame.

    Attributes:
        var: The value.
        reads: The values it is computed from.
        run: Computes and stores the value.
        kernel: The kernel that runs, if it is known before the data is.
    """

    var: relax.Var
    reads: tuple[relax.Var, ...]
    run: Callable[[Frame], None]
    kernel: KernelKey | None = None


def gather_tuple(frame: Frame, var: relax.Var, fields: Sequence[relax.Var]) -> None:
    """Bind a tuple of values."""
    frame.values[var] = tuple(frame.values[field] for field in fields)


class Planner:
    """Finds the steps of a function.

    All steps use the same object for a variable, and for a parameter the object in `params`. A
    table finds the same object at once, but has to ask TVM whether another object is equal.
    """

    def __init__(
        self, params: Sequence[relax.Var], func: relax.Function, kernels: KernelCache
    ) -> None:
        self.graph, self.kernels = FunctionGraph(func), kernels
        self.bindings, self.values = self.graph.bindings, self.graph.values
        bound = (binding.var for binding in self.bindings)
        self.objects = {var: var for var in (*params, *bound)}
        self.params = set(params)
        self.claimed: set[relax.Var] = set()
        #: sums of products that stay float32, as their reader takes them so
        self.sums: set[relax.Var] = set()

    def plan(self) -> Iterator[Step]:
        """Return the steps in order.

        A step for several values is placed where the last one was bound.
        """
        found: dict[relax.Var, Step] = {}
        for binding in self.bindings:
            if binding.var in self.claimed or binding.var not in self.values:
                continue
            rules = select_rules(EAGER_RULES, op_name(self.values[binding.var]))
            tried = ((rule, binding.var) for rule in rules)
            fired = fire_first(tried, self, binding.var.name)
            if fired is not None:
                found[fired[1].var] = fired[1]
        inner = self.claimed - set(found)
        for binding in self.bindings:
            if binding.var in found:
                yield found[binding.var]
            elif binding.var not in inner:
                yield self.plan_binding(binding)

    def find_object(self, var: relax.Var) -> relax.Var:
        """Return the object that all steps use for a variable."""
        return self.objects.setdefault(var, var)

    def operand(self, expr: relax.Expr) -> Operand:
        """Make the operand of an expression for which `is_operand` is true."""
        return make_operand(self.find_object(expr) if isinstance(expr, relax.Var) else expr)

    def make_step(
        self,
        var: relax.Var,
        reads: Iterable[relax.Var],
        run: Callable[[Frame], None],
        kernel: KernelKey | None = None,
    ) -> Step:
        """Make a step with the objects of this function's variables."""
        return Step(self.find_object(var), tuple(map(self.find_object, reads)), run, kernel)

    def plan_binding(self, binding: Any) -> Step:
        """Make the step that evaluates one binding in numpy."""
        reads = dict.fromkeys(relax.analysis.free_vars(binding.value))
        if isinstance(binding.value, relax.Tuple) and all(
            isinstance(part, relax.Var) for part in binding.value.fields
        ):
            var, fields = (
                self.find_object(binding.var),
                [*map(self.find_object, binding.value.fields)],
            )
            return self.make_step(var, reads, lambda frame: gather_tuple(frame, var, fields))
        call = CallStep.of(binding, self.find_object)
        if call is not None:
            return self.make_step(binding.var, reads, call.run)
        return self.make_step(binding.var, reads, lambda frame: execute_binding(frame, binding))

    # ---- products ----

    def plan_convolution(self, root: relax.Var) -> Step | Skip:
        """Plan the step of the convolution bound to `root` and what follows it."""
        return self.plan_product(root, Convolution.of)

    def plan_matmul(self, root: relax.Var) -> Step | Skip:
        """Plan the step of the product bound to `root` and what follows it."""
        return self.plan_product(root, lambda call: Matmul.of(call, self.params))

    def plan_product(
        self, root: relax.Var, lay_out: Callable[[Call], Convolution | Matmul | Skip]
    ) -> Step | Skip:
        """Plan the step of a product with a kernel in the layout that `lay_out` returns."""
        call = self.values[root]
        if not all(is_float32(expr) for expr in (*call.args, root)):
            return decline("not float32 of known rank")
        if not all(map(is_operand, call.args)):
            return decline("an operand is neither a variable nor a constant")
        layout = lay_out(call)
        if isinstance(layout, Skip):
            return layout
        start = EpilogueChain((root,), layout.axis, layout.channels)
        chain = follow_epilogue(self.graph, start, TAKES, is_free=self.is_free)
        self.claimed.update(chain.vars)
        operands = (*call.args, chain.bias, chain.residual)
        reads = [expr for expr in operands if isinstance(expr, relax.Var)]
        product = ProductStep(
            layout,
            chain,
            self.find_object(chain.last),
            self.operand(call.args[0]),
            self.operand(call.args[1]),
            None if chain.bias is None else self.operand(chain.bias),
            None if chain.residual is None else self.operand(chain.residual),
            self.kernels,
        )
        return self.make_step(chain.last, reads, product.run, product.product.key)

    # ---- products of integers ----

    def plan_integer_convolution(self, root: relax.Var) -> Step | Skip:
        """Plan the step of the integer convolution bound to `root`."""
        call = self.values[root]
        axis = ConvView.of(call).kernel_layout.index("O")
        return self.plan_integers(root, axis, Convolution.of)

    def plan_integer_dense(self, root: relax.Var) -> Step | Skip:
        """Plan the step of the integer product bound to `root`."""
        return self.plan_integers(root, 0, Matmul.of_dense)

    def plan_integers(
        self, root: relax.Var, axis: int, lay_out: Callable[[Call], Convolution | Matmul | Skip]
    ) -> Step | Skip:
        """Plan a product of integers by a constant weight with outputs at `axis`, if float32 holds
        all sums, or the sums of a few parts of the weight.
        """
        call = self.values[root]
        data, *constants = call.args[:4]
        if not isinstance(data, relax.Var) or not all(
            isinstance(expr, GenericConst) for expr in constants
        ):
            return decline("weight or zero points are computed")
        weight, zero_point, weight_zero = (view_constant(expr.value) for expr in constants)
        dtype = str(data.ty.dtype)
        if zero_point.size != 1 or np.dtype(dtype).itemsize > 2:
            return decline("there are several zero points, or the data is wide")
        none = np.zeros((0,), dtype)
        _, rows = center_factors(none, weight, zero_point, weight_zero, axis)
        zero, (low, high) = int(zero_point.item()), INTEGER_LIMITS[dtype]
        parts = split_weight(rows, axis, max(abs(low - zero), abs(high - zero)))
        if not parts:
            return decline("float32 does not hold the sums")
        layout = lay_out(call)
        if isinstance(layout, Skip):
            return layout
        out_dtype = str(call.attrs.out_dtype)
        step = IntegerProductStep(
            layout,
            self.find_object(root),
            self.operand(data),
            zero,
            parts,
            self.choose_sums(root, out_dtype) if len(parts) == 1 else out_dtype,
            self.kernels,
        )
        self.claimed.add(root)
        return self.make_step(root, [data], step.run, step.product.key)

    def choose_sums(self, root: relax.Var, dtype: str) -> str:
        """Choose the dtype in which sums of the given dtype are passed on."""
        user = self.graph.only_user(root)
        if dtype == "int32" and user is not None and op_name(self.values[user]) == "relax.add":
            user = self.graph.only_user(user)
        if dtype != "int32" or user is None or op_name(self.values[user]) not in AFFINE:
            return dtype
        found = read_affine(self.graph, user)
        if isinstance(found, Skip) or not any(
            each.data.same_as(root) for each in found[0].operands
        ):
            return dtype
        self.sums.add(root)
        return "float32"

    def plan_affine(self, root: relax.Var) -> Step | Skip:
        """Plan the step of an operator on affine integers, and of biases before it."""
        found = read_affine(self.graph, root)
        if isinstance(found, Skip):
            return found
        call, between = found
        data = [operand.data for operand in call.operands]
        dtypes = ["float32" if each in self.sums else str(each.ty.dtype) for each in data]
        self.claimed.update((*between, root))
        operands, result = [*map(self.operand, data)], self.find_object(root)
        step = AffineStep(call, call.plan_rows(dtypes), operands, result, self.kernels)
        return self.make_step(root, data, step.run, step.key)

    # ---- operators on rows ----

    def plan_softmax(self, root: relax.Var) -> Step | Skip:
        """Plan the step of a softmax."""
        call = self.values[root]
        axis = int(call.attrs.axis)
        width = find_width(call.args[0], axis)
        if width is None:
            return decline("not along an axis of known length, in float32")
        key = KernelKey(make_softmax, Softmax((None, width), 1))
        return self.plan_rows(root, key, width, axis=axis)

    def plan_layer_norm(self, root: relax.Var) -> Step | Skip:
        """Plan the step of a layer norm along the last axis, with constant factors."""
        call = self.values[root]
        width, attrs, factors = find_width(call.args[0]), call.attrs, call.args[1:]
        if width is None or [*map(int, attrs.axes)] not in ([-1], [len(shape_of(root)) - 1]):
            return decline("not along a last axis of known length, in float32")
        if not (attrs.center and attrs.scale) or not all(
            isinstance(each, GenericConst) and find_width(each) == width for each in factors
        ):
            return decline("scale or offset is missing, or no constant vector of float32")
        vectors = [view_constant(each.value).reshape(-1) for each in factors]
        if any(vector.size != width for vector in vectors):
            return decline("scale or offset has several rows")
        epsilon = float(attrs.epsilon)
        spec = RowNorm((None,), width, epsilon, is_centred=True, bias=True)
        return self.plan_rows(root, KernelKey(make_norm, spec), width, vectors)

    def plan_prelu(self, root: relax.Var) -> Step | Skip:
        """Plan the step of a prelu along the last axis, with constant slopes."""
        call = self.values[root]
        width, slope = find_width(call.args[0]), call.args[1]
        if width is None or int(call.attrs.axis) not in (-1, len(shape_of(root)) - 1):
            return decline("not along a last axis of known length, in float32")
        if not isinstance(slope, GenericConst) or not is_float32(slope):
            return decline("the slopes are computed")
        slopes = np.broadcast_to(view_constant(slope.value).reshape(-1), (width,))
        return self.plan_rows(root, KernelKey(make_prelu, Prelu(width)), width, [slopes])

    def plan_leaky_relu(self, root: relax.Var) -> Step | Skip:
        """Plan the step of a leaky_relu."""
        if not is_float32(root):
            return decline("not float32 of known rank")
        slope = np.array([float(self.values[root].attrs.alpha)], "float32")
        return self.plan_rows(root, LEAKY_RELU, 1, [slope])

    def plan_each(self, root: relax.Var) -> Step | Skip:
        """Plan the step of a function of each value."""
        if not is_float32(root):
            return decline("not float32 of known rank")
        return self.plan_rows(root, EACH[op_name(self.values[root])], 1)

    def plan_chain(self, first: relax.Var) -> Step | Skip:
        """Plan one step for several operators on single values."""
        found = find_chain(self.graph, first, self.is_free)
        if found is None:
            return decline("it begins no chain of operators on single values")
        self.claimed.update(found.vars)
        key = KernelKey(make_chain, found.chain)
        numbers = [np.array(found.numbers, "float32")] if found.numbers else []
        data, result = self.operand(found.data), self.find_object(found.vars[-1])
        step = RowStep(key, 1, data, numbers, result, self.kernels)
        return self.make_step(found.vars[-1], [found.data], step.run, key)

    def plan_rows(
        self,
        root: relax.Var,
        key: KernelKey,
        width: int,
        factors: Sequence[np.ndarray] = (),
        axis: int = -1,
    ) -> Step | Skip:
        """Plan the step of a kernel on rows, which lie along an axis."""
        data = self.values[root].args[0]
        if not isinstance(data, relax.Var):
            return decline("the data is a constant")
        self.claimed.add(root)
        var = self.find_object(root)
        step = RowStep(key, width, self.operand(data), factors, var, self.kernels, axis)
        return self.make_step(root, [data], step.run, key)

    def is_free(self, var: relax.Var) -> bool:
        """Whether no step found so far computes `var`."""
        return var not in self.claimed

    # ---- recurrent layers ----

    def plan_recurrence(self, root: relax.Var) -> Step | Skip:
        """Plan the step of lstm, gru or rnn."""
        layer = RecurrentCall.of(self.values[root])
        if isinstance(layer, Skip):
            return layer
        operands = (layer.data, layer.weight, *layer.others.values())
        if not all(map(is_operand, operands)):
            return decline("an operand is neither a variable nor a constant")
        isa = select_isa(self.kernels.target)
        spec = replace(layer.spec, steps=None, batch=None)
        weights: list[Operand] = [self.operand(layer.weight)]
        if layer.constants is not None:
            packed = pack_recurrence(spec, isa, *layer.constants)
            weights = [ConstantOperand(align_array(array)) for array in packed]
        step = RecurrentStep(
            plan_recurrence(spec, isa),
            self.operand(layer.data),
            weights,
            {name: self.operand(operand) for name, operand in layer.others.items()},
            self.find_object(root),
            self.kernels,
        )
        self.claimed.add(root)
        reads = [expr for expr in operands if isinstance(expr, relax.Var)]
        return self.make_step(root, reads, step.run, step.key)

    # ---- simulated quantization ----

    def plan_rounding(self, first: relax.Var) -> Step | Skip:
        """Plan one step for simulated_quantize, (maximum, minimum,) simulated_dequantize."""
        call = self.values[first]
        if not is_float32(first):
            return decline("not float32 of known rank")
        if str(call.attrs.rounding) != "TONEAREST_EVEN":
            return decline("another rounding")
        data, *operands = call.args
        if not all(isinstance(expr, relax.Var) for expr in (data, *operands)):
            return decline("an operand is not a variable")
        if any(static_sizes(shape_of(expr)) not in ([], [1]) for expr in operands):
            return decline("there is one scale per channel")
        bounds: list[relax.Expr] = []
        vars_ = [first]
        for name in ("relax.maximum", "relax.minimum", "relax.qnn.simulated_dequantize"):
            user = self.graph.only_user(vars_[-1])
            following = None if user is None else self.graph.call_of(user)
            if user is None or following is None:
                return decline("something else reads the integers")
            if op_name(following) != name:
                if name == "relax.qnn.simulated_dequantize" or bounds:
                    return decline("the integers are not dequantized after two bounds or none")
                continue
            vars_.append(user)
            if name == "relax.qnn.simulated_dequantize":
                same = all(a.same_as(b) for a, b in zip(following.args[1:], operands, strict=True))
                if not same or not following.args[0].same_as(vars_[-2]):
                    return decline("dequantized with other parameters")
                break
            if not following.args[0].same_as(vars_[-2]) or shape_of(following.args[1]):
                return decline("a bound is not a scalar")
            bounds.append(following.args[1])
        if len(bounds) == 1 or not all(map(is_operand, bounds)):
            return decline("there is one bound, or a bound is neither a variable nor a constant")
        self.claimed.update(vars_)
        reads = [expr for expr in (data, *operands, *bounds) if isinstance(expr, relax.Var)]
        rounding = RoundingStep(
            Variable(self.find_object(data)),
            [self.operand(expr) for expr in (*operands, *bounds)],
            self.find_object(vars_[-1]),
            self.kernels,
        )
        return self.make_step(vars_[-1], reads, rounding.run, ROUND)


EAGER_RULES: tuple[Rule[Planner, relax.Var, Step], ...] = (
    make_rule(Planner.plan_convolution, *CONVOLUTIONS),
    make_rule(Planner.plan_matmul, "relax.matmul"),
    make_rule(Planner.plan_integer_convolution, *INTEGER_CONVOLUTIONS),
    make_rule(Planner.plan_integer_dense, "relax.qnn.dense"),
    make_rule(Planner.plan_affine, *AFFINE),
    make_rule(Planner.plan_rounding, "relax.qnn.simulated_quantize"),
    make_rule(Planner.plan_softmax, "relax.nn.softmax"),
    make_rule(Planner.plan_layer_norm, "relax.nn.layer_norm"),
    make_rule(Planner.plan_prelu, "relax.nn.prelu"),
    make_rule(Planner.plan_leaky_relu, "relax.nn.leakyrelu"),
    make_rule(Planner.plan_chain, *LINKS),
    make_rule(Planner.plan_each, *EACH),
    make_rule(Planner.plan_recurrence, *RECURRENT_OPERATORS),
)


def find_width(expr: relax.Expr, axis: int = -1) -> int | None:
    """Return the size of a float32 tensor along an axis. None if it is symbolic or 0."""
    sizes = static_sizes([shape_of(expr)[axis]]) if is_float32(expr) else None
    return sizes[0] or None if sizes else None
