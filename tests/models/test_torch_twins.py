"""Models that are here as ONNX and as a program of torch.export: both files give equal results,
as float models and quantized with the same data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import relayquant as rq
from relayquant.base.runtime import Executor

torch = pytest.importorskip("torch", reason="pip install torch")

from onnx_in_torch import OnnxModule  # noqa: E402

#: model -> most noise between the two quantized models, as a part of what quantization adds. The
#: files of KWT-1 do not hold the same operators: GELU is one in PyTorch and a formula in ONNX, the
#: class token is put in front by a concat and by a pad.
MOST_NOISE = {"magika": 0.0, "kwt1": 0.7}


def find_twin(model: Path, example: np.ndarray, folder: Path) -> Path:
    """The .pt2 file beside an ONNX model, or one that is made of it."""
    path = model.with_suffix(".pt2")
    if path.exists():
        return path
    path = folder / path.name
    module = OnnxModule(onnx.load(str(model))).eval()
    torch.export.save(torch.export.export(module, (torch.from_numpy(example),)), path)
    return path


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", MOST_NOISE)
def test_twins__equal_results(name, request, tmp_path):
    case = request.getfixturevalue(name)
    samples = [sample[None] for sample in case.samples[:12]]
    calibration = [sample[None] for sample in np.concatenate(case.calibration)[:4]]

    def run(mod) -> np.ndarray:
        executor = Executor(rq.compile(mod))
        return np.concatenate([executor.run("main", [sample])[0] for sample in samples])

    floats, integers = [], []
    for path in (case.model, find_twin(case.model, samples[0], tmp_path)):
        mod, params = rq.load(path)
        assert not params
        floats.append(run(mod))
        qmod = rq.quantize(mod, None, calibration, effort="fast", guard=rq.config.Guard.OFF)
        integers.append(run(qmod))
    np.testing.assert_allclose(*floats, rtol=1e-5, atol=1e-5)
    assert (integers[0].argmax(1) == integers[1].argmax(1)).all()
    between, added = (
        np.sqrt(np.square(pair[0] - pair[1]).mean())
        for pair in (integers, (floats[0], integers[0]))
    )
    assert between <= MOST_NOISE[name] * added
