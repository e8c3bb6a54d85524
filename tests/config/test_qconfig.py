"""QConfig and QConfigMapping: precedence, plain data, and messages that name the wrong key."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

import relayquant as rq
from relayquant.config.mapping import OperatorSite
from relayquant.stages.backends import X86

CONFIG = X86.default_qconfig
CONV = OperatorSite(("net.conv", "Conv_1"), "relax.nn.conv2d", "conv2d_relu")


def with_bits(low: int) -> rq.QConfig:
    """A QConfig that differs from others by its weights' quant_min."""
    spec = replace(CONFIG.weight.spec, quant_min=low)
    return replace(CONFIG, weight=rq.TensorConfig(spec, rq.observers.MinMax()))


LINES = [
    lambda m, q: m.set_global(q),
    lambda m, q: m.set_object_type("conv2d", q),
    lambda m, q: m.set_module_name_regex("net.*", q),
    lambda m, q: m.set_module_name("net.conv", q),
    lambda m, q: m.set_module_name_object_type_order("net", "conv2d", 0, q),
]


@pytest.mark.parametrize("order", [1, -1])
def test_find_rule__later_kinds_win_whatever_the_order_of_the_lines(order):
    lines = list(enumerate(LINES))[::order]
    for count in range(1, 6):
        mapping = rq.QConfigMapping()
        for i, line in lines:
            if i < count:
                mapping = line(mapping, with_bits(-100 - i))
        assert mapping.find_rule(CONV).qconfig == with_bits(-100 - count + 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("general", "special"),
    [
        (
            lambda m, q: m.set_object_type("conv2d", q),
            lambda m, q: m.set_object_type("conv2d_relu", q),
        ),
        (lambda m, q: m.set_module_name("net", q), lambda m, q: m.set_module_name("net.conv", q)),
        (lambda m, q: m.set_module_name("", q), lambda m, q: m.set_module_name("net/", q)),
        (
            lambda m, q: m.set_module_name_object_type_order("", "conv2d", 0, q),
            lambda m, q: m.set_module_name_object_type_order("net", "conv2d", 0, q),
        ),
    ],
)  # fmt: skip
def test_find_rule__of_one_kind_the_special_line_wins_in_either_order(general, special, order):
    mapping = rq.QConfigMapping()
    for line, qconfig in [(general, None), (special, CONFIG)][::order]:
        mapping = line(mapping, qconfig)
    assert len(mapping.rules) == 2
    assert mapping.find_rule(CONV).qconfig is CONFIG


def test_find_rule__the_first_regular_expression_that_matches_wins():
    special, general = ("net.conv.*", CONFIG), ("net.*", None)
    for lines, found in [([special, general], CONFIG), ([general, special], None)]:
        mapping = rq.QConfigMapping()
        for regex, qconfig in lines:
            mapping = mapping.set_module_name_regex(regex, qconfig)
        assert mapping.find_rule(CONV).qconfig is found
        # As plain data, and set again, they keep their order.
        assert rq.QConfigMapping.from_dict(mapping.to_dict()) == mapping
        assert mapping.set_module_name_regex(*lines[0]) == mapping


def test_find_rule__spellings_of_one_operator_are_one_line_of_which_the_last_wins():
    mapping = (
        rq.QConfigMapping().set_object_type("conv2d", CONFIG).set_object_type("nn.conv2d", None)
    )
    assert mapping.find_rule(CONV).qconfig is None
    assert [rule.key for rule in mapping.find_idle([CONV])] == ["conv2d"]


