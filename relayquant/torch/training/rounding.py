"""Trainable fake quantization.

Values are rounded as in the integer module. Gradients pass straight through, and scales may be
learned.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from relayquant.base.axes import shape_along
from relayquant.base.qtypes import QParams, QSpec, check_qparams, choose_qparams, conform_scale
from relayquant.config import Ranges
from relayquant.config.observers import Fixed
from relayquant.errors import ModelError, format_count
from relayquant.ir.plan import SharedQParams

#: weight of a batch's extremes in their moving average, as in PyTorch's observers
MOMENTUM = 0.01
#: training batches that give the first range if there was no calibration
WATCHED = 10


def align_channels(values: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    """Reshape one value per channel to broadcast."""
    return values.reshape(shape_along(axis, like.ndim))


class RoundTrip(torch.autograd.Function):
    """dequantize(quantize(x)) with straight-through gradients.

    forward: (clip(round_half_even(x / s) + z) - z) * s
    backward for x: 1 if the rounded value lies within the bounds, else 0.
    backward for s: the gradient of the forward formula with round as identity, times
    `gradient_scale`. Inside: round(x / s) - x / s. Outside: bound - z (Esser et al. 2020, LSQ,
    equation 3, https://arxiv.org/abs/1902.08153).

    Apart from convolutions, most of a step's time is spent here, in passes over memory. So x / s is
    kept for the backward pass. If zero points are equal, the bounds are numbers, so that one pass
    replaces a comparison, a conversion and a product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        limits: tuple[int, int],
        gradient_scale: float,
    ) -> torch.Tensor:
        real = torch.div(x, scale)
        low, high = (shift_limit(limit, zero_point) for limit in limits)
        ctx.bounds, ctx.gradient_scale = (low, high), gradient_scale
        # The scale itself is not kept: a moving average changes it in place before the gradients
        # are computed.
        ctx.shape = scale.shape
        ctx.save_for_backward(real)
        return torch.round(real).clamp_(low, high).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (real,) = ctx.saved_tensors
        low, high = ctx.bounds
        of_x = of_scale = None
        if ctx.needs_input_grad[0]:
            of_x = keep_inside(gradient, real, low, high)
        if ctx.needs_input_grad[1]:
            # round(x / s) - x / s inside, bound - z outside
            slope = torch.round(real).clamp_(low, high).sub_(keep_inside(real, real, low, high))
            is_one = ctx.shape.numel() == 1
            if is_one and gradient.is_contiguous() and slope.is_contiguous():
                of_scale = torch.dot(slope.view(-1), gradient.view(-1)).reshape(ctx.shape)
            else:
                of_scale = slope.mul_(gradient).sum_to_size(ctx.shape)
            of_scale = of_scale * ctx.gradient_scale
        return of_x, of_scale, None, None, None


#: A bound of x / s: a number if zero points are equal, else a tensor that broadcasts
Bound = float | torch.Tensor


def shift_limit(limit: int, zero_point: torch.Tensor) -> Any:
    """Return limit - zero point, the bound of x / s as a whole number of steps."""
    first = int(zero_point.reshape(-1)[0])
    if zero_point.numel() == 1 or bool((zero_point == first).all()):
        return float(limit - first)
    return (limit - zero_point).to(torch.float32)


def keep_inside(values: torch.Tensor, real: torch.Tensor, low: Bound, high: Bound) -> torch.Tensor:
    """Keep `values` where round_half_even(real) lies within the bounds. 0 elsewhere."""
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        steps = torch.round(real)
        return torch.where((steps >= low) & (steps <= high), values, 0.0)
    # The gradient of hardtanh covers values strictly between two numbers. Half a step beyond an
    # even bound rounds to the bound. Half a step beyond an odd bound does not.
    dtype = real.dtype
    ends = torch.tensor([low - 0.5, high + 0.5], dtype=dtype)
    beyond = torch.nextafter(ends, torch.tensor([-math.inf, math.inf], dtype=dtype))
    least, most = (
        float(beyond[i] if bound % 2 == 0 else ends[i]) for i, bound in enumerate((low, high))
    )
    return torch.ops.aten.hardtanh_backward(values, real, least, most)


