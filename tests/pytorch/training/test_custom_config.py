"""Submodules that are not quantized as the rest is: the rows of FX's `PrepareCustomConfig`."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from operator_names import list_operators

import relayquant as rq

torch = pytest.importorskip("torch", reason="pip install torch")

from torch.ao.quantization import get_default_qconfig_mapping  # noqa: E402
from torch.ao.quantization.fx.custom_config import (  # noqa: E402
    PrepareCustomConfig as TheirConfig,
)
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: E402
from torch_models import ResidualBlock, ResidualNet, make  # noqa: E402

from relayquant.ir.rewrite import Graph  # noqa: E402
from relayquant.ir.rewrite.graph import constant_value  # noqa: E402
from relayquant.torch import PrepareCustomConfig  # noqa: E402
from relayquant.torch.custom_config import StandaloneRule  # noqa: E402

OPTIONS = {"backend": "x86", "effort": "fast"}
FOUR_BITS = rq.QConfigMapping().set_global(
    rq.QConfig(
        rq.get_backend_config("x86").default_qconfig.activation,
        rq.TensorConfig(
            rq.QSpec(
                "int8",
                rq.config.Scheme.SYMMETRIC,
                rq.config.Granularity.PER_CHANNEL,
                quant_min=-7,
                quant_max=7,
            ),
            rq.observers.MinMax(),
        ),
    )
)


def make_net():
    torch.manual_seed(0)
    return make(ResidualNet).eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]


def measure_sqnr(want: np.ndarray, got: np.ndarray) -> float:
    return float(10 * np.log10(np.square(want).sum() / np.square(want - got).sum()))


def calibrate_fx(module, data, config, mapping=None):
    """FX's quantized module of PyTorch."""
    mapping = mapping or get_default_qconfig_mapping("x86")
    prepared = prepare_fx(module, mapping, (data[0],), prepare_custom_config=config)
    for batch in data:
        prepared(batch)
    return convert_fx(prepared)


@pytest.mark.parametrize("by_class", [True, False])
def test_set_non_traceable_module_classes__stay_in_float_as_in_fx(by_class):
    net, data = make_net()
    paths = ["layer1.0", "layer1.1"]
    ours, theirs = PrepareCustomConfig(), TheirConfig()
    if by_class:
        ours = ours.set_non_traceable_module_classes([ResidualBlock])
        theirs.set_non_traceable_module_classes([ResidualBlock])
    else:
        ours = ours.set_non_traceable_module_names(paths)
        theirs.set_non_traceable_module_names(paths)
    converted = calibrate_fx(net, data, theirs)
    assert all(type(converted.get_submodule(path)) is ResidualBlock for path in paths)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=ours, **OPTIONS)
    rows = rq.ledger(qmod).rows
    within = [row for row in rows if row.name.startswith("layer1.")]
    assert within
    assert not any(row.quantized for row in within)
    assert {row.name for row in rows if row.quantized} >= {"relu", "fc"}
    # A line of the user's for a part of them does not count.
    mapping = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
    mapping = mapping.set_module_name(
        "layer1.0.conv1", rq.get_backend_config("x86").default_qconfig
    )
    again = rq.torch.quantize(
        net, (data[0],), data, prepare_custom_config=ours, qconfig_mapping=mapping, **OPTIONS
    )
    assert not any(r.quantized for r in rq.ledger(again).rows if r.name.startswith("layer1."))