def test_find_rule__is_that_of_torch_on_drawn_mappings():
    """PyTorch's own functions decide what each operator gets: kinds, names, expressions, order."""
    torch = pytest.importorskip("torch", reason="the precedence is compared with PyTorch's")
    from torch.ao.quantization.fx import qconfig_mapping_utils as fx

    rng = np.random.default_rng(0)
    paths = ["a", "a.b", "a.b.c", "a.d", "e"]
    types = {"conv2d": torch.nn.Conv2d, "matmul": torch.nn.Linear, "mean": torch.nn.AvgPool2d}
    # torch's expressions need not match to the end: these say where it is.
    regexes = [r"a.*$", r"a\.b.*$", r".*[ce]$", r"a\.[bd]$", r"e$"]
    kinds: set[str] = set()
    for _ in range(200):
        ours, theirs = rq.QConfigMapping(), torch.ao.quantization.QConfigMapping()
        for number in range(rng.integers(1, 9)):
            spec = replace(CONFIG.weight.spec, quant_min=-100 - number)
            qconfig = replace(CONFIG, weight=rq.TensorConfig(spec, rq.observers.MinMax()))
            if rng.random() < 0.2:
                qconfig = None
            kind, path = rng.integers(5), str(rng.choice(paths))
            name, regex = str(rng.choice([*types])), str(rng.choice(regexes))
            index = int(rng.integers(2))
            match kind:
                case 0:
                    ours, theirs = ours.set_global(qconfig), theirs.set_global(qconfig)
                case 1:
                    ours = ours.set_object_type(name, qconfig)
                    theirs.set_object_type(types[name], qconfig)
                case 2:
                    ours = ours.set_module_name_regex(regex, qconfig)
                    theirs.set_module_name_regex(regex, qconfig)
                case 3:
                    ours = ours.set_module_name(path, qconfig)
                    theirs.set_module_name(path, qconfig)
                case _:
                    ours = ours.set_module_name_object_type_order("e", name, index, qconfig)
                    theirs.set_module_name_object_type_order("e", types[name], index, qconfig)
        for path in paths:
            for op, kind in types.items():
                for place in range(2):
                    site = OperatorSite((path,), f"relax.nn.{op}", "", place, ((path,),) * 2)
                    rule = ours.find_rule(site)
                    want = fx._maybe_adjust_qconfig_for_module_type_or_name(
                        theirs, kind, path, theirs.global_qconfig
                    )
                    want = fx._maybe_adjust_qconfig_for_module_name_object_type_order(
                        theirs, path, kind, place, want
                    )
                    assert (rule.qconfig if rule is not None else None) == want, (ours, site)
                    kinds.add(rule.kind.value if rule is not None else "")
    assert len(kinds) == 6


@pytest.mark.parametrize(
    ("name", "found"), [("net", True), ("net.conv", True), ("ne", False), ("Conv_1", True)]
)
def test_find_rule__names_are_whole_parts(name, found):
    assert (rq.QConfigMapping().set_module_name(name, None).find_rule(CONV) is not None) == found


def test_find_rule__order_counts_operators_of_the_type_below_the_name():
    peers = (("stem",), ("net.a",), ("net/b", "node"), ("other",))
    for place, below_net in [(1, 0), (2, 1)]:
        site = OperatorSite(peers[place], "relax.nn.conv2d", "", place, peers)
        for index in range(3):
            rule = rq.QConfigMapping().set_module_name_object_type_order(
                "net", "conv2d", index, None
            )
            assert (rule.find_rule(site) is not None) == (index == below_net)
            rule = rq.QConfigMapping().set_module_name_object_type_order("", "conv2d", index, None)
            assert (rule.find_rule(site) is not None) == (index == place)
    outside = OperatorSite(peers[3], "relax.nn.conv2d", "", 3, peers)
    rule = rq.QConfigMapping().set_module_name_object_type_order("net", "conv2d", 2, None)
    assert rule.find_rule(outside) is None


@dataclass(frozen=True)
class Halved(rq.observers.MinMax):
    """An observer of a user's own, registered nowhere."""

    factor: float = 0.5


FULL = (
    rq.QConfigMapping()
    .set_global(CONFIG)
    .set_object_type("matmul", None)
    .set_module_name_regex(
        "a.*", replace(CONFIG, output=rq.TensorConfig(rq.QSpec("int16"), rq.observers.MSE()))
    )
    .set_module_name(
        "b",
        replace(
            CONFIG,
            activation=rq.TensorConfig(rq.QSpec("uint8", power_of_two=True), Halved(0.25)),
            bias=rq.TensorConfig(
                rq.QSpec("int16", rq.config.Scheme.SYMMETRIC),
                rq.observers.Fixed(low=(0, 1), high=(1, 2)),
            ),
        ),
    )
    .set_module_name_object_type_order("c", "conv2d", 3, CONFIG)
)  # fmt: skip


def test_plain_data__survives_json():
    data = json.loads(json.dumps(FULL.to_dict()))
    assert rq.QConfigMapping.from_dict(data) == FULL


def test_plain_data__has_no_none():
    """TOML cannot say None."""

    def walk(value):
        assert value is not None
        for part in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            walk(part)

    walk(FULL.to_dict())
    assert FULL.to_dict()["object_type"] == [{"key": "matmul", "qconfig": "float"}]


