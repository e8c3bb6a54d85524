"""Relay names of operators that Relax does not use, for mappings that were written for Relay.

Operators with the same name in both ("nn.conv2d", "add") are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RelaxOperator:
    """The Relax operator for a Relay name.

    Attributes:
        op: The operator.
        patterns: Prefixes of the patterns that it is limited to, because one Relax operator may
            stand for several Relay operators. "" is an operator without a pattern.
    """

    op: str
    patterns: tuple[str, ...] | None = None

    def is_site(self, op: str, pattern: str) -> bool:
        """Whether an operator with this pattern ("" for none) is this operator."""
        if op != self.op:
            return False
        return self.patterns is None or any(
            pattern.startswith(start) if start else not pattern for start in self.patterns
        )


#: Relay name -> Relax operator, as read by `relayquant.relay.operators`
RELAY_NAMES: Mapping[str, RelaxOperator] = {
    "nn.dense": RelaxOperator("relax.matmul", ("dense", "")),
    "nn.batch_matmul": RelaxOperator("relax.matmul", ("batch_matmul",)),
    "nn.matmul": RelaxOperator("relax.matmul"),
    "nn.bias_add": RelaxOperator("relax.add"),
    "nn.leaky_relu": RelaxOperator("relax.nn.leakyrelu"),
    "nn.global_avg_pool2d": RelaxOperator("relax.mean"),
    "nn.global_max_pool2d": RelaxOperator("relax.max"),
    "nn.upsampling": RelaxOperator("relax.image.resize2d"),
    "concatenate": RelaxOperator("relax.concat"),
    "transpose": RelaxOperator("relax.permute_dims"),
    "cast": RelaxOperator("relax.astype"),
    "reverse": RelaxOperator("relax.flip"),
    "gather": RelaxOperator("relax.gather_elements"),
}
