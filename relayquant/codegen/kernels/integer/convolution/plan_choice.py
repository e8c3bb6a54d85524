"""Specification of a convolution or product -> its plan, for one instruction set of the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.integer.tiled.plan import FEWEST_PIXELS, plan_tiles
from relayquant.codegen.kernels.isa.base import Isa
from relayquant.errors import format_count


class RankedPlan(Protocol):
    """Properties of a plan that `choose_instructions` compares."""

    @property
    def isa(self) -> Isa: ...
    @property
    def fewest_pixels(self) -> int: ...
    @property
    def instructions(self) -> float: ...


PlanT = TypeVar("PlanT", bound=RankedPlan)

#: Another form than the first must take less than this share of its estimated time.
FORM_GAIN = 0.98


def choose_plan(spec: Conv2d, isa: Isa) -> ConvPlan:
    """Choose the plan of `spec` for generator and packer, for `isa` or its companion.

    The instruction set is the one for activations of this dtype. Its companion is used if it needs
    no more instructions, or if there are fewer pixels than a dot product takes. Of a tile that
    `spec` asks for, only `Tile.sharing` changes this.
    """
    isa = isa.for_convolution(spec.in_dtype)
    return replace(choose_instructions(lambda isa: choose_form(spec, isa), isa), spec=spec)


def choose_form(spec: Conv2d, isa: Isa) -> ConvPlan:
    """Make the plan of one of `Isa.forms`: of the tile that `spec` asks for, or the fastest.

    The plan itself has no tile that was asked for. The phases of a transposed convolution, which
    share the packed weights, and matrix products take the first form.
    """
    plain, tile = replace(spec, tile=None), spec.tile
    if tile is not None:
        form = next((each for each in isa.forms if each.sharing == tile.sharing), None)
        if form is None:
            pixels = format_count(tile.sharing, "pixel")
            raise ValueError(f"{tile} of {isa.name}: no form has {pixels} in a vector")
        return make_plan(plain, form)
    first, *others = (make_plan(plain, each) for each in isa.forms)
    faster = [each for each in others if each.time < FORM_GAIN * first.time]
    return min(faster, key=lambda plan: plan.time, default=first)


def make_plan(
    spec: Conv2d, isa: Isa, weights_per_image: bool = False, is_part: bool = False
) -> ConvPlan:
    """Make the plan for an instruction set: on tiles if it has a matrix unit."""
    plan = ConvPlan(spec, isa, weights_per_image, is_part)
    return plan if isa.unit is None else plan_tiles(plan)


def choose_instructions(make: Callable[[Isa], PlanT], isa: Isa) -> PlanT:
    """Choose the plan of `make` for an instruction set or for its companion; see `choose_plan`."""
    plan = make(isa)
    if isa.companion is isa:
        return plan
    other = choose_instructions(make, isa.companion)
    fits = plan.fewest_pixels >= (isa.pixels if isa.unit is None else FEWEST_PIXELS)
    return plan if fits and plan.instructions < other.instructions else other
