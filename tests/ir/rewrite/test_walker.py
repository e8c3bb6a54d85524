"""The binding walker: exact names, results of every shape, unchanged input."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relayquant.errors import ModelError
from relayquant.ir.rewrite import Graph, rewrite_main
from relayquant.ir.rewrite.function import make_main


def copy_binding(emitter, binding):
    return emitter.get(binding.value)


def double_relu(emitter, binding):
    """relu(x) -> relu(add(x, x)): the replacement holds the replaced operator."""
    value = binding.value
    if getattr(value.op, "name", "") != "relax.nn.relu":
        return emitter.get(value)
    data = emitter.get(value.args[0])
    twice = emitter.emit(relax.op.add(data, data), f"{binding.var.name}.twice")
    return relax.op.nn.relu(twice)


def names(mod: tvm.IRModule) -> list[str]:
    return [binding.var.name for binding in Graph(mod).bindings]


def dotted_module() -> tvm.IRModule:
    """main(in/put) -> layer.1/conv:0, with names that no script could hold."""
    builder = relax.BlockBuilder()
    x = relax.Var("in/put", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.normalize(relax.op.nn.relu(x))
            hidden = relax.DataflowVar("layer.0/relu", value.ty)
            builder.emit_normalized(relax.VarBinding(hidden, value))
            value = builder.normalize(relax.op.sigmoid(hidden))
            out = relax.Var("layer.1/conv:0", value.ty)
            builder.emit_normalized(relax.VarBinding(out, value))
        builder.emit_func_output(out)
    return builder.finalize()


def test_rewrite__keeps_exact_names_and_that_of_the_output():
    mod = dotted_module()
    new = rewrite_main(mod, copy_binding)
    assert names(new) == ["layer.0/relu", "layer.1/conv:0"]
    assert [p.name for p in new["main"].params] == ["in/put"]
    assert new["main"].body.body.name == "layer.1/conv:0"
    assert not isinstance(new["main"].body.body, relax.DataflowVar)
    again = rewrite_main(rewrite_main(new, copy_binding), copy_binding)
    tvm.ir.assert_structural_equal(again, new, map_free_vars=True)


def test_rewrite__names_survive_json():
    new = tvm.ir.load_json(tvm.ir.save_json(rewrite_main(dotted_module(), copy_binding)))
    assert names(new) == ["layer.0/relu", "layer.1/conv:0"]


def test_rewrite__replacement_may_hold_the_replaced_operator():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.nn.relu(a)
                R.output(b)
            return b

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a_twice = R.add(x, x)
                a = R.nn.relu(a_twice)
                b_twice = R.add(a, a)
                b = R.nn.relu(b_twice)
                R.output(b)
            return b

    text = Before.script()
    new = rewrite_main(Before, double_relu)
    tvm.ir.assert_structural_equal(new["main"], Expected["main"], map_free_vars=True)
    assert names(new) == ["a.twice", "a", "b.twice", "b"]
    assert Before.script() == text


def test_rewrite__several_results_and_nested_tuples():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.add(a, y)
                out = (b, (a, x), a)
                R.output(out)
            return out

    new = rewrite_main(Module, copy_binding)
    tvm.ir.assert_structural_equal(new["main"], Module["main"], map_free_vars=True)
    graph = Graph(new)
    assert {var.name for var in graph.outputs} == {"out", "a", "b", "x"}


def test_rewrite__splits_and_projections():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                parts = R.split(x, 2, axis=1)
                left = parts[0]
                right = parts[1]
                out = R.add(left, right)
                R.output(out)
            return out

    new = rewrite_main(Module, copy_binding)
    tvm.ir.assert_structural_equal(new["main"], Module["main"], map_free_vars=True)
    assert names(new) == ["parts", "left", "right", "out"]


def test_rewrite__parameter_returned_directly():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(y)
                out = (x, a)
                R.output(out)
            return out

    new = rewrite_main(Module, copy_binding)
    relax.analysis.well_formed(new)
    value = Graph(new).values[new["main"].body.body]
    assert [field.name for field in value.fields] == ["x", "a"]

    alone = rewrite_main(Module, copy_binding, result=lambda emitter, out: emitter.get(out))
    assert len(alone["main"].params) == 2


def test_rewrite__function_that_only_returns_its_parameter():
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    mod = make_main([x], lambda _: x)
    new = rewrite_main(mod, copy_binding)
    relax.analysis.well_formed(new)
    assert [p.name for p in new["main"].params] == ["x"]


def test_rewrite__symbolic_batch():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            with R.dataflow():
                a = R.reshape(x, R.shape([n * 2, 2]))
                b = R.nn.relu(a)
                R.output(b)
            return b

    new = rewrite_main(Module, double_relu)
    (dim, two) = new["main"].ret_ty.shape.values
    assert int(two) == 2
    assert new["main"].params[0].name == "x"
    assert str(dim) == "n * T.int64(2)"


def test_rewrite__slice_of_a_symbolic_batch_that_main_returns():
    # Only sizes that are at least 0 have a first row behind one that is added.
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            with R.dataflow():
                a = R.nn.pad(R.nn.relu(x), [1, 0, 0, 0])
                b = R.strided_slice(a, [0], [0], [1])
                R.output(b)
            return b

    new = rewrite_main(Module, double_relu)
    relax.analysis.well_formed(new)
    assert [int(size) for size in new["main"].ret_ty.shape.values] == [1, 4]


def test_rewrite__drops_bindings_and_replaces_by_older_values():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.sigmoid(a)
                c = R.tanh(b)
                R.output(c)
            return c

    def skip_sigmoid(emitter, binding):
        if binding.var.name == "b":
            return emitter.get(binding.value.args[0])
        return emitter.get(binding.value)

    assert names(rewrite_main(Before, skip_sigmoid)) == ["a", "c"]


def test_rewrite__unused_values_vanish_and_names_stay_unique():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.sigmoid(a)
                R.output(b)
            return b

    def visit(emitter, binding):
        emitter.emit(relax.op.tanh(emitter.get(binding.value.args[0])), "unused")
        taken = emitter.emit(relax.op.abs(emitter.get(binding.value.args[0])), "a")
        return relax.op.add(taken, taken)

    assert names(rewrite_main(Before, visit)) == ["a.1", "a", "a.2", "b"]


def test_rewrite__attributes_added_and_removed():
    mod = rewrite_main(dotted_module(), copy_binding, attrs={"note": "one", "num_input": 1})
    assert str(mod["main"].attrs["note"]) == "one"
    gone = rewrite_main(mod, copy_binding, attrs={"note": None})
    assert "note" not in gone["main"].attrs
    assert int(gone["main"].attrs["num_input"]) == 1


def test_rewrite__other_functions_stay_while_called():
    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True, private=True)
        def copy(a: T.Buffer((2, 3), "float32"), b: T.Buffer((2, 3), "float32")):
            for i, j in T.grid(2, 3):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj]

        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            cls = Module
            with R.dataflow():
                a = R.call_tir(cls.copy, (x,), out_ty=R.Tensor((2, 3), "float32"))
                R.output(a)
            return a

    kept = rewrite_main(Module, copy_binding)
    assert {gv.name_hint for gv in kept.get_global_vars()} == {"main", "copy"}

    gone = rewrite_main(Module, lambda e, b: relax.op.nn.relu(e.get(b.value.args[1].fields[0])))
    assert {gv.name_hint for gv in gone.get_global_vars()} == {"main"}


def test_graph__refuses_modules_without_main_and_with_control_flow():
    @I.ir_module
    class Other:
        @R.function
        def forward(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                R.output(a)
            return a

        @R.function
        def decode(x: R.Tensor((2,), "float32")):
            return x

    with pytest.raises(ModelError, match=r"no Relax function 'main'.*decode, forward"):
        Graph(Other)

    @I.ir_module
    class Branch:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")):
            if c:  # noqa: SIM108
                y = R.nn.relu(x)
            else:
                y = R.sigmoid(x)
            with R.dataflow():
                z = R.tanh(y)
                R.output(z)
            return z

    with pytest.raises(ModelError, match="one dataflow block"):
        Graph(Branch)


def test_graph__users_outputs_and_order():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                b = R.add(a, a)
                c = R.sigmoid(a)
                out = (b, c)
                R.output(out)
            return out

    graph = Graph(Module)
    var = graph.vars
    assert [user.name for user in graph.users[var["a"]]] == ["b", "c"]
    assert not graph.has_one_user(var["a"])
    assert graph.has_one_user(var["x"])
    assert not graph.has_one_user(var["b"])  # returned
    assert graph.order[var["x"]] < graph.order[var["a"]] < graph.order[var["c"]]
    assert graph.op_name(var["b"]) == "relax.add"
    assert graph.op_name(var["x"]) == ""


def test_rewrite__match_cast_stays():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(ndim=2, dtype="float32")):
            n = T.int64()
            with R.dataflow():
                a = R.match_cast(x, R.Tensor((n, 4), "float32"))
                b = R.nn.relu(a)
                R.output(b)
            return b

    new = rewrite_main(Module, copy_binding)
    assert names(new) == ["a", "b"]
    tvm.ir.assert_structural_equal(new["main"], Module["main"], map_free_vars=True)
    assert Graph(new).op_name(Graph(new).vars["a"]) == ""
    (block,) = new["main"].body.blocks
    assert isinstance(block.bindings[0], relax.MatchCast)


def test_rewrite__match_cast_that_compares_sizes_of_inputs_stays():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")):
            n = T.int64()
            k = T.int64()
            with R.dataflow():
                a = R.match_cast(y, R.Tensor((n, 4), "float32"))
                b = R.match_cast(x, R.Tensor((k, 4), "float32"))
                c = R.add(a, b)
                R.output(c)
            return c

    func = rewrite_main(Module, copy_binding)["main"]
    cast, total = func.body.blocks[0].bindings
    (n, _), (m, _) = (param.ty.shape for param in func.params)
    assert isinstance(cast, relax.MatchCast)
    assert not n.same_as(m)
    assert cast.ty.shape[0].same_as(n)
    assert total.value.args[1].same_as(func.params[0])  # k is n: nothing is compared
    assert total.var.ty.shape[0].same_as(n)


def test_rewrite__match_cast_of_a_shape_that_is_written_there_stays():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", "m"), "float32")):
            n = T.int64()
            m = T.int64()
            with R.dataflow():
                a = R.match_cast(R.shape([m, 4]), R.Shape([n, 4]))  # noqa: F841
                b = R.nn.relu(x)
                R.output(b)
            return b

    new = rewrite_main(Module, copy_binding)
    assert names(new) == ["a", "b"]
    tvm.ir.assert_structural_equal(new["main"], Module["main"], map_free_vars=True)


def test_rewrite__what_reads_nothing_new_is_taken_over_as_it_is():
    """No type is inferred again of bindings before the first one that changes."""
    mod = dotted_module()
    old = Graph(mod).bindings[0]

    def visit(emitter, binding):
        value = emitter.get(binding.value)
        return value if binding.var.same_as(old.var) else relax.op.negative(value.args[0])

    first, last = Graph(rewrite_main(mod, visit)).bindings
    assert first.value.same_as(old.value)
    assert last.value.op.name == "relax.negative"
    assert last.var.name == "layer.1/conv:0"


def test_rewrite__what_reads_something_new_is_bound_anew():
    new = rewrite_main(dotted_module(), double_relu, attrs={"note": "new"})
    first, second, last = Graph(new).bindings
    assert second.value.args[0].same_as(first.var)
    assert last.value.args[0].same_as(second.var)


def test_rewrite__calls_inside_a_replacement_get_names_of_their_own():
    """A model whose values are named as TVM's builder names what it binds: lv, lv1."""
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.op.tanh(x), "lv")
            out = builder.emit_output(relax.op.exp(first), "lv1")
        builder.emit_func_output(out)

    def nest(emitter, binding):
        if binding.var.name != "lv":
            return emitter.get(binding.value)
        shared = relax.op.sin(x)
        half = relax.op.split(relax.op.cos(x), 2, axis=0)[1]
        joined = relax.op.concat([half, relax.op.negative(half)])
        return relax.op.multiply(shared, relax.op.add(shared, joined))

    assert names(rewrite_main(builder.finalize(), nest)) == [
        "lv.sin",
        "lv.add.concat.field.split.cos",
        "lv.add.concat.field.split",
        "lv.add.concat.field",
        "lv.add.concat.negative",
        "lv.add.concat",
        "lv.add",
        "lv",
        "lv1",
    ]


