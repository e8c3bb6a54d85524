"""Relay JSON: shared nodes, names, what is refused; a JSON file on disk."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from legacy_json import LegacyJson, conv_module
from relay_testing import value_names

import relayquant as rq
from relayquant.cli.files import load_model
from relayquant.errors import ModelError
from relayquant.relay import from_json, from_text

X = np.linspace(-2, 2, 32, dtype="float32").reshape(1, 2, 4, 4)


def test_json__computes():
    text = """
    def @main(%x: Tensor[(1, 2, 4, 4), float32], %w: Tensor[(2, 2, 3, 3), float32],
              %b: Tensor[(2), float32]) {
      %0 = nn.conv2d(%x, %w, padding=[1, 1, 1, 1]);
      %1 = nn.bias_add(%0, %b);
      add(nn.relu(%1), %x)
    }"""
    w = np.linspace(-1, 1, 36, dtype="float32").reshape(2, 2, 3, 3)
    want = rq.reference.run(from_text(text, {"w": w, "b": np.array([0.5, -0.5], "float32")}), [X])
    mod = from_json(conv_module())
    np.testing.assert_array_equal(rq.reference.run(mod, [X])[0], want[0])
    assert value_names(mod)[:3] == ["0", "1", "kept"]
    assert [param.name for param in mod["main"].params] == ["data"]


def test_json__file(tmp_path):
    (tmp_path / "model.json").write_text(conv_module())
    mod, params = rq.load(tmp_path / "model.json")
    assert params == {}
    assert rq.reference.run(mod, [X])[0].shape == (1, 2, 4, 4)


def test_json__on_the_command_line(tmp_path):
    """A .json file may hold either kind of module."""
    relay = from_json(conv_module())
    (tmp_path / "relay.json").write_text(conv_module())
    (tmp_path / "relax.json").write_text(tvm.ir.save_json(relay))
    for name in ("relay.json", "relax.json"):
        mod, _ = load_model(tmp_path / name)
        tvm.ir.assert_structural_equal(mod, relay)


def test_json__of_relax_is_named(tmp_path):
    (tmp_path / "model.json").write_text(tvm.ir.save_json(from_json(conv_module())))
    with pytest.raises(ModelError, match=r"not a Relay module.*tvm\.ir\.load_json"):
        rq.load(tmp_path / "model.json")


def test_json__variables_of_one_name():
    graph = LegacyJson()
    kind = graph.type((2,))
    params = [graph.var("x", kind), graph.var("x", kind)]
    body = graph.call("subtract", params)
    mod = from_json(graph.file(graph.function(params, body)))
    assert [param.name for param in mod["main"].params] == ["x", "x1"]
    got = rq.reference.run(mod, [np.full(2, 5, "float32"), np.full(2, 3, "float32")])
    np.testing.assert_array_equal(got[0], [2, 2])


def test_json__deep_graphs_need_no_recursion():
    graph = LegacyJson()
    x = graph.var("x", graph.type((2,)))
    value = x
    for _ in range(3000):
        value = graph.call("nn.relu", [value])
    mod = from_json(graph.file(graph.function([x], value)))
    assert len(value_names(mod)) == 3000


def test_json__unsupported_operators_are_listed():
    graph = LegacyJson()
    x = graph.var("x", graph.type((2,)))
    first = graph.call("vision.nms", [x])
    second = graph.add("relay.RefCreate", value=first)
    body = graph.add("relay.Tuple", fields=graph.array([first, second]))
    with pytest.raises(ModelError) as raised:
        from_json(graph.file(graph.function([x], body)))
    assert f"vision.nms: node {first}" in str(raised.value)
    assert f"relay.RefCreate: node {second}" in str(raised.value)


def test_json__circle():
    graph = LegacyJson()
    x = graph.var("x", graph.type((2,)))
    call = graph.call("add", [x, x])
    graph.nodes[int(graph.nodes[call]["attrs"]["args"])]["data"][1] = call
    with pytest.raises(ModelError, match=f"node {call}: it contains itself"):
        from_json(graph.file(graph.function([x], call)))


def test_json__branches_that_share_without_end():
    """Each `if` holds the one before twice: read as a tree that would be 2^60 nodes."""
    graph = LegacyJson()
    x = graph.var("x", graph.type(()))
    value = x
    for _ in range(60):
        attrs = {"cond": x, "true_branch": graph.call("exp", [value])}
        value = graph.add("relay.If", **attrs, false_branch=graph.call("exp", [value]))
    with pytest.raises(ModelError, match="share so much"):
        from_json(graph.file(graph.function([x], value)))


#: What is changed -> part of the message.
BROKEN = {
    '"root": 1': "is no JSON",
    "[]": "not a node graph",
    '{"root": 0}': "it has no nodes",
    '{"root": 7, "nodes": [{"type_key": ""}]}': "root is 7",
    '{"root": 0, "nodes": [{"type_key": ""}]}': "holds null, not a module",
    '{"root": 0, "nodes": [3]}': "it is not an object",
    '{"root": 0, "nodes": [{"type_key": "IRModule"}]}': "has no attribute 'functions'",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:30])
def test_json__broken(text):
    with pytest.raises(ModelError) as raised:
        from_json(text)
    assert BROKEN[text].replace("is no JSON", "is not JSON") in str(raised.value)


def test_json__attributes_are_checked():
    document = json.loads(conv_module())
    for node in document["nodes"]:
        if node["type_key"] == "relay.attrs.Conv2DAttrs":
            node["attrs"]["groups"] = "many"
    with pytest.raises(ModelError, match=r"node \d+: attribute 'groups' is 'many'"):
        from_json(json.dumps(document))
