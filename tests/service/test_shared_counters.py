"""The counters that workers share."""

import os
from pathlib import Path

import pytest

from headgate.service.shared_counters import ALLOWED, SLOT_WORDS, SLOTS, STOPPING, SharedCounters, create


@pytest.fixture
def file(tmp_path: Path) -> Path:
    create(tmp_path / "counters", 2, started_at=123)
    return tmp_path / "counters"


def test_slot_numbers(file: Path) -> None:
    """A name has the same slot in every worker."""
    one, other = SharedCounters(file), SharedCounters(file)
    assert [one.slot("a X"), other.slot("b X"), one.slot("b X"), other.slot("a X"), one.slot("a Y")] == [0, 1, 1, 0, 2]
    assert one.names() == other.names() == ["a X", "b X", "a Y"]


def test_long_names(file: Path) -> None:
    """A name that is too long is cut, and found again."""
    one, other = SharedCounters(file), SharedCounters(file)
    assert [one.slot("x" * 129), other.slot("x" * 129), SharedCounters(file).slot("x" * 128)] == [0, 0, 0]


def test_counts_are_shared(file: Path) -> None:
    """Each worker sees the counts, the report and the header of the others."""
    one, other = SharedCounters(file), SharedCounters(file)
    counters = one.claim()
    slot = one.slot("a X")
    counters.slots[slot * SLOT_WORDS + ALLOWED] += 3
    assert dict(other.slots())["a X"][ALLOWED] == 3
    counters.write_report(b"hello")
    assert b"hello" in list(other.reports())
    one.header[STOPPING] = 1
    assert other.header[STOPPING] == 1


def test_too_many_rules(file: Path) -> None:
    """Rules beyond the number of slots share the last slot."""
    one, other = SharedCounters(file), SharedCounters(file)
    for i in range(SLOTS + 10):
        slot = one.slot(f"rule-{i} GCRA")
    assert slot == SLOTS - 1 == other.slot("new GCRA")
    assert other.slot("rule-5 GCRA") == 5
    assert len(one.names()) == SLOTS and one.names()[-1] == "others ALL"


def test_claim(file: Path) -> None:
    """Every worker gets counters, even when more workers claim some than there are."""
    claimed = [SharedCounters(file).claim() for _ in range(5)]
    assert all(counters.gauges[0] == os.getpid() for counters in claimed)
