"""Names of operators in Relay that Relax does not use, for mappings that were written for Relay.

What has the same name in both ("nn.conv2d", "add") is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RelaxOperator:
    """What a name of Relay is in Relax.

    Attributes:
        op: The operator.
        patterns: Beginnings of the patterns it is limited to, since Relax has one operator for
            several of Relay's; "" is the operator that no pattern takes.
    """

    op: str
    patterns: tuple[str, ...] | None = None

    def is_site(self, op: str, pattern: str) -> bool:
        """Whether an operator, taken by a pattern or by none (""), is this one."""
        if op != self.op:
            return False
        return self.patterns is None or any(
            pattern.startswith(start) if start else not pattern for start in self.patterns
        )


#: name in Relay -> what it is in Relax; as `relayquant.relay.operators` reads them
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
