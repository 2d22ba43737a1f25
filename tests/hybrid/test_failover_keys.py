"""Leases of one key at the first of several stores that answers: what a switch may cost, and what it may not."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.hybrid_first import FirstFleet, walk
from tests.support.hybrid_fleet import QUOTAS, START

WALKS = int(os.environ.get("HEADGATE_MACHINE_WALKS", "800")) // 8
LASTING = "60/360d"  # nothing refills within a walk


def walked(kind: str, quota: str, stores: int, nodes: int, seed: int, steps: int = 80) -> FirstFleet:
    dice = random.Random(f"{kind} {quota} {stores} {nodes} {seed}")
    fleet = FirstFleet(kind, quota, stores, nodes, dice)
    fleet.loses = dice.choice([0.0, 0.1]) if nodes == 1 else 0.0
    walk(fleet, steps)
    return fleet


@pytest.mark.bounded(900)
@pytest.mark.parametrize("kind", QUOTAS)
def test_one_process(kind: str) -> None:
    """It has seen all: never one too many, whichever store dies, comes back or forgets, and what is lost or late."""
    for seed in range(WALKS):
        quota = [*QUOTAS[kind], LASTING][seed % (len(QUOTAS[kind]) + 1)]
        fleet = walked(kind, quota, 2 + seed % 2, 1, seed)
        assert fleet.over() == 0, f"{quota}, seed {seed}"


@pytest.mark.bounded(900)
@pytest.mark.parametrize("kind", QUOTAS)
def test_several_processes(kind: str) -> None:
    """A switch gives no more than what some process had not seen, and what is held of a bucket that refills."""
    for seed in range(WALKS):
        quota = [*QUOTAS[kind], LASTING][seed % (len(QUOTAS[kind]) + 1)]
        fleet = walked(kind, quota, 2, 2 + seed % 3, seed)
        assert fleet.over() <= fleet.slack, f"{quota}, seed {seed}"


@pytest.mark.parametrize("kind", ["token_bucket", "fixed_window"])
def test_all_was_seen(kind: str) -> None:
    """Nothing refills, and every process has reported before a switch: never one too many, and nearly all is used."""
    spent = 0
    for seed in range(WALKS):
        fleet = FirstFleet(kind, LASTING, 2, 4, random.Random(f"{kind} {seed}"))
        for _ in range(4):
            walk(fleet, 8, switches=False)
            fleet.settle()
            fleet.switch(0, 0 not in fleet.down, seed % 2 == 0)
        assert fleet.over() == 0, f"seed {seed}"
        spent += sum(permits for _, permits in fleet.admitted)
    assert spent >= 50 * WALKS


def test_what_is_held_is_exchanged() -> None:
    """A process that holds permits has them from the next store then, and they are counted there once."""
    fleet = FirstFleet("token_bucket", "1000/360d", 2, 1, random.Random(1))
    [node] = fleet.nodes
    for _ in range(6):
        fleet.trip(node, 5000, [])
        fleet.advance(100_000)
    held = node.lease.balance // fleet.params.cost
    fleet.spend(node, 1, 5)
    fleet.switch_off(0)
    for _ in range(3):
        fleet.trip(node, 5000, [])
    assert held > 20 and node.key.at == 1
    fleet.trip(node, 0, [], op="release")
    assert fleet.left(1) == 995


def test_what_was_seen_is_handed_on() -> None:
    """A store that lends in place of another has no more than that, whether the key was given back or not."""
    fleet = FirstFleet("token_bucket", "100/360d", 3, 1, random.Random(1))
    [node] = fleet.nodes
    fleet.trip(node, 0, [(70, 1)], op="sync")
    fleet.trip(node, 0, [], op="release")
    for off in (0, 1):
        fleet.switch_off(off)
        fleet.trip(node, 0, [(5, 1)])
    assert fleet.left(2) == 20
    fleet.trip(node, 0, [], op="release")
    fleet.down.clear()
    fleet.trip(node, 0, [])
    assert fleet.left(0) == 20


def test_what_is_held_is_kept() -> None:
    """A process holds all that was left: the next store has nothing to lend, and counts what is given back."""
    fleet = FirstFleet("fixed_window", LASTING, 2, 1, random.Random(1))
    [node] = fleet.nodes
    fleet.trip(node, 500, [(41, 1)])
    held = node.lease.balance
    assert held == 19 and fleet.free(0) == 0
    fleet.switch_off(0)
    fleet.trip(node, 50_000, [])
    assert node.key.at == 1 and node.lease.balance == held
    fleet.spend(node, 1, 5)
    fleet.trip(node, 0, [], op="release")
    assert fleet.left(1) == 60 - 41 - 5


def test_what_is_held_ends_with_its_window() -> None:
    """A lease of the window before is not kept at the next store, where others may have had all."""
    fleet = FirstFleet("fixed_window", "20/second", 2, 2, random.Random(1))
    node, other = fleet.nodes
    node.drift = other.drift = 0.0
    fleet.trip(other, 0, [])
    fleet.trip(node, 5000, [], pause=50_000)
    assert node.lease.balance > 0
    fleet.advance(START + 1_010_000 - fleet.true)
    fleet.switch_off(0)
    fleet.trip(other, 0, [(20, 1)])
    fleet.trip(node, 5000, [])
    assert node.lease.balance == 0 and fleet.over() == 0
