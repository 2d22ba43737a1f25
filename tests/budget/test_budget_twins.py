"""The budget in Lua and in Python gives the same replies; any trace keeps its room, and the order of waiters."""

import random
from collections.abc import Sequence
from typing import Any

from headgate.budget import records
from headgate.budget.records import DONE_TTL, LOST_TTL, MAX_WOKEN, buckets_of, forget_at, packed
from headgate.budget.state import BudgetState, budget_machine
from headgate.clock import MICROSECONDS
from headgate.coordination.states.machine import Operation
from tests.support.servers import Server
from tests.support.twins import Twins

SECOND = MICROSECONDS
HOLD = 10 * SECOND
WAITER = 5 * SECOND
MACHINE = budget_machine("default")

# Two quotas at the root, and one on each of two levels below, with room and rate: two drain in seconds, two hardly.
BUCKETS = {"- a": (10**15, 1), "- b": (3000 * SECOND, 30), "x a": (6 * 10**14, 7), "y b": (2000 * SECOND, 100)}
A = ("- a",)
SPECS = [["- a"], ["- a", "- b"], ["- a", "x a"], ["- b", "y b"]]


def spec_of(names: Sequence[str]) -> bytes:
    return records.spec_of([(*name.split(), *BUCKETS[name]) for name in names])  # type: ignore[misc]  # two words each


class Model:
    """What a budget should do, written for a reader: debts, holds, and a queue. Checks what the twins reply."""

    def __init__(self) -> None:
        self.debts = dict.fromkeys(BUCKETS, 0)
        self.at = dict.fromkeys(BUCKETS, 0)
        self.live: dict[str, tuple[int, list[str], list[int], list[int], str, str]] = {}
        self.lost: dict[str, tuple[int, list[str], list[int], list[int], list[int], str, str]] = {}
        self.done: dict[str, tuple[int, str, str]] = {}  # until, nonce, nonce of the call that ended it; '-': none did
        self.queue: dict[str, tuple[int, list[str], list[int]]] = {}
        self.paused = dict.fromkeys(BUCKETS, 0)  # until when
        self.now = 0

    def drain(self, bucket: str, now: int) -> None:
        rate = BUCKETS[bucket][1]
        self.debts[bucket] = max(self.debts[bucket] - (now - self.at[bucket]) * rate, 0)
        self.at[bucket] = now

    def add(self, names: Sequence[str], units: Sequence[int], sign: int = 1) -> None:
        for name, amount in zip(names, units, strict=True):
            self.debts[name] = max(self.debts[name] + sign * amount, 0)

    def pass_time(self, now: int) -> None:
        self.now = now
        for end, id in sorted((hold[0], id) for id, hold in self.live.items()):
            if end <= now:
                for bucket in BUCKETS:
                    self.drain(bucket, end)
                _, names, units, spent, lost, nonce = self.live.pop(id)
                cost = {"charge": units, "spent": spent, "release": [0] * len(units)}[lost]
                self.add(names, cost)
                self.lost[id] = (end + LOST_TTL, names, cost, units, spent, lost, nonce)
        for bucket in BUCKETS:
            self.drain(bucket, now)
        self.lost = {id: kept for id, kept in self.lost.items() if kept[0] > now}
        self.done = {id: kept for id, kept in self.done.items() if kept[0] > now}

    def held(self, bucket: str) -> int:
        return sum(
            amount
            for _, names, units, *_ in self.live.values()
            for name, amount in zip(names, units, strict=True)
            if name == bucket
        )

    def available(self, bucket: str) -> int:
        paused = BUCKETS[bucket][0] if self.paused[bucket] > self.now else 0
        return BUCKETS[bucket][0] - self.debts[bucket] - self.held(bucket) - paused

    def fits(self, id: str, names: Sequence[str], units: Sequence[int], now: int) -> bool:
        for each in [each for each, waiter in self.queue.items() if waiter[0] <= now]:
            if each == id:
                break
            del self.queue[each]
        for name, amount in zip(names, units, strict=True):
            ahead = 0
            for each, (_, its_names, its_units) in self.queue.items():
                if each == id:
                    break
                ahead += sum(its for its_name, its in zip(its_names, its_units, strict=True) if its_name == name)
            if amount + ahead > self.available(name):
                return False
        return True


