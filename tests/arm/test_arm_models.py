"""Whole models, cross-compiled and run over RPC on emulated CPUs, against x86 and numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product

import numpy as np
import pytest
import tvm
from emulator import CPUS, MATRIX_CPU, PLAIN_CPUS, Emulator, run_remotely, target_of
from float_models import Chain, build_model, draw_batches
from tvm import relax

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.demo import load_digits
from relayquant.ir.rewrite import Graph, expose_values
from relayquant.ir.rewrite.graph import tensor_dtype

Quantized = tuple[tvm.IRModule, np.ndarray]


def quantize_digits(backend: str) -> Quantized:
    """The built-in example, and sixteen of its held-out images."""
    demo = load_digits()
    mod, params = rq.load(str(demo.model_path))
    return rq.quantize(mod, params, demo.calibration[:4], backend=backend), demo.images[:16]


def residual_network() -> tvm.IRModule:
    """Built like ResNet-20: three stages of residual blocks, the last two begin with a stride."""

    def body(emit: Chain, x):
        op = relax.op

        def conv(name: str, value, channels: int, size: int = 3, stride: int = 1):
            inputs = int(value.ty.shape.values[1])
            weight = emit.constant(channels, inputs, size, size, scale=1 / size / inputs**0.5)
            product = op.nn.conv2d(value, weight, strides=stride, padding=size // 2)
            product = emit(f"{name}.conv", product)
            return emit(name, op.add(product, emit.constant(1, channels, 1, 1)))

        value = emit("stem", op.nn.relu(conv("stem.b", x, 16)))
        for stage, channels in enumerate((16, 24, 37)):
            name, stride = f"stage{stage}", 1 if stage == 0 else 2
            left = emit(f"{name}.relu", op.nn.relu(conv(f"{name}.a", value, channels, 3, stride)))
            left = conv(f"{name}.b", left, channels)
            if stage:
                value = conv(f"{name}.shortcut", value, channels, 1, stride)
            value = emit(name, op.nn.relu(emit(f"{name}.sum", op.add(left, value))))
        flat = emit("flat", op.reshape(emit("mean", op.mean(value, [2, 3])), (1, 37)))
        return emit("logits", op.add(emit.dense("dense", flat, 10), emit.constant(10)))

    return build_model(body, (1, 3, 16, 16))


def mobile_network() -> tvm.IRModule:
    """Depthwise and 1x1 convolutions, both kinds of pools, a concatenation."""

    def body(emit: Chain, x):
        op = relax.op
        value = emit("stem", op.clip(emit.conv_bias("stem.b", x, 20), 0, 6))
        value = emit("depth", op.clip(emit.conv_bias("depth.b", value, 20, groups=20), 0, 6))
        point = emit("point.conv", op.nn.conv2d(value, emit.constant(32, 20, 1, 1, scale=0.2)))
        value = emit("point", op.nn.relu(emit("p.b", op.add(point, emit.constant(1, 32, 1, 1)))))
        left = emit("left", op.nn.max_pool2d(value, (2, 2), (2, 2)))
        right = emit("right", op.nn.avg_pool2d(value, (3, 3), (2, 2), (1, 1, 1, 1)))
        both = emit("both", op.concat([left, right], axis=1))
        return emit("out", op.mean(both, [2, 3], keepdims=True))

    return build_model(body, (1, 3, 12, 12))


def quantize_drawn(mod: tvm.IRModule, backend: str) -> Quantized:
    """A model quantized on normal values, and one more of them."""
    *calibration, last = draw_batches(mod, 9)
    return rq.quantize(mod, None, calibration, backend=backend), last["x"]


MODELS: dict[str, Callable[[], Quantized]] = {
    "digits": lambda: quantize_digits("arm"),
    "digits for x86": lambda: quantize_digits("x86"),
    "residual network": lambda: quantize_drawn(residual_network(), "arm"),
    "mobile network": lambda: quantize_drawn(mobile_network(), "arm"),
}


@functools.cache
def make_model(name: str) -> Quantized:
    return MODELS[name]()


def integer_values(mod: tvm.IRModule) -> list[str]:
    graph = Graph(mod)
    return [
        binding.var.name
        for binding in graph.bindings
        if isinstance(binding.value, tvm.ir.Call)
        and tensor_dtype(binding.var).startswith(("int", "uint"))
    ]


@pytest.fixture(scope="session")
def ports(emulator: Emulator) -> Iterator[Callable[[str], int]]:
    """Function cpu -> port of its RPC server, which is started once."""
    with ExitStack() as stack:
        yield functools.cache(lambda cpu: stack.enter_context(emulator.serve(cpu)))


def assert_same_bits(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cpu"),
    [
        *product(["digits"], CPUS),
        *product([name for name in MODELS if name != "digits"], PLAIN_CPUS),
        ("residual network", MATRIX_CPU),
    ],
)
def test_model__equals_x86_and_numpy(emulator, ports, tmp_path, cpu, name):
    mod, x = make_model(name)
    library = emulator.export(rq.compile(mod, target_of(cpu)), tmp_path / "model.so")
    got = run_remotely(ports(cpu), library, x)
    assert_same_bits(got, Executor(rq.compile(mod)).run("main", [x]))
    assert_same_bits(got, rq.reference.run(mod, [x]))


@pytest.mark.slow
@pytest.mark.parametrize("cpu", PLAIN_CPUS)
@pytest.mark.parametrize("name", ["digits", "residual network"])
def test_model__every_integer_value_equals_numpy(emulator, ports, tmp_path, cpu, name):
    mod, x = make_model(name)
    names = integer_values(mod)
    assert len(names) > 4
    tapped = expose_values(mod, names)
    library = emulator.export(rq.compile(tapped, target_of(cpu)), tmp_path / "model.so")
    got = run_remotely(ports(cpu), library, x)
    expected = rq.reference.run(tapped, [x])
    assert_same_bits(got, expected)
    assert any(value.dtype == np.int8 and len(np.unique(value)) > 20 for value in expected)


@pytest.mark.slow
def test_model__without_the_pipeline(emulator, ports, tmp_path):
    """`tvm.compile` alone: slower code, the same bits."""
    mod, x = make_model("digits")
    library = emulator.export(tvm.compile(mod, target_of("cortex-a53")), tmp_path / "model.so")
    assert_same_bits(run_remotely(ports("cortex-a53"), library, x), rq.reference.run(mod, [x]))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.sample(3)
@pytest.mark.parametrize("cpu", CPUS)
def test_model__runs_on_arm_kernels(cpu):
    """Not a run: the code for the CPU holds the instructions that make it fast."""
    mod, _ = make_model("residual network")
    text = rq.compile(mod, target_of(cpu)).mod.imports[0].inspect_source("asm")
    assert ("sdot" in text) == (cpu != "cortex-a53")
    assert ("smmla" in text) == (cpu == MATRIX_CPU)
    assert rq.get_backend_config(target=target_of(cpu)) is rq.get_backend_config("arm")
