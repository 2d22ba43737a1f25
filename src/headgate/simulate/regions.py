"""A simulated fleet in several regions: real processes and ledgers, each region with a Redis, all with one home.

A process that is told to fetch asks home and brings the reply to its region, as `headgate.hybrid.region_leases` does;
a region that is cut off loses what it sends.
"""

from __future__ import annotations

from headgate.hybrid.lease import MILLISECOND, SECOND
from headgate.hybrid.protocol import LeaseReply, LeaseRequest
from headgate.hybrid.stock import (
    SHARES,
    Deposit,
    FetchOrder,
    HomeLedger,
    RegionLedger,
    check_regional,
    deposit_of,
    floor_params,
    in_units_of,
)
from headgate.simulate.fleet import Fleet, Process
from headgate.simulate.scenario import Outcome, Scenario


class RegionFleet(Fleet):
    """Processes 0, 1, 2... are in the regions 0, 1, 2..., 0, 1, 2 and so on."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.params = self.processes[0].limiter.params
        check_regional(self.params)
        self.share = round(scenario.floor * SHARES)
        self.floor = floor_params(self.params, self.share)
        self.regions = [RegionLedger() for _ in range(scenario.regions)]
        self.home = HomeLedger({str(number): self.share for number in range(scenario.regions)})
        self.home_trips = 0
        self.by_region: list[list[int]] = [[] for _ in self.regions]

    def region_of(self, process: Process) -> int:
        return int(process.limiter.node_id.removeprefix("node ")) % len(self.regions)

    def admit(self, process: Process, at: int) -> None:
        super().admit(process, at)
        self.by_region[self.region_of(process)].append(at)

    def decide(self, process: Process, requests: list[LeaseRequest]) -> list[LeaseReply]:
        number = self.region_of(process)
        replies = []
        for request in requests:
            reply, order = self.regions[number].sync(self.now // 1000, self.floor, process.limiter.profile, request)
            replies.append(in_units_of(reply, self.params, self.floor))
            if order:
                self.schedule(self.now + self._way(self.scenario.trip), self._fetch, number, order)
        return replies

    def run(self) -> Outcome:
        outcome = super().run()
        outcome.name = f"{len(self.regions)} regions, {self.scenario.accuracy}"
        outcome.home_trips, outcome.by_region = self.home_trips, self.by_region
        return outcome

    def _fetch(self, number: int, order: FetchOrder) -> None:
        self.schedule(self.now + self._way(self.scenario.home_trip), self._arrive_home, number, order)

    def _arrive_home(self, number: int, order: FetchOrder) -> None:
        if self._is_cut(number):
            return
        self.home_trips += 1
        reply = self.home.sync(self.now // 1000, self.params, order.request(str(number)), str(number), self.share)
        assert isinstance(reply, LeaseReply), reply
        way = self._way(self.scenario.home_trip) + self._way(self.scenario.trip)
        self.schedule(self.now + way, self._deposit, number, deposit_of(order, reply))

    def _deposit(self, number: int, deposit: Deposit) -> None:
        if not self._is_cut(number):
            self.regions[number].deposit(self.now // 1000, self.floor, deposit)

    def _is_cut(self, number: int) -> bool:
        seconds = (self.now - SECOND) / SECOND
        return any(number == region and start <= seconds < end for region, start, end in self.scenario.cuts)

    def _way(self, trip: float) -> int:
        return int(trip * MILLISECOND * self._dice.uniform(0.4, 0.6))

    def _unspent(self) -> int:
        """Permits that are free at home or in a region, or on lease and not spent."""
        leased = [lease for process in self.processes for lease in process.limiter.leases.values()]
        held = sum(lease.balance for lease in leased if self.now < lease.expires) // self.params.cost
        free = sum(max(region.ledger.free, 0) for region in self.regions) // self.floor.cost
        return held + free + max(self.home.ledger.free, 0) // (self.params.cost * SHARES)