def round_softly(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    limits: tuple[int, int],
    gradient_scale: float,
    sharpness: float,
) -> torch.Tensor:
    """Approximate `RoundTrip` by a staircase with a slope everywhere.

    Between two levels it is (1 + tanh(k (f - 1/2)) / tanh(k / 2)) / 2 for a share f of the way and
    sharpness k: a line for small k and a jump for large k (Gong et al. 2019, DSQ,
    https://arxiv.org/abs/1908.05033).
    """
    scale = scale.detach() + (scale - scale.detach()) * gradient_scale
    low, high = (shift_limit(limit, zero_point) for limit in limits)
    real = torch.clamp(x / scale, low, high)
    below = torch.floor(real.detach())
    share = torch.tanh((real - below - 0.5) * sharpness) / math.tanh(sharpness / 2)
    return (below + 0.5 + 0.5 * share) * scale


class StraightThrough(torch.autograd.Function):
    """The nearest scale that a specification allows, with the gradient of the original scale."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, spec: QSpec) -> torch.Tensor:
        return torch.from_numpy(
            np.asarray(conform_scale(scale.detach().numpy(), spec)).astype("float32")
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class FakeQuantize(nn.Module):
    """Rounds the values of one group, and holds its scale and how the scale is found.

    Attributes:
        scale, zero_point: float32 and int32 (n,), n = 1 or one per channel.
        log_factor: float32 (n,) if the scale is learned, else None. The learned scale is scale *
            exp(log_factor), so it stays positive and an optimizer step is relative to it.
        low, high: float32 (n,), the range found by a moving average.
        is_frozen: Whether the range is fixed, bool ().
        to_watch: Number of coming training batches that widen the range to their values, int64 ().
            These are the first batches if there was no calibration.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    is_frozen: torch.Tensor
    to_watch: torch.Tensor

    def __init__(
        self, group: SharedQParams, qparams: QParams, ranges: Ranges, is_waiting: bool = False
    ) -> None:
        super().__init__()
        self.group, self.limits = group, group.info.spec.limits
        is_given = group.is_fixed or isinstance(group.observer, Fixed)
        self.ranges = Ranges.FROZEN if is_given else ranges
        scale = np.array(qparams.scale, "float32").reshape(-1)
        zero_point = np.broadcast_to(qparams.zero_point.reshape(-1), scale.shape).copy()
        low, high = (
            ((limit - zero_point.astype("float64")) * scale).astype("float32")
            for limit in self.limits
        )
        self.register_buffer("scale", torch.from_numpy(scale))
        self.register_buffer("zero_point", torch.from_numpy(zero_point))
        self.register_buffer("low", torch.from_numpy(low))
        self.register_buffer("high", torch.from_numpy(high))
        self.register_buffer("is_frozen", torch.tensor(self.ranges is Ranges.FROZEN))
        is_waiting = is_waiting and group.constant is None and not is_given
        count = 1 if ranges is Ranges.MOVING_AVERAGE else WATCHED
        self.register_buffer("to_watch", torch.tensor(count if is_waiting else 0))
        if is_waiting:
            self.low.fill_(math.inf)
            self.high.fill_(-math.inf)
        self.log_factor: nn.Parameter | None = None
        if self.ranges is Ranges.LEARNED:
            self.log_factor = nn.Parameter(torch.zeros(len(scale)))
        #: sharpness of the staircase that replaces rounding in training, see `round_softly`
        self.sharpness: float | None = None
        #: extremes of the current batch
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Round `x`. `axis` is the channel axis, if channels have separate scales."""
        is_following = self.ranges is Ranges.MOVING_AVERAGE and not self.is_frozen
        is_watching = self.to_watch > 0 and not (self.is_frozen and self.ranges.moves)
        if self.training and (is_following or is_watching):
            self.observe(x.detach(), axis)
            if is_watching:
                self.widen()
            elif self.group.constant is not None:  # the range of a weight is its present range
                self.follow(1.0)
        scale = self.find_scale()
        shape = [1] * x.ndim
        if len(self.scale) > 1:
            if x.shape[axis] != len(self.scale):
                raise ModelError(
                    f"Value {self.group.key!r} has {format_count(x.shape[axis], 'channel')} "
                    f"and {format_count(len(self.scale), 'scale')}.",
                    code="RQ206",
                )
            shape = shape_along(axis, x.ndim)
        given = (
            x,
            scale.reshape(shape),
            self.zero_point.reshape(shape),
            self.limits,
            self.find_gradient_scale(x),
        )
        if self.sharpness is not None and self.training:
            return round_softly(*given, self.sharpness)
        return RoundTrip.apply(*given)  # pyright: ignore[reportReturnType]

    def find_gradient_scale(self, x: torch.Tensor) -> float:
        """Return the factor for the gradient of the scale when `x` is rounded (LSQ, section 2.2).

        It depends on the number of weights, or of features of one sample, per scale.
        """
        samples = 1 if self.group.constant is not None or not x.ndim else max(x.shape[0], 1)
        count = max(x.numel() // (samples * len(self.scale)), 1)
        return 1 / math.sqrt(count * max(self.limits[1], 1))

    def find_scale(self) -> torch.Tensor:
        """Return the present scale."""
        if self.log_factor is None:
            return self.scale
        factor = self.log_factor.detach() if self.is_frozen else self.log_factor
        scale = self.scale * factor.exp()
        if not self.is_conformed:
            return scale
        return StraightThrough.apply(  # pyright: ignore[reportReturnType]
            scale, self.group.info.spec
        )

    @property
    def is_conformed(self) -> bool:
        """Whether the specification allows only some scales."""
        spec = self.group.info.spec
        return spec.power_of_two or (spec.scale_min, spec.scale_max) != (None, None)

    def observe(self, x: torch.Tensor, axis: int) -> None:
        """Record the extremes of a value. A group may have several values."""
        if len(self.scale) > 1:
            x = x.transpose(0, axis).reshape(len(self.scale), -1)
        else:
            x = x.reshape(1, -1)
        if not x.numel():
            return
        low, high = x.amin(1), x.amax(1)
        if self.seen is not None:
            low, high = torch.minimum(low, self.seen[0]), torch.maximum(high, self.seen[1])
        self.seen = low, high

    def widen(self) -> None:
        """Widen the range to the recorded extremes."""
        if self.seen is not None:
            torch.minimum(self.low, self.seen[0], out=self.low)
            torch.maximum(self.high, self.seen[1], out=self.high)
            self.choose_parameters()

    def follow(self, momentum: float) -> None:
        """At the end of a batch, move the range toward the recorded extremes, and update the
        parameters.

        In the first batches the range has already been widened.
        """
        if self.seen is None:
            return
        if self.to_watch > 0:
            self.to_watch -= 1
        else:
            for mine, new in zip((self.low, self.high), self.seen, strict=True):
                mine.lerp_(new, momentum)
            self.choose_parameters()
        self.seen = None

    def choose_parameters(self) -> None:
        """Compute the parameters from the range."""
        info = self.group.info
        low, high = (bound.numpy().astype("float64") for bound in (self.low, self.high))
        axis = info.axis if info.spec.is_per_channel else None
        if axis is None:
            low, high = low[0], high[0]
        found = choose_qparams(low, high, info.spec, axis)
        # New tensors: gradients of earlier roundings may still need the old ones.
        self.scale = torch.from_numpy(np.array(found.scale, "float32").reshape(-1))
        self.zero_point = torch.from_numpy(np.array(found.zero_point, "int32").reshape(-1))

    @property
    def is_known(self) -> bool:
        """Whether a range was found."""
        return bool((self.low <= self.high).all())

    @property
    def qparams(self) -> QParams:
        """The parameters for the integer module."""
        info = self.group.info
        scale, zero_point = self.find_scale().detach().numpy(), self.zero_point.numpy()
        axis = info.axis if info.spec.is_per_channel else None
        if axis is None:
            scale, zero_point = scale[0], zero_point[0]
        return check_qparams(QParams(scale, zero_point, info.spec.dtype, axis), info, "Training")
