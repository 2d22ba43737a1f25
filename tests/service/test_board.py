"""The counters that workers share."""

import os
from pathlib import Path

import pytest

from headgate.service.board import ALLOWED, SLOT_WORDS, SLOTS, STOPPING, Board, create


@pytest.fixture
def board(tmp_path: Path) -> Path:
    create(tmp_path / "board", 2, started_at=123)
    return tmp_path / "board"


def test_slots_are_the_same_for_everybody(board: Path) -> None:
    one, other = Board(board), Board(board)
    assert [one.slot("a X"), other.slot("b X"), one.slot("b X"), other.slot("a X"), one.slot("a Y")] == [0, 1, 1, 0, 2]
    assert one.names() == other.names() == ["a X", "b X", "a Y"]


def test_what_is_counted_is_added_up(board: Path) -> None:
    one, other = Board(board), Board(board)
    slab = one.claim()
    slot = one.slot("a X")
    slab.slots[slot * SLOT_WORDS + ALLOWED] += 3
    assert dict(other.slots())["a X"][ALLOWED] == 3
    slab.write(b"hello")
    assert b"hello" in list(other.bodies())
    one.header[STOPPING] = 1
    assert other.header[STOPPING] == 1


def test_more_rules_than_slots_share_the_last(board: Path) -> None:
    one, other = Board(board), Board(board)
    for i in range(SLOTS + 10):
        slot = one.slot(f"rule-{i} GCRA")
    assert slot == SLOTS - 1 == other.slot("new GCRA")
    assert other.slot("rule-5 GCRA") == 5
    assert len(one.names()) == SLOTS and one.names()[-1] == "others ALL"


def test_a_slab_for_each_and_never_none(board: Path) -> None:
    slabs = [Board(board).claim() for _ in range(5)]  # more than there are
    assert all(slab.gauges[0] == os.getpid() for slab in slabs)
