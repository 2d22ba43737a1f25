"""What an HTTP answer says about a member, in every header format that servers use."""

import time
from types import SimpleNamespace

import pytest

from headgate.coordination.feedback import LONGEST, TOO_MANY, Feedback, feedback, of_response, of_stranger

DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
IN_A_MINUTE = "Sun, 06 Nov 1994 08:50:37 GMT"

# status   headers   outcome   cooldown   retire
ROWS: list[tuple[int, dict[str, str], str, float, bool]] = [
    (200, {}, "success", 0, False),
    (304, {}, "success", 0, False),
    (404, {}, "success", 0, False),
    (403, {}, "success", 0, False),
    (401, {}, "", 0, True),
    (408, {}, "failure", 0, False),
    (500, {}, "failure", 0, False),
    (503, {"Retry-After": "7"}, "failure", 7, False),
    (429, {}, "", TOO_MANY, False),
    (429, {"retry-after": "120"}, "", 120, False),
    (429, {"Retry-After": "1.5"}, "", 1.5, False),
    (429, {"Retry-After": " 5 "}, "", 5, False),
    (429, {"Retry-After": "soon"}, "", TOO_MANY, False),
    (429, {"Retry-After": "-5"}, "", TOO_MANY, False),
    (429, {"Retry-After": "9" * 40}, "", LONGEST, False),
    (429, {"Retry-After": IN_A_MINUTE, "Date": DATE}, "", 60, False),
    (429, {"Retry-After": DATE, "Date": IN_A_MINUTE}, "", 0, False),
    (429, {"Retry-After": "0"}, "", 0, False),
    (429, {"Retry-After": "120, 60"}, "", 120, False),  # two headers, as libraries join them
    (503, {"Retry-After": "1.5,90"}, "failure", 90, False),
    (429, {"Retry-After": "120, soon"}, "", TOO_MANY, False),
    (429, {"Retry-After": "Sun, 06 Nov 1994 08:49:37 +9999999999999999999999"}, "", TOO_MANY, False),
    (200, {"Retry-After": "99999999"}, "success", 0, False),
    (404, {"Retry-After": "60"}, "success", 0, False),
    (401, {"Retry-After": "60"}, "", 0, True),
    (302, {"Retry-After": "60"}, "success", 60, False),
    (413, {"Retry-After": "60"}, "success", 60, False),
    (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "99999999"}, "success", LONGEST, False),
    (503, {"Retry-After": "Sun Nov  6 08:50:37 1994", "Date": DATE}, "failure", 60, False),  # without a zone: UTC
    (200, {"RateLimit": "limit=10, remaining=0, reset=30"}, "success", 30, False),
    (200, {"RateLimit": "limit=10, remaining=1, reset=30"}, "success", 0, False),
    (403, {"Retry-After": "60"}, "success", 60, False),
    (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "30"}, "success", 30, False),
    (200, {"X-RateLimit-Remaining": "1", "X-RateLimit-Reset": "30"}, "success", 0, False),
    (200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "junk"}, "success", 0, False),
    (200, {"X-RateLimit-Remaining": "0"}, "success", 0, False),
    (200, {"RateLimit-Remaining": "0", "RateLimit-Reset": "12"}, "success", 12, False),
    (200, {"x-rate-limit-remaining": "0", "x-rate-limit-reset": "9"}, "success", 9, False),
    (200, {"RateLimit": '"default";r=0;t=44'}, "success", 44, False),
    (200, {"RateLimit": '"a";r=5;t=10, "b";r=0;t=3'}, "success", 3, False),
    (200, {"RateLimit": "nonsense"}, "success", 0, False),
    (429, {"Retry-After": "5", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"}, "", 50, False),
    (
        200,
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2000000060", "Date": "Wed, 18 May 2033 03:33:20 GMT"},
        "success",
        60,
        False,
    ),
    (
        200,
        {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2000000060000", "Date": "Wed, 18 May 2033 03:33:20 GMT"},
        "success",
        60,
        False,
    ),
]


@pytest.mark.parametrize(("status", "headers", "outcome", "cooldown", "retire"), ROWS, ids=repr)
def test_feedback(status: int, headers: dict[str, str], outcome: str, cooldown: float, retire: bool) -> None:
    """Each row of ROWS."""
    assert feedback(status, headers) == Feedback(outcome, cooldown, retire)


@pytest.mark.parametrize("status", [200, 401, 429, 503, 500, 302])
def test_of_stranger(status: int) -> None:
    """The same outcome, but no retirement and at most a minute of cooldown."""
    headers = {"Retry-After": "99999999", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "99999999"}
    mine = of_response(SimpleNamespace(status=status, headers=headers))
    assert of_stranger(SimpleNamespace(status=status, headers=headers)) == (mine.outcome, 60.0, False)


def test_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A date without a zone is UTC, whatever the time zone of this machine."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert feedback(503, {"Retry-After": "Sun Nov  6 08:50:37 1994", "Date": DATE}).cooldown == 60
    finally:
        monkeypatch.undo()
        time.tzset()
