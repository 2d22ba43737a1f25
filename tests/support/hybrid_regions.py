"""Processes in regions, each region with a ledger and a clock of its own, and home; networks that lose, repeat, delay
and reorder between all of them.

Leases and ledgers are the real ones (in Python; `test_region_twins.py` holds the scripts in Redis to them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseReply, quota_params
from headgate.hybrid.stock import (
    STOCK_TTL,
    Deposit,
    FetchOrder,
    HomeLedger,
    RegionLedger,
    deposit_of,
    floor_params,
    home_params,
    in_units_of,
)
from headgate.rule import Rule
from tests.support.hybrid_exact import check_ledger, rejected
from tests.support.hybrid_fleet import START, Answer, Fleet, Process, SentRequest

Message = TypeVar("Message")
STEPS = [1_000, 20_000, 120_000, 900_000, 5_500_000, 16_000_000, 33_000_000, 45_000_000]  # microseconds
QUOTAS = [
    "100/second burst 60",
    "10/second burst 20",
    "7/second burst 40",
    "1/second burst 30",
    "30/minute",
    "1000/second",
]
SHARES = [50, 100, 250]  # of a region; smaller ones leave no whole permit of some quotas


class Region:
    """A region's ledger, and its clock: as much as half a thousandth slow, and set back now and then."""

    def __init__(self, name: str, rule: Rule, share: int, drift: float) -> None:
        self.name, self.share, self.drift = name, share, drift
        self.ledger = RegionLedger()
        self.params = floor_params(quota_params(rule), share)
        self.behind = 0
        self.since = 0  # when it got its floor
        self.processes: list[RegionProcess] = []

    def now(self, true: int) -> int:
        return START + int((true - START) * (1 - self.drift)) - self.behind


class RegionProcess(Process):
    def __init__(self, name: str, drift: float, region: Region) -> None:
        super().__init__(name, drift)
        self.region = region


