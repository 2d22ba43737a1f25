"""The ledgers in PostgreSQL and in shared files: the same replies and fields as in Python, step by step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.errors import StoreUnavailable
from headgate.hybrid.ledger import Ledger, NodeRecord
from headgate.hybrid.ledger_sql import MOST
from headgate.hybrid.postgres_leases import PostgresLeases
from headgate.hybrid.protocol import PROFILES, LeaseReply, LeaseRequest, QuotaParams, quota_params
from headgate.hybrid.shared_leases import HEAD, SharedLeases, _thaw
from headgate.rule import Rule
from headgate.stores import PostgreSQLStore, SharedStore
from headgate.stores.base import LeaseCall
from tests.hybrid.test_twins import QUOTAS, START, _need, _reply, perhaps_with_inflow, some_request
from tests.support.callers import in_threads
from tests.support.clocks import until
from tests.support.hybrid_exact import check_ledger
from tests.support.postgres import PostgresServer

SLOTS = NodeRecord.__slots__
PARAMS, HIGH = quota_params(Rule("10/hour")), PROFILES["high"]


class SetClock:
    """A clock that goes back, too."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> int:
        return self.time


class Ledgers:
    """Ledgers of one store, by a clock that the test sets."""

    def __init__(self, leases: PostgresLeases | SharedLeases, clock: SetClock, kept: Callable[[str], Ledger]) -> None:
        self.leases, self.clock, self.kept = leases, clock, kept

    def ask(self, key: str, request: LeaseRequest, params: Any = PARAMS, profile: Any = HIGH) -> LeaseReply:
        [reply] = self.leases.exchange([LeaseCall(key, params, profile, request)])
        return _reply(reply)


@pytest.fixture
def postgres_ledgers(postgres_server: PostgresServer) -> Iterator[Ledgers]:
    clock = SetClock()
    store = PostgreSQLStore(postgres_server.url, clock=clock)  # type: ignore[arg-type]  # as much of one as is needed

    def kept(key: str) -> Ledger:
        """A `Ledger` with the fields of the rows of *key*."""
        fields = "law, at, free, win, current, previous, leased_out, demand, exp, born, lost, inflow, late"
        [row] = postgres_server.rows(f"SELECT {fields} FROM headgate_ledger WHERE key = '{key}'")
        kind, *numbers = row[0].split(":")
        found = Ledger()
        found.params = QuotaParams(kind, *map(int, numbers))
        names = ["at", "free", "window", "current", "previous", "leased_out", "demand", "exp", "born", "lost"]
        names += ["inflow", "late"]
        for name, value in zip(names, row[1:], strict=True):
            setattr(found, name, value)
        fields = ", ".join(["node", *SLOTS])
        for node, *values in postgres_server.rows(f"SELECT {fields} FROM headgate_lease WHERE key = '{key}'"):
            record = found.nodes[node] = NodeRecord(0)
            for name, value in zip(SLOTS, values, strict=True):
                setattr(record, name, value)
        return found

    yield Ledgers(store.leases(), clock, kept)
    store.close()


@pytest.fixture
def shared_ledgers(tmp_path: Path) -> Ledgers:
    clock = SetClock()
    store = SharedStore(f"shared://{tmp_path}/store", clock=clock)  # type: ignore[arg-type]  # as above
    leases = store.leases()
    return Ledgers(leases, clock, lambda key: _thaw(leases._read(key[:2])[key], 0)[0])


@pytest.fixture(params=[pytest.param("postgres_ledgers", marks=pytest.mark.server), "shared_ledgers"])
def ledgers(request: pytest.FixtureRequest) -> Ledgers:
    found: Ledgers = request.getfixturevalue(request.param)
    return found


def key_of(number: int) -> str:
    return f"{number:02x}" * 16


def fields_of(ledger: Ledger) -> dict[str, Any]:
    """All that a ledger keeps. Only one of `free` and the windows counts, by the kind of its quota."""
    records = {node: [getattr(record, name) for name in SLOTS] for node, record in ledger.nodes.items()}
    unused = ("window", "current", "previous") if ledger.params and ledger.params.kind == "bucket" else ("free",)
    return {name: value for name, value in vars(ledger).items() if name not in unused} | {"nodes": records}


@pytest.mark.parametrize("kind", QUOTAS)
@pytest.mark.parametrize("seed", range(3))
def test_ledger_and_store_agree(kind: str, seed: int, ledgers: Ledgers) -> None:
    """Ledger and store give the same reply to every one of thousands of random steps, and keep the same fields."""
    dice = random.Random(f"{kind} {seed} store")
    for number, quota in enumerate(QUOTAS[kind]):
        params, other = quota_params(Rule(quota, kind)), quota_params(Rule(QUOTAS[kind][0], kind))
        ledger, key = Ledger(), key_of(number)
        seqs: dict[str, int] = {}
        lids: dict[str, int] = {}
        ledgers.clock.time = START
        for step in range(60):
            steps = [0, 7, 1_500, 200_000, 1_000_000, 6_500_000, -3_000, -2_000_000, -40_000_000]
            ledgers.clock.time += dice.choice(steps)
            params_now = other if dice.random() < 0.05 else params
            request, profile = some_request(dice, seqs, lids, params_now.limit), PROFILES[dice.choice(sorted(PROFILES))]
            request = perhaps_with_inflow(dice, request, params_now.limit)
            ours = ledger.sync(ledgers.clock.time, params_now, profile, request)
            assert ledgers.ask(key, request, params_now, profile) == ours, f"step {step}: {request}"
            if ours.lease_id:
                lids[request.node] = ours.lease_id
            check_ledger(ledger)
        assert fields_of(ledgers.kept(key)) == fields_of(ledger)


