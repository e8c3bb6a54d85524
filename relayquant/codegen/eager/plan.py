"""Eager, planning: a function as steps; which of them run on kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.codegen.eager.kernel_cache import KernelCache, KernelKey
from relayquant.codegen.eager.operand import Operand, Variable, is_operand, make_operand
from relayquant.codegen.eager.product import (
    CONVOLUTIONS,
    Convolution,
    Matmul,
    ProductStep,
)
from relayquant.codegen.eager.rounding import ROUND, RoundingStep
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import execute_binding
from relayquant.ir.rewrite.epilogue_pattern import Tail, float_takes, follow_tail
from relayquant.ir.rewrite.expressions import (
    FunctionGraph,
    is_float32,
    op_name,
    shape_of,
    static_sizes,
)
from relayquant.ir.rewrite.rule import (
    OnSkip,
    Rule,
    Skip,
    decline,
    fire_first,
    log_skip,
    make_rule,
    select_rules,
)

#: A bias may be a value too: of a calibration graph, say, whose biases are parameters.
TAKES = float_takes(GenericConst, relax.Var)


@dataclass(frozen=True, eq=False)
class Step:
    """One value, computed from others in a frame.

    Attributes:
        var: The value.
        reads: What it is computed from.
        run: Computes and stores it.
        kernel: What runs on it, where that is known before the data is.
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

    `on_skip` hears why a product or a rounding runs in numpy, and where a kernel ends. A variable
    is one object in all steps, in `params` if it is a parameter: a table finds the same
    object at once, but has to ask TVM whether another one is equal.
    """

    def __init__(
        self,
        params: Sequence[relax.Var],
        func: relax.Function,
        kernels: KernelCache,
        on_skip: OnSkip = log_skip,
    ) -> None:
        self.graph, self.kernels, self.on_skip = FunctionGraph(func), kernels, on_skip
        self.bindings, self.values = self.graph.bindings, self.graph.values
        bound = (binding.var for binding in self.bindings)
        self.objects = {var: var for var in (*params, *bound)}
        self.params = set(params)
        self.claimed: set[relax.Var] = set()

    def plan(self) -> Iterator[Step]:
        """The steps in order; one that computes several values stands where the last of them was
        bound.
        """
        found: dict[relax.Var, Step] = {}
        for binding in self.bindings:
            if binding.var in self.claimed or binding.var not in self.values:
                continue
            rules = select_rules(EAGER_RULES, op_name(self.values[binding.var]))
            tried = ((rule, binding.var) for rule in rules)
            fired = fire_first(tried, self, binding.var.name, self.on_skip)
            if fired is not None:
                found[fired[1].var] = fired[1]
        inner = self.claimed - set(found)
        for binding in self.bindings:
            if binding.var in found:
                yield found[binding.var]
            elif binding.var not in inner:
                yield self.plan_binding(binding)

    def find_object(self, var: relax.Var) -> relax.Var:
        """The object that stands for a variable."""
        return self.objects.setdefault(var, var)

    def operand(self, expr: relax.Expr) -> Operand:
        """What reads an expression that `is_operand`."""
        return make_operand(self.find_object(expr) if isinstance(expr, relax.Var) else expr)

    def make_step(
        self,
        var: relax.Var,
        reads: Iterable[relax.Var],
        run: Callable[[Frame], None],
        kernel: KernelKey | None = None,
    ) -> Step:
        """A step of this function's variables."""
        return Step(self.find_object(var), tuple(map(self.find_object, reads)), run, kernel)

    def plan_binding(self, binding: Any) -> Step:
        """One binding, in numpy."""
        reads = dict.fromkeys(relax.analysis.free_vars(binding.value))
        if isinstance(binding.value, relax.Tuple) and all(
            isinstance(part, relax.Var) for part in binding.value.fields
        ):
            var, fields = (
                self.find_object(binding.var),
                [*map(self.find_object, binding.value.fields)],
            )
            return self.make_step(var, reads, lambda frame: gather_tuple(frame, var, fields))
        return self.make_step(binding.var, reads, lambda frame: execute_binding(frame, binding))

    # ---- products ----

    def plan_convolution(self, root: relax.Var) -> Step | Skip:
        """The step of the convolution bound to `root` and what follows it."""
        return self.plan_product(root, Convolution.of)

    def plan_matmul(self, root: relax.Var) -> Step | Skip:
        """The step of the product bound to `root` and what follows it."""
        return self.plan_product(root, lambda call: Matmul.of(call, self.params))

    def plan_product(
        self, root: relax.Var, lay_out: Callable[[Call], Convolution | Matmul | Skip]
    ) -> Step | Skip:
        """The step of a product that a kernel takes in the layout that `lay_out` finds."""
        call = self.values[root]
        if not all(is_float32(expr) for expr in (*call.args, root)):
            return decline("not float32 of known rank")
        if not all(map(is_operand, call.args)):
            return decline("an operand is neither a variable nor a constant")
        layout = lay_out(call)
        if isinstance(layout, Skip):
            return layout
        start = Tail((root,), layout.axis, layout.channels)
        tail = follow_tail(self.graph, start, TAKES, is_free=self.is_free, on_skip=self.on_skip)
        self.claimed.update(tail.vars)
        operands = (*call.args, tail.bias, tail.residual)
        reads = [expr for expr in operands if isinstance(expr, relax.Var)]
        product = ProductStep(
            layout,
            tail,
            self.find_object(tail.last),
            self.operand(call.args[0]),
            self.operand(call.args[1]),
            None if tail.bias is None else self.operand(tail.bias),
            None if tail.residual is None else self.operand(tail.residual),
            self.kernels,
        )
        return self.make_step(tail.last, reads, product.run, product.find_kernel())

    def is_free(self, var: relax.Var) -> bool:
        """Whether no step found so far computes `var`."""
        return var not in self.claimed

    # ---- simulated quantization ----

    def plan_rounding(self, first: relax.Var) -> Step | Skip:
        """The step for simulated_quantize, (maximum, minimum,) simulated_dequantize of one
        tensor.
        """
        call = self.values[first]
        if not is_float32(first):
            return decline("not float32 of known rank")
        if str(call.attrs.rounding) != "TONEAREST_EVEN":
            return decline("another rounding")
        data, *operands = call.args
        if not all(isinstance(expr, relax.Var) for expr in (data, *operands)):
            return decline("an operand is no variable")
        if any(static_sizes(shape_of(expr)) not in ([], [1]) for expr in operands):
            return decline("channels have scales of their own")
        bounds: list[relax.Expr] = []
        vars_ = [first]
        for name in ("relax.maximum", "relax.minimum", "relax.qnn.simulated_dequantize"):
            user = self.graph.only_user(vars_[-1])
            following = None if user is None else self.graph.call_of(user)
            if user is None or following is None:
                return decline("something else reads the integers")
            if op_name(following) != name:
                if name == "relax.qnn.simulated_dequantize" or bounds:
                    return decline("the integers are not dequantized, with two bounds or none")
                continue
            vars_.append(user)
            if name == "relax.qnn.simulated_dequantize":
                same = all(a.same_as(b) for a, b in zip(following.args[1:], operands, strict=True))
                if not same or not following.args[0].same_as(vars_[-2]):
                    return decline("dequantized with other parameters")
                break
            if not following.args[0].same_as(vars_[-2]) or shape_of(following.args[1]):
                return decline("a bound is no scalar")
            bounds.append(following.args[1])
        if len(bounds) == 1 or not all(map(is_operand, bounds)):
            return decline("there is one bound, or a bound is neither a variable nor a constant")
        self.claimed.update(vars_)
        reads = [expr for expr in (data, *operands, *bounds) if isinstance(expr, relax.Var)]
        rounding = RoundingStep(
            Variable(self.find_object(data)),
            [self.operand(expr) for expr in operands],
            [self.operand(expr) for expr in bounds],
            self.find_object(vars_[-1]),
            self.kernels,
        )
        return self.make_step(vars_[-1], reads, rounding.run, ROUND)


EAGER_RULES: tuple[Rule[Planner, relax.Var, Step], ...] = (
    make_rule(Planner.plan_convolution, *CONVOLUTIONS),
    make_rule(Planner.plan_matmul, "relax.matmul"),
    make_rule(Planner.plan_rounding, "relax.qnn.simulated_quantize"),
)
