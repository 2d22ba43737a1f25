"""Sliding window log: no window of that length, wherever it starts, holds more than the limit."""

import pytest

from headgate import Quota
from tests.support.callers import Callers
from tests.support.scenario import Scenario, play

SCENARIOS = [
    Scenario(
        "an entry is forgotten exactly a period after it was made",
        "3/10s",
        """
        0         take  1   yes  2  0         10        3
        4         take  1   yes  1  0         10
        6         take  1   yes  0  0         10
        6         take  1   no   0  4         10
        9.999999  take  1   no   0  0.000001  6.000001
        10        take  1   yes  0  0         10
        10        take  2   no   0  6         10
        16        take  2   yes  0  0         10
        16        take  1   no   0  4         10
        36        peek  0   yes  3  0         0
        """,
    ),
    Scenario(
        "calls at one instant are calls all the same",
        "4/minute",
        """
        0         take  1   yes  3  0         60
        0         take  1   yes  2  0         60
        0         take  1   yes  1  0         60
        0         take  1   yes  0  0         60
        0         take  1   no   0  60        60
        60        take  4   yes  0  0         60
        """,
    ),
    Scenario(
        "no burst at the edge of a window",
        "5/minute",
        """
        59        take  5   yes  0  0         60
        60        take  1   no   0  59        59
        118.999999 take 1   no   0  0.000001  0.000001
        119       take  5   yes  0  0         60
        """,
    ),
    Scenario(
        "a wait for several permits ends when enough old entries are gone",
        "5/minute",
        """
        0         take  2   yes  3  0         60
        10        take  2   yes  1  0         60
        20        take  1   yes  0  0         60
        20        peek  1   no   0  40        60
        20        peek  2   no   0  40        60
        20        peek  3   no   0  50        60
        20        peek  4   no   0  50        60
        20        peek  5   no   0  60        60
        """,
    ),
    Scenario(
        "half a second is a period too",
        Quota(2, period=0.5),
        """
        0.3       take  2   yes  0  0         0.5
        0.799999  take  1   no   0  0.000001  0.000001
        0.8       take  2   yes  0  0         0.5
        """,
    ),
    Scenario(
        "a denial spends nothing and leaves no entry",
        "3/10s",
        """
        0         take  2   yes  1  0         10
        5         take  2   no   1  5         5
        5         take  3   no   1  5         5
        10        peek  0   yes  3  0         0
        10        take  3   yes  0  0         10
        """,
    ),
    Scenario(
        "peek answers as if it had spent, and has not",
        "3/10s",
        """
        0         peek  1   yes  2  0         10
        0         peek  3   yes  0  0         10
        0         peek  0   yes  3  0         0
        0         take  3   yes  0  0         10
        4         peek  0   yes  0  0         6
        4         peek  1   no   0  6         6
        """,
    ),
    Scenario(
        "a refund gives back the newest, and never above the limit",
        "3/10s",
        """
        0         refund 2
        0         peek  0   yes  3  0         0
        0         take  1   yes  2  0         10
        5         take  2   yes  0  0         10
        5         refund 2
        5         peek  0   yes  2  0         5
        5         refund 99
        5         peek  0   yes  3  0         0
        5         take  3   yes  0  0         10
        20        refund 1
        20        peek  0   yes  3  0         0
        """,
    ),
    Scenario(
        "a reset key was never seen",
        "3/10s",
        """
        0         reset
        0         take  3   yes  0  0         10
        1         reset
        1         peek  0   yes  3  0         0
        1         take  3   yes  0  0         10
        """,
    ),
    Scenario(
        "several quotas: all must allow, the one that binds most is reported",
        ["2/second", "3/minute"],
        """
        0         take  2   yes  0  0         60        2
        0         take  1   no   0  1         60        2
        1         take  1   yes  0  0         60        3
        1         take  1   no   0  59        60        3
        60        take  2   yes  0  0         60
        60        reset
        60        peek  1   yes  1  0         60        2
        """,
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.story)
def test_scenario(scenario: Scenario, callers: Callers) -> None:
    play(scenario, "sliding_window", callers)
