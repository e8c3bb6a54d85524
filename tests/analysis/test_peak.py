"""The peak of products in registers: what runs, and how many operations are counted."""

from __future__ import annotations

import pytest

from relayquant.analysis.speed import peak
from relayquant.analysis.speed.peak import ITERATIONS, choose_peak_isa, compile_peak
from relayquant.codegen.kernels.isa.select import select_isa
from relayquant.codegen.kernels.isa.target import resolve_target


@pytest.mark.parametrize("permitted", [True, False])
def test_compile_peak__runs_what_this_process_may(monkeypatch, permitted):
    target = resolve_target(None)
    isa = select_isa(target)
    if not permitted:
        monkeypatch.setattr(peak, "may_use_tiles", lambda: False)
    call, operations = compile_peak(target)
    call()
    chosen = choose_peak_isa(target)
    on_tiles = permitted and isa.unit is not None and peak.may_use_tiles()
    assert (chosen.unit is not None) == on_tiles
    products = 16 * 64 * 16 * 4 if on_tiles else chosen.lanes * chosen.products
    assert operations % (2 * products * ITERATIONS) == 0
