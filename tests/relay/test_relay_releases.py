"""Relay out: every call is one that the release accepts, for all releases and all rows."""

from __future__ import annotations

import pytest
from attribute_calls import VARIED, build_models, pick_result
from relay_export_cases import FLOAT, INTEGER, X, build
from relay_facts import load_facts
from tvm import relax

from relayquant.errors import ConfigError, ModelError, RelayQuantError
from relayquant.ir.rewrite.graph import Graph, call_name
from relayquant.relay import to_text
from relayquant.relay.export import EXPORTS
from relayquant.relay.export.float_rows import _SAME
from relayquant.relay.export.releases import (
    ATTRIBUTES_SINCE,
    OPERATORS_SINCE,
    RELEASES,
    choose_attributes,
)
from relayquant.relay.operators import OPERATORS

RELEASE_NAMES = [str(release) for release in RELEASES]


@pytest.fixture
def facts(shared_data):
    return load_facts(shared_data("../facts/relay_releases.json"))


def make_same(name: str, count: int):
    """A call of an operator that Relay calls the same."""
    *path, last = name.split(".")
    holder = relax.op.nn if path else relax.op
    is_logical = name.startswith("logical")
    is_whole = name.startswith("bitwise") or name.endswith("shift")

    def make(x):
        if is_logical:
            x = relax.op.greater(x, relax.const(0, "float32"))
        elif is_whole:
            x = relax.op.astype(x, "int32")
        elif name == "where":
            return relax.op.where(relax.op.greater(x, x), x, x)
        return getattr(holder, last)(*[x] * count)

    return make


def build_rows():
    """Name -> a small module; together they have all operators that are written."""
    found = {name: build(make, **inputs) for name, (make, inputs, _) in INTEGER.items()}
    found |= {f"float {name}": build(make, x=X) for name, make in FLOAT.items()}
    others = {1: ("negative", "bitwise_not", "logical_not")}  # whose models take more than X
    for count, names in (*_SAME.items(), *others.items()):
        for name in (*names, "add") if count == 2 else names:
            if hasattr(relax.op.nn if "." in name else relax.op, name.split(".")[-1]):
                found[f"same {name}"] = build(make_same(name, count), x=X)
    for name in VARIED:
        _, values, mod, _ = build_models(name)
        found |= {f"{name} {what}": pick_result(mod, i) for i, what in enumerate(values)}
    return found


@pytest.fixture(scope="module")
def rows():
    return build_rows()


@pytest.mark.slow
def test_rows__are_all_here(rows):
    here = {
        call_name(binding.value)
        for mod in rows.values()
        for binding in Graph(mod).bindings
        if hasattr(binding.value, "op")
    }
    assert set(EXPORTS) <= here


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_written__as_the_release_has_it(exact, rows, facts):
    """What a release is refused has, in the text of the newest, a call that it does not accept."""
    written = 0
    for name, mod in rows.items():
        try:
            newest, _ = to_text(mod, exact=exact)
        except RelayQuantError:
            continue  # no Relay has it
        for release in RELEASE_NAMES:
            try:
                text, _ = to_text(mod, exact=exact, release=release)
            except ModelError:
                assert facts.find_faults(newest, release), (name, release)
                continue
            assert not facts.find_faults(text, release), (name, release, text)
            written += 1
    assert written > 12 * 150


def test_table__rows_are_first_releases(facts):
    """No row stands for what all releases have, and none is a release late."""
    for name, release in OPERATORS_SINCE.items():
        if name != "nn.batch_matmul":  # older; its attributes are not
            assert facts.operators[name]["operator"] == f"{release}-0.19"
    for (name, key), since in ATTRIBUTES_SINCE.items():
        assert key in OPERATORS[name].attrs
        spans = facts.operators[name]["attributes"].get(key, {})
        if spans:
            assert set(spans) == {f"{since.release}-0.19"}


def test_refused__what_the_release_lacks_is_listed():
    from relayquant.ir.dialect import qnn

    def make(x):
        relu = qnn.leaky_relu(x, 0.1, 0, 0.1, 0, 0.3, rounding="UPWARD", compute_dtype="int64")
        return qnn.requantize(relu, 0.1, 0, 0.2, 0, rounding="UPWARD", compute_dtype="float32")

    mod = build(make, x=INTEGER["conv2d"][1]["x"])
    to_text(mod, release="0.9")
    with pytest.raises(ModelError) as raised:
        to_text(mod, release="0.8")
    message = str(raised.value)
    assert "2 values cannot be written in the Relay of TVM 0.8" in message
    assert "qnn.leaky_relu is in TVM 0.9 and later, not in 0.8" in message
    assert "compute_dtype=float32 of qnn.requantize is in TVM 0.9 and later" in message


@pytest.mark.parametrize("release", ["0.7", "0.20", "0.9.0", "v0.9", ""])
def test_release__unknown(release):
    with pytest.raises(ConfigError, match=r"release is '.*'; allowed: 0.8, 0.9, .*0.19\."):
        to_text(build(relax.op.nn.relu, x=X), release=release)


def test_attributes__defaults_that_changed_are_written():
    for release in RELEASES:
        attrs = {"kernel_layout": "IOHW", "groups": 1}
        assert choose_attributes(release, "nn.conv2d_transpose", attrs) == {"kernel_layout": "IOHW"}


def test_conv1d_transpose__kernel_is_named_as_the_release_names_it():
    """Before 0.12, OIW was the name of kernels (I, O, W); a real 0.10 refuses IOW for them."""
    mod = build(FLOAT["conv1d_transpose"], x=X)
    for release in RELEASES:
        text, _ = to_text(mod, release=str(release))
        layout = "OIW" if release.minor < 12 else "IOW"
        assert f'kernel_layout="{layout}"' in text
        assert "Tensor[(3, 4, 3), float32]" in text