class Around(torch.nn.Module):
    """Float code around a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize(
    "mapping",
    [rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig), FOUR_BITS],
)
def test_set_standalone_module_name__quantized_by_itself(mapping):
    """In a model of floats it is the module that quantizing it alone gives, with its own config."""
    torch.manual_seed(0)
    block = ResidualBlock(8, 8, 1).eval()
    net, data = Around(block), [torch.randn(4, 8, 8, 8) for _ in range(2)]
    config = PrepareCustomConfig().set_standalone_module_name("block", mapping)
    rest = rq.QConfigMapping().set_global(None)
    whole = rq.torch.quantize(
        net, (data[0],), data, prepare_custom_config=config, qconfig_mapping=rest, **OPTIONS
    )
    options = {**OPTIONS, "guard": rq.config.Guard.OFF}
    alone = rq.torch.quantize(block, (data[0],), data, qconfig_mapping=mapping, **options)
    (got,), (want,) = (rq.reference.run(m, [data[1].numpy()]) for m in (whole, alone))
    np.testing.assert_array_equal(got, want)
    assert rq.verify(whole, [data[1].numpy()]).is_equal


def test_set_standalone_module_name__without_a_mapping_as_the_caller_says():
    """As in FX; names in it are those of the whole model."""
    net, data = make_net()
    mapping = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
    mapping = mapping.set_module_name("layer1.0.conv1", None).set_module_name("layer1.1", None)
    config = PrepareCustomConfig().set_standalone_module_name("layer1.0")
    qmod = rq.torch.quantize(
        net, (data[0],), data, prepare_custom_config=config, qconfig_mapping=mapping, **OPTIONS
    )
    floats = [r for r in rq.ledger(qmod).rows if not r.quantized and r.op == "nn.conv2d"]
    assert {row.name.split(".")[1] for row in floats} == {"0", "1"}
    within = [r for r in rq.ledger(qmod).rows if r.name.startswith("layer1.0") and r.quantized]
    assert sum(row.op == "nn.conv2d" for row in within) == 1, "conv2 alone"


INTEGERS = PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])


class Linears(torch.nn.Module):
    """A linear layer, one in a module of its own, and another behind both."""

    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = (torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def count_calls(mod):
    """How often quantize and dequantize are in an integer module, and requantize between."""
    names = list_operators(mod)
    return {name: names.count(f"qnn.{name}") for name in ("quantize", "dequantize", "requantize")}


@pytest.mark.parametrize("backend", [None, "arm"])
def test_set_standalone_module_name__integers_in_and_out_as_in_fx(backend):
    """`input_quantized_idxs` and `output_quantized_idxs` of a standalone module, and its own
    backend: no float lies between caller and module.
    """
    torch.manual_seed(0)
    net, data = Linears().eval(), [torch.randn(4, 12) for _ in range(4)]
    ours = PrepareCustomConfig().set_standalone_module_name("inner", None, INTEGERS, backend)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=ours, **OPTIONS)
    inner = TheirConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    theirs = TheirConfig()
    theirs.set_standalone_module_name("inner", None, (data[0],), inner, None)
    converted = calibrate_fx(net, data, theirs)
    called = [str(node.target) for node in converted.graph.nodes]
    assert sum("quantize_per_tensor" in name for name in called) == called.count("dequantize") == 1
    counts = count_calls(qmod)
    # A module of int8 among those of uint8 has its result shifted by 128.
    shift = 1 if backend == "arm" else 0
    assert counts == {"quantize": 1, "dequantize": 1, "requantize": 2 + shift}
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    graph = Graph(qmod)
    dtypes = {
        str(b.var.ty.dtype) for b in graph.bindings if graph.op_name(b.var).endswith("quantize")
    }
    assert dtypes == {"float32", "uint8", "int8"} if backend else {"float32", "uint8"}
    with torch.no_grad():
        want, peer = net(data[0]).numpy(), converted(data[0]).numpy()
    (got,) = rq.reference.run(qmod, [data[0].numpy()])
    assert measure_sqnr(want, got) > max(20, measure_sqnr(want, peer) - 3)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(12), torch.nn.Linear(12, 12)

    def forward(self, x):
        return self.norm(self.inner(self.norm(x)))


def test_set_standalone_module_name__integers_where_nothing_takes_them():
    net, data = Around(Normed()).eval(), [torch.randn(4, 12) for _ in range(2)]
    for one, message in (
        (
            PrepareCustomConfig().set_input_quantized_indexes([0]),
            "input 'x' of .* 'block' cannot be integer",
        ),
        (PrepareCustomConfig().set_output_quantized_indexes([0]), "computed in float"),
        (PrepareCustomConfig().set_output_quantized_indexes([1]), "index 1; allowed: 0 to 0"),
    ):
        config = PrepareCustomConfig().set_standalone_module_name("block", None, one)
        with pytest.raises(rq.ConfigError, match=message):
            rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)


def test_set_standalone_module_name__float_modules_within():
    """The configuration of a standalone module speaks of what is within, by paths within; what
    that leaves in float the caller does not quantize.
    """
    net, data = make_net()
    inner = PrepareCustomConfig().set_non_traceable_module_names(["0"])
    config = PrepareCustomConfig().set_standalone_module_name("layer1", None, inner)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)
    rows = {row.name: row for row in rq.ledger(qmod).rows if row.op == "nn.conv2d"}
    floats = {name for name, row in rows.items() if not row.quantized}
    assert len(floats) == 2
    assert all(name.startswith("layer1.") for name in floats)
    assert len(rows) == 6
    assert rq.verify(qmod, [data[0].numpy()]).is_equal


CONV = "relax.qnn.conv2d"
GIVEN = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)


@pytest.mark.parametrize(
    ("mapping", "by_class"), [pytest.param(None, False, marks=pytest.mark.slow), (GIVEN, True)]
)
def test_set_standalone_module_name__standalone_within_standalone(mapping, by_class):
    """The `prepare_custom_config` of a standalone module has standalone modules of its own, with
    mappings of their own; the caller's mapping, too, leaves the names within as they are.
    """
    net, data = make_net()
    ours, theirs = PrepareCustomConfig(), TheirConfig()
    if by_class:
        ours = ours.set_standalone_module_class(ResidualBlock, FOUR_BITS)
        theirs.set_standalone_module_class(ResidualBlock, None, None, None, None)
    else:
        for name in ("0", "1"):
            ours = ours.set_standalone_module_name(name, FOUR_BITS)
            theirs.set_standalone_module_name(name, None, None, None, None)
    config = PrepareCustomConfig().set_standalone_module_name("layer1", None, ours)
    outer = TheirConfig().set_standalone_module_name("layer1", None, None, theirs, None)
    options = {**OPTIONS, "qconfig_mapping": mapping}
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **options)
    rows = [row for row in rq.ledger(qmod).rows if row.op.endswith("conv2d")]
    assert len(rows) == 6
    assert all(row.quantized for row in rows)
    graph = Graph(qmod)
    calls = [graph.call_of(b.var) for b in graph.bindings if graph.op_name(b.var) == CONV]
    peaks = [np.abs(constant_value(call.args[1]).astype("int32")).max() for call in calls]
    assert sorted(peaks)[:5] == [7] * 5, "4 bits within"
    assert max(peaks) > 100, "8 bits in the stem"
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    mapping = get_default_qconfig_mapping("x86")
    prepared = prepare_fx(net, mapping, (data[0],), prepare_custom_config=outer)
    assert isinstance(prepared.layer1, torch.fx.GraphModule)
    kinds = {type(prepared.layer1.get_submodule(name)) for name in ("0", "1")}
    assert kinds == {torch.nn.Module}, "FX takes it, and quantizes layer1 as one all the same"


def test_set_standalone_module_class__of_the_class_of_the_standalone_module_itself():
    """A rule of classes speaks of what is within, not of the module that it is the rule of."""
    torch.manual_seed(0)
    net = Around(Around(torch.nn.Linear(8, 8))).eval()
    data = [torch.randn(4, 8) for _ in range(2)]
    inner = PrepareCustomConfig().set_standalone_module_class(Around)
    config = PrepareCustomConfig().set_standalone_module_name("block", None, inner)
    with pytest.raises(rq.ConfigError, match="'Around', but the module has no such submodule"):
        rq.torch.quantize(
            net,
            (data[0],),
            data,
            prepare_custom_config=config,
            **OPTIONS,
            qconfig_mapping=GIVEN,
        )


def test_set_standalone_module_class__each_by_itself_and_no_worse_than_fx():
    net, data = make_net()
    config = PrepareCustomConfig().set_standalone_module_class(ResidualBlock)
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    rows = rq.ledger(qmod).rows
    assert sum(row.op.endswith("conv2d") for row in rows) >= 5
    assert all(row.quantized for row in rows), "also the mean of what the last of them gives"
    theirs = TheirConfig().set_standalone_module_class(ResidualBlock, None, None, None, None)
    with torch.no_grad():
        want = net(data[0]).numpy()
        peer = calibrate_fx(net, data, theirs)(data[0]).numpy()
    (got,) = rq.reference.run(qmod, [data[0].numpy()])
    assert measure_sqnr(want, got) > max(20, measure_sqnr(want, peer) - 3)


# --- Inputs and outputs by index --------------------------------------------------------------


def test_set_input_quantized_indexes__main_takes_and_gives_integers_as_in_fx():
    """The real values of what comes out are those of FX's module, on the grids of ours."""
    net, data = make_net()
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=INTEGERS, **OPTIONS)
    (taken,), (given,) = rq.ledger(qmod).inputs, rq.ledger(qmod).outputs
    assert taken.dtype == given.dtype == "uint8"
    graph = Graph(qmod)
    assert count_calls(qmod)["quantize"] == count_calls(qmod)["dequantize"] == 0
    assert not any("float" in str(b.var.ty.dtype) for b in graph.bindings)
    theirs = TheirConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    converted = calibrate_fx(net, data, theirs)
    (scale,), (zero_point,) = taken.scale, taken.zero_point
    integers = torch.quantize_per_tensor(data[0], scale, zero_point, torch.quint8)
    peer = converted(integers)
    assert peer.dtype is torch.quint8
    (got,) = rq.reference.run(qmod, [integers.int_repr().numpy()])
    assert got.dtype == np.uint8
    real = (got.astype("float32") - given.zero_point[0]) * np.float32(given.scale[0])
    with torch.no_grad():
        want = net(data[0]).numpy()
    assert measure_sqnr(want, real) > max(20, measure_sqnr(want, peer.dequantize().numpy()) - 3)
    assert rq.verify(qmod, [integers.int_repr().numpy()]).is_equal


