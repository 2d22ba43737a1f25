"""Fixed window with start="first": at most the limit in a window, which starts at a key's first call."""

from typing import Any

import pytest

from headgate import Limiter, Quota
from headgate.testing import ManualClock
from tests.support.callers import Callers
from tests.support.scenario import Scenario, play

SCENARIOS = [
    Scenario(
        "the window is a minute from the first call, not the minute of the clock",
        "5/minute",
        """
        10        peek  1   yes  4  0         60        5
        10        take  3   yes  2  0         60        5
        59        take  1   yes  1  0         11
        61        take  2   no   1  9         9
        69.999999 take  1   yes  0  0         0.000001
        69.999999 take  1   no   0  0.000001  0.000001
        70        peek  0   yes  5  0         0
        75        take  5   yes  0  0         60
        134       take  1   no   0  1         1
        """,
    ),
    Scenario(
        "a window that has ended does not count, however long ago",
        Quota(2, period=0.5),
        """
        0.4       take  2   yes  0  0         0.5
        0.9       take  2   yes  0  0         0.5
        1.4       take  1   yes  1  0         0.5
        86400     take  2   yes  0  0         0.5
        """,
    ),
    Scenario(
        "a denial spends nothing, and starts nothing",
        "10/minute",
        """
        0         take  8   yes  2  0         60
        1         take  5   no   2  59        59
        2         take  2   yes  0  0         58
        60        peek  10  yes  0  0         60
        61        take  1   yes  9  0         60
        """,
    ),
    Scenario(
        "what is given back is there again in the same window; all given back: the next call starts a window",
        "5/minute",
        """
        0         refund 3
        0         peek  0   yes  5  0         0
        0         take  5   yes  0  0         60
        1         refund 2
        1         take  2   yes  0  0         59
        2         refund 99
        2         peek  0   yes  5  0         0
        3         take  1   yes  4  0         60
        70        refund 1
        70        peek  0   yes  5  0         0
        """,
    ),
    Scenario(
        "a reset key was never seen",
        "5/minute",
        """
        0         reset
        0         take  5   yes  0  0         60
        3         reset
        3         take  5   yes  0  0         60
        """,
    ),
    Scenario(
        "several quotas: all must allow, the one that binds most is reported",
        ["2/second", "3/minute"],
        """
        0.5       take  2   yes  0  0         60        2
        0.5       take  1   no   0  1         60        2
        1.5       take  1   yes  0  0         59        3
        1.5       take  1   no   0  59        59        3
        60.5      take  2   yes  0  0         60        2
        """,
    ),
    Scenario(
        "years",
        "3/3660d",
        """
        1         take  3   yes  0  0         316224000
        316224000 take  1   no   0  1         1
        316224001 take  1   yes  2  0         316224000
        """,
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.story)
def test_scenario(scenario: Scenario, callers: Callers) -> None:
    play(scenario, "first_window", callers)


def test_states_are_apart(callers: Callers) -> None:
    """A limiter with windows of the clock, of the same name and quota, has a count of its own."""
    clock = ManualClock()
    limiters = [callers.limiter("5/minute", algorithm=name, clock=clock) for name in ("fixed_window", "first_window")]
    for limiter in limiters:
        assert limiter.try_acquire("k", permits=5)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"algorithm": "fixed_window", "start": "now"}, "'clock' or 'first'"),
        ({"algorithm": "sliding_window", "start": "first"}, "fixed_window"),
        ({"start": "first"}, "fixed_window"),
    ],
    ids=str,
)
def test_bad_start(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Limiter("5/minute", **arguments)
