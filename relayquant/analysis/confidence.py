"""Beside analysis: what a few samples say of all data of their kind."""

from __future__ import annotations

import math

import numpy as np

#: that a standard normal variable stays below with a probability of 95 %
NORMAL = 1.6449
#: Student's t at 95 %, one-sided, for 1, 2, 3, ... degrees of freedom
T_OF_FEW = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def find_t(freedom: int) -> float:
    """Student's t at 95 %, one-sided; within 0.002 beyond the table (Abramowitz and Stegun 26.7.5).

    Raises:
        ValueError: there is no degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}; allowed: 1 or more.")
    if freedom <= len(T_OF_FEW):
        return T_OF_FEW[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def bound_share(count: int, samples: int) -> tuple[float, float]:
    """(least, most) that a share of all data is of which `count` of some samples are: Wilson's
    score interval, each side at 95 %; (0, 1) without samples.
    """
    if not samples:
        return 0.0, 1.0
    share, square = count / samples, NORMAL**2 / samples
    middle = share + square / 2
    half = NORMAL * math.sqrt(share * (1 - share) / samples + (square / (2 * NORMAL)) ** 2)
    return max(middle - half, 0.0) / (1 + square), min((middle + half) / (1 + square), 1.0)


def find_margins(signal: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """dB that the ratio of two sums over samples may be too high and too low by.

    On the logarithm, by the ratio estimator's standard error (Cochran 1977, 6.4) and Student's t.
    For the first margin the worst sample counts twice: noise has few large values, so that few
    samples show too little of it. Of log-normal noise (deviations of 0.5 to 1.2) the true ratio was
    below the bound for 8 samples in 10 to 17 % of all draws, for 64 in 5 to 7 %; without both, in
    13 to 28 % and in 10 to 17 %.

    Args:
        signal, noise: Energies of each sample, (n,) float64.

    Returns:
        (0, 0) for fewer than 2 samples, and where the ratio is no finite number.
    """
    n, decibels = len(noise), 10 / math.log(10)
    if n < 2 or not np.isfinite(noise.sum()) or not noise.any() or not signal.any():
        return 0.0, 0.0
    worst = int(np.argmax(noise / noise.sum() - signal / signal.sum()))
    twice = np.append(np.arange(n), worst)
    ratio, error = measure_ratio(signal, noise)
    higher, higher_error = measure_ratio(signal[twice], noise[twice])
    t = find_t(n - 1)
    below = decibels * (math.log(higher / ratio) + t * higher_error)
    return below, decibels * t * error


def measure_ratio(signal: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """(sum of noise / sum of signal, its standard error as a share of it) of n >= 2 samples."""
    n, signals, noises = len(noise), signal.sum(), noise.sum()
    rest = noise / noises - signal / signals
    return float(noises / signals), float(np.sqrt(n / (n - 1) * np.square(rest).sum()))
