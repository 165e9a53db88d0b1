"""Interleaved timing, and the largest size that fits."""

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


def interleaved_seconds(
    calls: Mapping[Key, Callable[[], Any]], *, repeats: int, seed: int = 0
) -> dict[Key, list[float]]:
    """Times calls in rounds: each once a round, in an order shuffled anew, after a round that is not timed.

    What slows the machine for a while then slows all alike, and ratios stand. The first round takes
    compilation and first allocations.

    Args:
        calls: functions without arguments; what they return is waited for, and dropped.
        repeats: rounds, at least 1.
        seed: of the orders.

    Returns:
        For each call the seconds of each round.

    Raises:
        ValueError: if `repeats` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    order, shuffler = list(calls), random.Random(seed)
    seconds: dict[Key, list[float]] = {name: [] for name in calls}
    for round_number in range(repeats + 1):
        shuffler.shuffle(order)
        for name in order:
            started = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if round_number > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median time of each call."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def largest_fitting(total: Callable[[int], int], limit: float | int, *, first: int) -> int:
    """The n, at least 0, with total(n) <= limit < total(n + 1), both of them evaluated.

    Guesses by a straight line, which memory follows nearly, and by halves where that gains little.

    Args:
        total: a size, such as bytes, that grows with n without bound; evaluated as seldom as possible.
        limit: the largest size that fits.
        first: the first guess, at least 1.
    """
    sizes = {0: 0}
    low, high, guess = 0, math.inf, first
    while high - low > 1:
        before = low, high
        sizes[guess] = total(guess)
        if sizes[guess] <= limit:
            low = guess
        else:
            high = guess
        # A line through the two ends, or through the last two that fit.
        other = before[0] if math.isinf(high) else int(high)
        slope = (sizes[other] - sizes[low]) / (other - low)
        ahead = int((limit - sizes[low]) / slope) if slope > 0 else low
        if math.isinf(high):
            guess = low + max(ahead, 1)
        elif high - low > (before[1] - before[0]) / 2:
            guess = low + (int(high) - low) // 2
        else:
            guess = low + min(max(ahead, 1), int(high) - low - 1)
    return low
