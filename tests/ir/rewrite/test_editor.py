"""The mutable form of main: use counts, order, names, outputs."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.errors import ModelError
from relayquant.ir.rewrite.editor import Editor


@I.ir_module
class Diamond:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        R.func_attr({"note": "kept"})
        with R.dataflow():
            a = R.exp(x)
            b = R.tanh(a)
            c = R.add(a, a)
            y = R.add(b, c)
            R.output(a, y)
        return (y, a)


def by_name(editor: Editor) -> dict[str, relax.Var]:
    return {name: var for var, name in editor.names.items() if var in editor.values}


def names_of(mod: tvm.IRModule) -> list[str]:
    return [binding.var.name for binding in mod["main"].body.blocks[0].bindings]


def test_unedited__same_function():
    built = Editor(Diamond).build()
    tvm.ir.assert_structural_equal(built["main"], Diamond["main"], map_free_vars=True)
    assert built["main"].attrs["note"] == "kept"


def test_uses__counted():
    editor = Editor(Diamond)
    values = by_name(editor)
    assert [editor.names[user] for user in editor.users(values["a"])] == ["b", "c"]
    assert editor.has_one_use(values["b"])
    assert not editor.has_one_use(values["a"])  # three reads, and returned
    assert not editor.has_one_use(values["y"])  # returned
    assert editor.is_output(values["a"])
    assert editor.op_name(values["c"]) == "relax.add"


def test_define_and_redefine__placed_before_and_dead_values_gone():
    editor = Editor(Diamond)
    values = by_name(editor)
    helper = editor.define(values["c"], relax.op.negative(values["a"]), "b", origin=values["b"])
    editor.redefine(values["y"], relax.op.add(helper, helper))
    built = editor.build()
    assert names_of(built) == ["a", "b.1", "y"]
    assert editor.origins == {"b.1": "b"}
    assert names_of(Editor(Diamond).build()) == ["a", "b", "c", "y"]


def test_replace__everywhere_even_in_the_result():
    editor = Editor(Diamond)
    values = by_name(editor)
    editor.replace(values["y"], values["b"])
    built = editor.build()
    assert names_of(built) == ["a", "b"]
    assert [field.name for field in built["main"].body.body.fields] == ["b", "a"]
    assert not any(isinstance(f, relax.DataflowVar) for f in built["main"].body.body.fields)


def test_alias_of_a_parameter__keeps_the_name():
    editor = Editor(Diamond)
    editor.alias(by_name(editor)["y"], editor.params[0])
    assert names_of(editor.build()) == ["a", "y"]


def test_bind_param__constant():
    editor = Editor(Diamond)
    editor.bind_param(editor.params[0], relax.const([[1.0, 2.0, 3.0]] * 2, "float32"))
    assert len(editor.build()["main"].params) == 0


def test_unread_functions__dropped():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit_te(lambda t: tvm.topi.tanh(t), x)
            out = builder.emit_output(builder.emit_te(lambda t: tvm.topi.exp(t), a))
        builder.emit_func_output(out)
    editor = Editor(builder.finalize())
    first, second, *_ = editor.order()
    assert len(editor.build().get_global_vars()) == 3
    editor.redefine(second, relax.op.exp(first))
    assert len(editor.build().get_global_vars()) == 2


def test_no_main__refused():
    with pytest.raises(ModelError, match="Rename the function"):
        Editor(tvm.IRModule())
