"""Relay writer: differences between the TVM releases that read the text, 0.8 to 0.19.

The parser of a release rejects an attribute that it does not know, and a missing one that it
requires. Common features of all releases need no row.
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


#: Releases that can be written. The last one is the last TVM with Relay.
RELEASES = tuple(Release(minor) for minor in range(8, 20))
NEWEST = str(RELEASES[-1])


def find_release(text: str) -> Release:
    """Return the release named `text`, for example "0.19".

    Raises:
        ConfigError: it is not in RELEASES.
    """
    for release in RELEASES:
        if str(release) == text:
            return release
    raise ConfigError(
        f"release is {text!r}; allowed: {', '.join(map(str, RELEASES))}.", code="RQ101"
    )


@dataclass(frozen=True)
class Since:
    """The first release that knows an attribute, and the value that earlier releases imply."""

    release: Release
    before: Any


#: Operator -> the first release that can read it. `nn.batch_matmul` is older, but before it had no
#: attributes to say which operand is transposed.
OPERATORS_SINCE = {
    "nn.batch_matmul": Release(9),
    "qnn.avg_pool2d": Release(13),
    "qnn.leaky_relu": Release(9),
}

#: (operator, attribute) -> when it was added
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

#: First release with the right kernel layout names of nn.conv1d_transpose. Before, IOW was called
#: OIW.
IOW_SINCE = Release(12)

#: Written even with the default value, because the default of transposed convolutions changed in
#: 0.12.
ALWAYS_WRITTEN = "kernel_layout"


def has_operator(release: Release, name: str) -> bool:
    """Return whether a release can read calls of the operator."""
    return release >= OPERATORS_SINCE.get(name, RELEASES[0])


def has_attribute(release: Release, name: str, key: str) -> bool:
    """Return whether a release can read the attribute of the operator."""
    since = ATTRIBUTES_SINCE.get((name, key))
    return since is None or release >= since.release


def choose_attributes(release: Release, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `attrs` that a call of operator `name` must write. Defaults are left
    out.

    Raises:
        ModelError: the release lacks the operator, or the value of an attribute.
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
