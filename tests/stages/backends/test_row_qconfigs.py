"""QConfigs of a backend's rows: which one an operator gets, and where they are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from onnx_runtime import run_onnxruntime
from tvm import relax

import relayquant as rq
from relayquant.config import Effort, ModelType
from relayquant.flow.refine.search import make_wide
from relayquant.flow.refine.wider_weights import find_wider_weights
from relayquant.ir.ops import BUILTIN_OPS
from relayquant.stages.backends import ARM, GENERIC
from relayquant.stages.effort import default_mapping

SYMMETRIC = rq.config.Scheme.SYMMETRIC
DEFAULT = GENERIC.default_qconfig
WIDE = rq.QConfig(
    rq.TensorConfig(rq.QSpec("int16", SYMMETRIC), rq.observers.MinMax()), DEFAULT.weight
)
#: convolutions on bytes, sums on 16 bits, which convolutions therefore do not compute
MIXED = replace(
    GENERIC,
    name="mixed",
    patterns=tuple(r for r in GENERIC.patterns if not r.pattern.name.startswith("conv2d_bias_add")),
).with_settings("add", default_qconfig=WIDE)


def build_sums():
    """Two convolutions and the sum of their results, then a product."""

    def body(emit, x):
        # With as many groups they would become one convolution.
        one, two = emit.conv_bias("one", x), emit.conv_bias("two", x, groups=2)
        both = emit("both", relax.op.add(one, two))
        last = emit.conv_bias("last", both)
        flat = emit("flat", relax.op.reshape(last, (1, 144)))
        return emit.dense("out", flat, 3)

    return build_model(body, MAP)


MODEL = build_sums()
DATA = draw_batches(MODEL, 8)


def prepare(backend=MIXED, mapping=None, **options) -> rq.PreparedModel:
    return rq.prepare(MODEL, None, qconfig_mapping=mapping, backend=backend, **options)


def find_dtypes(prepared: rq.PreparedModel) -> dict[str, str]:
    """The dtype of each operator's data; "" for an operator in float."""
    plan = prepared.plan
    return {
        row.name: plan.group(row.operands[0][1]).info.spec.dtype if row.quantized else ""
        for row in plan.operators
    }


MIXED_DTYPES = {
    "one": "uint8", "two": "uint8", "both": "int16", "last": "uint8", "flat": "", "out": "uint8"
}  # fmt: skip


def test_row_qconfig__decides_without_a_mapping_and_is_what_a_line_would_say():
    prepared = prepare()
    assert find_dtypes(prepared) | {"flat": ""} == MIXED_DTYPES
    line = GENERIC.default_mapping.set_object_type("add", WIDE)
    bare = replace(MIXED, patterns=tuple(replace(r, default_qconfig=None) for r in MIXED.patterns))
    asked = prepare(bare, line, effort="fast")
    assert prepare(effort="fast").plan.groups == asked.plan.groups


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (rq.QConfigMapping().set_global(DEFAULT), "uint8"),
        (MIXED.default_mapping.set_global(DEFAULT), "uint8"),
        (MIXED.default_mapping.set_object_type("add", DEFAULT), "uint8"),
        (MIXED.default_mapping.set_module_name("both", None), ""),
        (MIXED.default_mapping.set_module_name("out", None), "int16"),
        (MIXED.default_mapping.set_object_type("nn.conv2d", DEFAULT), "int16"),
    ],
    ids=["global", "replaced global", "type", "name", "another name", "another type"],
)
def test_row_qconfig__every_line_of_the_user_wins(mapping, expected):
    asked = mapping.set_object_type("reshape", None)
    assert find_dtypes(prepare(mapping=asked))["both"] == expected


def test_row_qconfig__is_of_that_row_alone():
    """A row named as its operator does not speak for the operator's other rows."""
    row = GENERIC.find_pattern("conv2d")
    patterns = tuple(
        replace(row, default_qconfig=WIDE) if each is row else each for each in GENERIC.patterns
    )
    backend = replace(GENERIC, patterns=patterns)
    rule = backend.default_mapping.rules[0]
    assert dict(rule.rows) == {"conv2d": WIDE}
    assert set(find_dtypes(prepare(backend)).values()) == {"uint8"}


def test_row_qconfig__alone_keeps_other_rows_in_float():
    backend = replace(MIXED, default_qconfig=None).with_settings(
        "nn.conv2d", default_qconfig=DEFAULT
    )
    prepared = prepare(backend)
    assert find_dtypes(prepared)["out"] == ""
    assert "whose row has no QConfig" in prepared.plan.operator("out").reason
    assert find_dtypes(prepared)["both"] == "int16"


@pytest.mark.parametrize("effort", [level.value for level in Effort])
def test_row_qconfig__effort_chooses_its_open_observers(effort):
    narrow = rq.get_backend_config("arm").default_qconfig
    backend = GENERIC.with_settings("nn.conv2d", default_qconfig=narrow)
    (rule,) = default_mapping(backend, Effort(effort)).rules
    (observer,) = {qconfig.activation.observer for _, qconfig in rule.rows}
    assert observer == rule.qconfig.activation.observer


def test_row_qconfig__of_a_transformer():
    """Only products are quantized, with the QConfigs of their rows."""
    backend = MIXED.with_settings(
        "nn.dense", default_qconfig=replace(DEFAULT, activation=WIDE.activation)
    )
    prepared = rq.prepare(MODEL, None, DATA, backend=backend, model_type=ModelType.TRANSFORMER)
    dtypes = find_dtypes(prepared)
    assert (dtypes["one"], dtypes["both"], dtypes["out"]) == ("uint8", "", "int16")


