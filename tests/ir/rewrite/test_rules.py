"""Rules: priority, reasons to decline, and rules that never settle."""

from __future__ import annotations

import pytest
from operator_names import list_operators
from tvm import relax
from tvm.relax.dpl import is_op, wildcard
from tvm.script import ir as I
from tvm.script import relax as R

from relayquant.ir.rewrite import Pattern, Rule, Skip, apply_rules
from relayquant.ir.rewrite.rule import decline, make_rule, select_rules


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.sigmoid(a)
            out = R.nn.relu(b)
            R.output(out)
        return out


def replace_rule(name: str, old: str, new, *, only: str = "") -> Rule:
    """old(x) -> new(x), everywhere or at one value."""
    data = wildcard()
    pattern = Pattern(is_op(old)(data), {"data": data})

    def rewrite(emitter, match):
        if only and match.name != only:
            return Skip(f"not at {only}", "look elsewhere")
        return new(emitter.get(match.parts["data"]))

    return Rule(name, pattern, rewrite)


def test_apply_rules__the_first_that_accepts_wins():
    to_tanh = replace_rule("tanh", "relax.nn.relu", relax.op.tanh)
    to_exp = replace_rule("exp", "relax.nn.relu", relax.op.exp)
    assert list_operators(apply_rules(Chain, [to_tanh, to_exp])) == [
        "tanh", "sigmoid", "tanh",
    ]  # fmt: skip
    assert list_operators(apply_rules(Chain, [to_exp, to_tanh])) == [
        "exp", "sigmoid", "exp",
    ]  # fmt: skip


def test_apply_rules__a_rule_that_declines_leaves_it_to_the_next_and_says_why():
    heard = []
    rules = [
        replace_rule("only out", "relax.nn.relu", relax.op.tanh, only="out"),
        replace_rule("rest", "relax.nn.relu", relax.op.exp),
    ]
    new = apply_rules(
        Chain, rules, on_skip=lambda rule, name, skip: heard.append((rule, name, skip))
    )
    assert list_operators(new) == ["exp", "sigmoid", "tanh"]
    assert heard == [("only out", "a", Skip("not at out", "look elsewhere"))]


def test_apply_rules__what_declined_is_logged(caplog):
    rules = [replace_rule("only out", "relax.nn.relu", relax.op.tanh, only="out")]
    with caplog.at_level("DEBUG", logger="relayquant.ir.rewrite"):
        apply_rules(Chain, rules)
    assert "only out declines at a: not at out" in caplog.text


def test_select_rules__of_the_kind_or_of_all_operators():
    def anywhere(context, var):
        return Skip("no")

    def at_relu(context, var):
        return Skip("no")

    rules = [make_rule(anywhere), make_rule(at_relu, "relax.nn.relu", "alias")]
    assert [rule.name for rule in select_rules(rules, "relax.nn.relu")] == ["anywhere", "at_relu"]
    assert [rule.name for rule in select_rules(rules, "relax.exp")] == ["anywhere"]
    assert [rule.name for rule in select_rules(rules, "alias")] == ["at_relu"]
    assert select_rules(rules, "") == []


def test_decline__is_a_skip_of_that_reason_made_once():
    assert decline("no") == Skip("no")
    assert decline("no") is decline("no")


def test_apply_rules__repeats_until_nothing_fires():
    rules = [
        replace_rule("2", "relax.sigmoid", relax.op.tanh),
        replace_rule("1", "relax.nn.relu", relax.op.sigmoid),
    ]
    assert list_operators(apply_rules(Chain, rules)) == ["tanh"] * 3


def test_apply_rules__nothing_to_do_gives_the_module_back():
    assert apply_rules(Chain, [replace_rule("no", "relax.exp", relax.op.tanh)]).same_as(Chain)


def test_apply_rules__input_is_not_changed():
    text = Chain.script()
    apply_rules(Chain, [replace_rule("1", "relax.nn.relu", relax.op.sigmoid)])
    assert Chain.script() == text


def test_apply_rules__rules_that_undo_one_another_raise():
    rules = [
        replace_rule("there", "relax.nn.relu", relax.op.sigmoid),
        replace_rule("back", "relax.sigmoid", relax.op.nn.relu),
    ]
    with pytest.raises(RuntimeError, match=r"did not settle after 7 rounds.*'back', 'there'"):
        apply_rules(Chain, rules, max_rounds=7)
