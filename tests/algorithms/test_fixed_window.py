"""Fixed window: at most the limit in each window, and the windows are aligned to the epoch."""

import pytest

from headgate import Quota
from headgate.redis.script import LimiterScript
from headgate.rule import Rule
from tests.support.callers import Callers
from tests.support.scenario import Scenario, play
from tests.support.servers import Server

SCENARIOS = [
    Scenario(
        "the window is the minute of the clock, not a minute from the first call",
        "5/minute",
        """
        10        take  3   yes  2  0         50        5
        10        take  3   no   2  50        50        5
        59.999999 take  2   yes  0  0         0.000001
        59.999999 take  1   no   0  0.000001  0.000001
        60        take  5   yes  0  0         60
        61        take  1   no   0  59        59
        180       peek  0   yes  5  0         0
        """,
    ),
    Scenario(
        "midnight UTC divides by a minute but not by seven seconds",
        "3/7s",
        """
        0         take  3   yes  0  0         5
        4.999999  take  1   no   0  0.000001  0.000001
        5         take  3   yes  0  0         7
        11.5      take  1   no   0  0.5       0.5
        12        take  1   yes  2  0         7
        """,
    ),
    Scenario(
        "two windows in a second do not share a counter",
        Quota(2, period=0.5),
        """
        0.4       take  2   yes  0  0         0.1
        0.4       take  1   no   0  0.1       0.1
        0.5       take  2   yes  0  0         0.5
        0.999999  take  1   no   0  0.000001  0.000001
        1.0       take  2   yes  0  0         0.5
        """,
    ),
    Scenario(
        "a denial spends nothing: what was left is still there",
        "10/minute",
        """
        0         take  8   yes  2  0         60
        0         take  5   no   2  60        60
        0         take  3   no   2  60        60
        1         take  2   yes  0  0         59
        """,
    ),
    Scenario(
        "peek answers as if it had spent, and has not",
        "4/minute",
        """
        6         peek  1   yes  3  0         54
        6         peek  4   yes  0  0         54
        6         peek  0   yes  4  0         0
        6         take  4   yes  0  0         54
        6         peek  0   yes  0  0         54
        6         peek  1   no   0  54        54
        """,
    ),
    Scenario(
        "a refund gives back in this window, and never above the limit",
        "5/minute",
        """
        0         refund 3
        0         peek  0   yes  5  0         0
        0         take  5   yes  0  0         60
        1         refund 2
        1         take  2   yes  0  0         59
        1         refund 99
        1         peek  0   yes  5  0         0
        2         take  5   yes  0  0         58
        60        refund 2
        60        peek  0   yes  5  0         0
        """,
    ),
    Scenario(
        "a reset key was never seen",
        "5/minute",
        """
        0         reset
        0         take  5   yes  0  0         60
        3         reset
        3         peek  0   yes  5  0         0
        3         take  5   yes  0  0         57
        """,
    ),
    Scenario(
        "one a day",
        "1/day",
        """
        86399     take  1   yes  0  0         1
        86400     take  1   yes  0  0         86400
        172799.999999 take 1 no  0  0.000001  0.000001
        """,
    ),
    Scenario(
        "several quotas: all must allow, the one that binds most is reported",
        ["2/second", "3/minute"],
        """
        0         take  2   yes  0  0         60        2
        0         take  1   no   0  1         60        2
        1         take  1   yes  0  0         59        3
        1         take  1   no   0  59        59        3
        60        take  2   yes  0  0         60        2
        60        reset
        60        peek  1   yes  1  0         60        2
        """,
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.story)
def test_scenario(scenario: Scenario, callers: Callers) -> None:
    play(scenario, "fixed_window", callers)


# quota            the server's time, in seconds    the window that the client names
NAMED = [
    ("5/minute", 1_699_920_030, "1699920000"),
    ("5/minute", 1_699_920_030, "1699919940"),
    ("5/minute", 1_699_920_030, "1699923600"),
    ("5/minute", 1_699_920_030, "11699920000"),
    ("5/minute", 930, "900"),
    ("5/minute", 930, "1699920000"),
    (Quota(5, 0.5), 1_699_920_000.75, "1699920000.500000"),
    (Quota(5, 0.5), 1_699_920_000.75, "1699920000"),
    (Quota(5, 0.5), 1_699_920_000.25, "1699920000.500000"),
]


@pytest.mark.parametrize(("quota", "seconds", "named"), NAMED, ids=str)
def test_clients_clock(quota: str | Quota, seconds: float, named: str, any_redis_server: Server) -> None:
    """Whatever window a client's clock is in, the call counts in that of the server's clock."""
    rule = Rule(quota, "fixed_window")
    script = LimiterScript(rule, "rate_limiter", False, None)
    start, now = "rate_limiter:fixed_window:{k}", int(seconds * 1_000_000)
    arguments = ["take", now, 1, *script.numbers[0], 1]
    for _ in range(2):
        any_redis_server.client().eval(script.text, 1, f"{start}:{named}", *arguments)
    assert any_redis_server.names() == [start + rule.parts[0].redis_suffix(now)]
    assert any_redis_server.client().get(any_redis_server.names()[0]) == "2"
