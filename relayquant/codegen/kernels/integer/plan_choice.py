"""Specification of a convolution or product -> its plan, for one instruction set of the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from relayquant.codegen.kernels.integer.conv_plan import ConvPlan
from relayquant.codegen.kernels.integer.specs import Conv2d
from relayquant.codegen.kernels.integer.tiled_plan import FEWEST_PIXELS, plan_tiles
from relayquant.codegen.kernels.isa.base import Isa


class RankedPlan(Protocol):
    """Properties of a plan that `choose_instructions` compares."""

    @property
    def isa(self) -> Isa: ...
    @property
    def fewest_pixels(self) -> int: ...
    @property
    def instructions(self) -> float: ...


PlanT = TypeVar("PlanT", bound=RankedPlan)


def choose_plan(spec: Conv2d, isa: Isa) -> ConvPlan:
    """Choose the plan of `spec` for generator and packer, for `isa` or its companion.

    The instruction set is the one for activations of this dtype. Its companion is used if it needs
    no more instructions, or if there are fewer pixels than a dot product takes. A tile that `spec`
    asks for changes nothing of this.
    """
    plain = replace(spec, tile=None)
    isa = isa.for_convolution(spec.in_dtype)
    return replace(choose_instructions(lambda isa: make_plan(plain, isa), isa), spec=spec)


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