class RegionFleet(Fleet):
    """Every method is something that can happen. *which* picks a process, a region or a message, whatever there is."""

    def __init__(self, quota: int, profile: str, share: int, drifts: Sequence[int], regions: int = 2) -> None:
        self.rule = Rule(QUOTAS[quota % len(QUOTAS)])
        self.params, self.profile = quota_params(self.rule), PROFILES[profile]
        self.share = SHARES[share % len(SHARES)]
        self.drifts = drifts
        self.home = HomeLedger({})
        self.true = START
        self.regions: list[Region] = []
        self.born = 0
        self.requests: list[SentRequest] = []
        self.answers: list[Answer] = []
        self.orders: list[tuple[Region, FetchOrder]] = []
        self.deposits: list[tuple[Region, Deposit]] = []
        self.admitted: list[tuple[int, int]] = []
        for _ in range(regions):
            self.join()

    def join(self) -> None:
        """One more region, with its floor, whatever the others have from home at this moment."""
        if sum(self.home.floors.values()) + self.share > 500:
            return
        drift = self.drifts[len(self.regions) % len(self.drifts)] / 10_000
        region = Region(f"r{len(self.regions)}", self.rule, self.share, abs(drift))
        region.since = region.now(self.true) if self.home.floors else 0  # the first has no other beside it
        self.home.floors[region.name] = self.share
        for _ in range(2):
            region.processes.append(self._new_process(drift, region))
        self.regions.append(region)

    def ledger_of(self, process: Process) -> Ledger:
        assert isinstance(process, RegionProcess)
        return process.region.ledger.ledger

    def arrive(self, which: int, again: bool = False) -> None:
        """A report reaches its region's ledger, perhaps to come again; the ledger may want a process to fetch."""
        if self.requests:
            process, request = _take(self.requests, which, again)
            assert isinstance(process, RegionProcess)
            region = process.region
            now = region.now(self.true)
            reply, order = region.ledger.sync(now, region.params, self.profile, request, region.since)
            self.answers.append(Answer(process, request, in_units_of(reply, self.params, region.params), self.true))
            if order:
                self.orders.append((region, order))
            self.check()

    def fetch(self, which: int, again: bool = False) -> None:
        """An order reaches home, perhaps to come again."""
        if self.orders:
            region, order = _take(self.orders, which, again)
            reply = self.home.sync(self.true, self.params, order.request(region.name), region.name, region.share)
            assert isinstance(reply, LeaseReply)
            self.deposits.append((region, deposit_of(order, reply)))
            self.check()

    def deposit(self, which: int, again: bool = False) -> None:
        """The reply of home reaches the region, perhaps to come again."""
        if self.deposits:
            region, deposit = _take(self.deposits, which, again)
            region.ledger.deposit(region.now(self.true), region.params, deposit)
            self.check()

    def trip(self, which: int, demand: int, waiting: Sequence[tuple[int, int]] = (), op: str = "sync") -> None:
        """There and back, and to home and back if that is due, as it is on most days."""
        super().trip(which, demand, waiting, op)
        self.fetch(-1)
        self.deposit(-1)

    def drop(self, which: int) -> None:
        """A message to or from home is lost."""
        queues: list[list[Any]] = [self.orders, self.deposits]
        if waiting := [queue for queue in queues if queue]:
            _take(waiting[which % len(waiting)], which, False)

    def crash(self, which: int) -> None:
        """A process dies with all it holds; another starts in its place."""
        process = self._process(which)
        region = process.region
        region.processes[region.processes.index(process)] = self._new_process(process.drift, region)

    def step_back(self, by: int) -> None:
        """The clock of the first region is set back, while its processes report."""
        self.trip(0, 500)
        self.regions[0].behind += by
        self.trip(0, 500)

    def stock(self, which: int, times: int) -> None:
        """A busy region: processes report and take, fetches come and go."""
        for _ in range(times):
            self.trip(which, 500, [(1, 1)])
            self.advance(30_000)

    def brink(self, which: int, demand: int) -> None:
        """A region is cut off and spends all it has in the last moments of its stock; then another takes what it can.

        That is the moment that home burns the stock.
        """
        self.stock(which, 6)
        region = self._process(which).region
        left = region.ledger.stock.ends - region.now(self.true)
        home = self.home.ledger.nodes.get(f"{region.name}.{region.ledger.ledger.born}")
        if left <= 1_000_000 or home is None:
            return
        self.orders = [(other, order) for other, order in self.orders if other is not region]
        self.advance(left - 900_000)
        self._take_all(region)
        burns = home.exp - self.true
        if burns > 0:
            self.advance(burns - 3_000)
            self._spend_all(region)
            self.advance(6_000)
            self._take_all(self.regions[(which + 1) % len(self.regions)])
            self._spend_all(region)

    def echo(self, which: int, demand: int) -> None:
        """An order reaches home twice; its deposit comes twice, and between the two everything is spent."""
        self._trip_here(which, 500)
        region = self._process(which).region
        self.fetch(-1, True)
        self.deposit(-1, True)
        self._take_all(region)
        self.fetch(-1)
        self.deposit(-1)
        self._take_all(region)

    def late(self, which: int, by: int) -> None:
        """A deposit comes late, after the next fetch or after a long time."""
        region = self._process(which).region
        self._trip_here(which, 500)
        self.fetch(-1)
        waits, self.deposits = self.deposits[-1:], self.deposits[:-1]
        self.advance(by)
        self._trip_here(which, 500)
        self.fetch(-1)
        self.deposits += waits
        self.deposit(-1)
        self._take_all(region)
        self.deposit(-1)
        self._take_all(region)

    def slow(self, which: int, full: bool) -> None:
        """Everything is full, or used up; a region fetches, and the reply takes seconds; then all take all they can."""
        if full:
            self.advance(61_000_000)
        else:
            for region in self.regions:
                self._take_all(region)
            self.advance(1_100_000)
        self._trip_here(which, 500)
        order, self.orders = self.orders[-1:], self.orders[:-1]
        for region in self.regions:
            self._trip_here(self._index(region.processes[0]), 0)
        self.orders += order
        self.fetch(-1)
        self.advance(9_000_000 if full else self.params.capacity_units // self.params.rate // 3)
        self.deposit(-1)
        for region in self.regions:
            self._take_all(region)

    def hoard(self) -> None:
        """Everything is full, and regions fetch what they can; then a region joins, and all spend what they have."""
        self.advance(61_000_000)
        for _ in range(6):
            for region in self.regions:
                self.trip(self._index(region.processes[0]), 500)
            self.advance(11_000)
        self.join()
        self.advance(min(self.params.capacity_units // self.params.rate, 20_000_000))
        for region in self.regions:
            self._trip_here(self._index(region.processes[0]), 500, [(self.params.limit, 1)])
            self._spend_all(region)

    def step_back_and_cut(self, which: int) -> None:
        """A region's clock is set back while home answers it; then it is cut off, and home burns its stock."""
        self.stock(which, 6)
        self.advance(1_100_000)
        region = self._process(which).region
        self._trip_here(which, 500)
        self.fetch(-1)
        region.behind += 40_000_000
        self._trip_here(which, 500)
        self.deposit(-1)
        self._trip_here(which, 500)
        self.orders = [(other, order) for other, order in self.orders if other is not region]
        self.advance(42_000_000)
        for other in self.regions:
            if other is not region:
                self._take_all(other)
        self._trip_here(which, 500, [(self.params.limit, 1)])
        self._spend_all(region)

    def finish(self) -> None:
        """Every process takes what can be had, and an exact limiter must have nothing against any of it."""
        for region in self.regions:
            self._spend_all(region)
        for region in self.regions:
            self._take_all(region)
        assert rejected(self.rule, self.admitted, START) == 0

    def check(self) -> None:
        """What is free and leased in a region is at most its floor and its stock; home counts no stock as less."""
        check_ledger(self.home.ledger)
        for region in self.regions:
            stock, ledger = region.ledger.stock, region.ledger.ledger
            check_ledger(ledger)
            has = ledger.free + ledger.leased_out * region.params.cost
            assert has <= (region.params.limit + stock.out) * region.params.cost, "more than floor and stock"
            if stock.out and region.now(self.true) < stock.ends:
                record = self.home.ledger.nodes.get(f"{region.name}.{ledger.born}")
                assert record and record.leased_out >= stock.out, "home counts the stock as less"
                latest = max((each.exp for each in ledger.nodes.values()), default=0)
                assert latest <= stock.ends, "a lease outlives the stock"
        most = sum(region.params.limit for region in self.regions)
        assert most + home_params(self.params, sum(self.home.floors.values())).limit <= self.params.limit

    def _spend_all(self, region: Region) -> None:
        for process in region.processes:
            self.spend(self._index(process), 1, self.params.limit)

    def _trip_here(self, which: int, demand: int, waiting: Sequence[tuple[int, int]] = ()) -> None:
        """To the region's ledger and back; home is not asked yet."""
        super().trip(which, demand, waiting)

    def _take_all(self, region: Region) -> None:
        """All that the region and home have to give goes to callers of *region*."""
        for _ in range(6):
            self.trip(self._index(region.processes[0]), 500, [(self.params.limit, 1)])
            self.advance(11_000)  # then the next fetch is due
        self._spend_all(region)

    def _new_process(self, drift: float, region: Region) -> RegionProcess:
        self.born += 1
        return RegionProcess(f"p{self.born}", drift, region)

    def _all(self) -> list[RegionProcess]:
        return [process for region in self.regions for process in region.processes]

    def _process(self, which: int) -> RegionProcess:
        everything = self._all()
        return everything[which % len(everything)]

    def _index(self, process: Process) -> int:
        return self._all().index(process)  # type: ignore[arg-type]  # one of them


def _take(messages: list[Message], which: int, again: bool) -> Message:
    index = which % len(messages)
    return messages[index] if again else messages.pop(index)


assert STEPS[-1] > STOCK_TTL
