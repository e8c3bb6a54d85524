"""Relay, writing: what differs between the releases of TVM that read it, 0.8 to 0.19.

An attribute that a release does not know is an error of its parser, and so is a missing one that it
requires. What all of these releases have in common needs no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relayquant.errors import ConfigError, ModelError
from relayquant.relay.operators import OPERATORS


@dataclass(frozen=True, order=True)
class Release:
    """TVM 0.`minor`."""

    minor: int

    def __str__(self) -> str:
        return f"0.{self.minor}"


#: those that Relay is written for; the last one was the last with Relay
RELEASES = tuple(Release(minor) for minor in range(8, 20))
NEWEST = str(RELEASES[-1])


def find_release(text: str) -> Release:
    """The release called `text`, such as "0.19".

    Raises:
        ConfigError: it is none of RELEASES.
    """
    for release in RELEASES:
        if str(release) == text:
            return release
    raise ConfigError(
        f"release is {text!r}; allowed: {', '.join(map(str, RELEASES))}.", code="RQ101"
    )


@dataclass(frozen=True)
class Since:
    """Of an attribute: the first release that knows it, and the value that earlier ones imply."""

    release: Release
    before: Any


#: operator -> the first release that can read it. `nn.batch_matmul` is older, but which operand is
#: transposed could not be written.
OPERATORS_SINCE = {
    "nn.batch_matmul": Release(9),
    "qnn.avg_pool2d": Release(13),
    "qnn.leaky_relu": Release(9),
}

#: (operator, attribute) -> since when
ATTRIBUTES_SINCE = {
    ("image.resize2d", "extrapolation_value"): Since(Release(9), 0.0),
    ("image.resize2d", "roi"): Since(Release(9), (0.0, 0.0, 0.0, 0.0)),
    ("qnn.dequantize", "out_dtype"): Since(Release(14), "float32"),
    ("qnn.requantize", "compute_dtype"): Since(Release(9), "int64"),
    **{
        (f"qnn.{name}", f"{side}_axis"): Since(Release(9), -1)
        for name in ("add", "subtract", "mul")
        for side in ("lhs", "rhs")
    },
}

#: The first release in which the kernel layout of nn.conv1d_transpose is what it says: before, what
#: is called OIW is IOW.
IOW_SINCE = Release(12)

#: written even where it equals the default: that of transposed convolutions changed in 0.12
ALWAYS_WRITTEN = "kernel_layout"


def has_operator(release: Release, name: str) -> bool:
    """Whether a release can read calls of the operator."""
    return release >= OPERATORS_SINCE.get(name, RELEASES[0])


def has_attribute(release: Release, name: str, key: str) -> bool:
    """Whether a release can read the attribute of the operator."""
    since = ATTRIBUTES_SINCE.get((name, key))
    return since is None or release >= since.release


def choose_attributes(release: Release, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `attrs` that a call of operator `name` has to write; defaults are left out.

    Raises:
        ModelError: the release has not the operator, or not what an attribute asks for.
    """
    if not has_operator(release, name):
        raise ModelError(
            f"{name} is in TVM {OPERATORS_SINCE[name]} and later, not in {release}", code="RQ203"
        )
    known, written = OPERATORS[name].attrs, {}
    for key, value in attrs.items():
        if not has_attribute(release, name, key):
            since = ATTRIBUTES_SINCE[name, key]
            if value != since.before:
                raise ModelError(
                    f"{key}={value} of {name} is in TVM {since.release} and later; {release} "
                    f"computes as {since.before} says",
                    code="RQ203",
                )
        elif key == ALWAYS_WRITTEN or known[key].required or value != known[key].default:
            written[key] = value
    return written
