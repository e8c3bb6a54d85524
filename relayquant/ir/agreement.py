"""Agreement: how closely the outputs of an integer module follow the float model, and on which
samples.

`quantize`, its guard, `compare`, `sensitivity` and the report measure it with
`relayquant.analysis.outputs` and show it in the words of this module. If two of them show different
numbers, the words say which samples or which arithmetic differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from relayquant.errors import format_count

#: dB; SQNR is kept within these bounds in files, because JSON has no infinity
MOST_DECIBELS = 999.0


@dataclass(frozen=True)
class Agreement:
    """The agreement of two models on some samples.

    Attributes:
        sqnr: SQNR of the worst output over all samples, dB.
        samples: Number of samples that both models ran on.
        answers: Number of answers: one for each sample if an output holds scores of classes, one
            for each element of an integer output. 0 if no output holds answers.
        equal: Number of answers that are equal (the same arg max), at the worst output. None if it
            was not counted.
        total: Number of samples that the data has. None if all of them were compared.
        held_back: Number of these samples that calibration did not read. None if it is not known.
        is_validation: Whether the samples are from a validation data set.
        is_simulated: Whether the integer model was simulated in float, before it was built.
    """

    sqnr: float
    samples: int
    answers: int = 0
    equal: int | None = None
    total: int | None = None
    held_back: int | None = None
    is_validation: bool = False
    is_simulated: bool = False

    @property
    def share(self) -> float | None:
        """The share of equal answers. None if no answers were counted."""
        return self.equal / self.answers if self.answers and self.equal is not None else None

    def __str__(self) -> str:
        """All of it: "25.5 dB SQNR, 39 of 40 answers equal (97.5%), on 40 samples"."""
        how = "simulated, " if self.is_simulated else ""
        return f"{self.describe()}, {how}on {self.describe_samples()}"

    def describe(self) -> str:
        """Return the measures: "25.5 dB SQNR, 39 of 40 answers equal (97.5%)"."""
        text = describe_sqnr(self.sqnr)
        if self.share is not None:
            text += f", {self.equal} of {format_count(self.answers, 'answer')} equal"
            text += f" ({self.share:.1%})"
        return text

    def describe_samples(self) -> str:
        """Return the samples: "4 of 40 samples (3 held back, 1 calibrated with)"."""
        kind = "validation sample" if self.is_validation else "sample"
        text = format_count(self.samples, kind)
        if self.total is not None and self.total > self.samples:
            text = f"{self.samples} of {format_count(self.total, kind)}"
        if self.held_back is None or self.is_validation:
            return text
        read = self.samples - self.held_back
        notes = [f"{self.held_back} held back"] if self.held_back else []
        notes += [f"{read} calibrated with"] if read else []
        return f"{text} ({', '.join(notes)})"


def describe_part(name: str, sqnr: float, whole: float) -> str:
    """Describe a value that an output concatenates. Return "" if it is not weaker than `whole`."""
    return f"the part {name!r} has {describe_sqnr(sqnr)}" if sqnr < whole else ""


def describe_sqnr(decibels: float) -> str:
    """Return an SQNR in words: "25.5 dB SQNR". Infinity means that nothing differs."""
    if decibels >= MOST_DECIBELS:
        return "no difference"
    return "NaN or infinity" if decibels <= -MOST_DECIBELS else f"{decibels:.1f} dB SQNR"
