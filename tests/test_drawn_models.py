"""Drawn models of many operators, attributes and sizes: what every target computes is what numpy
computes, bit for bit, and near what float computes.
"""

from __future__ import annotations

import numpy as np
import pytest
from drawing import count_examples
from float_models import draw_batches
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_graphs import TARGETS, draw_models

import relayquant as rq
from relayquant.flow.testing.check import observe_parameters


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "examples",
    [pytest.param(15, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.nightly)],
)
def test_drawn_model__every_target(examples, symbolic):
    @settings(
        max_examples=count_examples(examples),
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(draw=st.data())
    def check_drawn(draw):
        mod = draw.draw(draw_models(wide=True, symbolic=symbolic))
        check_model(mod, draw.draw(st.sampled_from(("x86", "arm", "generic"))), TARGETS)

    check_drawn()


def check_model(mod, backend: str, targets) -> None:
    data = draw_batches(mod, 3, n=3)
    prepared = rq.prepare(mod, None, backend=backend)
    prepared = observe_parameters(prepared, data)
    qmod = rq.lower(rq.convert_to_reference(prepared), prepared.backend)
    for got, want in zip(
        rq.reference.run(qmod, data[0]), rq.reference.run(mod, data[0]), strict=True
    ):
        noise = np.square(got.astype("float64") - want).sum()
        power = np.square(want.astype("float64")).sum()
        assert noise <= 0.1 * power + 1e-12, f"{10 * np.log10(power / noise):.1f} dB"
    for target in targets:
        report = rq.verify(qmod, data[1], target)
        assert report.is_equal, f"{target}: {report.first}"