def test_set_output_quantized_indexes__one_of_two():
    """One input of two and one output of two: the other ones stay float, and no worse for it."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)
            self.c, self.d = torch.nn.Linear(8, 4), torch.nn.Linear(8, 3)

        def forward(self, x, y):
            z = torch.relu(torch.cat([self.a(x), self.b(y)], 1))
            return self.c(z), self.d(z)

    net, data = Two().eval(), [(torch.randn(4, 8), 5 * torch.randn(4, 6)) for _ in range(2)]
    config = PrepareCustomConfig().set_input_quantized_indexes([1])
    config = config.set_output_quantized_indexes([0])
    qmod = rq.torch.quantize(net, data[0], data, prepare_custom_config=config, **OPTIONS)
    taken, given = rq.ledger(qmod).inputs, rq.ledger(qmod).outputs
    assert [value.dtype for value in taken] == ["float32", "uint8"]
    assert [value.dtype for value in given] == ["uint8", "float32"]
    x, y = data[0]
    integers = torch.quantize_per_tensor(
        y, taken[1].scale[0], taken[1].zero_point[0], torch.quint8
    ).int_repr()
    first, second = rq.reference.run(qmod, [x.numpy(), integers.numpy()])
    real = (first.astype("float32") - given[0].zero_point[0]) * np.float32(given[0].scale[0])
    with torch.no_grad():
        wanted = [value.numpy() for value in net(x, y)]
    assert measure_sqnr(wanted[0], real) > 30
    assert measure_sqnr(wanted[1], second) > 30
    assert rq.verify(qmod, [x.numpy(), integers.numpy()]).is_equal


def quantize_input(x, row):
    """Integers of an input that a ledger describes, as FX's tensor."""
    return torch.quantize_per_tensor(x, row.scale[0], row.zero_point[0], torch.quint8)


def real_values(integers, row):
    """float32 of integers that a ledger describes."""
    return (integers.numpy().astype("float32") - row.zero_point[0]) * np.float32(row.scale[0])


def prepare_all(function, net, data, config):
    """(prepared, converted) by one of the functions that prepare."""
    if function == "prepare_qat":
        prepared = rq.torch.prepare_qat(
            net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
        )
        return prepared, rq.torch.convert(prepared.eval())
    prepared = rq.torch.prepare(net, (data[0],), prepare_custom_config=config, **OPTIONS)
    for batch in data[1:]:
        prepared(batch)
    return prepared, rq.torch.convert(prepared)


def call_converted(converted, integers):
    """What a converted model of either kind gives for integers."""
    if not callable(converted):
        return torch.from_numpy(rq.reference.run(converted, [integers.numpy()])[0])
    return converted(integers)


def convert_fx_with(net, data, grids):
    """FX's module of two linear layers, by quantization parameters that are given, and with
    integers in and out.
    """
    from torch.ao.quantization import (
        FixedQParamsObserver,
        PerChannelMinMaxObserver,
        QConfig,
        QConfigMapping,
    )

    weight = PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    mapping = QConfigMapping()
    for name, (scale, zero_point) in grids.items():
        observer = FixedQParamsObserver.with_args(
            scale=scale, zero_point=zero_point, dtype=torch.quint8, quant_min=0, quant_max=255
        )
        mapping.set_module_name(name, QConfig(observer, weight))
    theirs = TheirConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    return calibrate_fx(net, data, theirs, mapping)


