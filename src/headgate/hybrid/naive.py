"""What one would try first, simulated for comparison: a full bucket on every node, and now and then a look around."""

from __future__ import annotations

import random

from headgate.hybrid.lease import SECOND
from headgate.hybrid.scenario import Exact, Outcome, Recorder, Scenario, calls
from headgate.quota import Quota


def naive(scenario: Scenario, interval: float, extrapolate: bool = False) -> Outcome:
    """Run *scenario* with a full bucket on each node and a look at the others every *interval* seconds.

    A node admits what its own bucket has and what was left in all, when it last looked, minus its own use since;
    *extrapolate* adds what has refilled since. Reports are sent and answered without delay or loss, to be kind; a
    bucket that is asked for more than it has is empty, and owes nothing.
    """
    quota = Quota.parse(scenario.quota)
    how = ", extrapolated" if extrapolate else ""
    recorder = Recorder(f"naive, every {interval:g} s{how}", scenario)
    dice = random.Random(f"naive {scenario.seed}")
    rate = quota.limit / quota.period / SECOND
    capacity = float(quota.capacity)
    locals_ = [Exact(quota) for _ in range(scenario.nodes)]
    looks_at = [SECOND + int(dice.random() * interval * SECOND) for _ in range(scenario.nodes)]
    looked = [float(SECOND)] * scenario.nodes
    left = [capacity] * scenario.nodes
    used = [0] * scenario.nodes
    level, level_at = capacity, SECOND
    for now, place in calls(scenario, random.Random(scenario.seed)):
        recorder.asked(now)
        if now >= looks_at[place]:
            level = max(min(level + (now - level_at) * rate, capacity) - used[place], 0.0)
            level_at = now
            left[place], used[place], looked[place] = level, 0, float(now)
            looks_at[place] = now + int(interval * SECOND)
            recorder.outcome.trips += 1
        there = left[place]
        if extrapolate:
            there = min(there + (now - looked[place]) * rate, capacity)
        if used[place] < there and locals_[place].ask(now):
            used[place] += 1
            recorder.admissions.append(now)
    return recorder.finish()
