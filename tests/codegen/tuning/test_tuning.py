"""Forms that are timed, and the file that remembers them. No test depends on what a clock says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tvm
from float_models import build_model, draw_batches
from hosts import HOSTS, on_x86
from tvm import relax

import relayquant as rq
from relayquant.codegen.kernels.curve import Curve, CurveStep, Operation
from relayquant.codegen.kernels.floating.convolution.plan import (
    FloatConv2d,
    list_conv2d_schedules,
    pack_conv2d,
    plan_conv2d,
)
from relayquant.codegen.kernels.floating.gemm import FloatDense, list_dense_schedules, pack_dense
from relayquant.codegen.kernels.floating.tile import FloatEpilogue, choose_float_isa
from relayquant.codegen.kernels.integer.conv_plan import list_tiles
from relayquant.codegen.kernels.integer.convolution.plan_choice import choose_plan
from relayquant.codegen.kernels.integer.convolution.winograd import can_winograd
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Store
from relayquant.codegen.kernels.integer.specs import Conv2d, KernelSchedule, Tile
from relayquant.codegen.kernels.isa import target as target_module
from relayquant.codegen.kernels.isa.emitted import list_missing_instructions
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import list_instructions, resolve_target
from relayquant.codegen.kernels.isa.x86 import AMX, VNNI512
from relayquant.codegen.tuning import schedule_cache
from relayquant.codegen.tuning import tuner as tuning
from relayquant.codegen.tuning.schedule_cache import (
    add_schedules,
    find_cache_folder,
    read_schedules,
)
from relayquant.codegen.tuning.tuner import (
    describe_layer,
    list_schedules,
    open_tuner,
)
from relayquant.errors import ConfigError, FileError

TARGET = resolve_target(None)
ISA = select_isa(TARGET)
LAYER = Conv2d(1, 28, 28, 32, 64, (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(is_small=True))


@pytest.fixture
def last_is_fastest(monkeypatch):
    """A clock by which every kernel is faster than the one before."""
    ticks = count()
    monkeypatch.setattr(tuning, "time_run", lambda _run: 0.5 ** next(ticks))
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)


def model():
    """Two convolutions, of which the first has enough products to be timed."""

    def body(emit, x):
        y = emit("relu", relax.op.nn.relu(emit.conv("first", x, 32)))
        return emit("second", relax.op.nn.conv2d(y, emit.constant(24, 32, 1, 1)))

    return build_model(body, (1, 16, 20, 20))


@pytest.mark.slow
def test_compile__tuned_is_bit_equal(tmp_path, last_is_fastest):
    mod = model()
    batches = draw_batches(mod, 2)
    qmod = rq.quantize(mod, None, batches, effort="fast")
    inputs = [*batches[0].values()]
    wanted = rq.Executor(rq.compile(qmod)).run("main", inputs)
    path = tmp_path / "forms.json"
    got = rq.Executor(rq.compile(qmod, tune=path)).run("main", inputs)
    np.testing.assert_array_equal(got[0], wanted[0])
    schedules = read_schedules(path)
    assert len(schedules) == 1  # the other layer has too few products to matter
    (layer,) = schedules
    assert "1x20x20x16 to 32" in layer


@pytest.mark.parametrize("able", [False, True], ids=["direct", "transforms too"])
def test_open_tuner__takes_the_fastest_and_remembers_it(tmp_path, monkeypatch, able):
    path = tmp_path / "new folder" / "forms.json"
    listed = list_schedules(LAYER, VNNI512, able)
    assert len(listed) > 2
    monkeypatch.setattr(
        tuning, "time_schedules", lambda _spec, _isa, _target, schedules: schedules[-1]
    )
    with open_tuner(TARGET, path) as tuner:
        assert tuner.choose(LAYER, VNNI512, able) == listed[-1]
    monkeypatch.setattr(tuning, "time_schedules", None)  # would fail if it were called
    with open_tuner(TARGET, path) as tuner:
        assert tuner.choose(LAYER, VNNI512, able) == listed[-1]


FLOAT_ISA = choose_float_isa(TARGET)
FLOAT_LAYERS = [
    FloatConv2d(
        1, 13, 12, 32, 80, (3, 3), (2, 1), (1, 1, 1, 1), epilogue=FloatEpilogue(True, True)
    ),
    FloatConv2d(2, 20, 20, 32, 64, (1, 1), epilogue=FloatEpilogue(bias=True, low=0.0)),
    FloatDense((3, 15, 64), 200, FloatEpilogue(bias=True)),
]


@pytest.mark.parametrize("spec", FLOAT_LAYERS, ids=lambda spec: type(spec).__name__)
def test_time_float_schedules__every_schedule_computes_the_same_bits(monkeypatch, spec):
    results = []

    def compute(kernel, product, isa):
        dense = isinstance(product, FloatDense)
        rng = np.random.default_rng(0)
        draw = lambda shape: rng.standard_normal(shape).astype("float32")  # noqa: E731
        weight = draw((product.outputs, product.inner) if dense else product.weight_shape)
        packed = (pack_dense if dense else pack_conv2d)(weight, product, isa)
        arrays = [draw(product.shape if dense else product.in_shape), packed]
        arrays += [draw(len(weight))] if product.epilogue.bias else []
        arrays += [draw(product.out_shape)] if product.epilogue.residual else []
        tensors = [tvm.runtime.tensor(a) for a in (*arrays, np.zeros(product.out_shape, "float32"))]
        kernel(*tensors)
        results.append(tensors[-1].numpy())

    monkeypatch.setattr(tuning, "bind_float_arguments", compute)
    monkeypatch.setattr(tuning, "find_fastest", lambda _runs: 1)
    is_dense = isinstance(spec, FloatDense)
    listed = (list_dense_schedules if is_dense else list_conv2d_schedules)(spec, FLOAT_ISA)
    assert len({*listed}) == len(listed) >= 2
    assert {each.by_panels for each in listed} == {False, True}
    assert tuning.time_float_schedules(spec, FLOAT_ISA, TARGET, listed) == listed[1]
    assert np.abs(results[0]).max() > 1
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_open_tuner__a_file_that_cannot_be_written_is_told_before_layers_are_timed():
    with pytest.raises(FileError, match=r"Cannot write /proc/no/forms\.json"):
        open_tuner(TARGET, Path("/proc/no/forms.json")).__enter__()


def test_open_tuner__remembers_float_products_beside_integer_layers(tmp_path, monkeypatch):
    path, spec = tmp_path / "forms.json", FLOAT_LAYERS[1]
    add_schedules(path, {"another": KernelSchedule(Tile(1, 7, 4), True)})
    monkeypatch.setattr(tuning, "time_float_schedules", lambda *args: args[-1][-1])
    with open_tuner(TARGET, path) as tuner:
        chosen = tuner.choose_float(spec, FLOAT_ISA)
    assert chosen == list_conv2d_schedules(spec, FLOAT_ISA)[-1]
    monkeypatch.setattr(tuning, "time_float_schedules", None)  # would fail if it were called
    with open_tuner(TARGET, path) as tuner:
        assert tuner.choose_float(spec, FLOAT_ISA) == chosen
        assert tuner.choose_float(replace(spec, height=1, width=1), FLOAT_ISA) is None  # too small
    assert [*read_schedules(path).values()].count(chosen) == 1
    panels = plan_conv2d(replace(spec, schedule=chosen), FLOAT_ISA)[1]
    assert (panels.blocks, panels.most_rows) == (chosen.blocks, chosen.rows)
    assert len(read_schedules(path)) == 2


@pytest.mark.slow
def test_compile__a_tuned_float_model_is_bit_equal(tmp_path, last_is_fastest):
    mod = model()
    inputs = [*draw_batches(mod, 1)[0].values()]
    wanted = rq.Executor(rq.compile(mod)).run("main", inputs)
    path = tmp_path / "forms.json"
    got = rq.Executor(rq.compile(mod, tune=path)).run("main", inputs)
    np.testing.assert_array_equal(got[0], wanted[0])


@pytest.mark.slow
def test_time_schedules__the_fastest(last_is_fastest):
    schedules = list_schedules(LAYER, ISA, False)
    assert len(schedules) > 2
    assert tuning.time_schedules(LAYER, ISA, TARGET, schedules) == schedules[-1]
    assert choose_plan(replace(LAYER, tile=schedules[-1].tile), ISA).tile == schedules[-1].tile


@pytest.mark.slow
def test_open_tuner__the_estimate_stays_where_nothing_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "time_run", lambda _run: 1.0)
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)
    with open_tuner(TARGET, tmp_path / "forms.json") as tuner:
        assert tuner.choose(LAYER, ISA, False) == KernelSchedule(choose_plan(LAYER, ISA).tile)


@pytest.mark.slow
def test_open_tuner__a_form_that_is_not_listed_is_not_built(tmp_path, last_is_fastest):
    """A file is untrusted: 60,000 accumulators would take LLVM hours, and transforms of weights
    that are too large would be wrong.
    """
    path = tmp_path / "forms.json"
    with open_tuner(TARGET, path) as tuner:
        fastest = tuner.choose(LAYER, ISA, False)
    (layer,) = read_schedules(path)
    for other in (KernelSchedule(Tile(1, 60_000, 1)), replace(fastest, transforms=True)):
        add_schedules(path, {layer: other})
        with open_tuner(TARGET, path) as tuner:
            assert tuner.choose(LAYER, ISA, False) == fastest
        assert read_schedules(path) == {layer: fastest}


@pytest.mark.slow
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(residual=Residual("int8", 3, 0.5), is_small=True),
        Epilogue(curve=Curve((CurveStep(Operation.ERF, (0,)),)), is_small=True),
    ],
    ids=["residual", "curve"],
)
def test_open_tuner__times_for_real(tmp_path, monkeypatch, epilogue):
    monkeypatch.setattr(tuning, "SECONDS", 0.002)
    spec = replace(LAYER, epilogue=epilogue)
    with open_tuner(TARGET, tmp_path / "forms.json") as tuner:
        weight, bias = np.ones(spec.weight_shape, "int8"), np.zeros(spec.out_channels, "int32")
        able_too = epilogue.curve is None and can_winograd(spec, ISA, weight, bias)
        for able in {False, able_too}:
            assert tuner.choose(spec, ISA, able) in list_schedules(spec, ISA, able)


def test_bind_arguments__operands_come_from_a_far_cache():
    """A call takes other operands than the calls before, as each layer of a network does."""
    calls = []
    run = tuning.bind_arguments(
        lambda *operands: calls.append(operands), LAYER, VNNI512, KernelSchedule()
    )
    for _ in range(2000):
        run()
    for operands in zip(*calls, strict=True):
        copies = len({id(operand) for operand in operands})
        assert copies * sum(each.numpy().nbytes for each in calls[0]) >= tuning.COLD_BYTES
        assert len({id(operand) for operand in operands[:copies]}) == copies


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"height": 56, "width": 56}, True),
        ({"height": 5, "width": 5, "out_channels": 16, "in_channels": 16}, False),
    ],
)
def test_list_schedules__with_transforms_and_without(changes, first):
    spec = replace(LAYER, **changes)
    schedules = list_schedules(spec, VNNI512, True)
    assert schedules[0].transforms is first
    assert {schedule.transforms for schedule in schedules} == {True, False}
    assert len({*schedules}) == len(schedules) <= tuning.CANDIDATES
    assert not any(schedule.transforms for schedule in list_schedules(spec, VNNI512, False))


def test_list_schedules__blocks_of_tiles():
    schedules = list_schedules(LAYER, AMX, True)
    assert len(schedules) > 1
    assert not any(schedule.transforms for schedule in schedules)
    assert {schedule.tile for schedule in schedules} <= {*choose_plan(LAYER, AMX).ranked_tiles}


def test_list_tiles__differ_and_begin_with_the_estimate():
    tiles = list_tiles(choose_plan(LAYER, ISA), 4)
    assert tiles[0] == choose_plan(LAYER, ISA).tile
    assert len({(tile.blocks, tile.pixels) for tile in tiles}) == len(tiles)


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"height": 27},
        {"width": 27},
        {"in_channels": 36},
        {"out_channels": 80},
        {"kernel": (1, 3)},
        {"strides": (2, 1)},
        {"padding": (1, 0, 1, 0)},
        {"dilation": (2, 1)},
        {"groups": 2},
        {"in_dtype": "int8"},
        {"epilogue": Epilogue()},
        {"epilogue": Epilogue(Store.DEQUANTIZE, "float32", is_small=True)},
        {"epilogue": Epilogue(dtype="int8", is_small=True)},
        {"epilogue": Epilogue(residual=Residual("uint8", 3, 0.5), is_small=True)},
    ],
    ids=str,
)
def test_describe_layer__tells_layers_apart(change):
    changed = describe_layer(replace(LAYER, **change), ISA, False)
    assert changed != describe_layer(LAYER, ISA, False)


def test_describe_layer__tells_weights_apart_that_transforms_can_take():
    assert describe_layer(LAYER, ISA, True) != describe_layer(LAYER, ISA, False)


def test_describe_layer__is_the_same_for_other_numbers():
    other = replace(LAYER, in_zero_point=9, epilogue=replace(LAYER.epilogue, zero_point=5, low=3))
    assert describe_layer(other, ISA, False) == describe_layer(LAYER, ISA, False)


FORM = (
    '{"tile": {"rows": 1, "cols": 2, "blocks": 3, "chains": 1, "sharing": 1}, "transforms": false}'
)
FLOAT_FORM = '{"blocks": 2, "rows": 14, "by_panels": true}'
GOOD = '{"format": "relayquant.forms", "version": 3, "made_by": "%s", "forms": {"a": FORM}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no file of timed schedules, or is damaged"),
        (GOOD[:-9], "is no file of timed schedules, or is damaged"),
        ("[]", "its format is not 'relayquant.forms'"),
        ('{"format": "relayquant.qparams"}', "its format is not 'relayquant.forms'"),
        (GOOD.replace("FORM", "[1, 2, 3, 1]"), "is no schedule"),
        (GOOD.replace("FORM", FORM.replace("false", "0")), "is no schedule"),
        (GOOD.replace("FORM", FORM.replace(', "chains": 1', "")), "is no tile"),
        (GOOD.replace("FORM", FORM.replace("1", "0")), "is no tile"),
        (GOOD.replace("FORM", FORM.replace("1", "true")), "is no tile"),
        (GOOD.replace("FORM", FORM.replace("1", "1e9")), "is no tile"),
        (GOOD.replace("FORM", '{"tile": null, "transforms": false}'), "is no tile"),
        (GOOD.replace("FORM", FLOAT_FORM.replace("2", "0")), "is no schedule of float32"),
        (GOOD.replace("FORM", FLOAT_FORM.replace("true", "1")), "is no schedule of float32"),
        (GOOD.replace('{"a": FORM}', "7"), "is no file of timed schedules, or is damaged"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_compile__a_damaged_file_is_refused_and_stays(tmp_path, text, message):
    path = tmp_path / "forms.json"
    text = text.replace("%s", schedule_cache.tvm.__version__)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"forms\.json.*Delete it, or name another file") as error:
        rq.compile(model(), tune=path)
    assert message in str(error.value)
    assert path.read_text() == text


@pytest.mark.parametrize("change", [{"version": 0}, {"made_by": "0.1"}])
def test_read_schedules__of_another_version_are_timed_anew(tmp_path, change):
    path = tmp_path / "forms.json"
    good = json.loads((GOOD % schedule_cache.tvm.__version__).replace("FORM", FORM))
    path.write_text(json.dumps(good))
    assert read_schedules(path) == {"a": KernelSchedule(Tile(1, 2, 3, 1))}
    path.write_text(json.dumps(good | change))
    assert read_schedules(path) == {}


def test_add_schedules__keeps_what_another_process_wrote(tmp_path):
    path = tmp_path / "forms.json"
    add_schedules(path, {"a": KernelSchedule(Tile(1, 2, 3)), "b": KernelSchedule(Tile(4, 5, 1))})
    add_schedules(
        path, {"b": KernelSchedule(Tile(1, 5, 2), True), "c": KernelSchedule(Tile(1, 1, 4, 3))}
    )
    wanted = {
        "a": KernelSchedule(Tile(1, 2, 3)),
        "b": KernelSchedule(Tile(1, 5, 2), True),
        "c": KernelSchedule(Tile(1, 1, 4, 3)),
    }
    assert read_schedules(path) == wanted
    assert [each.name for each in tmp_path.iterdir()] == ["forms.json"]  # nothing temporary stays


def test_add_schedules__an_interrupted_writer_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "forms.json"
    add_schedules(path, {"a": KernelSchedule(Tile(1, 2, 3))})

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        add_schedules(path, {"b": KernelSchedule(Tile(1, 2, 3))})
    assert read_schedules(path) == {"a": KernelSchedule(Tile(1, 2, 3))}
    assert [each.name for each in tmp_path.iterdir()] == ["forms.json"]


def test_compile__a_file_that_cannot_be_written_is_said_before_anything_is_timed(tmp_path):
    with pytest.raises(FileError, match="it is a folder"):
        rq.compile(model(), tune=tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76", "has another architecture"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=diamondrapids", "lacks amx"),
    ],
)
def test_compile__tuning_is_for_what_this_machine_runs(tmp_path, target, message):
    with pytest.raises(ConfigError, match=message):
        rq.compile(model(), target, tune=tmp_path / "forms.json")


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3", "haswell", "znver2", "znver3"])
def test_check_runnable__what_other_cpus_do_fast_is_no_instruction(cpu):
    """All of these but the first are of AVX2; haswell moves bytes fast, which a Zen does not."""
    target = resolve_target(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    if not list_instructions(target) <= list_instructions(TARGET):
        pytest.skip(f"this CPU has less instructions than {cpu}")
    tuning.check_runnable(target)


@on_x86
@pytest.mark.parametrize(
    ("host", "cpu", "lacks"),
    [
        ("Sapphire Rapids", "sapphirerapids", ""),
        ("Sapphire Rapids", "emeraldrapids", ""),
        ("Sapphire Rapids", "graniterapids", "amx-fp16"),
        ("Sapphire Rapids", "znver4", "sse4a"),
        ("Zen 5", "znver4", ""),
        ("Zen 4", "znver5", "avx512vp2intersect, avxvnni"),
        ("without AMX", "emeraldrapids", "amx-bf16, amx-int8, amx-tile"),
        ("without AMX", "icelake-server", ""),
        ("without AVX512", "cascadelake", "avx512bw"),
        ("without AVX512", "alderlake", ""),
    ],
)
def test_check_runnable__asks_for_the_features_of_the_machine(monkeypatch, host, cpu, lacks):
    monkeypatch.setattr(target_module, "ask_host", HOSTS[host].ask)
    target = resolve_target(f"llvm -mcpu={cpu}")
    expected = pytest.raises(ConfigError, match=f"lacks {lacks}") if lacks else nullcontext()
    with expected:
        tuning.check_runnable(target)


@on_x86
@pytest.mark.parametrize(
    ("host", "cpu", "lacks"),
    [
        ("Zen 5", "znver4", ""),
        ("Sapphire Rapids", "znver4", ""),  # no code has its sse4a unasked
        ("Zen 4", "znver5", "avxvnni"),
        ("without AMX", "emeraldrapids", ""),  # its code asks for the tiles
        ("without AVX512", "cascadelake", "avx512bw"),
    ],
)
def test_list_missing_instructions__of_hosts(monkeypatch, host, cpu, lacks):
    executable = rq.compile(build_model(lambda _, x: relax.op.tanh(x), (1, 4)), f"llvm -mcpu={cpu}")
    monkeypatch.setattr(target_module, "ask_host", HOSTS[host].ask)
    missing = list_missing_instructions(executable.target, resolve_target(None))
    assert missing[:1] == ([lacks] if lacks else [])
    if lacks:
        with pytest.raises(ConfigError, match=rf"machine lacks {lacks}.*Compile it for this"):
            rq.Executor(executable)


@pytest.mark.parametrize(
    ("cpu", "others", "wanted"),
    [
        ("x86-64-v3", ["haswell"], ["x86-64-v2"]),
        ("haswell", ["znver3", "cascadelake", "znver5"], ["x86-64-v3"]),
        ("cascadelake", ["icelake-server", "sapphirerapids"], ["x86-64-v4", "skylake-avx512"]),
        ("cortex-a76", ["neoverse-n1", "cortex-a78"], ["cortex-a75", "cortex-a55"]),
    ],
)
def test_list_instructions__of_cpus_that_follow_each_other(cpu, others, wanted):
    def of(name):
        triple = "aarch64-linux-gnu" if name.startswith(("cortex", "neo")) else "x86_64-linux-gnu"
        return list_instructions(resolve_target(f"llvm -mtriple={triple} -mcpu={name}"))

    assert all(of(name) <= of(cpu) for name in wanted)
    assert all(of(cpu) < of(name) for name in others)


def test_find_cache_folder__is_that_of_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule_cache.sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_cache_folder() == tmp_path / ".cache/relayquant"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, the specification says
    assert find_cache_folder() == tmp_path / ".cache/relayquant"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert find_cache_folder() == tmp_path / "elsewhere/relayquant"
    monkeypatch.setattr(schedule_cache.sys, "platform", "darwin")
    assert find_cache_folder() == tmp_path / "Library/Caches/relayquant"
    monkeypatch.setattr(schedule_cache.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert find_cache_folder() == tmp_path / "Local/relayquant"
