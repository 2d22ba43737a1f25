"""Processes, a network that loses, repeats, delays and reorders, a clock that steps back, crashes; and one ledger.

The leases and the ledger are the real ones (the ledger in Python; `test_twins.py` holds the script in Redis to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headgate.hybrid.lease import Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseReply, LeaseRequest, count_served, quota_params
from headgate.rule import Rule
from tests.support.hybrid_exact import check_ledger, rejected

START = 1_700_000_000_000_000  # microseconds
TRIP = 1_000_000  # nanoseconds that a process takes a trip for
STEPS = [1_000, 20_000, 120_000, 900_000, 5_500_000, 7_000_000, 31_000_000]  # microseconds

QUOTAS = {
    "token_bucket": [
        "10/second burst 5",
        "5/second",
        "3/minute",
        "7/second burst 20",
        "1/second",
        "100/second burst 12",
        "50/second burst 40",
        "9/second burst 60",
    ],
    "gcra": ["4/second burst 9"],
    "fixed_window": ["5/10s", "20/second", "3/minute"],
    "sliding_window_counter": ["5/10s", "20/second", "3/minute"],
}


class Process:
    def __init__(self, name: str, drift: float) -> None:
        self.name = name
        self.drift = drift
        self.seq = 0
        self.latest: LeaseRequest | None = None
        self.lease = Lease("k", 0, 0)

    def now(self, true: int) -> int:
        """Nanoseconds of its own clock, which is up to half a thousandth off."""
        return int((true - START) * 1000 * (1 + self.drift))


class SentRequest(NamedTuple):
    process: Process
    request: LeaseRequest


class Answer(NamedTuple):
    process: Process
    request: LeaseRequest
    reply: LeaseReply
    at: int


class Fleet:
    """Every method is something that can happen. *which* picks a process or a message, whatever there is."""

    def __init__(self, kind: str, which: int, profile: str, drifts: Sequence[int]) -> None:
        quotas = QUOTAS[kind]
        self.rule = Rule(quotas[which % len(quotas)], kind)
        self.params, self.profile = quota_params(self.rule), PROFILES[profile]
        self.ledger = Ledger()
        self.true, self.behind = START, 0
        self.processes = [Process(f"p{i}", drift / 10_000) for i, drift in enumerate(drifts)]
        self.born = len(drifts)
        self.requests: list[SentRequest] = []
        self.answers: list[Answer] = []
        self.admitted: list[tuple[int, int]] = []

    def advance(self, by: int) -> None:
        self.true += by

    def spend(self, which: int, permits: int, times: int) -> None:
        """A process admits callers from its lease."""
        process = self._process(which)
        lease, cost = process.lease, permits * self.params.cost
        now = process.now(self.true)
        for _ in range(times):
            if now < lease.expires and lease.balance >= cost:
                lease.balance -= cost
            elif not lease.spend_inflow(now, cost):
                break
            self.admitted.append((self.true, permits))

    def report(self, which: int, demand: int, waiting: Sequence[tuple[int, int]] = (), op: str = "sync") -> None:
        """A process sends a report; one that is still under way is given up first."""
        process = self._process(which)
        now, lease = process.now(self.true), process.lease
        if lease.in_flight:
            assert process.latest
            lease.lose_reply(now, process.latest)
        process.seq += 1
        able = tuple((count, permits) for count, permits in waiting if permits <= self.params.limit and op == "sync")
        lease.count_demand(now, self.params, ())
        lease.demand, lease.last_call_at = float(demand), now  # whatever it has learned: any demand is possible
        request = process.latest = lease.report(
            now, process.seq, process.name, self.params, self.profile, TRIP, op, able
        )
        self.requests.append(SentRequest(process, request))

    def arrive(self, which: int, again: bool = False) -> None:
        """A report reaches the ledger, perhaps to come again."""
        if self.requests:
            index = which % len(self.requests)
            process, request = self.requests[index]
            if not again:
                self.requests.pop(index)
            reply = self.ledger.sync(self.true - self.behind, self.params, self.profile, request)
            self.answers.append(Answer(process, request, reply, self.true))
            check_ledger(self.ledger)
            assert self.ledger.free >= 0

    def answer(self, which: int, again: bool = False) -> None:
        """A reply reaches its process, perhaps to come again."""
        if self.answers:
            index = which % len(self.answers)
            process, request, reply, at = self.answers[index]
            if not again:
                self.answers.pop(index)
            if process.lease.accept(process.now(self.true), reply, request, self.params, self.profile, TRIP):
                record = self.ledger_of(process).nodes.get(process.name)
                if record and record.seq == request.seq:
                    most = record.leased_out * self.params.cost
                    assert process.lease.balance <= most, "the lease has more than the ledger counts"
                served = count_served(reply.free_before, self.params.cost, request.waiting)
                for (_, permits), many in zip(request.waiting, served, strict=True):
                    self.admitted += [(at, permits)] * many  # decided there and then

    def trip(self, which: int, demand: int, waiting: Sequence[tuple[int, int]] = (), op: str = "sync") -> None:
        """There and back, as it is on most days."""
        self.report(which, demand, waiting, op)
        self.arrive(-1)
        self.answer(-1)

    def lose(self, which: int) -> None:
        """A process gives up on the reply to its report."""
        process = self._process(which)
        if process.lease.in_flight and process.latest:
            process.lease.lose_reply(process.now(self.true), process.latest)

    def drop_request(self, which: int) -> None:
        if self.requests:
            self.requests.pop(which % len(self.requests))

    def drop_answer(self, which: int) -> None:
        if self.answers:
            self.answers.pop(which % len(self.answers))

    def crash(self, which: int) -> None:
        """A process dies with all it holds; another starts in its place."""
        index = which % len(self.processes)
        self.processes[index] = Process(f"p{self.born}", self.processes[index].drift)
        self.born += 1

    def forget(self, which: int) -> None:
        """A process gives a key up without a word, and meets it again."""
        process = self._process(which)
        process.lease = Lease("k", process.seq, process.now(self.true))

    def step_back(self, by: int) -> None:
        """The server's clock steps back. Windows would be told by it, and ours by the true one: not for those."""
        if not self.params.period:
            self.behind += by

    def brink(self, which: int, demand: int) -> None:
        """A lease is spent to the last at its last moment, and the next moment another process takes what there is."""
        self.trip(which, demand)
        process = self._process(which)
        left = process.lease.expires - process.now(self.true)
        if left > 2_000_000:
            self.advance(left // 1000 - 2_000)
            self.spend(which, 1, self.params.limit)
            self.advance(left // 900_000 + 15_000)  # past the end as the ledger sees it: later by a thousandth
            self.trip(which + 1, 0, [(self.params.limit, 1)])

    def echo(self, which: int, demand: int) -> None:
        """A report arrives twice, and between the two its lease is spent."""
        self.report(which, demand)
        self.arrive(-1, True)
        self.answer(-1)
        self.spend(which, 1, self.params.limit)
        self.arrive(-1)
        self.trip(which + 1, 0, [(self.params.limit, 1)])

    def finish(self) -> None:
        """Everybody takes what can be had, and an exact limiter must have nothing against any of it."""
        for which in range(len(self.processes)):
            self.spend(which, 1, self.params.limit)
        self.trip(0, 0, [(self.params.limit, 1)])
        assert rejected(self.rule, self.admitted, START) == 0

    def ledger_of(self, process: Process) -> Ledger:
        """The ledger that answers *process*."""
        return self.ledger

    def _process(self, which: int) -> Process:
        return self.processes[which % len(self.processes)]
