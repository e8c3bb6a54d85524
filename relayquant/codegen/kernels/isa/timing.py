"""CPU core -> its timing, for the choice of register tiles, of Winograd's transforms, and of how
weights are read.

Cores with the same instructions differ in timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Streams:
    """How a single row, which waits for memory, reads codes of weights.

    Attributes:
        count: Places of memory that are read in turns.
        ahead: Bytes between what is read and what is fetched into the first-level cache, at each.
    """

    count: int
    ahead: int


@dataclass(frozen=True)
class TileTiming:
    """A register tile of products, in units of one dot product.

    A core begins the next tile while it stores the results of one, but looks ahead only a limited
    number of instructions. Each result of a tile beyond `ahead` takes `behind` longer.
    """

    word: float = 1.0  #: of the loop over words, without the dot products
    activation: float = 1.0  #: of loading one word of one pixel; one vector of weights takes 1
    #: added to the dot products of a word where the words of two pixels are joined: the first one
    #: waits. Infinite: not measured, so pixels do not share vectors
    join: float = inf
    #: of any load, where loads go on while results are converted and stored: then only all loads of
    #: a tile together, one for each result besides, can take longer than the rest. 0: they never do
    load: float = 0.0
    dots_in_flight: int | None = None  #: if it differs from the instruction set
    #: least time of a word of a loop that LLVM does not unroll: each sum waits for its last dot
    #: product, and what is late once stays late. The time is for one chain of sums
    looped: float = 0.0
    plain_store: float = 7.0  #: of one vector of results, stored alone
    #: of one vector of results that is stored as packed bytes, for the numbers of blocks of tiles
    #: that may be stored so
    narrow_store: tuple[tuple[int, float], ...] = ((1, 6.0), (2, 5.5), (4, 4.75))
    #: most words of a sum whose results are stored between the products of the next tile, and the
    #: time of one vector, as in `narrow_store`. A core that begins the next tile early enough by
    #: itself gains nothing, and longer sums gain less than larger tiles do
    delayed_words: int = 0
    delayed_store: tuple[tuple[int, float], ...] = ()
    #: whether the results of a depthwise row are stored behind the products of the next row
    delays_rows: bool = True
    ahead: int = 32
    behind: float = 0.0

    def time_stores(self, results: int, blocks: int, is_narrow: bool, is_delayed: bool) -> float:
        """Return the time to store `results` vectors of a tile of `blocks` vectors."""
        if is_delayed:
            return results * dict(self.delayed_store)[blocks]
        one = dict(self.narrow_store).get(blocks, self.plain_store)
        one = one if is_narrow else self.plain_store
        return results * one + self.behind * max(results - self.ahead, 0)


@dataclass(frozen=True)
class WinogradTiming:
    """Winograd's transforms, and weights that caches do not keep, in units of one dot product."""

    #: of the transform of one vector of a tile of activations, and of a tile of results
    input_transform: float = 390.0
    output_transform: float = 290.0
    #: share of the time of the direct form's dot products that Winograd's form may take to be used.
    #: The direct form also stores results, but reads fewer weights, also from other threads' caches
    worth: float = 0.92
    #: bytes of weights that come from the last-level cache in one unit, if they are fetched ahead,
    #: beside what comes while products go on;
    #: and the share of the products' time that goes by while they are fetched
    far_bytes: float = 2.5
    overlap: float = 1.0
    #: most bytes of weights that stay in the second-level cache, next to other data, until the next
    #: chunk of an image reads them again. None: the last-level cache is fast enough
    near_weights: int | None = 512 * 1024
    #: most bytes of constants of a module whose weights stay in the last-level cache from one run
    #: to the next, next to what they are expanded to; None: not measured
    last_bytes: int | None = None
    memory_bytes: float = 2.4  #: like `far_bytes`, of weights that come from memory in each run
    is_beyond: bool = False  #: whether the constants of the module are more than `last_bytes`

    def time_fetches(self, size: int, reads: int, batch: int) -> float:
        """Return the time to fetch weights of `size` bytes `reads` times, for an image of `batch`.

        Only the first read of a run can come from memory.
        """
        time = reads * size / self.far_bytes
        if self.is_beyond:
            time += size * (1 / self.memory_bytes - 1 / self.far_bytes) / batch
        return time