@pytest.mark.parametrize("function", ["prepare", "prepare_qat"])
def test_set_input_quantized_indexes__same_scales_give_the_integers_of_fx(function):
    """Both prepare in float; what they convert to takes and gives integers. By the same scales FX's
    module gives the same ones.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 7))
    net, data = net.eval(), [torch.randn(64, 12) for _ in range(4)]
    mod, params = rq.load(rq.torch.export(net, (data[0],)))
    plain = rq.calibrate(rq.prepare(mod, params, effort="fast"), data)
    inner = plain.parameters[plain.plan.value_groups["1"][0]]
    prepared, converted = prepare_all(function, net, data, INTEGERS)
    assert prepared(data[0]).dtype is torch.float32
    ledger = converted.ledger if callable(converted) else rq.ledger(converted)
    (taken,), (given,) = ledger.inputs, ledger.outputs
    assert taken.dtype == given.dtype == "uint8"
    hidden = float(inner.scale), int(inner.zero_point)
    theirs = convert_fx_with(
        net, data, {"0": hidden, "1": hidden, "2": (given.scale[0], given.zero_point[0])}
    )
    different = 0
    for batch in data:
        integers = quantize_input(batch, taken)
        want = theirs(integers).int_repr().int()
        got = call_converted(converted, integers.int_repr())
        assert got.dtype is torch.uint8
        different += int((got.int() != want).sum())
        assert int((got.int() - want).abs().max()) <= 1
    assert different <= 0.005 * 4 * 64 * 7, "what lies between two integers but for the last bits"


@pytest.mark.parametrize("where", ["before", "inner"])
def test_set_input_quantized_indexes__trains_with_standalone_modules(where):
    """Integers in and out of a model whose first or middle module is quantized by itself."""
    torch.manual_seed(0)
    net, data = Linears().eval(), [torch.randn(16, 12) for _ in range(4)]
    config = INTEGERS.set_standalone_module_name(where, None, INTEGERS)
    trained, qmod = prepare_all("prepare_qat", net, data, config)
    assert count_calls(qmod)["quantize"] == count_calls(qmod)["dequantize"] == 0
    (taken,), (given,) = rq.ledger(qmod).inputs, rq.ledger(qmod).outputs
    got = call_converted(qmod, quantize_input(data[0], taken).int_repr())
    with torch.no_grad():
        want = trained(data[0]).numpy()
    assert np.abs(real_values(got, given) - want).max() <= 1.01 * given.scale[0]


def test_set_input_quantized_indexes__operators_in_float_train_on_rounded_values():
    """What the integer module can only get as integers, the module that trains rounds, too, for
    operators that stay in float.
    """

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

        def forward(self, x):
            return self.linear(x), self.norm(x)

    torch.manual_seed(0)
    net, data = Both().eval(), [torch.randn(16, 8) for _ in range(2)]
    config = PrepareCustomConfig().set_input_quantized_indexes([0])
    trained, qmod = prepare_all("prepare_qat", net, data, config)
    (taken,) = rq.ledger(qmod).inputs
    integers = quantize_input(data[0], taken).int_repr().numpy()
    with torch.no_grad():
        wanted = [value.numpy() for value in trained(data[0])]
        floats = net(data[0])[1].numpy()
    got = rq.reference.run(qmod, [integers])
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
    assert np.abs(floats - wanted[1]).max() > 1e-4


@pytest.mark.parametrize("function", ["prepare", "prepare_qat"])
def test_set_input_quantized_indexes__where_nothing_takes_them_is_refused_first(function):
    """Before the training, that is; with code that runs, when it is converted."""

    net, data = Normed().eval(), [torch.randn(4, 12) for _ in range(2)]
    for config, message in (
        (PrepareCustomConfig().set_input_quantized_indexes([0]), "input 'x' is not quantized"),
        (PrepareCustomConfig().set_output_quantized_indexes([0]), "computed in float"),
        (PrepareCustomConfig().set_input_quantized_indexes([2]), "index 2; allowed: 0 to 0"),
    ):
        with pytest.raises(rq.ConfigError, match=message):
            prepare_all(function, net, data, config)


class Cut(torch.nn.Module):
    """Control flow on what is computed: `a` or not, then `b` as often as it takes, then `c`."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        sign = x.sum()
        if sign > 0:
            x = torch.relu(self.a(x))
        while x.abs().max() > 1:
            x = self.b(x) * 0.5
        return self.c(x), sign


def make_cut():
    torch.manual_seed(0)
    return Cut().eval(), [3 * torch.randn(4, 12) + k for k in (-1, 1, -1, 1)]


def test_set_input_quantized_indexes__of_code_that_runs():
    """The first runs take the integers, whichever they are, the last one gives integers; PyTorch
    gets their real values, which is said. FX traces no such code.
    """
    net, data = make_cut()
    with pytest.warns(UserWarning, match="read in PyTorch by sum in the model"):
        prepared, converted = prepare_all("prepare", net, data, INTEGERS)
    assert prepared(data[0])[0].dtype is torch.float32
    ledger = converted.ledger
    assert [row.dtype for row in (*ledger.inputs, *ledger.outputs)] == [
        "uint8", "uint8", "float32",
    ]  # fmt: skip
    taken, given = ledger.inputs[0], ledger.outputs[0]
    _, floats = prepare_all("prepare", net, data, None)
    first = [run.inputs[0] for run in converted.regions]
    assert len(first) == 3
    assert all(grid is not None and grid.dtype == "uint8" for grid in first)
    for batch in data:
        integers = quantize_input(batch, taken)
        rounded = integers.dequantize()
        got, sign = converted(integers.int_repr())
        assert got.dtype is torch.uint8
        torch.testing.assert_close(sign, rounded.sum())
        with torch.no_grad():
            want = net(rounded)[0].numpy()
        sqnr = measure_sqnr(want, real_values(got, given))
        assert sqnr > 20
        assert sqnr > measure_sqnr(want, floats(rounded)[0].numpy()) - 3, "than with floats"
    with pytest.raises(rq.DataError, match="is float32; the converted model takes uint8"):
        converted(data[0])