DYNAMIC = rq.QConfig(rq.TensorConfig(rq.QSpec("int8", is_dynamic=True)), DEFAULT.weight)
GROUPED = rq.QConfig(None, rq.TensorConfig(rq.QSpec("int8", SYMMETRIC, group_size=16)))


@pytest.mark.parametrize(("own", "kind"), [(DYNAMIC, "dynamic"), (GROUPED, "grouped")])
def test_row_qconfig__ranges_of_the_run_time_and_groups(own, kind):
    backend = MIXED.with_settings("nn.dense", default_qconfig=own)
    plan = prepare(backend).plan
    assert getattr(plan.operator("out"), kind) is not None
    assert plan.operator("one").quantized
    assert getattr(plan.operator("one"), kind) is None
    qmod = rq.quantize(MODEL, None, DATA, backend=backend)
    assert rq.verify(qmod, DATA[0]).is_equal


def test_row_qconfig__survives_json_and_files(tmp_path):
    data = json.loads(json.dumps(MIXED.to_dict()))
    assert rq.BackendConfig.from_dict(data, BUILTIN_OPS) == MIXED
    mapping = MIXED.default_mapping.set_module_name("one", None)
    assert rq.QConfigMapping.from_dict(json.loads(json.dumps(mapping.to_dict()))) == mapping
    calibrated = rq.calibrate(prepare(), DATA)
    rq.save_prepared(calibrated, tmp_path / "model.zip")
    loaded = rq.load_prepared(tmp_path / "model.zip", MIXED)
    assert loaded.mapping == calibrated.mapping
    np.testing.assert_array_equal(run(rq.lower(loaded)), run(rq.lower(calibrated)))
    rq.save_qparams(calibrated.parameters, tmp_path / "qparams.json")
    given = prepare(qparams=rq.load_qparams(tmp_path / "qparams.json"))
    np.testing.assert_array_equal(
        run(rq.lower(rq.calibrate(given, DATA))), run(rq.lower(calibrated))
    )


def run(qmod) -> np.ndarray:
    (found,) = rq.reference.run(qmod, DATA[0])
    return found


def test_row_qconfig__is_where_searches_start():
    calibrated = rq.calibrate(prepare(), DATA)
    report = rq.sensitivity(calibrated, DATA)
    base = report.to_mapping(0)
    assert base == calibrated.mapping
    assert find_dtypes(prepare(mapping=report.to_mapping(1)))["both"] in ("int16", "")
    assert make_wide(calibrated, "one").weight == DEFAULT.weight


def test_row_qconfig__few_bits_get_those_of_the_row():
    few = replace(DEFAULT.weight.spec, quant_min=-8, quant_max=7)
    seven = replace(DEFAULT.weight.spec, quant_min=-64, quant_max=63)
    backend = MIXED.with_settings(
        "nn.conv2d", default_qconfig=replace(DEFAULT, weight=replace(DEFAULT.weight, spec=seven))
    )
    asked = replace(DEFAULT, weight=replace(DEFAULT.weight, spec=few))
    prepared = prepare(backend, backend.default_mapping.set_module_name("one", asked))
    (found,) = find_wider_weights(prepared).items()
    assert (found[0], found[1].weight.spec.limits) == ("one", (-64, 63))
    assert make_wide(prepared, "two").weight.spec == seven


def test_row_qconfig__that_the_row_cannot_run():
    bad = rq.TensorConfig(rq.QSpec("uint16"), rq.observers.MinMax())
    with pytest.raises(
        rq.ConfigError, match=r"row 'sigmoid' cannot run its default_qconfig"
    ) as error:
        GENERIC.with_settings("sigmoid", default_qconfig=replace(WIDE, activation=bad))
    assert error.value.code == "RQ102"
    with pytest.raises(rq.ConfigError, match=r"cannot run 'sigmoit'.*'sigmoid'"):
        GENERIC.with_settings("sigmoit", default_qconfig=WIDE)


@pytest.mark.slow
def test_row_qconfig__whole_model_and_onnxruntime(tmp_path):
    qmod = rq.quantize(MODEL, None, DATA, backend=MIXED)
    row = rq.ledger(qmod).row("both")
    assert (row.quantized, row.dtype) == (True, "int16")
    assert rq.verify(qmod, DATA[0]).is_equal
    rq.export_onnx(qmod, tmp_path / "mixed.onnx")
    (found,) = run_onnxruntime(tmp_path / "mixed.onnx", DATA[0])
    np.testing.assert_allclose(found, run(qmod), atol=1e-5)


@pytest.mark.slow
def test_row_qconfig__is_trained_with():
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.last = (torch.nn.Conv2d(4, 4, 3) for _ in range(2))
            self.two = torch.nn.Conv2d(4, 4, 3, groups=2)

        def forward(self, x):
            return self.last(self.one(x) + self.two(x))

    batches = [torch.from_numpy(batch["x"]) for batch in DATA]
    trained = rq.torch.prepare_qat(
        Net().eval(), (batches[0],), backend=MIXED, calibration_dataset=batches
    )
    qmod = rq.torch.convert(trained)
    assert {row.dtype for row in rq.ledger(qmod).quantized if row.op == "add"} == {"int16"}
    assert ARM.find_default("add") == ARM.default_qconfig