@dataclass(frozen=True)
class GroupedTiming:
    """How products with weights in groups read codes."""

    streams: Streams = Streams(4, 1024)
    #: panels of codes that a tile of several rows multiplies. A second one halves the loads of rows
    #: and doubles the unpacking, which pays where products alone are not the limit
    panels: int = 1


@dataclass(frozen=True)
class Timing:
    """One core, by the kinds of kernels that ask. The defaults are Intel's cores."""

    tiles: TileTiming = TileTiming()
    winograd: WinogradTiming = WinogradTiming()
    grouped: GroupedTiming = GroupedTiming()
    #: whether a vector of products of pairs of bfloat16 takes no longer than one of float32
    has_fast_pairs: bool = False
    #: whether kernels of the module can ask the system how many threads there are
    counts_threads: bool = True

    def for_constants(self, size: int) -> Timing:
        """Return the timing for kernels of a module with constants of `size` bytes."""
        most = self.winograd.last_bytes
        if most is None or size <= most:
            return self
        return replace(self, winograd=replace(self.winograd, is_beyond=True))


#: LLVM features that identify a core, and its timing.
Timings = tuple[tuple[tuple[str, ...], Timing], ...]

#: Used if the core is not known.
COMMON = Timing()
#: Zen 5: conversions and packs have separate units from the dot products. One stream of codes,
#: fetched far ahead, is faster than several: by a sixth where weights come from memory.
ZEN5 = Timing(
    TileTiming(
        word=0.2,
        activation=0.5,
        join=1.3,
        load=1.1,
        dots_in_flight=6,
        looped=9.5,
        plain_store=2.8,
        narrow_store=((1, 2.2), (2, 1.7), (3, 2.3), (4, 1.3)),
        delayed_words=48,
        delayed_store=((1, 1.9), (2, 1.4), (3, 1.45), (4, 1.15)),
        ahead=10,
        behind=0.7,
    ),
    WinogradTiming(
        input_transform=145.0,
        output_transform=150.0,
        worth=0.97,
        far_bytes=35.0,
        overlap=0.0,
        near_weights=None,
        last_bytes=16 * 1024 * 1024,
        memory_bytes=7.5,
    ),
    GroupedTiming(Streams(1, 8 * 1024), panels=2),
)
#: Zen 4: as on Zen 5, but a dot product takes twice the time. Loads keep up with it in tiles of 8
#: results, whose stores hide behind the next tile. Fitted to the times of 16 tiles each for 130
#: layers of nine networks.
ZEN4 = Timing(
    TileTiming(
        word=0.1,
        activation=0.5,
        dots_in_flight=6,
        plain_store=3.4,
        narrow_store=((1, 3.0), (2, 2.8), (4, 2.2)),
        delays_rows=False,
        ahead=8,
        behind=1.0,
    ),
    WinogradTiming(
        input_transform=145.0,
        output_transform=175.0,
        far_bytes=12.0,
        overlap=0.0,
        near_weights=None,
    ),
)

#: Products of bfloat16 on Zen 5. They take 6 cycles, two begin in each. Tiles of one block are
#: slow, and the stores of many results of a tile do not hide behind the next. Fitted to the times
#: of some 16 tiles each for 50 layers of three networks. Not measured on Zen 4.
ZEN_BF16 = replace(
    ZEN5,
    tiles=replace(
        ZEN5.tiles, load=0.0, word=1.5, activation=1.0, dots_in_flight=12, ahead=12, behind=4.0
    ),
    has_fast_pairs=True,
)

#: LLVM features that identify a core -> its timing, newest first. Only AMD cores have sse4a.
TIMINGS: Timings = (
    (("sse4a", "avx512vnni", "avx512vp2intersect"), ZEN5),
    (("sse4a", "avx512vnni"), ZEN4),
)
#: The same for products of bfloat16.
BF16_TIMINGS: Timings = ((("sse4a", "avx512bf16"), ZEN_BF16),)
