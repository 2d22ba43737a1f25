"""Sliding window counter: the previous window counts for as much of it as the last period still covers."""

import pytest

from headgate import Quota
from tests.support.callers import Callers
from tests.support.scenario import Scenario, play

SCENARIOS = [
    Scenario(
        "the previous window fades as the current one goes on",
        "10/10s",
        """
        0         take  10  yes  0  0         20        10
        5         take  1   no   0  6         15
        10        take  1   no   0  1         10
        10.999999 take  1   no   0  0.000001  9.000001
        11        take  1   yes  0  0         19
        15        take  4   yes  0  0         15
        15        take  1   no   0  1         15
        20        peek  0   yes  5  0         10
        30        peek  0   yes  10 0         0
        """,
    ),
    Scenario(
        "what is left is rounded down",
        "10/10s",
        """
        0         take  10  yes  0  0         20
        12.5      peek  0   yes  2  0         7.5
        13.5      take  3   yes  0  0         16.5
        13.5      take  1   no   0  0.5       16.5
        14        take  1   yes  0  0         16
        """,
    ),
    Scenario(
        "a weight that is not a whole number of microseconds is waited for in full",
        "7/second",
        """
        0         take  7   yes  0  0         2
        0         take  1   no   0  1.142858  2
        1.142857  take  1   no   0  0.000001  0.857143
        1.142858  take  1   yes  0  0         1.857142
        """,
    ),
    Scenario(
        "half a second is a period too",
        Quota(2, period=0.5),
        """
        0         take  2   yes  0  0         1.0
        0.5       take  1   no   0  0.25      0.5
        0.75      take  1   yes  0  0         0.75
        """,
    ),
    Scenario(
        "two windows later everything is forgotten",
        "5/minute",
        """
        59        take  5   yes  0  0         61
        119.999999 peek 0   yes  4  0         0.000001
        120       peek  0   yes  5  0         0
        120       take  5   yes  0  0         120
        """,
    ),
    Scenario(
        "a denial spends nothing",
        "10/minute",
        """
        0         take  8   yes  2  0         120
        0         take  3   no   2  67.5      120
        0         take  3   no   2  67.5      120
        1         take  2   yes  0  0         119
        """,
    ),
    Scenario(
        "peek answers as if it had spent, and has not",
        "4/minute",
        """
        6         peek  1   yes  3  0         114
        6         peek  4   yes  0  0         114
        6         peek  0   yes  4  0         0
        6         take  4   yes  0  0         114
        6         peek  0   yes  0  0         114
        6         peek  1   no   0  69        114
        """,
    ),
    Scenario(
        "a refund gives back, and never above the limit",
        "10/10s",
        """
        0         refund 3
        0         peek  0   yes  10 0         0
        0         take  6   yes  4  0         20
        0         refund 4
        0         peek  0   yes  8  0         20
        0         refund 99
        0         peek  0   yes  10 0         0
        0         take  10  yes  0  0         20
        """,
    ),
    Scenario(
        "a reset key was never seen",
        "5/minute",
        """
        0         reset
        0         take  5   yes  0  0         120
        63        reset
        63        peek  0   yes  5  0         0
        63        take  5   yes  0  0         117
        """,
    ),
    Scenario(
        "several quotas: all must allow, the one that binds most is reported",
        ["2/second", "3/minute"],
        """
        0         take  2   yes  0  0         120       2
        0         take  1   no   0  1.5       120       2
        2         take  1   yes  0  0         118       3
        2         take  1   no   0  78        118       3
        2         reset
        2         peek  1   yes  1  0         118       2
        """,
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.story)
def test_scenario(scenario: Scenario, callers: Callers) -> None:
    play(scenario, "sliding_window_counter", callers)
