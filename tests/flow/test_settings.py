"""settings: the arguments by name of a public function are the fields of the value it makes."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import relayquant as rq
from relayquant.flow.compression.settings import CompressSettings
from relayquant.flow.settings import CalibrateSettings, PrepareSettings, QuantizeSettings
from relayquant.torch.finetuning.settings import FinetuneSettings

#: function -> the settings that it makes, and what it takes by name besides
TAKE = {
    rq.quantize: (QuantizeSettings, set()),
    rq.prepare: (PrepareSettings, {"backend", "qconfig_mapping"}),
    rq.calibrate: (CalibrateSettings, set()),
    rq.compress_weights: (CompressSettings, set()),
    rq.torch.finetune: (FinetuneSettings, set()),
}


@pytest.mark.parametrize("function", TAKE, ids=lambda function: function.__name__)
def test_signature__has_the_fields_and_their_defaults(function):
    kind, besides = TAKE[function]
    taken = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in besides
    }
    assert taken == {field.name: field.default for field in fields(kind)}
