"""Token bucket, leaky bucket and GCRA: three ways to keep the same promise, so one table for the three."""

import pytest

from headgate import Quota
from tests.support.callers import Callers
from tests.support.quotas import BUCKETS
from tests.support.scenario import Scenario, play

SCENARIOS = [
    Scenario(
        "a burst, then one permit each 100 ms",
        "10/second burst 4",
        """
        0.0       take  1   yes  3  0         0.1       4
        0.0       take  3   yes  0  0         0.4       4
        0.0       take  1   no   0  0.1       0.4       4
        0.0       peek  4   no   0  0.4       0.4
        0.05      take  1   no   0  0.05      0.35
        0.099999  take  1   no   0  0.000001  0.300001
        0.1       take  1   yes  0  0         0.4
        0.1       take  2   no   0  0.2       0.4
        0.3       take  2   yes  0  0         0.4
        10        peek  0   yes  4  0         0
        10        take  4   yes  0  0         0.4
        """,
    ),
    Scenario(
        "the capacity defaults to the limit",
        "3/minute",
        """
        0         take  1   yes  2  0         20        3
        5         take  1   yes  1  0         35
        5         take  2   no   1  15        35
        20        take  2   yes  0  0         60
        79.999999 peek  3   no   2  0.000001  0.000001
        80        take  3   yes  0  0         60
        """,
    ),
    Scenario(
        "a seventh of a second is not a whole number of microseconds, and is not rounded in state",
        "7/second",
        """
        0         take  7   yes  0  0         1.0
        0         take  1   no   0  0.142858  1.0
        0.142857  take  1   no   0  0.000001  0.857143
        0.142858  take  1   yes  0  0         1.0
        0.285714  take  1   no   0  0.000001  0.857144
        0.285715  take  1   yes  0  0         1.0
        1.142857  take  6   no   5  0.000001  0.142858
        1.142858  take  6   yes  0  0         1.0
        """,
    ),
    Scenario(
        "half a second is a period too",
        Quota(100, period=0.5),
        """
        0         take  100 yes  0  0         0.5       100
        0         take  1   no   0  0.005     0.5
        0.004999  take  1   no   0  0.000001  0.495001
        0.005     take  1   yes  0  0         0.5
        0.255     take  50  yes  0  0         0.5
        """,
    ),
    Scenario(
        "one a day",
        "1/day",
        """
        0         take  1   yes  0  0         86400
        86399.999999  take 1 no  0  0.000001  0.000001
        86400     take  1   yes  0  0         86400
        """,
    ),
    Scenario(
        "a burst far above the limit takes long to come back",
        "1/minute burst 1000",
        """
        0         take  1000 yes 0  0         60000     1000
        59        take  1   no   0  1         59941
        60        take  1   yes  0  0         60000
        6060      take  101 no   100 60       54000
        6060      take  100 yes  0  0         60000
        """,
    ),
    Scenario(
        "a denial spends nothing, however often it is asked",
        "10/second burst 4",
        """
        0         take  3   yes  1  0         0.3
        0         take  2   no   1  0.1       0.3
        0         take  2   no   1  0.1       0.3
        0         take  4   no   1  0.3       0.3
        0.05      take  2   no   1  0.05      0.25
        0.1       take  2   yes  0  0         0.4
        """,
    ),
    Scenario(
        "peek answers as if it had spent, and has not",
        "10/second burst 4",
        """
        0         peek  1   yes  3  0         0.1
        0         peek  4   yes  0  0         0.4
        0         peek  0   yes  4  0         0
        0         take  4   yes  0  0         0.4
        0         peek  0   yes  0  0         0.4
        0         peek  1   no   0  0.1       0.4
        """,
    ),
    Scenario(
        "a refund gives back, and never above the capacity",
        "10/second burst 4",
        """
        0         refund 3
        0         peek  0   yes  4  0         0
        0         take  3   yes  1  0         0.3
        0         refund 2
        0         peek  0   yes  3  0         0.1
        0.05      refund 100
        0.05      peek  0   yes  4  0         0
        0.05      take  4   yes  0  0         0.4
        0.05      take  1   no   0  0.1       0.4
        """,
    ),
    Scenario(
        "a reset key was never seen",
        "10/second burst 4",
        """
        0         reset
        0         take  4   yes  0  0         0.4
        0         reset
        0         peek  0   yes  4  0         0
        0         take  4   yes  0  0         0.4
        """,
    ),
    Scenario(
        "after a long rest the bucket is full, and not fuller",
        "10/second burst 4",
        """
        0         take  4   yes  0  0         0.4
        100000000 peek  0   yes  4  0         0
        100000000 take  4   yes  0  0         0.4
        100000000 take  1   no   0  0.1       0.4
        """,
    ),
    Scenario(
        "several quotas: all must allow, the one that binds most is reported",
        ["5/second", "6/minute"],
        """
        0         take  4   yes  1  0         40        5
        0         take  2   no   1  0.2       40        5
        0.4       take  2   yes  0  0         59.6      6
        1         take  1   no   0  9         59        6
        1         peek  0   yes  0  0         59        6
        10        take  1   yes  0  0         60        6
        10        refund 3
        10        peek  0   yes  3  0         30        6
        10        reset
        10        peek  1   yes  4  0         10        5
        """,
    ),
    Scenario(
        "several quotas: the longest wait is the one that counts",
        ["10/second burst 2", "2/minute burst 3"],
        """
        0         take  2   yes  0  0         60        2
        0         take  2   no   1  30        60        3
        30        take  2   yes  0  0         90
        """,
    ),
]


@pytest.mark.parametrize("algorithm", BUCKETS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.story)
def test_scenario(scenario: Scenario, algorithm: str, callers: Callers) -> None:
    play(scenario, algorithm, callers)
