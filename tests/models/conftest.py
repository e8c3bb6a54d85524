"""Real models and data for the whole-model tests, as fixtures."""

from __future__ import annotations

import pytest
import real_models


@pytest.fixture
def resnet20(shared_data) -> real_models.Case:
    return real_models.read_resnet20(shared_data)


@pytest.fixture
def resnet8(shared_data) -> real_models.Case:
    return real_models.read_resnet8(shared_data)


@pytest.fixture
def mobilenet(shared_data) -> real_models.Case:
    pytest.importorskip("PIL.Image", reason="Pillow decodes the JPEG images")
    return real_models.read_mobilenet(shared_data)


@pytest.fixture
def dscnn(shared_data) -> real_models.Case:
    return real_models.read_dscnn(shared_data)


@pytest.fixture
def mnist(shared_data) -> real_models.Case:
    return real_models.read_mnist(shared_data)


@pytest.fixture
def kwt1(shared_data) -> real_models.Case:
    return real_models.read_kwt1(shared_data)


@pytest.fixture
def magika(shared_data) -> real_models.Case:
    return real_models.read_magika(shared_data)


@pytest.fixture
def digits() -> real_models.Case:
    return real_models.read_digits()