def random_units(dice: random.Random, names: Sequence[str]) -> list[int]:
    return [dice.choice([0, 1, dice.randrange(BUCKETS[name][0] // 2), BUCKETS[name][0] // 3]) for name in names]


def run_trace(twins: Twins, model: Model, dice: random.Random, steps: int) -> dict[str, int]:
    seen: dict[str, int] = {}
    for _ in range(steps):
        op = dice.choice(["reserve"] * 4 + ["extend", "settle", "settle", "withdraw", "holds", "pause", "advance"])
        if op == "advance":
            twins.clock.advance(dice.choice([0.1, 1.0, 4.0, 9.999999, 30.0, 61.0, dice.choice([3.0, 3661.0])]))
            continue
        now, times = twins.clock.now(), dice.choice([1, 1, 2])
        model.pass_time(now)
        id, names = dice.choice("abcdefgh"), dice.choice(SPECS)
        if op == "extend" and id in model.live and dice.random() < 0.9:
            names = model.live[id][1]
        units = random_units(dice, names)
        spec, nonce = spec_of(names), dice.choice(["", "", "n"])
        if op == "reserve":
            ttl, lost = dice.choice([0, WAITER, WAITER]), dice.choice(["charge", "release", "spent"])
            path = names[-1].split()[0].replace("-", "")
            granted, _, binds, *_ = reply = twins.step(op, id, spec, packed(units), HOLD, nonce, lost, ttl, path)
            check_reserve(model, now, id, names, units, nonce, lost, ttl, reply)
            if binds:
                assert reply[3] == model.available(names[binds - 1])
            if times > 1 and granted:
                assert twins.step(op, id, spec, packed(units), HOLD, nonce, lost, ttl, path)[0] == granted
        elif op == "extend":
            spent = [dice.randrange(amount + 1) for amount in units]
            reply = twins.step(op, id, spec, packed(units), HOLD, packed(spent))
            if times > 1:
                assert twins.step(op, id, spec, packed(units), HOLD, packed(spent))[0] == reply[0]
            check_extend(model, now, id, names, units, spent, reply)
        elif op in ("settle", "withdraw"):
            final = units if op == "settle" else [0] * len(units)
            unknown = dice.choice([0, 0, 1]) if op == "settle" else 0
            reply = twins.step(op, id, spec, packed(final), nonce, unknown)
            check_end(model, now, op, id, names, final, nonce, unknown, reply)
            again = twins.step(op, id, spec, packed(final), nonce, unknown)
            assert again[0] == reply[0]
        elif op == "pause" and dice.random() < 0.2:
            duration = dice.choice([0, SECOND, 20 * SECOND])
            reply = twins.step(op, "", spec, packed(units), duration, times=times)
            for bucket, amount in zip(names, units, strict=True):
                room = BUCKETS[bucket][0] - model.held(bucket)
                model.debts[bucket] = max(room + amount, model.debts[bucket])
                model.paused[bucket] = max(model.paused[bucket], now + duration)
        elif op == "holds":
            reply = twins.step(op, "", spec, packed(units))
            rows = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
            found = {each: (left, its_units) for each, left, its_units in rows}
            live = {each: hold for each, hold in model.live.items() if hold[1] == names}
            assert found == {each: (hold[0] - now, " ".join(map(str, hold[2]))) for each, hold in live.items()}
        every = list(BUCKETS)
        available = twins.step("available", "", spec_of(every), packed([0] * len(every)))
        assert available == [model.available(bucket) for bucket in every], (op, id, names, units)
        if op not in ("holds", "pause"):
            what = f"{op} {reply[0]}"
            seen[what] = seen.get(what, 0) + 1
    return seen


def check_reserve(
    model: Model,
    now: int,
    id: str,
    names: list[str],
    units: list[int],
    nonce: str,
    lost: str,
    ttl: int,
    reply: list[Any],
) -> None:
    if id in model.done and model.done[id][1] == nonce:
        assert reply[0] == -1
    elif id in model.live:
        its_names, its_units = model.live[id][1:3]
        same = its_names != names or its_units == units
        assert reply[:5] == ([1, 0, 0, 0, 0] if same else [2, len(its_units), 0, 0, 0])
        assert same or reply[5 : 5 + len(its_units)] == its_units
        model.live[id] = (now + HOLD, *model.live[id][1:])
    elif model.fits(id, names, units, now):
        assert reply[0] == 1, "refused with room"
        model.live[id] = (now + HOLD, names, units, [0] * len(units), lost, nonce)
        model.lost.pop(id, None)
        model.done.pop(id, None)
        model.queue.pop(id, None)
    else:
        assert reply[0] == 0 and reply[1] > 0, "granted without room, or out of turn"
        if ttl:
            model.queue[id] = (now + ttl, names, units)
        else:
            model.queue.pop(id, None)


def check_extend(
    model: Model, now: int, id: str, names: list[str], units: list[int], spent: list[int], reply: list[Any]
) -> None:
    if id in model.live and model.live[id][1] == names:
        _, _, known, _, lost, nonce = model.live[id]
        raised = [max(pair) for pair in zip(units, known, strict=True)]
        rows = zip(names, raised, known, strict=True)
        fits = all(amount == had or amount - had <= model.available(name) for name, amount, had in rows)
        assert reply[0] == fits
        model.live[id] = (now + HOLD, names, raised if fits else known, spent, lost, nonce)
    elif id in model.lost and model.lost[id][1] == names:
        _, _, cost, known, _, lost, nonce = model.lost[id]
        raised = [max(pair) for pair in zip(units, known, strict=True)]
        back = {name: min(paid, model.debts[name]) for name, paid in zip(names, cost, strict=True)}
        fits = all(amount <= model.available(name) + back[name] for name, amount in zip(names, raised, strict=True))
        assert reply[0] == fits
        if fits:  # it lives again
            del model.lost[id]
            model.add(names, cost, -1)
            model.live[id] = (now + HOLD, names, raised, spent, lost, nonce)
    else:
        assert reply[0] == 0


def check_end(
    model: Model,
    now: int,
    op: str,
    id: str,
    names: list[str],
    final: list[int],
    nonce: str,
    unknown: int,
    reply: list[Any],
) -> None:
    if op == "withdraw" and (id in model.lost or (id in model.live and model.live[id][5] != nonce)):
        assert reply[0] == 0
        return
    model.queue.pop(id, None)
    if id in model.live:
        assert reply[0] == 1
        model.done[id] = (forget_at(now), model.live.pop(id)[5], nonce)
        model.add(names, final)
    elif id in model.lost:
        assert reply[0] == 1
        _, its_names, cost, _, _, _, its_nonce = model.lost.pop(id)
        model.done[id] = (forget_at(now), its_nonce, nonce)
        model.add(names, final)
        model.add(its_names, cost, -1)
    else:
        assert reply[0] == (id in model.done and model.done[id][2] == nonce)
        if id not in model.done:
            model.done[id] = (forget_at(now), nonce, "-")
            if unknown:
                model.add(names, final)


def test_thousands_of_random_steps(redis_server: Server) -> None:
    """Both do what the model does, step by step, and every kind of reply was seen."""
    seen: dict[str, int] = {}
    for seed in range(12):
        twins = Twins(MACHINE, redis_server)
        for what, count in run_trace(twins, Model(), random.Random(seed), 250).items():
            seen[what] = seen.get(what, 0) + count
        client = redis_server.client()
        assert all(client.pttl(key) > 0 for key in client.keys("*")), "a key without a TTL"
        twins.close()
    expected = {"reserve 1", "reserve 0", "reserve -1", "extend 1", "extend 0", "settle 1", "settle 0"}
    assert seen.keys() >= expected | {"withdraw 1", "withdraw 0"}, seen


def reserve(
    twins: Twins, id: str, units: int, ttl: int = WAITER, names: Sequence[str] = ("- a",), path: str = ""
) -> Any:
    both = packed([units] * len(names))
    return twins.step("reserve", id, spec_of(names), both, HOLD, "", "release", ttl, path)


def settle(twins: Twins, id: str, units: int, names: Sequence[str] = A) -> Any:
    return twins.step("settle", id, spec_of(names), packed([units] * len(names)), "", 0)


def test_large_ones_do_not_starve(redis_server: Server) -> None:
    """No small reservation takes what a large one waits for; one that finds room beside that goes through."""
    twins, part = Twins(MACHINE, redis_server), 10**14
    assert reserve(twins, "a", 3 * part)[0] == reserve(twins, "b", 4 * part)[0] == 1
    assert reserve(twins, "large", 5 * part)[0] == 0
    assert reserve(twins, "small", part)[0] == 0, "three tenths are free, and the large one waits for five"
    assert reserve(twins, "hasty", part, ttl=0)[0] == 0
    assert settle(twins, "b", 0) == [1, ""], "waiters may go now"
    assert reserve(twins, "small", 2 * part)[0] == 1, "two tenths are left beside the five"
    assert reserve(twins, "large", 5 * part)[0] == 1
    twins.close()


def test_a_branch_does_not_block_another(redis_server: Server) -> None:
    """A waiter whose own level is used up does not hold up callers of another branch; a settle wakes both paths."""
    twins, part = Twins(MACHINE, redis_server), 10**14
    assert reserve(twins, "x1", 5 * part, names=("- a", "x a"), path="x")[0] == 1
    assert reserve(twins, "x2", 2 * part, names=("- a", "x a"), path="x")[0] == 0
    assert reserve(twins, "root", part)[0] == 1
    assert reserve(twins, "root 2", 4 * part)[0] == 0, "x2 waits for two of the four that are left"
    assert settle(twins, "x1", 0, ("- a", "x a")) == [1, "x", ""]
    assert reserve(twins, "x2", 2 * part, names=("- a", "x a"), path="x")[0] == 1
    twins.close()


def test_few_waiters_are_told(redis_server: Server) -> None:
    """A settle names the paths of the first waiters only."""
    twins = Twins(MACHINE, redis_server)
    assert reserve(twins, "all", 10**15)[0] == 1
    for number in range(MAX_WOKEN + 5):
        reserve(twins, f"{number:02}", 1, path=f"p{number}")
    assert settle(twins, "all", 0) == [1, *(f"p{number}" for number in range(MAX_WOKEN))]
    twins.close()


def test_a_clock_that_is_put_back(redis_server: Server) -> None:
    """A little: nothing drains until the time is reached again. More: it drains from the new time on."""
    twins, part = Twins(MACHINE, redis_server), 10**14
    reserve(twins, "a", part)
    settle(twins, "a", part)
    spec = spec_of(["- a"])
    for back, drained in (30, 0), (90, 5 * SECOND):
        now = twins.clock.now()
        [before] = twins.step("available", "", spec, packed([0]))
        twins.clock._now = now - back * SECOND  # no public way to put it back
        reserve(twins, f"touch {back}", 0)
        twins.clock.advance(5)
        assert twins.step("available", "", spec, packed([0])) == [before + drained]
        twins.clock._now = now
    twins.close()


def test_the_short_way() -> None:
    """A state whose steps are taken the short way where that can be done is as one that knows only the law."""
    outcomes = set()
    for seed in range(40):
        dice, law, short, now = random.Random(seed), BudgetState(), BudgetState(), 1_000 * SECOND
        live: list[tuple[str, list[str]]] = []
        for step in range(200):
            now += dice.choice([0, 1, SECOND // 10, SECOND, 4 * SECOND, dice.choice([SECOND, 11 * SECOND, LOST_TTL])])
            what, names = dice.choice(["reserve", "reserve", "wait", "settle", "settle", "extend"]), dice.choice(SPECS)
            if what in ("reserve", "wait"):
                id, units, ttl = f"id {step}", random_units(dice, names), WAITER if what == "wait" else 0
                spec, lost = spec_of(names), dice.choice(["charge", "release", "spent"])
                granted = law.hold(now, id, spec, units, HOLD, "", lost, ttl, "")
                shortly = short.grant(now, id, spec, buckets_of(spec), units, HOLD, lost)
                if not shortly:
                    assert short.hold(now, id, spec, units, HOLD, "", lost, ttl, "") == granted
                assert granted[0] == 1 or not shortly, "granted without room, or before a waiter"
                if granted[0]:
                    live.append((id, names))
                outcomes.add(("grant", shortly, granted[0]))
            elif live:
                id, names = live.pop(dice.randrange(len(live)))
                units, spec = random_units(dice, names), spec_of(names)
                if what == "extend":
                    both = [each.extend(now, id, spec, packed(units), HOLD, packed(units)) for each in (law, short)]
                    assert both[0] == both[1]
                    live.append((id, names))
                else:
                    settled = law.finish(now, id, spec, units, "", 0)
                    shortly = short.settle_granted(now, id, buckets_of(spec), units)
                    assert settled == (shortly or short.finish(now, id, spec, units, "", 0))
                    outcomes.add(("settle", shortly, settled))
            if dice.random() < 0.05:  # waiters give up
                law.waiting.clear()
                short.waiting.clear()
            every = (now, "", spec_of(list(BUCKETS)), b"")
            assert law.available(*every) == short.available(*every)
            for names in SPECS:
                assert law.holds(now, "", spec_of(names), b"") == short.holds(now, "", spec_of(names), b"")
            assert law.waiting.keys() == short.waiting.keys()
    grants = {("grant", True, 1), ("grant", False, 1), ("grant", False, 0)}
    assert outcomes == grants | {("settle", True, 1), ("settle", False, 1), ("settle", False, 0)}


def test_not_one_unit_more(redis_server: Server) -> None:
    """The short ways too grant all that there is, and not a unit more, of which a permit is many."""
    twins, names, room = Twins(MACHINE, redis_server), ["- b"], BUCKETS["- b"][0]
    short, spec = BudgetState(), spec_of(["- b"])
    for id, units, granted in ("first", 1, 1), ("over", room, 0), ("rest", room - 1, 1), ("one more", 1, 0):
        assert reserve(twins, id, units, ttl=0, names=names)[0] == granted, id
        assert short.grant(SECOND, id, spec, buckets_of(spec), [units], HOLD, "release") == bool(granted), id
    assert settle(twins, "rest", room - 1, names) == [1] and settle(twins, "first", 0, names) == [1]
    for id, units, granted in ("over", 2, 0), ("last", 1, 1):  # beside a debt
        assert reserve(twins, id, units, ttl=0, names=names)[0] == granted, id
    twins.close()


def test_nothing_is_left(redis_server: Server) -> None:
    """A state whose debts are paid and whose holds are forgotten takes no room in memory, and little while it lives."""
    twins = Twins(MACHINE, redis_server)
    for number in range(2000):
        twins.memory.run(MACHINE, twins.name, _operation("reserve", str(number), 1))
        twins.memory.run(MACHINE, twins.name, _operation("settle", str(number), 1))
    state = twins.memory._states[MACHINE.prefix, twins.name]
    assert len(state.due) <= 4 * len(state.records) + 64
    twins.clock.advance(2 * DONE_TTL / SECOND)
    assert state.is_expired(twins.clock.now())
    twins.close()


def _operation(name: str, id: str, units: int) -> Any:
    more: tuple[str | int | bytes, ...] = (HOLD, "", "charge", 0, "") if name == "reserve" else ("", 0)
    return Operation(name, (id, spec_of(["- a"]), packed([units]), *more))
