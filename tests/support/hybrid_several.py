"""Processes that lease from several ledgers at once, of which a minority is away, slow, forgetful or loses messages.

Leases, ledgers and `KeyLeases` between them are the real ones. At most a minority of the stores is bad at a time, and
`settle` lets every process report before others may become bad: that is what the promise asks for.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from headgate.hybrid.lease import Lease
from headgate.hybrid.ledger import Ledger
from headgate.hybrid.protocol import PROFILES, LeaseReply, LeaseRequest, count_served, quota_params
from headgate.hybrid.several_keys import KeyLeases
from headgate.rule import Rule
from tests.support.hybrid_exact import check_ledger, rejected
from tests.support.hybrid_fleet import QUOTAS, START, STEPS, TRIP

PROFILE = PROFILES["high"]


class Node:
    """One process."""

    def __init__(self, name: str, drift: float, stores: int, seq: int = 0) -> None:
        self.name, self.drift, self.seq = name, drift, seq
        self.lease = Lease("k", seq, 0)
        self.keys = KeyLeases(stores, stores // 2 + 1, seq)
        self.latest: LeaseRequest | None = None
        self.inbox: dict[int, LeaseReply] = {}

    def now(self, true: int) -> int:
        return int((true - START) * 1000 * (1 + self.drift))


class Message(NamedTuple):
    node: Node
    place: int
    request: LeaseRequest
    outer: LeaseRequest  # the request of the process that it is a part of


class SeveralFleet:
    """Every method is something that can happen."""

    def __init__(self, kind: str, quota: str, stores: int, nodes: int, dice: random.Random) -> None:
        self.rule = Rule(quota, kind)
        self.params, self.dice = quota_params(self.rule), dice
        self.ledgers = [Ledger() for _ in range(stores)]
        self.down: set[int] = set()
        self.mute: set[int] = set()  # stores that do what they are asked, and whose replies are lost
        self.bad: set[int] = set()  # stores that lose, delay, die and forget: a minority
        self.true, self.born = START, nodes
        self.nodes = [Node(f"p{i}", dice.randint(-5, 5) / 10_000, stores) for i in range(nodes)]
        self.late: list[Message] = []
        self.cut: Node | None = None  # a process that no reply reaches
        self.admitted: list[tuple[int, int]] = []
        self.failed = 0

    # ------------------------------------------------------------------------------------------------- what can happen

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
        """A request to all stores, which reach them in any order; the bad ones may not get it, or not in time."""
        now, lease = node.now(self.true), node.lease
        node.seq += 1
        able = tuple((count, permits) for count, permits in waiting if permits <= self.params.limit and op == "sync")
        lease.count_demand(now, self.params, ())
        lease.demand, lease.last_call_at = float(demand), now
        outer = lease.report(now, node.seq, node.name, self.params, PROFILE, TRIP, op, able)
        node.latest, node.inbox = outer, {}
        self._send(node, outer, node.keys.requests(now, outer, self.params), pause)
        self._send(node, outer, node.keys.more_requests(node.now(self.true), node.inbox, self.params), pause)
        self._finish(node)

    def arrive_late(self) -> None:
        if self.late:
            self._arrive(self.late.pop(self.dice.randrange(len(self.late))))

    def kill(self) -> None:
        if self.bad:
            self.down.add(self.dice.choice(sorted(self.bad)))

    def restart(self, empty: bool) -> None:
        if self.down:
            place = self.down.pop()
            if empty:
                self.ledgers[place] = Ledger()

    def forget(self, place: int) -> None:
        """A store loses its data, and nobody sees it go."""
        self.ledgers[place] = Ledger()

    def crash(self) -> None:
        """A process dies with all it holds; another starts in its place."""
        index = self.dice.randrange(len(self.nodes))
        self.nodes[index] = Node(f"p{self.born}", self.nodes[index].drift, len(self.ledgers))
        self.born += 1

    def choose_bad(self) -> None:
        """Other stores may go wrong from now on."""
        self.settle()
        most = (len(self.ledgers) - 1) // 2
        self.bad = set(self.dice.sample(range(len(self.ledgers)), most))

    def settle(self) -> None:
        """All stores are there, and every process reports until they have missed nothing."""
        self.cut = None
        while self.late:
            self.arrive_late()
        self.down.clear()
        self.bad.clear()
        for turn in range(80):
            for node in self.nodes:  # a store that lends nothing cannot cover what is held; it is given back when idle
                self.trip(node, self.dice.choice([0, 5, 30]), [], op="release" if turn == 40 else "sync")
            if all(map(self.is_good, self.nodes)):
                return
            self.advance(300_000)
        raise AssertionError("a store is never made good")

    def is_good(self, node: Node) -> bool:
        keys = node.keys
        return all(
            not store.missed
            and not store.lost
            and not store.level_from
            and store.told >= keys.total
            and store.covered >= keys.leased
            for store in keys.stores
        )

    def finish(self) -> None:
        """Everybody takes what can be had, and an exact limiter must have nothing against any of it."""
        for node in self.nodes:
            self.spend(node, 1, self.params.limit)
        self.trip(self.nodes[0], 0, [(self.params.limit, 1)])
        assert rejected(self.rule, self.admitted, START) == 0

    # ------------------------------------------------------------------------------------------------------ how it does

    def _send(self, node: Node, outer: LeaseRequest, requests: dict[int, LeaseRequest], pause: int) -> None:
        messages = [Message(node, place, request, outer) for place, request in requests.items()]
        self.dice.shuffle(messages)
        for message in messages:
            if (message.place in self.bad or node is self.cut) and self.dice.random() < 0.3:
                if self.dice.random() < 0.6:
                    self.late.append(message)
                continue
            self._arrive(message)
            if pause and not outer.waiting:  # callers go on meanwhile, and time too
                self.spend(node, 1, self.dice.choice([0, 1, self.params.limit]))
                self.advance(pause)

    def _arrive(self, message: Message) -> None:
        node, place, request, outer = message
        if place in self.down:
            return
        reply = self.ledgers[place].sync(self.true, self.params, PROFILE, request)
        check_ledger(self.ledgers[place])
        if node.latest is outer and node is not self.cut and place not in self.mute:
            if place in self.bad and self.dice.random() < 0.15:
                return  # the reply is lost
            node.inbox[place] = reply

    def _finish(self, node: Node) -> None:
        outer, now = node.latest, node.now(self.true)
        assert outer is not None
        reply = node.keys.combine(now, node.inbox, self.params)
        node.latest = None
        if reply is None:
            self.failed += 1
            node.lease.lose_reply(now, outer)
        elif node.lease.accept(now, reply, outer, self.params, PROFILE, TRIP):
            served = count_served(reply.free_before, self.params.cost, outer.waiting)
            refused = [permits for (count, permits), many in zip(outer.waiting, served, strict=True) if many < count]
            assert not refused or reply.free + node.lease.balance < min(refused) * self.params.cost, "refused in vain"
            for (_, permits), many in zip(outer.waiting, served, strict=True):
                self.admitted += [(self.true, permits)] * many


def walk(fleet: SeveralFleet, steps: int) -> None:
    """Something happens, again and again."""
    dice, limit = fleet.dice, fleet.params.limit
    for _ in range(steps):
        node = dice.choice(fleet.nodes)
        demand = dice.choice([0, 1, 5, 30, 500])
        waiting = dice.choice([[], [], [(limit, 1)], [(dice.randint(1, 20), dice.randint(1, 4)), (3, 1)]])
        match dice.choice(["trip"] * 8 + ["spend"] * 5 + ["advance"] * 4 + ["slow", "slow", "round", "round", "release",
                           "late", "cut", "kill", "kill", "restart", "restart", "bad", "crash"]):  # fmt: skip
            case "trip":
                fleet.trip(node, demand, waiting)
            case "spend":
                fleet.spend(node, dice.choice([1, 1, 2, 3]), dice.choice([1, limit]))
            case "advance":
                fleet.advance(dice.choice(STEPS) * dice.randint(1, 10) // 10)
            case "slow":
                fleet.trip(node, demand, [], pause=dice.choice([1_000, 50_000, 900_000]))
            case "round":  # everybody takes all there is
                for each in fleet.nodes:
                    fleet.trip(each, demand, dice.choice([[], [(limit, 1)]]))
                    fleet.spend(each, 1, limit)
            case "release":
                fleet.trip(node, 0, [], op="release")
            case "late":
                fleet.arrive_late()
            case "cut":
                fleet.cut = node if fleet.cut is None else None
            case "kill":
                fleet.kill()
            case "restart":
                fleet.restart(dice.random() < 0.5)
            case "bad":
                fleet.choose_bad()
            case "crash":
                if not fleet.bad:
                    fleet.crash()


def quotas(kind: str) -> list[str]:
    return QUOTAS[kind]
