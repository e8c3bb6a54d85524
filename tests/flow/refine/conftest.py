"""The model of the built-in example, which tests of refinement share."""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.demo import load_digits


@pytest.fixture(scope="session")
def digits():
    demo = load_digits()
    mod, params = rq.load(str(demo.model_path))
    return mod, params, [np.concatenate(demo.calibration)[:64]]