def test_set_output_quantized_indexes__of_code_that_runs_in_another_dtype():
    """A mapping of int8 makes runs of int8; the caller has the dtype of the backend, uint8, as of
    a model that exports.
    """
    qconfig = rq.QConfig(
        rq.get_backend_config("arm").default_qconfig.activation,
        rq.get_backend_config("generic").default_qconfig.weight,
    )
    mapping = rq.QConfigMapping().set_global(qconfig)
    net, data = make_cut()
    given = {"prepare_custom_config": INTEGERS, "qconfig_mapping": mapping, "effort": "fast"}
    prepared = rq.torch.prepare(net, (data[0],), backend=rq.get_backend_config("generic"), **given)
    for batch in data[1:]:
        prepared(batch)
    with pytest.warns(UserWarning, match="read in PyTorch"):
        converted = rq.torch.convert(prepared)
    whole = rq.torch.quantize(
        net.c, (data[0],), data, backend=rq.get_backend_config("generic"), **given
    )
    for ledger in (converted.ledger, rq.ledger(whole)):
        assert ledger.inputs[0].dtype == ledger.outputs[0].dtype == "uint8"
    assert converted.regions[0].inputs[0].dtype == "int8"
    taken, given = converted.ledger.inputs[0], converted.ledger.outputs[0]
    integers = torch.quantize_per_tensor(
        data[0], taken.scale[0], taken.zero_point[0], torch.quint8
    )  # fmt: skip
    got, _ = converted(integers.int_repr())
    assert got.dtype is torch.uint8
    with torch.no_grad():
        want = net(integers.dequantize())[0].numpy()
    assert measure_sqnr(want, real_values(got, given)) > 20


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PrepareCustomConfig().set_output_quantized_indexes([1]), "output 1 .* it is sum in the"),
        (PrepareCustomConfig().set_output_quantized_indexes([2]), "no output 2; allowed: 0 to 1"),
        (PrepareCustomConfig().set_input_quantized_indexes([1]), "no input 1; allowed: 0 to 0"),
    ],
)
def test_set_output_quantized_indexes__of_code_that_runs_names_what_is_in_float(config, message):
    net, data = make_cut()
    with pytest.raises(rq.ConfigError, match=message):
        prepare_all("prepare", net, data, config)


def test_set_input_quantized_indexes__of_code_that_runs_read_by_pytorch_alone():
    net = torch.nn.Linear(4, 4).eval()

    def run(x, y):
        return net(y) if x.sum() > 0 else y

    config = PrepareCustomConfig().set_input_quantized_indexes([0])
    x = torch.ones(2, 4)
    prepared = rq.torch.prepare(run, (x, x.clone()), prepare_custom_config=config, **OPTIONS)
    with pytest.raises(rq.ConfigError, match=r"input 0 of .* PyTorch reads it, in sum"):
        rq.torch.convert(prepared)


# --- Custom modules ---------------------------------------------------------------------------


class Gain(torch.nn.Module):
    """A user's class: each channel by a number, within bounds."""

    def __init__(self, channels):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 2, channels))

    def forward(self, x):
        return (x * self.gain).clamp(-4, 4)


class ObservedGain(torch.nn.Module):
    """It looks at the largest value that comes in."""

    @classmethod
    def from_float(cls, module):
        self = cls()
        self.inner, self.peak, self.calls = module, 0.0, 0
        return self

    def forward(self, x):
        self.peak, self.calls = max(self.peak, float(x.abs().max())), self.calls + 1
        return self.inner(x)


class QuantizedGain(torch.nn.Module):
    """Products of integers, by hand: 8 bits of data, 8 bits of gain."""

    made: list = []

    @classmethod
    def from_observed(cls, observed):
        self = cls()
        cls.made.append(observed)
        self.step, gain = observed.peak / 127, observed.inner.gain.detach()
        self.unit = float(gain.abs().max() / 127)
        self.register_buffer("gain", torch.round(gain / self.unit).to(torch.int32))
        return self

    def forward(self, x):
        integers = torch.clamp(torch.round(x / self.step), -127, 127).to(torch.int32)
        products = integers * self.gain
        return (products.to(torch.float32) * (self.step * self.unit)).clamp(-4, 4)


class WithGain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.gain = torch.nn.Linear(12, 8), Gain(8)
        self.after = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.after(self.gain(torch.relu(self.before(x))))


CUSTOM = PrepareCustomConfig().set_float_to_observed_mapping(Gain, ObservedGain)


def test_set_float_to_observed_mapping__observed_then_quantized_as_in_fx():
    """The observed form sees what calibration brings, once each; the quantized form is part of the
    integer module, with the user's own arithmetic.
    """
    torch.manual_seed(0)
    net, data = WithGain().eval(), [torch.randn(16, 12) for _ in range(3)]
    config = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    QuantizedGain.made.clear()
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)
    (observed,) = QuantizedGain.made
    with torch.no_grad():
        hidden = [torch.relu(net.before(batch)) for batch in data]
        by_hand = QuantizedGain.from_observed(observed)
        want = net.after(by_hand(hidden[0])).numpy()
    assert observed.calls == 3
    assert observed.peak == max(float(each.abs().max()) for each in hidden)
    assert type(net.gain) is Gain, "the user's module is as it was"
    (got,) = rq.reference.run(qmod, [data[0].numpy()])
    assert measure_sqnr(want, got) > 30
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    quantized = {row.name for row in rq.ledger(qmod).rows if row.quantized}
    assert {"after"} <= quantized
    assert any(name.startswith(("before", "relu")) for name in quantized)
    # FX swaps the same classes at the same times.
    theirs = TheirConfig().set_float_to_observed_mapping(Gain, ObservedGain)
    mapping = get_default_qconfig_mapping("x86")
    prepared = prepare_fx(net, mapping, (data[0],), prepare_custom_config=theirs)
    assert type(prepared.gain) is ObservedGain


def test_set_float_to_observed_mapping__within_standalone():
    """The `prepare_custom_config` of a standalone module has custom modules of its own: they
    observe what calibration brings there.
    """
    torch.manual_seed(0)
    net, data = Around(WithGain()).eval(), [torch.randn(16, 12) for _ in range(3)]
    inner = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    config = PrepareCustomConfig().set_standalone_module_name("block", None, inner)
    QuantizedGain.made.clear()
    options = {**OPTIONS, "qconfig_mapping": GIVEN}
    qmod = rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **options)
    (observed,) = QuantizedGain.made
    with torch.no_grad():
        hidden = [torch.relu(net.block.before(batch)) for batch in data]
        by_hand = QuantizedGain.from_observed(observed)
        want = net.block.after(by_hand(hidden[0])).numpy()
    assert observed.calls == 3
    assert observed.peak == max(float(each.abs().max()) for each in hidden)
    (got,) = rq.reference.run(qmod, [data[0].numpy()])
    assert measure_sqnr(want, got) > 30
    assert rq.verify(qmod, [data[0].numpy()]).is_equal
    theirs = TheirConfig().set_float_to_observed_mapping(Gain, ObservedGain)
    outer = TheirConfig().set_standalone_module_name("block", None, None, theirs, None)
    fx = prepare_fx(
        net, get_default_qconfig_mapping("x86"), (data[0],), prepare_custom_config=outer
    )
    assert type(fx.block.gain) is torch.nn.Module, "FX takes it, and looks through the class"


