"""Processes that lease from the first of several ledgers that is there. Leases, ledgers and `FailoverKey` are real.

`slack` is what the promise leaves open: at a switch, what was taken from the store before it after the process that has
seen least of it saw it last; and of a bucket, which refills meanwhile, what the processes hold from there.
"""

from __future__ import annotations

import random

from headgate.hybrid.failover_keys import FailoverKey
from headgate.hybrid.lease import Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import LeaseReply, LeaseRequest, count_served, quota_params
from headgate.rule import Rule
from tests.support.hybrid_exact import check_ledger, rejected
from tests.support.hybrid_fleet import START, STEPS, TRIP
from tests.support.hybrid_several import PROFILE


class Node:
    """One process."""

    def __init__(self, name: str, drift: float, stores: int) -> None:
        self.name, self.drift, self.seq = name, drift, 0
        self.lease = Lease("k", 0, 0)
        self.key = FailoverKey(stores, 0)

    def now(self, true: int) -> int:
        return int((true - START) * 1000 * (1 + self.drift))


class FirstFleet:
    """Every method is something that can happen."""

    def __init__(self, kind: str, quota: str, stores: int, nodes: int, dice: random.Random) -> None:
        self.rule = Rule(quota, kind)
        self.params, self.dice = quota_params(self.rule), dice
        self.ledgers = [Ledger() for _ in range(stores)]
        self.down: set[int] = set()
        self.true, self.slack, self.failed = START, 0, 0
        self.nodes = [Node(f"p{i}", dice.randint(-5, 5) / 10_000, stores) for i in range(nodes)]
        self.loses = 0.0  # how often a request or its reply is lost, or the request comes late
        self.late: list[tuple[int, LeaseRequest]] = []
        self.admitted: list[tuple[int, int]] = []

    def advance(self, by: int) -> None:
        self.true += by

    def spend(self, node: Node, permits: int, times: int) -> None:
        lease, price = node.lease, permits * self.params.cost
        for _ in range(times):
            if node.now(self.true) >= lease.expires or lease.balance < price:
                return
            lease.balance -= price
            self.admitted.append((self.true, permits))

    def trip(self, node: Node, demand: int, waiting: list[tuple[int, int]], op: str = "sync", pause: int = 0) -> None:
        """A request to the stores in their order, until one answers. In a pause callers go on, and time too."""
        now, lease = node.now(self.true), node.lease
        node.seq += 1
        able = tuple((count, permits) for count, permits in waiting if permits <= self.params.limit and op == "sync")
        lease.count_demand(now, self.params, ())
        lease.demand, lease.last_call_at = float(demand), now
        outer = lease.report(now, node.seq, node.name, self.params, PROFILE, TRIP, op, able)
        replies: dict[int, LeaseReply] = {}
        requests = node.key.requests(now, outer, self.params)
        while requests:
            for place, request in requests.items():
                self._send(place, request, replies)
            if pause and not able:
                self.spend(node, 1, self.dice.choice([0, 1, self.params.limit]))
                self.advance(pause)
            requests = node.key.more_requests(node.now(self.true), replies, self.params)
        self._finish(node, outer, node.key.combine(node.now(self.true), replies, self.params))

    def switch(self, place: int, down: bool, empty: bool = False) -> None:
        """A store dies or comes back. Every process makes a trip then, in any order, and callers go on."""
        self.slack += self.unseen()
        if down:
            self.down.add(place)
        else:
            self.down.discard(place)
            if empty:
                self.ledgers[place] = Ledger()
        limit, nodes = self.params.limit, list(self.nodes)
        self.dice.shuffle(nodes)
        for node in nodes:
            self.spend(self.dice.choice(nodes), 1, self.dice.choice([0, 1, limit]))
            self.trip(node, self.dice.choice([0, 5, 500]), self.dice.choice([[], [(limit, 1)]]))
            self.spend(node, 1, self.dice.choice([0, 1, limit]))

    def switch_off(self, place: int) -> None:
        self.down.add(place)

    def unseen(self) -> int:
        """What a switch now may give too many: see above."""
        most = held = 0
        for node in self.nodes:
            held += -(-node.lease.balance // self.params.cost)
            for place in {each.key.at for each in self.nodes} - {-1}:
                if node.key.at in (-1, place):
                    most = max(most, node.key._free_now(node.now(self.true), self.params) - self.free(place))
        return -(-most // self.params.cost) + (held if self.params.kind == "bucket" and len(self.nodes) > 1 else 0)

    def free(self, place: int) -> int:
        """Units that are free at one ledger."""
        peek = LeaseRequest("peek", "nobody", 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 1)
        return self.ledgers[place].sync(self.true, self.params, PROFILE, peek).free

    def left(self, place: int) -> int:
        """Permits that one ledger has, those on lease included."""
        return self.free(place) // self.params.cost + self.ledgers[place].leased_out

    def settle(self) -> None:
        """Every process reports, until all have seen the same."""
        for _ in range(2):
            for node in self.nodes:
                self.trip(node, 0, [])

    def over(self) -> int:
        """What an exact limiter would not have admitted, after everybody has taken what can be had."""
        for node in self.nodes:
            self.spend(node, 1, self.params.limit)
        self.trip(self.nodes[0], 0, [(self.params.limit, 1)])
        return rejected(self.rule, [(at, 1) for at, permits in self.admitted for _ in range(permits)], START)

    def arrive_late(self) -> None:
        if self.late:
            place, request = self.late.pop(self.dice.randrange(len(self.late)))
            if place not in self.down:
                self.ledgers[place].sync(self.true, self.params, PROFILE, request)

    def _send(self, place: int, request: LeaseRequest, replies: dict[int, LeaseReply]) -> None:
        lost = self.dice.random() < self.loses
        if lost and self.dice.random() < 0.6:
            if self.dice.random() < 0.6:
                self.late.append((place, request))
            return
        if place not in self.down:
            reply = self.ledgers[place].sync(self.true, self.params, PROFILE, request)
            check_ledger(self.ledgers[place])
            if not lost:
                replies[place] = reply

    def _finish(self, node: Node, outer: LeaseRequest, reply: LeaseReply | None) -> None:
        now = node.now(self.true)
        if reply is None:
            self.failed += 1
            node.lease.lose_reply(now, outer)
        elif node.lease.accept(now, reply, outer, self.params, PROFILE, TRIP):
            served = count_served(reply.free_before, self.params.cost, outer.waiting)
            for (_, permits), many in zip(outer.waiting, served, strict=True):
                self.admitted += [(self.true, permits)] * many


def walk(fleet: FirstFleet, steps: int, switches: bool = True) -> None:
    """Something happens, again and again."""
    dice, limit = fleet.dice, fleet.params.limit
    events = ["trip"] * 8 + ["spend"] * 5 + ["advance"] * 4 + ["slow", "release", "late"] * 2
    events += ["switch"] * 2 if switches else []
    for _ in range(steps):
        node = dice.choice(fleet.nodes)
        demand = dice.choice([0, 1, 5, 30, 500])
        waiting = dice.choice([[], [], [(limit, 1)], [(dice.randint(1, 20), dice.randint(1, 4)), (3, 1)]])
        match dice.choice(events):
            case "trip":
                fleet.trip(node, demand, waiting)
            case "spend":
                fleet.spend(node, dice.choice([1, 1, 2, 3]), dice.choice([1, limit]))
            case "advance":
                fleet.advance(dice.choice(STEPS) * dice.randint(1, 10) // 10)
            case "slow":
                fleet.trip(node, demand, [], pause=dice.choice([1_000, 50_000, 900_000]))
            case "release":
                fleet.trip(node, 0, [], op="release")
            case "late":
                fleet.arrive_late()
            case "switch":
                place = dice.randrange(len(fleet.ledgers))
                fleet.switch(place, place not in fleet.down, dice.random() < 0.5)
