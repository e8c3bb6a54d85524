"""QConfigMapping and QConfig objects of torch.ao.quantization, in calls that take a module."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.base.qtypes import Granularity
from relayquant.config.observers import MSE, Fixed, MinMax, MovingAverageMinMax

torch = pytest.importorskip("torch")
from torch.ao import quantization as ao  # noqa: E402
from torch.ao.quantization import observer as observers  # noqa: E402
from torch.ao.quantization import qconfig as qconfigs  # noqa: E402

from relayquant.torch.ao_config import read_ao_mapping, read_ao_qconfig  # noqa: E402

nn = torch.nn
DEFAULT = rq.get_backend_config("x86").default_qconfig
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 4))
BATCHES = [torch.randn(16, 8) for _ in range(4)]


def read(config):
    return read_ao_qconfig(config, "here", DEFAULT)


@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
def test_ao_qconfig__defaults_of_torch(engine):
    theirs = ao.get_default_qconfig(engine)
    ours = read(theirs)
    for made, config in ((theirs.activation(), ours.activation), (theirs.weight(), ours.weight)):
        spec = config.spec
        assert spec.limits == (made.quant_min, made.quant_max)
        assert spec.is_symmetric == (
            made.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
        )
    assert isinstance(ours.activation.observer, MSE)
    assert ours.activation.spec.dtype == "uint8"
    wanted = Granularity.PER_CHANNEL if engine == "x86" else Granularity.PER_TENSOR
    assert ours.weight.spec.granularity is wanted


def test_ao_qconfig__training_form_has_the_observer_inside():
    ours = read(ao.get_default_qat_qconfig("x86"))
    assert ours.activation.observer == MovingAverageMinMax(1 - 0.01)
    assert ours.weight.observer == MinMax()


@pytest.mark.slow
def test_ao_qconfig__the_observer_of_weights_gives_the_same_scales():
    """Integer for integer what PyTorch's observer gives, for symmetric weights in -127..127."""
    make = observers.PerChannelMinMaxObserver.with_args(
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    qconfig = ao.QConfig(activation=observers.MinMaxObserver, weight=make)
    module = nn.Sequential(nn.Linear(8, 16))
    trained = rq.torch.prepare_qat(module, (BATCHES[0],), qconfig, "x86")
    (quantizer,) = [q for n, q in trained.quantizers.items() if "weight" in n]
    theirs = make()
    theirs(module[0].weight.detach())
    ours = quantizer.scale.detach().flatten()
    np.testing.assert_allclose(ours, theirs.calculate_qparams()[0], rtol=1e-6)


def test_ao_qconfig__dynamic_fixed_float16_and_float():
    assert read(qconfigs.default_dynamic_qconfig).activation.spec.is_dynamic
    assert read(qconfigs.float16_static_qconfig) is rq.config.FLOAT16
    assert read(None) is None
    fixed = ao.QConfig(
        activation=observers.FixedQParamsObserver.with_args(
            scale=1 / 256, zero_point=0, dtype=torch.quint8, quant_min=0, quant_max=255
        ),
        weight=observers.NoopObserver,
    )
    assert read(fixed).output.observer == Fixed(1 / 256, 0)
    assert read(fixed).activation == DEFAULT.activation


class Own(observers.MinMaxObserver):
    """An observer of the user."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation": Own}, "here, activation: Own has no counterpart"),
        ({"activation": nn.Identity}, r"here: its activations are float32 \(Identity\)"),
        (
            {"weight": observers.PerChannelMinMaxObserver.with_args(
                dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams
            )},
            "here, weight: PerChannelMinMaxObserver has qscheme .*float_qparams",
        ),
        ({"weight": observers.MinMaxObserver.with_args(dtype=torch.quint4x2)}, "quint4x2"),
        (
            {"weight": observers.PerChannelMinMaxObserver.with_args(
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=1
            )},
            "ch_axis=1",
        ),
        ({"activation": 3}, "cannot be built"),
    ],
)  # fmt: skip
def test_ao_qconfig__what_has_no_counterpart_is_named(change, said):
    config = ao.get_default_qconfig("qnnpack")._replace(**change)
    with pytest.raises(rq.errors.ConfigError, match=said):
        read(config)


def test_ao_qconfig__float16_activations_alone_are_refused():
    with pytest.raises(rq.errors.ConfigError, match="float16"):
        read(qconfigs.float16_dynamic_qconfig)


@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
def test_ao_mapping__defaults_of_torch_are_one_line(engine):
    """Their lines for operators are what our backends do anyway."""
    mapping = read_ao_mapping(ao.get_default_qconfig_mapping(engine), DEFAULT)
    assert [rule.kind.value for rule in mapping.rules] == ["global"]


def test_ao_mapping__lines_of_every_kind_select_what_fx_selects():
    theirs = (
        ao.QConfigMapping()
        .set_global(ao.get_default_qconfig("x86"))
        .set_object_type(nn.Linear, None)
        .set_module_name("4", ao.get_default_qconfig("qnnpack"))
    )
    qmod = rq.torch.quantize(
        NET, (BATCHES[0],), BATCHES, qconfig_mapping=theirs, effort="fast", backend="x86"
    )
    assert {row.name: row.quantized for row in rq.ledger(qmod).rows} == {
        "1": False, "2": False, "3": False, "4": True,
    }  # fmt: skip
    mapping = read_ao_mapping(theirs.set_module_name_regex("2", None), DEFAULT)
    (regex,) = [rule for rule in mapping.rules if rule.kind.value == "module_name_regex"]
    assert regex.key == "(?:2).*"


def test_ao_mapping__without_a_global_line_the_rest_is_float():
    theirs = ao.QConfigMapping().set_object_type(nn.Linear, ao.get_default_qconfig("x86"))
    mapping = read_ao_mapping(theirs, DEFAULT)
    kinds = [rule.kind.value for rule in mapping.rules]
    assert kinds == ["global", "module_class"]
    assert mapping.rules[0].qconfig is None


@pytest.mark.slow
def test_ao_mapping__the_whole_network_is_as_accurate_as_torchs_own():
    """The same QConfigMapping for FX and here: SQNR of the results against float."""
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    theirs = ao.get_default_qconfig_mapping("x86")
    NET.eval()
    prepared = prepare_fx(NET, theirs, (BATCHES[0],))
    for batch in BATCHES:
        prepared(batch)
    fx = convert_fx(prepared)
    qmod = rq.torch.quantize(
        NET, (BATCHES[0],), BATCHES, qconfig_mapping=theirs, backend="x86", effort="fast"
    )
    exe = rq.Executor(rq.compile(qmod))
    wanted = NET(BATCHES[0]).detach().numpy()

    def sqnr(got):
        return 10 * np.log10((wanted**2).sum() / ((got - wanted) ** 2).sum())

    (ours,) = exe.run("main", [BATCHES[0].numpy()])
    assert sqnr(ours) > sqnr(fx(BATCHES[0]).detach().numpy()) - 3
    assert all(row.quantized for row in rq.ledger(qmod).rows)
