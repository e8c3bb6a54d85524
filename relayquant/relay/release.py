"""Relay reader: the release of TVM that wrote a module.

A few defaults changed between releases, but the header of a text is the same in all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from relayquant.errors import ModelError

#: minor numbers of the releases with Relay: 0.7 to 0.19
FIRST_MINOR, LAST_MINOR = 7, 19


@dataclass(frozen=True, order=True)
class WrittenBy:
    """TVM 0.`minor`."""

    minor: int

    def __str__(self) -> str:
        return f"0.{self.minor}"

    @classmethod
    def parse(cls, text: str) -> WrittenBy:
        """Return the release named `text`, for example "0.11".

        Raises:
            ModelError: it is not a release with Relay.
        """
        found = cls.find(text) if re.fullmatch(r"0\.\d+", text) else None
        if found is None:
            raise ModelError(
                f'release is {text!r}; allowed: "0.{FIRST_MINOR}" to "0.{LAST_MINOR}", the '
                "releases of TVM that had Relay.",
                code="RQ101",
            )
        return found

    @classmethod
    def find(cls, version: str) -> WrittenBy | None:
        """Return the release of a version in a JSON file ("0.10.0", "0.11.dev0").

        None for a fork with other version numbers.
        """
        match = re.match(r"0\.(\d{1,3})(?!\d)", version)
        minor = int(match[1]) if match else -1
        return cls(minor) if FIRST_MINOR <= minor <= LAST_MINOR else None


#: nn.batch_matmul got its attributes. Before, y was always transposed.
BATCH_MATMUL_ATTRIBUTES = WrittenBy(9)
#: The letters I and O in the kernel layout of transposed convolutions, by spatial axes, got their
#: usual meaning. Before, they were swapped.
KERNEL_LETTERS = {1: WrittenBy(12), 2: WrittenBy(8)}
#: The default kernel layout of nn.conv2d_transpose became IOHW. Before, it was OIHW.
KERNEL_DEFAULT = WrittenBy(12)