def test_rewrite__result_of_thousands_of_nested_calls():
    """Each call becomes a binding, behind the one that it reads."""

    def visit(emitter, binding):
        value = emitter.get(binding.value)
        for _ in range(3000):
            value = relax.op.nn.relu(value)
        return value

    graph = Graph(rewrite_main(dotted_module(), visit))
    assert len(graph.bindings) == 2 * 3001
    operators = [binding.value.op.name for binding in graph.bindings]
    (place,) = (at for at, name in enumerate(operators) if name == "relax.sigmoid")
    assert place == 3001
    for before, binding in pairwise(graph.bindings):
        assert binding.value.args[0].same_as(before.var)


def test_rewrite__shared_operand_in_tuples_is_bound_once():
    def visit(emitter, binding):
        value = emitter.get(binding.value)
        twice = relax.Tuple([value, relax.Tuple([value, value])])
        return relax.op.add(relax.TupleGetItem(twice, 0), value)

    graph = Graph(rewrite_main(dotted_module(), visit))
    operators = [getattr(getattr(b.value, "op", None), "name", "") for b in graph.bindings]
    assert operators.count("relax.sigmoid") == operators.count("relax.nn.relu") == 1


def test_rewrite_main__other_functions_call_the_new_one():
    @I.ir_module
    class Twice:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            with R.dataflow():
                y = R.nn.relu(x)
                R.output(y)
            return y

        @R.function
        def twice(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            cls = Twice
            once: R.Tensor((2, 3), "float32") = cls.main(x)
            again: R.Tensor((2, 3), "float32") = cls.main(once)
            return again

    rebuilt = rewrite_main(Twice, double_relu, tidy=False)
    relax.analysis.well_formed(rebuilt, check_ty=False)
    callees = [b.value.op for block in rebuilt["twice"].body.blocks for b in block.bindings]
    assert all(callee.same_as(rebuilt.get_global_var("main")) for callee in callees)
    assert names(rebuilt) == ["y.twice", "y"]
