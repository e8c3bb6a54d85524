"""What differs between CPUs with the same instructions, as far as the choice of a tile asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Times in units of one dot product; the default is that of Intel's cores.

    A core begins the next tile while it stores the results of one, but sees only so many
    instructions ahead: results beyond `ahead` of a tile take `behind` longer.
    """

    word: float = 1.0  #: of the loop over words, beside the dot products
    activation: float = 1.0  #: of loading one word of one pixel; one vector of weights takes 1
    dots_in_flight: int | None = None  #: as of the instruction set, where that is not the same
    plain_store: float = 7.0  #: of one vector of results, stored by itself
    #: of one vector of results that leaves as packed bytes, in tiles of 1, 2 and 4 blocks
    narrow_store: tuple[tuple[int, float], ...] = ((1, 6.0), (2, 5.5), (4, 4.75))
    ahead: int = 32
    behind: float = 0.0

    def time_stores(self, results: int, blocks: int, is_narrow: bool) -> float:
        """Of `results` vectors of one tile of `blocks` vectors of channels."""
        one = dict(self.narrow_store).get(blocks, self.plain_store)
        one = one if is_narrow else self.plain_store
        return results * one + self.behind * max(results - self.ahead, 0)


#: Where nothing else is known.
COMMON = Timing()
#: Zen 5: conversions and packs have units of their own, beside those of the dot products.
ZEN5 = Timing(
    word=0.2,
    activation=0.5,
    dots_in_flight=6,
    plain_store=2.8,
    narrow_store=((1, 2.2), (2, 1.7), (4, 1.3)),
    ahead=10,
    behind=0.7,
)
#: Zen 4: so they have, and a dot product takes twice the time there; loads keep up with it in tiles
#: of 8 results, the stores of which hide behind the next tile. Fitted to the times of 16 tiles each
#: of 130 layers of nine networks.
ZEN4 = Timing(
    word=0.1,
    activation=0.5,
    dots_in_flight=6,
    plain_store=3.4,
    narrow_store=((1, 3.0), (2, 2.8), (4, 2.2)),
    ahead=8,
    behind=1.0,
)

#: LLVM features that tell a core -> its timing, the newest first; only AMD's have sse4a.
TIMINGS: tuple[tuple[tuple[str, ...], Timing], ...] = (
    (("sse4a", "avx512vnni", "avx512vp2intersect"), ZEN5),
    (("sse4a", "avx512vnni"), ZEN4),
)