def test_set_observed_to_quantized_mapping__reference_operators_become_integers():
    """What a quantized form quantizes as PyTorch's programs do is computed on integers."""
    import torch.ao.quantization.fx._decomposed

    space = torch.ops.quantized_decomposed

    class Quantized(torch.nn.Module):
        @classmethod
        def from_observed(cls, observed):
            self = cls()
            self.step = observed.peak / 127
            weight = observed.inner.weight.detach()
            self.unit = float(weight.abs().max() / 127)
            self.register_buffer("weight", torch.round(weight / self.unit).to(torch.int8))
            return self

        def forward(self, x):
            x = space.quantize_per_tensor(x, self.step, 0, -128, 127, torch.int8)
            x = space.dequantize_per_tensor(x, self.step, 0, -128, 127, torch.int8)
            weight = space.dequantize_per_tensor(self.weight, self.unit, 0, -127, 127, torch.int8)
            return torch.nn.functional.linear(x, weight)

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    config = PrepareCustomConfig().set_float_to_observed_mapping(torch.nn.Linear, ObservedGain)
    config = config.set_observed_to_quantized_mapping(ObservedGain, Quantized)
    data = [torch.randn(4, 8) for _ in range(2)]
    qmod = rq.torch.quantize(
        net[1:].eval(), (data[0],), data, prepare_custom_config=config, **OPTIONS
    )
    assert "qnn.dense" in qmod.script()
    assert rq.verify(qmod, [data[0].numpy()]).is_equal


