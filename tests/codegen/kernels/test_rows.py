"""Dense layers with a number of rows known at run time, compiled for every instruction set, against
numpy: every number of rows up to two tiles and one more, and enough for threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import tvm
from emulated_unit import EMULATED, REFUSED, find_target
from exact import finish, random_multipliers, random_values
from machines import best_isa, compile_kernel, every_isa

from relayquant.codegen.kernels.integer.convolution.order import SMALL_WEIGHT_BYTES
from relayquant.codegen.kernels.integer.dynamic_rows import (
    build_dense_rows,
    pack_dense_rows,
    plan_rows,
)
from relayquant.codegen.kernels.integer.epilogue import Epilogue, Residual, Slope, Store
from relayquant.codegen.kernels.integer.specs import Constants, Dense
from relayquant.codegen.kernels.isa.arm import NEON, SDOT, SMMLA
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.codegen.kernels.isa.x86 import AMX


@dataclass(frozen=True, eq=False)
class Layer:
    """One dense layer, compiled once, and what numpy makes of any input."""

    spec: Dense
    isa: Isa
    leading: tuple[int | None, ...] = (None,)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def check(self, *shapes: tuple[int, ...]) -> None:
        """Compare results for every shape of the rows, bit for bit."""
        spec, rng = self.spec, self.rng
        w = random_values(rng, (spec.out_features, spec.in_features), "int8")
        bias = rng.integers(-5000, 5000, spec.out_features).astype("int32")
        multiplier = random_multipliers(rng, w, spec.epilogue)
        packed = pack_dense_rows(spec, self.isa, Constants(w, bias, multiplier))
        func = build_dense_rows(spec, self.isa, "dense", self.leading)
        kernel = compile_kernel(func, find_target(self.isa))
        for shape in shapes:
            x = random_values(rng, (*shape, spec.in_features), spec.in_dtype)
            acc = (x.astype("int64") - spec.in_zero_point) @ w.T.astype("int64") + bias
            added = spec.epilogue.residual
            residual = random_values(rng, acc.shape, added.dtype) if added else None
            inputs = [x, *packed.arguments(), *([] if residual is None else [residual])]
            y = tvm.runtime.tensor(np.full(acc.shape, 77, spec.epilogue.dtype))
            kernel(*map(tvm.runtime.tensor, inputs), y)
            expected = finish(acc, spec.epilogue, multiplier, residual)
            np.testing.assert_array_equal(y.numpy(), expected, err_msg=str(shape))


def all_row_counts(spec: Dense, isa: Isa) -> list[tuple[int, ...]]:
    """0 to two full tiles and one row more."""
    return [(rows,) for rows in range(2 * plan_rows(spec, isa).full.spec.width + 2)]


@pytest.mark.slow
@pytest.mark.sample(4)
@every_isa
def test_build_dense_rows__every_number_of_rows(isa):
    added = Epilogue(zero_point=7, low=7, residual=Residual("int8", 4, 0.37))
    spec = Dense(0, 40, 72, "uint8", 9, added)
    Layer(spec, isa).check(*all_row_counts(spec, isa))


OTHERS = {
    "copied: int8, odd sizes": Dense(0, 37, 10, "int8", -7, Epilogue(dtype="int8", zero_point=3)),
    "slope": Dense(0, 48, 40, epilogue=Epilogue(zero_point=60, slope=Slope(-60, None, 1.1))),
    "int16": Dense(0, 33, 40, "int16", 300, Epilogue(dtype="int16")),
    "accumulators": Dense(0, 16, 1, epilogue=Epilogue(Store.ACCUMULATOR, "int32")),
    "panel by panel": Dense(0, 512, 130, epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHERS)
def test_build_dense_rows__every_kind_of_layer(name):
    spec, isa = OTHERS[name], best_isa()
    is_large = plan_rows(spec, isa).full.weight_bytes > SMALL_WEIGHT_BYTES
    assert is_large == (name == "panel by panel")
    Layer(spec, isa).check(*all_row_counts(spec, isa), (1500,))


@pytest.mark.slow
def test_build_dense_rows__several_symbolic_extents():
    spec = Dense(0, 24, 20)
    Layer(spec, best_isa(), (None, 3, None)).check((1, 3, 1), (2, 3, 11), (0, 3, 5), (50, 3, 50))


ON_TILES = {
    "few outputs": Dense(0, 36, 5, epilogue=Epilogue(Store.ACCUMULATOR, "int32")),
    "in place": Dense(
        0, 128, 72, epilogue=Epilogue(zero_point=7, residual=Residual("int8", 4, 0.3))
    ),
    "copied: int8, odd sizes": Dense(0, 101, 40, "int8", -7, Epilogue(dtype="int8", zero_point=3)),
    "panel by panel": Dense(0, 2048, 160, epilogue=Epilogue(Store.DEQUANTIZE, "float32")),
}


@pytest.mark.slow
@pytest.mark.parametrize("isa", [AMX, EMULATED, REFUSED], ids=["unit", "emulated", "refused"])
@pytest.mark.parametrize(
    "name", ["few outputs", *(pytest.param(n, marks=pytest.mark.slow) for n in list(ON_TILES)[1:])]
)
def test_build_dense_rows__on_a_matrix_unit(isa, name):
    """Few rows on vectors, tiles of every height, odd tiles, several chunks, and threads."""
    spec = ON_TILES[name]
    counts = [0, 1, 3, 4, 5, 6, 7, 15, 16, 17, 32, 33, 47, 50, 100, 300]
    Layer(spec, isa).check(*((count,) for count in counts))


def test_plan_rows__a_matrix_unit_shares_the_weights_with_vectors():
    for spec in ON_TILES.values():
        plan = plan_rows(spec, AMX)
        assert plan.tiled is not None
        assert plan.full.isa.unit is None
        sizes = {(each.weight_size, each.channel_size) for each in (*plan.tiles, plan.tiled)}
        assert len(sizes) == 1


def test_plan_rows__heights_share_their_panels():
    for isa in (best_isa(), SDOT, NEON, SMMLA):
        plan = plan_rows(Dense(0, 64, 100, in_dtype=isa.activation), isa)
        heights = [tile.spec.width for tile in plan.tiles]
        assert heights == sorted(heights, reverse=True)
        assert heights[-1] == plan.full.isa.pixels
        assert len({(tile.panels, tile.panel_vectors) for tile in plan.tiles}) == 1
