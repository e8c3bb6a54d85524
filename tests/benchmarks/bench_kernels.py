"""Speed of the integer kernels on this machine against its measured dot-product peak; run by hand.

    python tests/benchmarks/bench_kernels.py [word in the name of a layer ...]

One thread, CPU time, best of many: the numbers stand on a shared machine. The peak is measured in
turns with each kernel, because the clock of a core changes by a tenth with what its neighbours do.
`compile` is the time of `tvm.compile` for the one kernel.
"""

from __future__ import annotations

import os

os.environ.setdefault("TVM_NUM_THREADS", "1")  # before tvm starts its thread pool

import sys
import time
from collections.abc import Callable

import numpy as np
import tvm
from tvm.target import Target

from relayquant.analysis.speed.peak import compile_peak
from relayquant.codegen.kernels.integer.convolution.direct import build_conv2d, pack_conv2d
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual
from relayquant.codegen.kernels.integer.specs import Constants, Conv2d, Dense
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import name_cpu, resolve_target


def conv(c_in: int, c_out: int, kernel: int, stride: int, size: int, **more) -> Conv2d:
    pad = (kernel // 2,) * 4
    more.setdefault("epilogue", Epilogue(is_small=True))
    return Conv2d(1, size, size, c_in, c_out, (kernel,) * 2, (stride,) * 2, pad, **more)


ADD = Epilogue(residual=Residual("uint8", 3, 0.5), is_small=True)
LAYERS: dict[str, Conv2d] = {
    "resnet 7x7/2 3->64 @224": conv(3, 64, 7, 2, 224, in_zero_point=114),
    "resnet 3x3 64->64 @56": conv(64, 64, 3, 1, 56),
    "resnet 1x1 64->256 @56": conv(64, 256, 1, 1, 56),
    "resnet 1x1 64->256 @56 add": conv(64, 256, 1, 1, 56, epilogue=ADD),
    "resnet 1x1 256->64 @56": conv(256, 64, 1, 1, 56),
    "resnet 3x3/2 128->128 @56": conv(128, 128, 3, 2, 56),
    "resnet 3x3 128->128 @28": conv(128, 128, 3, 1, 28),
    "resnet 1x1 128->512 @28": conv(128, 512, 1, 1, 28),
    "resnet 1x1 512->128 @28": conv(512, 128, 1, 1, 28),
    "resnet 1x1/2 256->512 @56": conv(256, 512, 1, 2, 56),
    "resnet 3x3 256->256 @14": conv(256, 256, 3, 1, 14),
    "resnet 1x1 1024->256 @14": conv(1024, 256, 1, 1, 14),
    "resnet 1x1 256->1024 @14 add": conv(256, 1024, 1, 1, 14, epilogue=ADD),
    "resnet 3x3 512->512 @7": conv(512, 512, 3, 1, 7),
    "resnet 1x1 2048->512 @7": conv(2048, 512, 1, 1, 7),
    "resnet 1x1 512->2048 @7 add": conv(512, 2048, 1, 1, 7, epilogue=ADD),
    "mobilenet 3x3/2 3->32 @224": conv(3, 32, 3, 2, 224),
    "mobilenet 1x1 32->16 @112": conv(32, 16, 1, 1, 112),
    "mobilenet 1x1 16->96 @112": conv(16, 96, 1, 1, 112),
    "mobilenet 1x1 96->24 @56": conv(96, 24, 1, 1, 56),
    "mobilenet 1x1 144->24 @56 add": conv(144, 24, 1, 1, 56, epilogue=ADD),
    "mobilenet 1x1 384->64 @14": conv(384, 64, 1, 1, 14),
    "mobilenet 1x1 320->1280 @7": conv(320, 1280, 1, 1, 7),
    "resnext 3x3 128->128 @56 32 groups": conv(128, 128, 3, 1, 56, groups=32),
    "gemm 128x768x3072": Dense(128, 768, 3072).as_conv2d(),
    "gemv 768->768": Dense(1, 768, 768).as_conv2d(),
    "gemv 2048->1000": Dense(1, 2048, 1000).as_conv2d(),
    "depthwise 3x3 144 @56": conv(144, 144, 3, 1, 56, groups=144),
    "depthwise 3x3 384 @14": conv(384, 384, 3, 1, 14, groups=384),
    "depthwise 3x3/2 96 @112": conv(96, 96, 3, 2, 112, groups=96),
    "depthwise 3x3 32 @112": conv(32, 32, 3, 1, 112, groups=32),
    "depthwise 3x3 960 @7": conv(960, 960, 3, 1, 7, groups=960),
    "depthwise 5x5 240 @28": conv(240, 240, 5, 1, 28, groups=240),
}


def seconds_per_call(calls: list[Callable[[], None]], budget: float = 0.5) -> list[float]:
    """Best CPU seconds of each; with one TVM thread the caller's CPU time is the kernel's.

    All calls take turns for `budget` seconds.
    """
    repeats = []
    for call in calls:
        call()
        start = time.thread_time()
        call()
        repeats.append(max(1, int(5e-4 / max(time.thread_time() - start, 1e-6))))
    best, deadline = [float("inf")] * len(calls), time.perf_counter() + budget
    while time.perf_counter() < deadline:
        for i, (call, repeat) in enumerate(zip(calls, repeats, strict=True)):
            start = time.thread_time()
            for _ in range(repeat):
                call()
            best[i] = min(best[i], (time.thread_time() - start) / repeat)
    return best


def compile_call(func, target: Target, arrays) -> tuple[Callable[[], None], float]:
    name = str(func.attrs["global_symbol"])
    start = time.perf_counter()
    kernel = tvm.compile(tvm.IRModule({name: func}), target=target)[name]
    seconds = time.perf_counter() - start
    args = [tvm.runtime.tensor(a) for a in arrays]
    return lambda: kernel(*args), seconds


def compile_layer(spec: Conv2d, isa: Isa, target: Target) -> tuple[Callable[[], None], float]:
    """(the kernel on random operands, compile seconds)."""
    rng = np.random.default_rng(0)
    w = rng.integers(-127, 128, spec.weight_shape).astype("int8")
    m = np.full(spec.out_channels, 1 / (np.sqrt(w[0].size) * 127 * 80), "float32")
    packed = pack_conv2d(spec, isa, Constants(w, np.zeros(spec.out_channels, "int32"), m))
    arrays = [rng.integers(0, 128, spec.in_shape).astype(spec.in_dtype), *packed.arguments()]
    results = 2 if spec.epilogue.residual else 1
    arrays += [np.zeros(spec.out_shape, spec.epilogue.dtype) for _ in range(results)]
    return compile_call(build_conv2d(spec, isa), target, arrays)


def main() -> None:
    options = [a for a in sys.argv[1:] if a.startswith("mcpu=")]
    words = [a for a in sys.argv[1:] if a not in options]
    target = resolve_target(f"llvm -mcpu={options[0][5:]}" if options else None)
    isa = select_isa(target)
    peak_call, peak_operations = compile_peak(target)
    print(f"{options[0][5:] if options else name_cpu()}, {isa.name}")
    for name, spec in LAYERS.items():
        if words and not any(word in name for word in words):
            continue
        call, compile_seconds = compile_layer(spec, isa, target)
        peak_seconds, seconds = seconds_per_call([peak_call, call])
        peak, rate = peak_operations / peak_seconds / 1e9, 2 * spec.macs / seconds / 1e9
        print(
            f"{name:36s} {seconds * 1e6:8.1f} us {rate:6.0f} of {peak:4.0f} GOP/s = "
            f"{rate / peak:5.2f} of peak, compile {compile_seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