def test_batch_order(ledgers: Ledgers) -> None:
    """A batch is answered in the order of its calls, of which several may be about one key."""
    order = [3, 1, 2, 3, 3]
    calls = [LeaseCall(key_of(key), PARAMS, HIGH, _need(1)._replace(seq=at)) for at, key in enumerate(order, 1)]
    found = [_reply(reply) for reply in ledgers.leases.exchange(calls)]
    assert [reply.free // PARAMS.cost for reply in found] == [9, 9, 9, 8, 7]


def test_expired_ledgers(ledgers: Ledgers) -> None:
    """A ledger whose bucket is full and whose leases have run out for long counts as never seen."""
    taken = ledgers.ask(key_of(1), _need(4)._replace(target=3, demand=1000))
    assert taken.granted > 0
    ledgers.clock.time += 3 * 3_600_000_000
    fresh = ledgers.ask(key_of(1), _need(1)._replace(node="other"))
    assert (fresh.free_before, fresh.nodes, fresh.others) == (PARAMS.capacity_units, 1, 0)
    assert ledgers.kept(key_of(1)).born == ledgers.clock.time
    assert list(ledgers.kept(key_of(1)).nodes) == ["other"]


def test_peek_writes_nothing(ledgers: Ledgers) -> None:
    peek = _need(1)._replace(op="peek", waiting=())
    assert ledgers.ask(key_of(1), peek).free == PARAMS.capacity_units
    with pytest.raises((ValueError, KeyError)):
        ledgers.kept(key_of(1))
    ledgers.ask(key_of(1), _need(1)._replace(ttl=1_000_000))
    before = fields_of(ledgers.kept(key_of(1)))
    ledgers.clock.time += 60_000_000  # its lease has run out, which a peek sees and leaves to others to write
    assert ledgers.ask(key_of(1), peek).nodes == 0
    assert fields_of(ledgers.kept(key_of(1))) == before


# ---------------------------------------------------------------------------------------------------- PostgreSQL alone


def test_value_out_of_range(postgres_ledgers: Ledgers) -> None:
    """A request that the server cannot compute is an error of its key; the others of the batch are answered."""
    absurd = _need(1)._replace(demand=MOST, node="absurd")
    calls = [LeaseCall(key_of(key), PARAMS, HIGH, absurd if key == 2 else _need(1)) for key in (1, 2, 3)]
    first, second, third = postgres_ledgers.leases.exchange(calls)
    assert isinstance(second, str) and "out of range" in second
    assert _reply(first).free == _reply(third).free == PARAMS.capacity_units - PARAMS.cost


def test_huge_numbers(postgres_ledgers: Ledgers) -> None:
    """A refund or debt beyond all measure counts as one of the whole capacity."""
    assert postgres_ledgers.ask(key_of(1), _need(10)).free == 0
    assert postgres_ledgers.ask(key_of(1), _need(1)._replace(seq=2, refund=10**30)).free_before == PARAMS.capacity_units
    owing = postgres_ledgers.ask(key_of(1), _need(1)._replace(seq=3, debt=10**30))
    assert owing.free_before == -PARAMS.capacity_units


def test_no_deadlocks(postgres_server: PostgresServer) -> None:
    """Batches of the same keys in any order wait for one another in no ring; the server's clock counts."""
    store = PostgreSQLStore(postgres_server.url)
    leases, numbers = store.leases(), iter(range(4))
    params = quota_params(Rule("1000/30d"))

    def ask() -> int:
        node, asked = f"node {next(numbers)}", 0
        for seq in range(1, 26):
            keys = random.sample(range(16), 16)
            request = _need(1)._replace(node=node, seq=seq, acked_seq=seq - 1)
            replies = leases.exchange([LeaseCall(key_of(key), params, HIGH, request) for key in keys])
            asked += sum(_reply(reply).status == 0 for reply in replies)
        return asked

    assert in_threads(4, ask) == [25 * 16] * 4
    [(units,)] = postgres_server.rows("SELECT DISTINCT free FROM headgate_ledger")
    refilled = 100 * params.cost - (params.capacity_units - units)
    assert 0 <= refilled < params.cost, "each of a hundred requests took one permit from each key"
    [(drift,)] = postgres_server.rows("SELECT max(abs(extract(epoch FROM now()) - at / 1e6)) FROM headgate_ledger")
    assert drift < 60
    store.close()


def test_rows_are_swept(postgres_server: PostgresServer) -> None:
    """Ordinary reports remove ledgers that are gone, with their leases, and leave those that are not."""
    store = PostgreSQLStore(postgres_server.url)
    leases = store.leases()
    for start in range(0, 200, 50):
        leases.exchange([LeaseCall(key_of(key), PARAMS, HIGH, _need(1)) for key in range(start, start + 50)])
    postgres_server.rows(f"UPDATE headgate_ledger SET gone = 1 WHERE key > '{key_of(19)}'")

    def counts() -> Any:
        sql = "SELECT (SELECT count(*) FROM headgate_ledger), (SELECT count(DISTINCT key) FROM headgate_lease)"
        return postgres_server.rows(sql)

    def swept() -> bool:
        leases.exchange([LeaseCall(key_of(0), PARAMS, HIGH, _need(1)._replace(op="peek"))] * 16)
        return bool(counts() == [(20, 20)])

    until(swept)
    store.close()


# -------------------------------------------------------------------------------------------------- shared files alone


def test_killed_anywhere(tmp_path: Path) -> None:
    """A process that is killed in an exchange leaves whole ledgers and no lock; its clock is the machine's."""
    leases = SharedStore(f"shared://{tmp_path}/store").leases()
    dice = random.Random(7)
    for turn in range(1, 26):
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                exchanges(leases, f"child {turn}", go)
            finally:
                os._exit(1)
        os.read(ready, 1)
        time.sleep(dice.uniform(0, 0.004))  # it is killed wherever it is by then
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(go)
        keys = [key_of(key) for key in range(4)]
        request = _need(1)._replace(node="parent", seq=turn, acked_seq=turn - 1, waiting=())
        replies = leases.exchange([LeaseCall(key, PARAMS, HIGH, request) for key in keys])
        assert all(_reply(reply).status == 0 for reply in replies)
        for key in keys:
            ledger, gone = _thaw(leases._read(key[:2])[key], 0)
            assert gone and "parent" in ledger.nodes and abs(ledger.at - time.time_ns() // 1000) < 60_000_000
            check_ledger(ledger)


def exchanges(leases: SharedLeases, node: str, go: int) -> None:
    """Make exchanges until this process is killed."""
    seq = 0
    while True:
        seq += 1
        request = _need(1)._replace(node=node, seq=seq, acked_seq=seq - 1, target=2, demand=1000)
        leases.exchange([LeaseCall(key_of(key), PARAMS, HIGH, request) for key in range(4)])
        if seq == 1:
            os.write(go, b"!")


def test_removed_while_in_use(tmp_path: Path) -> None:
    """Files that a cleaner of temporary files removes are made anew; the ledgers start anew."""
    store = SharedStore(f"shared://{tmp_path}/store")
    ledgers = Ledgers(store.leases(), SetClock(), lambda key: Ledger())
    assert ledgers.ask(key_of(1), _need(10)).free < PARAMS.cost
    for path in [*(tmp_path / "store" / "leases").iterdir()]:
        path.unlink()
    (tmp_path / "store" / "leases").rmdir()
    assert ledgers.ask(key_of(1), _need(1)._replace(seq=2)).free_before == PARAMS.capacity_units
    assert (tmp_path / "store" / "leases").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store" / "leases").iterdir()} == {0o600}


def test_files_of_another_version(tmp_path: Path) -> None:
    """They are refused with a clear word, and stay as they are; a line that makes no sense is a key never seen."""
    store = SharedStore(f"shared://{tmp_path}/store")
    ledgers = Ledgers(store.leases(), SetClock(), lambda key: Ledger())
    path = tmp_path / "store" / "leases" / "01"
    path.write_text("headgate leases 999\n")
    with pytest.raises(StoreUnavailable, match="of another version of headgate"):
        ledgers.ask(key_of(1), _need(1))
    assert path.read_text() == "headgate leases 999\n"
    path.write_text(f"{HEAD}\n{key_of(1)} {1 << 60} {{\n")
    assert ledgers.ask(key_of(1), _need(1)).free_before == PARAMS.capacity_units


def test_shared_files_are_swept(shared_ledgers: Ledgers, tmp_path: Path) -> None:
    """Ordinary reports remove ledgers that are gone, and files without any."""
    for number in range(8):
        shared_ledgers.ask(key_of(number), _need(1))
    shared_ledgers.clock.time += 86_400_000_000
    leases = shared_ledgers.leases
    assert isinstance(leases, SharedLeases)
    places = iter(range(8))
    leases._dice = SimpleNamespace(randrange=lambda _: next(places, 99))  # type: ignore[assignment]  # not at random
    for _ in range(8 * 16):
        shared_ledgers.ask(key_of(200), _need(1)._replace(op="peek"))
    assert [path.name for path in (tmp_path / "store" / "leases-given-clock").iterdir() if len(path.name) == 2] == []
