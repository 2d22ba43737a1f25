"""Calls over time, for `Scenario.trace`: the same shapes at any rate, made from a seed.

steady   evenly random
bursty   quiet for two seconds on average, then five times as many calls for half a second on average
diurnal  a day in a minute: from a fifth of the average to nearly twice the average and back
flash    calm for a third of the time, then at once eight times as many, fading over ten seconds
moving   evenly random in time; a few nodes have most of the calls, other nodes every ten seconds
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from headgate.hybrid.lease import SECOND

TRACES = ("steady", "bursty", "diurnal", "flash", "moving")
BURST, QUIET_SECONDS, BURST_SECONDS = 5.0, 2.0, 0.5
DAY = 60.0  # seconds
FLASH, FADE_SECONDS = 8.0, 10.0


def intensity(trace: str, seconds: float, dice: random.Random) -> Callable[[float], float]:
    """Calls at a time in nanoseconds, as a multiple of the average; to be asked in the order of time."""
    if trace == "bursty":
        return _bursty(dice)
    if trace == "diurnal":
        return lambda now: 1 - 0.8 * math.cos(2 * math.pi * (now / SECOND - 1) / DAY)
    if trace == "flash":
        begins = 1 + seconds / 3

        def flash(now: float) -> float:
            after = now / SECOND - begins
            return 0.6 * (1 + (FLASH - 1) * math.exp(-after / FADE_SECONDS) if after >= 0 else 1)

        return flash
    return lambda now: 1.0


def _bursty(dice: random.Random) -> Callable[[float], float]:
    quiet = (QUIET_SECONDS + BURST_SECONDS) / (QUIET_SECONDS + BURST * BURST_SECONDS)  # so that the average is 1
    state = [quiet, 0.0]  # the intensity, and until when

    def bursty(now: float) -> float:
        while now >= state[1]:
            state[0] = BURST * quiet if state[0] == quiet else quiet
            state[1] = max(state[1], SECOND) + dice.expovariate(1.0) * SECOND * (
                QUIET_SECONDS if state[0] == quiet else BURST_SECONDS
            )
        return state[0]

    return bursty