def changed(path: list, value: object) -> dict:
    data = json.loads(json.dumps(FULL.to_dict()))
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["globl"], {}, "no key 'globl'. Did you mean 'global'?"),
        (
            ["global", "wieght"],
            {},
            "QConfigMapping.global has no key 'wieght'. Did you mean 'weight'?",
        ),
        (
            ["global", "weight", "spec", "dtyp"],
            "int8",
            "spec has no key 'dtyp'. Did you mean 'dtype'",
        ),
        (
            ["global", "weight", "spec", "scheme"],
            "symetric",
            "scheme is 'symetric'. Did you mean 'symm",
        ),
        (["global", "weight", "spec", "dtype"], "int9", "QSpec.dtype is 'int9'"),
        (["global", "weight", "spec", "quant_min"], "low", "QSpec.quant_min is 'low'"),
        (["global", "weight", "observer", "name"], "Minmax", "'Minmax'. Did you mean 'MinMax'?"),
        (["global", "weight", "observer", "bits"], 3, r"observer (MinMax) has no key 'bits'"),
        (["global", "weight"], 3, "QConfigMapping.global.weight is 3; allowed: a dict"),
        (["global"], {}, "QConfigMapping.global lacks 'activation', 'weight'"),
        (["object_type"], {}, "QConfigMapping.object_type is {}; allowed: a list"),
        (["object_type", 0, "keys"], "x", r"object_type[0] has no key 'keys'. Did you mean 'key'?"),
        (["module_name_regex", 0, "key"], "(", "no regular expression"),
        (["module_name_object_type_order", 0, "index"], -1, "index is -1"),
    ],
)
def test_from_dict__names_what_is_wrong(path, value, message):
    with pytest.raises(rq.ConfigError) as error:
        rq.QConfigMapping.from_dict(changed(path, value))
    assert message in str(error.value)


def test_to_dict__a_callable_has_no_plain_form():
    config = replace(
        CONFIG, activation=rq.TensorConfig(rq.QSpec("uint8"), lambda info, samples: None)
    )
    with pytest.raises(rq.ConfigError, match=r"lambda.*cannot be written"):
        rq.QConfigMapping().set_global(config).to_dict()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rq.QConfigMapping().set_global(3), "expected a QConfig or None"),
        (lambda: rq.QConfigMapping().set_module_name(3, None), "no text"),
        (lambda: rq.QConfig(rq.observers.MinMax(), CONFIG.weight), "QConfig.activation is MinMax"),
        (lambda: rq.TensorConfig("int8", rq.observers.MinMax()), "TensorConfig.spec is 'int8'"),
        (lambda: rq.QSpec("int8", "symetric"), "QSpec.scheme is 'symetric'"),
        (
            lambda: rq.QSpec("int8", power_of_two=True, scale_min=0.6, scale_max=0.9),
            "no power of two",
        ),
        (lambda: rq.QSpec("int8", scale_min=2.0, scale_max=1.0), "not a range of scales"),
    ],
)  # fmt: skip
def test_values__refuse_what_is_wrong(make, message):
    with pytest.raises(rq.ConfigError, match=message):
        make()


TOML = """
[global.activation]
spec = {dtype = "uint8"}
observer = {name = "Percentile", percentile = 99.5}

[global.weight]
spec = {dtype = "int4", scheme = "symmetric", granularity = "per_channel"}
observer = {name = "MSE"}

[[object_type]]
key = "matmul"
qconfig = "float"

[[module_name]]
key = "net.conv"
qconfig = "float16"
"""


def test_plain_data__is_what_toml_reads():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    mapping = rq.QConfigMapping.from_dict(tomllib.loads(TOML))
    expected = rq.QConfig(
        rq.TensorConfig(rq.QSpec("uint8"), rq.observers.Percentile(99.5)),
        rq.TensorConfig(
            rq.QSpec("int4", rq.config.Scheme.SYMMETRIC, rq.config.Granularity.PER_CHANNEL),
            rq.observers.MSE(),
        ),
    )
    assert mapping.find_rule(OperatorSite(("other",), "relax.nn.conv2d")).qconfig == expected
    assert mapping.find_rule(OperatorSite(("d",), "relax.matmul")).qconfig is None
    assert mapping.find_rule(CONV).qconfig == rq.config.FLOAT16
    assert rq.QConfigMapping.from_dict(mapping.to_dict()) == mapping
