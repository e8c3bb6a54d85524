"""The frame of all lowerings: rules claim values, kernels are built once, blocks rewritten."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from tvm import relax, te

from relayquant.codegen.kernels.in_place import STORES_ONCE
from relayquant.codegen.lowering.engine import BlockView, Kernel, Lowered, lower_functions
from relayquant.ir.rewrite.expressions import op_name
from relayquant.ir.rewrite.rule import Skip, decline, make_rule

SHAPE = relax.TensorType((4,), "float32")


def make_function(body, name="main"):
    """A function of `body(emit, x, y)`."""
    x, y = relax.Var("x", SHAPE), relax.Var("y", SHAPE)
    builder = relax.BlockBuilder()
    with builder.function(name, [x, y]):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, x, y))
        builder.emit_func_output(out)
    return builder.finalize()[name]


def make_sum(name="sum_kernel"):
    """PrimFunc(x, y, x + y)."""
    x, y = (te.placeholder((4,), "float32", name) for name in "xy")
    z = te.compute((4,), lambda i: x[i] + y[i], "z")
    return te.create_prim_func([x, y, z]).with_attr("global_symbol", name)


class Sums:
    """A rule for additions, and a relu behind; counts how often a kernel is built."""

    def __init__(self, **marks):
        self.built, self.marks = [], marks
        self.rules = (make_rule(self.lower_sum, "relax.add"),)

    def lower_sum(self, block: BlockView, var: relax.Var) -> Lowered | Skip:
        call = block.call_of(var)
        if call.args[0].same_as(call.args[1]):
            return decline("twice the same")
        user = block.only_user(var)
        has_relu = user is not None and op_name(block.values[user]) == "relax.nn.relu"

        def build():
            self.built.append(has_relu)
            return make_sum().with_attrs(self.marks)

        vars_ = (var, user) if has_relu else (var,)
        return Lowered(vars_, Kernel("sum_kernel", has_relu, build), tuple(call.args))


def lower(mod, **options):
    sums = Sums()
    with hear_declined() as heard:
        lowered = lower_functions(mod, sums.rules, lambda block: block, **options)
    return lowered, sums.built, [told[1:] for told in heard]


def list_values(expr):
    """What a function, or a branch, binds."""
    body = expr.body if isinstance(expr, relax.Function) else expr
    return [binding.value for block in body.blocks for binding in block.bindings]


def test_lower_functions__equal_specifications_are_built_once_for_all_functions():
    def add_twice(emit, x, y):
        return emit(relax.op.add(emit(relax.op.add(x, y)), y))

    mod = tvm.IRModule({name: make_function(add_twice, name) for name in ("main", "other")})
    lowered, built, _ = lower(mod)
    assert built == [False]
    callees = {v.args[0].name_hint for f in ("main", "other") for v in list_values(lowered[f])[:2]}
    assert callees == {"sum_kernel"}
    assert lowered["sum_kernel"].attrs["relayquant.macs"] == 0
    assert "add" in op_name(list_values(mod["main"])[0])  # the input is not changed


def test_lower_functions__what_is_inside_a_kernel_is_bound_no_more():
    func = make_function(lambda emit, x, y: emit(relax.op.nn.relu(emit(relax.op.add(x, y)))))
    lowered, built, _ = lower(tvm.IRModule({"main": func}))
    values = list_values(lowered["main"])
    assert built == [True]
    assert [op_name(v) for v in values if op_name(v)] == ["relax.call_tir"]


def test_lower_functions__a_rule_that_declines_is_heard_and_changes_nothing():
    func = make_function(lambda emit, x, y: emit(relax.op.add(x, x)))
    mod = tvm.IRModule({"main": func})
    lowered, built, heard = lower(mod)
    assert lowered is mod
    assert built == []
    assert [reason for _, reason in heard] == ["twice the same"]


def test_lower_functions__only_the_named_function():
    def add(emit, x, y):
        return emit(relax.op.add(x, y))

    mod = tvm.IRModule({name: make_function(add, name) for name in ("main", "other")})
    lowered, _, _ = lower(mod, only="other")
    names = {name: op_name(list_values(lowered[name])[0]) for name in ("main", "other")}
    assert names == {"main": "relax.add", "other": "relax.call_tir"}


def test_lower_functions__branches_where_any_block_is_rewritten():
    builder, c = relax.BlockBuilder(), relax.Var("c", relax.TensorType((), "bool"))
    x, y = relax.Var("x", SHAPE), relax.Var("y", SHAPE)

    def branch(name, op):
        value = relax.Var(name, SHAPE)
        binding = relax.VarBinding(value, builder.normalize(op(x, y)))
        return relax.SeqExpr([relax.BindingBlock([binding])], value)

    out = relax.Var("out", SHAPE)
    choice = relax.If(c, branch("sum", relax.op.add), branch("product", relax.op.multiply))
    block = relax.BindingBlock([relax.VarBinding(out, builder.normalize(choice))])
    func = relax.Function([c, x, y], relax.SeqExpr([block], out), SHAPE)
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    assert lower(mod)[0] is mod
    lowered, built, _ = lower(mod, in_any_block=True)
    assert built == [False]
    (value,) = list_values(lowered["main"])
    assert op_name(list_values(value.true_branch)[0]) == "relax.call_tir"
    assert op_name(list_values(value.false_branch)[0]) == "relax.multiply"
    machine = relax.VirtualMachine(tvm.compile(lowered, "llvm"), tvm.cpu())
    a, b = np.arange(4, dtype="float32"), np.full(4, 3, "float32")
    for flag, want in ((True, a + b), (False, a * b)):
        got = machine["main"](*map(tvm.runtime.tensor, (np.bool_(flag).reshape(()), a, b)))
        np.testing.assert_array_equal(got.numpy(), want)


def read_last(emit, x, y):
    a = emit(relax.op.add(x, y))
    return emit(relax.op.add(emit(relax.op.add(x, a)), a))


def read_later(emit, x, y):
    a = emit(relax.op.add(x, y))
    b = emit(relax.op.add(x, a))
    return emit(relax.op.add(b, emit(relax.op.add(a, b))))


def read_view(emit, x, y):
    a = emit(relax.op.add(x, y))
    view = emit(relax.op.reshape(a, (4,)))
    return emit(relax.op.add(emit(relax.op.add(x, a)), view))


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (read_last, [False, False, True]),  # only the second reader of a is the last one
        (read_later, [False, False, False, True]),
        (read_view, [False, False, False]),
    ],
)
def test_lower_functions__a_result_takes_the_memory_of_an_operand_that_is_read_last(body, changed):
    mod = tvm.IRModule({"main": make_function(body)})
    sums = Sums(**{STORES_ONCE: True})
    lowered = lower_functions(mod, sums.rules, lambda block: block)
    names = [op_name(value) for value in list_values(lowered["main"])]
    calls = [name for name in names if "call_tir" in name]
    assert [name == "relax.call_tir_inplace" for name in calls] == changed
    arrays = [np.arange(4, dtype="float32"), np.full(4, 0.5, "float32")]
    got, wanted = (
        relax.VirtualMachine(tvm.compile(each, "llvm"), tvm.cpu())["main"](
            *[tvm.runtime.tensor(array) for array in arrays]
        ).numpy()
        for each in (lowered, mod)
    )
    np.testing.assert_array_equal(got, wanted)