class Unwritable(QuantizedGain):
    """Its code looks at values, which no graph holds."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class NoModule(QuantizedGain):
    @classmethod
    def from_observed(cls, observed):
        return 3


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Unwritable, "Custom module 'gain': its quantized form Unwritable cannot be a part"),
        (NoModule, "'gain': NoModule.from_observed returned int"),
    ],
)
def test_set_observed_to_quantized_mapping__names_the_form_that_does_not_fit(form, message):
    net, data = WithGain().eval(), [torch.randn(4, 12)]
    config = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, form)
    with pytest.raises(rq.ModelError, match=message):
        rq.torch.quantize(net, (data[0],), data, prepare_custom_config=config, **OPTIONS)


def test_set_float_to_observed_mapping__names_what_is_missing():
    net, data = WithGain().eval(), [torch.randn(4, 12)]
    with pytest.raises(
        rq.ConfigError, match=r"Add set_observed_to_quantized_mapping\(ObservedGain"
    ):
        rq.torch.quantize(net, (data[0],), data, prepare_custom_config=CUSTOM, **OPTIONS)
    with pytest.raises(rq.ConfigError, match=r"got Gain, .* no class method `from_float"):
        PrepareCustomConfig().set_float_to_observed_mapping(Gain, Gain)
    with pytest.raises(rq.ConfigError, match=r"got Gain, .* no class method `from_observed"):
        CUSTOM.set_observed_to_quantized_mapping(ObservedGain, Gain)


# --- The other functions ----------------------------------------------------------------------


def test_set_non_traceable_module_names__train_in_float():
    net, data = make_net()
    config = PrepareCustomConfig().set_non_traceable_module_names(["layer1.0"])
    trained = rq.torch.prepare_qat(
        net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
    )
    rows = rq.ledger(rq.torch.convert(trained)).rows
    assert not any(row.quantized for row in rows if row.name.startswith("layer1.0"))
    assert any(row.quantized for row in rows if row.name.startswith("layer1.1"))


def test_set_non_traceable_module_names__stay_in_float_in_code_that_runs():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

    def run(x):
        return net(x) if x.sum() > 0 else -x

    config = PrepareCustomConfig().set_non_traceable_module_names(["net.2"])
    prepared = rq.torch.prepare(run, (torch.ones(2, 8),), prepare_custom_config=config, **OPTIONS)
    rows = {row.name: row.quantized for row in rq.torch.convert(prepared).ledger.rows}
    assert not any(quantized for name, quantized in rows.items() if name.startswith("net.2"))
    assert any(rows.values())


# --- Training ---------------------------------------------------------------------------------


def train(module, data, wanted, steps=20):
    """The mean squared error before and after a few steps."""
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-3)
    losses = []
    module.train()
    for i in range(steps):
        loss = torch.nn.functional.mse_loss(module(data[i % len(data)]), wanted[i % len(data)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    module.eval()
    return np.mean(losses[:3]), np.mean(losses[-3:])


def check_agreement(trained, data):
    """The contract of `convert`: the integer module and the module in evaluation give the same, but
    for single steps of values on the border of two.
    """
    qmod = rq.torch.convert(trained)
    with torch.no_grad():
        want = trained(data).numpy()
    (got,) = rq.reference.run(qmod, [data.numpy()])
    assert measure_sqnr(want, got) > 35
    assert rq.verify(qmod, [data.numpy()]).is_equal
    return qmod


def test_set_standalone_module_name__trains_within_its_own_config_as_in_fx():
    """`prepare_qat_fx` of a standalone module makes fake quantization of its own within; here 4
    bits in the standalone module, 8 around it.
    """
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    net, data = make_net()
    config = PrepareCustomConfig().set_standalone_module_name("layer1.0", FOUR_BITS)
    trained = rq.torch.prepare_qat(
        net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
    )
    with torch.no_grad():
        wanted = [net(batch) for batch in data]
    inner = trained.parts["layer1/0"]
    again = copy.deepcopy(trained)
    before = {key: value.clone() for key, value in inner.state_dict().items()}
    start, end = train(trained, data, wanted)
    assert end < start / 2
    changed = [key for key, value in inner.state_dict().items() if not value.equal(before[key])]
    assert any(key.startswith("weights.") for key in changed)
    assert any(key.endswith("log_factor") for key in changed)
    qmod = check_agreement(trained, data[0])
    graph = Graph(qmod)
    calls = [graph.call_of(b.var) for b in graph.bindings if graph.op_name(b.var) == CONV]
    peaks = [np.abs(constant_value(call.args[1]).astype("int32")).max() for call in calls]
    assert sorted(peaks)[:2] == [7] * 2, "4 bits within"
    assert sorted(peaks)[2] > 7, "8 bits around"
    # any number of samples; state goes round; switches reach what is within
    assert trained(data[0][:2]).shape == (2, 5)
    again.load_state_dict(trained.state_dict())
    torch.testing.assert_close(again.eval()(data[0]), trained(data[0]), rtol=0, atol=0)
    trained.freeze_ranges()
    assert not any(v.requires_grad for k, v in trained.named_parameters() if "log_factor" in k)
    # FX has an observed module of its own there.
    theirs = TheirConfig()
    theirs.set_standalone_module_name("layer1.0", None, (data[0],), TheirConfig(), None)
    peer = prepare_qat_fx(net.train(), get_default_qat_qconfig_mapping("x86"), (data[0],), theirs)
    assert isinstance(peer.layer1.get_submodule("0"), torch.fx.GraphModule)
    assert any("fake_quant" in name for name, _ in peer.layer1.named_buffers())


def test_set_standalone_module_name__trains_with_integers_in_and_out_as_in_fx():
    """As without training: no float lies between caller and module."""
    torch.manual_seed(0)
    net, data = Linears().eval(), [torch.randn(4, 12) for _ in range(4)]
    config = PrepareCustomConfig().set_standalone_module_name("inner", None, INTEGERS)
    trained = rq.torch.prepare_qat(
        net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
    )
    qmod = check_agreement(trained.eval(), data[0])
    assert count_calls(qmod) == {"quantize": 1, "dequantize": 1, "requantize": 2}


def test_set_float_to_observed_mapping__observed_form_trains_as_in_fx():
    """It is called in place of the module, with gradients, and `convert` puts in the quantized form
    of what it has become.
    """
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    torch.manual_seed(0)
    net, data = WithGain().eval(), [torch.randn(16, 12) for _ in range(3)]
    config = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    trained = rq.torch.prepare_qat(
        net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
    )
    observed = trained.parts["gain"]
    assert type(observed) is ObservedGain
    gain, calls = observed.inner.gain.detach().clone(), observed.calls
    start, end = train(trained, data, [torch.randn(16, 4) for _ in data])
    assert end < start
    assert observed.calls == calls + 20
    assert not torch.equal(observed.inner.gain, gain)
    QuantizedGain.made.clear()
    check_agreement(trained, data[0])
    (last,) = QuantizedGain.made
    assert torch.equal(last.inner.gain, observed.inner.gain)
    assert type(net.gain) is Gain, "the user's module is as it was"
    assert torch.equal(net.gain.gain.detach(), torch.linspace(0.5, 2, 8))
    theirs = TheirConfig().set_float_to_observed_mapping(Gain, ObservedGain)
    mapping = get_default_qat_qconfig_mapping("x86")
    peer = prepare_qat_fx(net.train(), mapping, (data[0],), theirs)
    assert type(peer.gain) is ObservedGain


def test_set_float_to_observed_mapping__trains_within_standalone_around_a_shortcut():
    """Custom in standalone, called twice, with a value that goes round it; batch norms with live
    statistics on both sides.
    """

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4)
            self.gain = Gain(6)

        def forward(self, x):
            y = self.norm(self.conv(x))
            return {"sum": self.gain(y) + self.gain(torch.relu(y)) + y, "none": None}

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4)
            self.block = Twice()

        def forward(self, x):
            return self.conv(torch.relu(self.norm(self.block(self.norm(self.conv(x)))["sum"])))

    torch.manual_seed(0)
    net, data = Outer().eval(), [torch.randn(8, 4, 6, 6) for _ in range(2)]
    inner = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    config = PrepareCustomConfig().set_standalone_module_name("block", None, inner)
    trained = rq.torch.prepare_qat(
        net, (data[0],), calibration_dataset=data, prepare_custom_config=config, **OPTIONS
    )
    start, end = train(trained, data, [torch.randn(8, 4, 6, 6) for _ in data])
    assert end < start
    check_agreement(trained, data[0])
    with pytest.raises(rq.ConfigError, match="is not one calibrated graph"):
        trained.to_prepared()


# --- Code that runs ---------------------------------------------------------------------------


class Loop(torch.nn.Module):
    """Data decide how often it goes round; the inner modules are called in it."""

    def __init__(self, inner):
        super().__init__()
        self.before, self.inner, self.after = torch.nn.Linear(12, 8), inner, torch.nn.Linear(8, 4)

    def forward(self, x):
        h = torch.relu(self.before(x))
        for _ in range(1 + int(x.sum() > 0)):
            h = h + self.inner(h)
        return self.after(h)


def calibrate_loop(net, config, mapping=None):
    """(prepared, converted, the data) of a network whose loop is passed once and twice."""
    data = [sign * torch.rand(4, 12) for sign in (1, -1, 1)]
    prepared = rq.torch.prepare(
        net, (data[0],), qconfig_mapping=mapping, prepare_custom_config=config, **OPTIONS
    )
    for batch in data[1:]:
        prepared(batch)
    return prepared, rq.torch.convert(prepared), data


@pytest.mark.parametrize(("mapping", "integers"), [(None, None), (GIVEN, INTEGERS)])
def test_set_standalone_module_name__unit_of_code_that_runs(mapping, integers):
    """A module by itself, with a mapping of its own, wherever control flow calls it; FX traces no
    such code. It gives what quantizing it alone, on its calls, gives.
    """
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    net = Loop(inner).eval()
    config = PrepareCustomConfig().set_standalone_module_name("inner", FOUR_BITS, integers)
    calls = []
    handle = inner.register_forward_pre_hook(lambda m, args: calls.append(args[0].clone()))
    _, converted, data = calibrate_loop(net, config, mapping)
    handle.remove()
    calls = calls[:5]  # calibration's: torch.export calls it, too
    alone = rq.torch.quantize(
        inner, (calls[0],), calls, qconfig_mapping=FOUR_BITS, prepare_custom_config=integers,
        **OPTIONS
    )  # fmt: skip
    part = converted.parts["inner"]
    if integers is None:
        with torch.no_grad():
            (want,) = rq.reference.run(alone, [calls[1].numpy()])
        np.testing.assert_array_equal(part(calls[1]).numpy(), want)
    else:
        assert [value.dtype for value in rq.ledger(part.mod).inputs] == ["uint8"]
    rows = {row.name: row for row in converted.ledger.rows}
    assert all(
        rows[name].quantized for name in ("before", "inner.0", "inner.2", "after") if name in rows
    )
    assert any(name.startswith("inner.") for name in rows)
    assert part.mod in converted.modules
    hook = inner.register_forward_hook(lambda m, args, result: None)  # as if nothing had changed
    with torch.no_grad():
        for batch in data:
            want = net(batch)
            assert measure_sqnr(want.numpy(), converted(batch).numpy()) > 12
    hook.remove()
    assert "forward" not in inner.__dict__


def test_set_float_to_observed_mapping__observed_then_quantized_in_code_that_runs():
    """The observed form is called at each call of calibration, the quantized one afterwards; both
    from within loops and functions, and with more than tensors.
    """
    torch.manual_seed(0)
    net = Loop(Gain(8)).eval()
    config = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    QuantizedGain.made.clear()
    _, converted, data = calibrate_loop(net, config)
    (observed,) = QuantizedGain.made
    assert observed.calls == 5
    assert type(converted.parts["inner"]) is QuantizedGain
    assert type(net.inner) is Gain
    with torch.no_grad():
        for batch in data:
            h = torch.relu(net.before(batch))
            for _ in range(1 + int(batch.sum() > 0)):
                h = h + converted.parts["inner"](h)
            assert measure_sqnr(net.after(h).numpy(), converted(batch).numpy()) > 25
    rows = [row for row in converted.ledger.rows if row.name.startswith("inner")]
    assert [row.reason for row in rows] == ["it is custom: its quantized form is called"]
    assert sum(row.quantized for row in converted.ledger.rows) >= 2


def test_set_standalone_module_name__in_code_that_runs_with_parts_within():
    """Standalone holds custom; results are a dict; the whole is a function."""

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gain = torch.nn.Linear(8, 8), Gain(8)

        def forward(self, x):
            return {"sum": self.gain(self.first(x)) + x, "none": None}

    torch.manual_seed(0)
    pair, head = Pair().eval(), torch.nn.Linear(8, 3)

    def run(x):
        y = pair(x)["sum"]
        if x.sum() > 0:
            y = pair(y)["sum"]
        return head(y)

    inner = CUSTOM.set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
    config = PrepareCustomConfig().set_standalone_module_class(Pair, None, inner)
    data = [sign * torch.rand(4, 8) for sign in (1, -1)]
    prepared = rq.torch.prepare(run, (data[0],), prepare_custom_config=config, **OPTIONS)
    prepared(data[1])
    converted = rq.torch.convert(prepared)
    assert list(converted.parts) == ["pair"]
    with torch.no_grad():
        for batch in data:
            assert measure_sqnr(run(batch).numpy(), converted(batch).numpy()) > 20


def test_set_standalone_module_name__that_writes_into_what_it_gets():
    inner = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 8))
    config = PrepareCustomConfig().set_standalone_module_name("inner")
    with pytest.raises(rq.ModelError, match=r"'inner' .* writes into one of its arguments"):
        calibrate_loop(Loop(inner).eval(), config)
    assert "forward" not in inner.__dict__


# --- Messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda c: c.set_standalone_module_name("layer2"), "'layer2', but .* no such submodule"),
        (lambda c: c.set_non_traceable_module_classes([torch.nn.GRU]), "'GRU', but the module"),
        (lambda c: c.set_non_traceable_module_names([3]), r"names is \[3\]; allowed: a list"),
        (lambda c: replace(c, standalone=(StandaloneRule(3),)), "got 3; allowed: the path"),
        (
            lambda c: c.set_standalone_module_name("layer1").set_standalone_module_name("layer1.0"),
            "makes 'layer1.0' standalone, and also 'layer1', which contains it",
        ),
        (
            lambda c: c.set_standalone_module_name("layer1", None, CUSTOM),
            "'Gain', but the module has no such submodule",
        ),
        (
            lambda c: (
                c.set_standalone_module_name("layer1")
                .set_float_to_observed_mapping(torch.nn.BatchNorm2d, ObservedGain)
                .set_observed_to_quantized_mapping(ObservedGain, QuantizedGain)
            ),
            "makes 'layer1.0.bn1' custom, but it is inside 'layer1', which is standalone.",
        ),
    ],
)
def test_prepare_custom_config__names_what_is_wrong(make_config, message):
    net, data = make_net()
    with pytest.raises(rq.ConfigError, match=message):
        rq.torch.quantize(
            net, (data[0],), data, prepare_custom_config=make_config(PrepareCustomConfig()),
            **OPTIONS,
        )  # fmt: skip


def test_set_standalone_module_name__refuses_shapes_of_the_run_time():
    net, data = make_net()
    config = PrepareCustomConfig().set_standalone_module_name("layer1.0")
    shapes = ({0: torch.export.Dim("n")},)
    with pytest.raises(rq.ConfigError, match="Leave out example_kwargs and dynamic_shapes"):
        rq.torch.quantize(
            net, (data[0],), data, prepare_custom_config=config, dynamic_shapes=shapes, **OPTIONS
        )
