"""Quotas: what text means, what is refused, and that text and value are the same thing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Limiter, Quota
from headgate.errors import HeadgateError, InvalidQuota
from headgate.rule import AlgorithmName
from tests.support.quotas import BUCKETS, WINDOWS

GOOD = [
    # text                       limit  period   burst
    ("100/minute", 100, 60.0, None),
    ("100/m", 100, 60.0, None),
    ("100 per minute", 100, 60.0, None),
    ("1/second", 1, 1.0, None),
    ("1/s", 1, 1.0, None),
    ("7 per s", 7, 1.0, None),
    ("1000/hour", 1000, 3600.0, None),
    ("1000/h", 1000, 3600.0, None),
    ("1/day", 1, 86400.0, None),
    ("1/d", 1, 86400.0, None),
    ("100/5m", 100, 300.0, None),
    ("80/10 minutes", 80, 600.0, None),
    ("80 per 10 minutes", 80, 600.0, None),
    ("2/3d", 2, 259200.0, None),
    ("30/2 hours", 30, 7200.0, None),
    ("10/second burst 100", 10, 1.0, 100),
    ("10/second burst 4", 10, 1.0, 4),
    ("80/10 minutes burst 80", 80, 600.0, 80),
    ("100/5m burst 7", 100, 300.0, 7),
    ("  100 / minute  ", 100, 60.0, None),
    ("100/MINUTE", 100, 60.0, None),
]

BAD = [
    # text                  a word of the message that helps
    ("10/fortnight", "fortnight"),
    ("0/s", "1"),
    ("-1/s", "N/period"),
    ("1.5/s", "N/period"),
    ("", "N/period"),
    ("ten/minute", "N/period"),
    ("10", "N/period"),
    ("10/", "N/period"),
    ("/minute", "N/period"),
    ("10 minute", "N/period"),
    ("10/minute burst", "N/period"),
    ("10/minute burst 0", "burst"),
    ("10/minute burst -3", "N/period"),
    ("10/minute burst ten", "N/period"),
    ("10/minute 20/hour", "N/period"),
    ("10/0s", "period"),
    ("10/-5m", "N/period"),
    ("١٠/minute", "N/period"),
]


@pytest.mark.parametrize(("text", "limit", "period", "burst"), GOOD)
def test_text_means(text: str, limit: int, period: float, burst: int | None) -> None:
    quota = Quota.parse(text)
    assert (quota.limit, quota.period, quota.burst) == (limit, period, burst)
    assert quota == Quota(limit=limit, period=period, burst=burst)
    assert quota.capacity == (burst or limit)


@pytest.mark.parametrize(("text", "word"), BAD)
def test_bad_text(text: str, word: str) -> None:
    """The error says what would be right."""
    with pytest.raises(InvalidQuota, match=word) as caught:
        Quota.parse(text)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HeadgateError)


@pytest.mark.parametrize(
    "values",
    [
        {"limit": 0, "period": 1.0},
        {"limit": -1, "period": 1.0},
        {"limit": 1.5, "period": 1.0},
        {"limit": True, "period": 1.0},
        {"limit": "10", "period": 1.0},
        {"limit": 10, "period": 0.0},
        {"limit": 10, "period": -1.0},
        {"limit": 10, "period": float("nan")},
        {"limit": 10, "period": float("inf")},
        {"limit": 10, "period": "minute"},
        {"limit": 10, "period": True},
        {"limit": 10, "period": 1e-9},
        {"limit": 10, "period": 1.0, "burst": 0},
        {"limit": 10, "period": 1.0, "burst": -4},
        {"limit": 10, "period": 1.0, "burst": 2.5},
        {"limit": 10, "period": 1.0, "burst": True},
    ],
    ids=str,
)
def test_bad_values(values: dict[str, object]) -> None:
    with pytest.raises(InvalidQuota):
        Quota(**values)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("text", [None, 10, 10.5, b"10/s", ["10/s"]], ids=repr)
def test_only_text_parses(text: object) -> None:
    with pytest.raises(InvalidQuota):
        Quota.parse(text)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_a_bucket_takes_a_burst(algorithm: AlgorithmName) -> None:
    with Limiter("10/second burst 100", algorithm=algorithm) as limiter:
        assert limiter.peek("k", permits=0).limit == 100


@pytest.mark.parametrize("algorithm", WINDOWS)
@pytest.mark.parametrize("quota", ["10/second burst 100", Quota(10, 1.0, burst=10), ["5/second", "9/minute burst 2"]])
def test_a_window_refuses_a_burst(algorithm: AlgorithmName, quota: str | Quota | list[str | Quota]) -> None:
    with pytest.raises(InvalidQuota, match="burst"):
        Limiter(quota, algorithm=algorithm)


@pytest.mark.parametrize("quota", [[], None, 5, [None], ["10/s", 7]], ids=repr)
def test_a_limiter_needs_a_quota(quota: object) -> None:
    with pytest.raises(InvalidQuota):
        Limiter(quota)  # type: ignore[arg-type]  # the point of the test


def test_a_quota_is_a_value() -> None:
    assert Quota(100, 60.0) == Quota.parse("100/minute")
    assert hash(Quota(100, 60.0)) == hash(Quota.parse("100/minute"))
    assert Quota(100, 60.0) != Quota(100, 60.0, burst=200)
    assert Quota(100, 60) == Quota(100, 60.0)
    with pytest.raises((AttributeError, TypeError)):
        Quota(100, 60.0).limit = 5  # type: ignore[misc]  # the point of the test


COUNTS = st.integers(1, 10**9)
PERIODS = st.one_of(
    st.sampled_from([1.0, 60.0, 3600.0, 86400.0, 0.5, 0.1, 1.5, 90.0, 600.0]),
    st.integers(1, 30 * 86400 * 10**6).map(lambda us: us / 10**6),
)


@given(limit=COUNTS, period=PERIODS, burst=st.none() | COUNTS)
def test_text_of_a_quota_parses_back(limit: int, period: float, burst: int | None) -> None:
    quota = Quota(limit=limit, period=period, burst=burst)
    assert Quota.parse(str(quota)) == quota


@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    """Any text parses, or is an `InvalidQuota`."""
    try:
        quota = Quota.parse(text)
    except InvalidQuota:
        return
    assert quota.limit >= 1
    assert quota.period > 0
