"""A batch norm that trains beside the quantized operator that it was folded into (`batch_norm`)."""

from __future__ import annotations

import torch
from torch import nn

from relayquant.errors import ModelError
from relayquant.torch.training.batch_norm import FoldedNorm
from relayquant.torch.training.rounding import align_channels


class LiveBatchNorm(nn.Module):
    """A batch norm separated from a quantized operator, with live statistics.

    The operator's weight is rounded as folded with the running statistics, as in FX's ConvBn (Jacob
    et al. 2018, section 3.2, https://arxiv.org/abs/1712.05877).

    With a = gamma / sqrt(running variance + epsilon) the operator's weight is weight * a. In
    training, its sum of products y is converted to the statistics of the batch: y * sqrt(running
    variance + epsilon) / sqrt(batch variance + epsilon), and the bias uses the batch's mean. In
    evaluation the factor is 1, and weight and bias are the folded ones.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    is_frozen: torch.Tensor

    def __init__(self, folded: FoldedNorm, bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        norm = folded.norm
        self.place, self.bias_shape = folded, bias_shape
        self.epsilon, self.momentum = norm.epsilon, norm.momentum
        self.gamma = nn.Parameter(torch.from_numpy(norm.gamma.copy()))
        self.beta = nn.Parameter(torch.from_numpy(norm.beta.copy()))
        self.register_buffer("running_mean", torch.from_numpy(norm.mean.copy()))
        self.register_buffer("running_var", torch.from_numpy(norm.variance.copy()))
        self.register_buffer("is_frozen", torch.tensor(False))

    def find_factor(self) -> torch.Tensor:
        """Return the factor of the weight."""
        return self.gamma / torch.sqrt(self.running_var + self.epsilon)

    def fold_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight folded for the operator."""
        return weight * align_channels(self.find_factor(), weight, self.place.weight_axis)

    def fold_bias(self) -> torch.Tensor:
        """Return the bias folded for the operator."""
        shift = self.beta - self.running_mean * self.find_factor()
        return shift.reshape(self.bias_shape)

    def forward(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert the folded weight's sum of products to the batch's statistics. Return it and
        the bias to add.
        """
        if not self.training or self.is_frozen:
            return total, self.fold_bias()
        axis = self.place.axis % total.ndim
        axes = [i for i in range(total.ndim) if i != axis]
        count = total.numel() // total.shape[axis]
        if count < 2:
            raise ModelError(
                f"Batch norm {self.place.norm.name!r}: a batch of one value per channel has no "
                "variance. Train with larger batches, or freeze_statistics().",
                code="RQ206",
            )
        deviation = torch.sqrt(self.running_var + self.epsilon)
        # The sum of the weight before folding. If that factor is 0, the product is 0 too.
        plain = total / align_channels(self.gamma / deviation, total, axis)
        variance, mean = torch.var_mean(plain, axes, correction=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        inverse = torch.rsqrt(variance + self.epsilon)
        bias = self.beta - self.gamma * mean * inverse
        return total * align_channels(deviation * inverse, total, axis), bias.reshape(
            self.bias_shape
        )
