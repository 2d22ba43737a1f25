"""Break the protocol in every way that is known to matter, and see the tests go red.

    python -m tests.hybrid.mutants            all of them; exits with 1 if one survives
    python -m tests.hybrid.mutants report     those whose name has that in it

Each is one change to a copy of the source; then the tests that should notice run against the copy. The first run has
no change at all and must be green.
"""

# ruff: noqa: E501  # excerpts of the source as they are
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE, TWINS, LEASE = "test_machine.py", "test_twins.py", "test_lease.py"
HABITS, TABLE, RETRY, STATS = "test_habits.py", "test_table.py", "test_retry.py", "test_stats.py"
SIMULATE = "test_simulate.py"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = MACHINE


MUTANTS = [
    Mutant(
        "refill ignores what is leased out",
        "ledger.py",
        "(now - self.at) * law.rate, self._top(law, law.room)), law.room",
        "(now - self.at) * law.rate, law.room), law.room",
    ),
    Mutant(
        "report applied before refill",
        "ledger.py",
        "        free, ceiling = self._load(now)  # refill first: what was leased until now left no room for it\n",
        "        early = self.nodes.get(ask.node)\n"
        "        if early and early.seq < ask.seq and early.lid == ask.lid and ask.ack >= early.seq:\n"
        "            self.out -= early.out - min(ask.held, early.out)\n"
        "            early.out = min(ask.held, early.out)\n"
        "        free, ceiling = self._load(now)\n",
    ),
    Mutant(
        "a burn before the refill",
        "ledger.py",
        "        free, ceiling = self._load(now)  # refill first",
        "        if now >= self.exp:\n            self._burn(now)\n        free, ceiling = self._load(now)  # refill first",
    ),
    Mutant(
        "an expired lease is refunded",
        "ledger.py",
        "            self._burn(now)\n        free -= self._overhang()\n",
        "            was = self.out\n            self._burn(now)\n            free += (was - self.out) * law.cost\n"
        "        free -= self._overhang()\n",
    ),
    Mutant("no sequence check", "ledger.py", "if record and ask.seq <= record.seq:", "if record and ask.seq < 0:"),
    Mutant("the same number twice", "ledger.py", "if record and ask.seq <= record.seq:", "if record and ask.seq < record.seq:"),
    Mutant("a late reply is accepted", "lease.py", "        if ask.seq != self.flight:\n", "        if ask.seq < 0:\n"),
    Mutant(
        "a return is not cut to what was leased",
        "ledger.py",
        "returned = max(0, min(ask.returned - record.returned, record.out - held))",
        "returned = max(0, ask.returned - record.returned)",
        TWINS,
    ),
    Mutant("a lease is known by anybody", "ledger.py", "(not record or record.lid != ask.lid)", "(not record)", TWINS),
    Mutant(
        "what is held is believed",
        "ledger.py",
        "held = min(ask.held, record.out) if",
        "held = ask.held if",
        TWINS,
    ),
    Mutant(
        "a lost grant is not taken back from what is out",
        "ledger.py",
        "            self.out -= record.lease\n            record.out -= record.lease\n",
        "            record.out -= record.lease\n",
    ),
    Mutant(
        "permits that were decided and not received come back",
        "ledger.py",
        "            free += record.lease * law.cost\n",
        "            free = max(free, min(free + (record.lease + 1) * law.cost, law.room - self.out * law.cost))\n",
    ),
    Mutant(
        "an old lease is kept under a new one",
        "ledger.py",
        "        self.out -= record.out - held\n",
        "        self.out -= record.out - held if ask.lid else 0\n",
    ),
    Mutant("a lease is cut short", "ledger.py", "max(exp, record.exp) if held else exp", "exp", LEASE),
    Mutant("a lease is not counted as out", "ledger.py", "        self.out += lease\n", "        self.out += 0\n"),
    Mutant("what waits is served for nothing", "ledger.py", "            free -= many * permits * law.cost\n", "            pass\n"),
    Mutant(
        "a lease outlives its time here",
        "lease.py",
        "self.expires = self.sent_at + lasts - lasts // 1000 - MARGIN",
        "self.expires = now + lasts",
    ),
    Mutant("a lease outlives its window", "lease.py", "lasts = 1000 * (min(ask.ttl, reply.ends) if reply.ends else ask.ttl)", "lasts = 1000 * ask.ttl"),
    Mutant(
        "what goes back stays here",
        "lease.py",
        "        self.balance -= multiply(give, law.cost)\n",
        "        self.balance -= 0\n",
    ),
    Mutant("a key met again claims to know nothing", "../../../tests/support/hybrid_fleet.py", "Lease(\"k\", process.seq,", "Lease(\"k\", 0,"),
    Mutant("a lease that nobody knows is spent on", "lease.py", "                self.balance = self.mark = self.unheard = self.lid = self.expires = self.known = 0\n", "                self.lid = 0\n", LEASE),
    Mutant("a debt without a floor", "ledger.py", "max(free - debt * law.cost, -law.room)", "free - debt * law.cost", LEASE),
    Mutant("a lowered quota owes what is leased", "ledger.py", "return top if law.period else max(top, 0)", "return top", LEASE),
    Mutant("what comes back of a larger quota fills above the brim", "ledger.py", "            free = min(free, top)  # more", "            pass  # more", LEASE),
    Mutant("leases of a larger quota are not in the way", "ledger.py", "return top if law.period else max(top, 0)", "return top if law.period or top >= 0 else law.room"),
    Mutant("more is leased than the style says", "ledger.py", "fair, there, most - self.out, room)", "fair, there, room)", LEASE),
    Mutant("first come takes all", "ledger.py", "fair = max(1, ceil(there * min(1, WIDE * part)))", "fair = there", LEASE),
    Mutant("a spare for everybody", "ledger.py", "if plenty else 0), full, False", "if plenty or 1 else 0), full, False", LEASE),
    Mutant("a clock that steps back makes leases longer", "ledger.py", "                record.exp -= back\n", "                pass\n", LEASE),
    Mutant("a lease does not last until the next report", "lease.py", "SPARE_TTL if spare else max(TTL, 3 * self.pause)", "SPARE_TTL if spare else TTL", LEASE),
    Mutant("a counter leases for a few milliseconds", "lease.py", " or now < self.ends < now + MARGIN + TICK):", "):", LEASE),
    Mutant("a counter leases what will have run out", "lease.py", "        if max(self.promise, self.latest) > max(now, self.deny_until + self.later):", "        if False:", RETRY),
    Mutant("a counter leases what was promised", "lease.py", "        return self.latest + TICK > now and self.latest + MARGIN + TICK + 2 * trip >= self.turns\n", "        return False\n", RETRY),
    Mutant("a counter refuses while it fetches", "table.py", "return lease.balance == 0 and lease.flight == 0", "return lease.balance == 0", RETRY),
    Mutant("a report counts as heard when it is sent", "table.py", "self.room - lease.unheard - lease.mark", "self.room - lease.mark", RETRY),
    Mutant("the latest promise only", "lease.py", "or until < self.promise", "or until > self.promise", LEASE),
    Mutant("the first promise only", "lease.py", "if self.promise >= earliest else self.latest", "if self.promise >= earliest else 0", RETRY),
    Mutant("a promise that cannot be kept", "lease.py", "                self.due = earliest = self.sent_at + reply.wait * 1000\n", "                self.due = self.sent_at + reply.wait * 1000\n", LEASE),
    Mutant("a long trip makes a wait short", "lease.py", "self.deny_until = max(latest, self.due + trip + 2 * TICK)", "self.deny_until = self.due + trip + 2 * TICK", RETRY),
    Mutant("a long trip makes a wait short where nothing is leased", "lease.py", "max(latest, min(self.due, now + law.room // law.rate * 250))", "min(self.due, now + law.room // law.rate * 250)", LEASE),
    Mutant("a crowd is kept its promise", "lease.py", "        kept = self.balance > 0 and self.several < earliest and not law.period\n", "        kept = False\n", SIMULATE),
    Mutant("one permit is enough for several", "lease.py", "kept = self.balance > 0 and self.several < earliest and", "kept = self.balance > 0 and", RETRY),
    Mutant("what runs out keeps a promise", "lease.py", "self.several < earliest and not law.period\n", "self.several < earliest\n", RETRY),
    Mutant("what came too late is burned", "lease.py", "if now >= self.expires and (self.balance == 0 or now >= self.known):", "if now >= self.expires:", LEASE),
    Mutant("what came too late is refused for", "lease.py", "                self.deny_until, self.due = 0, now\n", "                self.due = now\n", LEASE),
    Mutant("what was burned goes back", "lease.py", "if now >= self.expires and (self.balance == 0 or now >= self.known):", "if now >= self.expires and self.balance == 0:", LEASE),
    Mutant("what was served meanwhile is promised again", "lease.py", "            self.there -= multiply(-(-early // 1000), law.rate)", "            self.there -= 0", RETRY),
    Mutant("a window is over when it may not be", "lease.py", "self.ends = now + reply.ends * 1000 if", "self.ends = self.sent_at + reply.ends * 1000 if", RETRY),
    Mutant("refused beyond the window", "lease.py", "                self.deny_until = min(self.deny_until, self.ends)\n", "                pass\n", RETRY),
    Mutant("alone, and waits for others", "lease.py", "if reply.wait > 0 and reply.nodes == 1:", "if reply.wait < 0:", RETRY),
    Mutant("alone, and asks for every permit", "lease.py", "max(reply.wait * 1000, ALONE, shortest)", "max(reply.wait * 1000, shortest)", RETRY),
    Mutant("refused although something went back", "lease.py", "            self.deny_until = 0  # there will be", "            pass  # there will be", LEASE),
    Mutant("many are refused in spite of others", "lease.py", "        if reply.others or law.period:\n", "        if law.period:\n", LEASE),
    Mutant("refusals are no demand", "lease.py", " or self.denied > 0 or self.debt > 0", " or self.debt > 0", LEASE),
    Mutant("leases that only delay", "lease.py", "> style.leased / 1000 * law.limit:", "> style.leased * 1e9 * law.limit:", LEASE),
    Mutant("a reset forgives what may be charged", "lease.py", "        self.debt = self.doubt\n", "        self.debt = 0\n", LEASE),
    Mutant("idle, and nobody looks", "lease.py", "            self.due = self.look = now + self.quiet\n", "            pass\n", HABITS),
    Mutant("idle after any gap", "lease.py", "max(IDLE, min(int(FEW * SECOND / max(self.demand, 0.001)), self.pause))", "IDLE", HABITS),
    Mutant("asked for when reported", "lease.py", "        if spent != self.glance or needs:\n", "        if spent > 0 or needs:\n", HABITS),
    Mutant("trust is forgotten", "lease.py", " or now < self.remember:", ":", HABITS),
    Mutant("trust while others hold leases", "lease.py", "self.remember = now + self._empty(reply, law)", "self.remember = now + reply.wait * 1000 * (reply.others == 0)", HABITS),
    Mutant("taken from a lease that ran out", "table.py", "if now >= lease.expires or lease.balance < cost:", "if lease.balance < cost:", TABLE),
    Mutant("put back into a lease that ran out", "table.py", ", 0) if self.read_clock() < lease.expires else 0", ", 0)", TABLE),
    Mutant("a refund of any amount is told", "table.py", "max(-(-min(cost - here, missing) // self.cost), 0)", "(cost - here) // self.cost", TABLE),
    Mutant("a refund leaves the refusal", "table.py", "            lease.deny_until = 0\n", "", TABLE),
    Mutant("a look at an empty lease", "table.py", "and now < lease.expires and lease.balance > 0:", "and now < lease.expires:", TABLE),
    Mutant("full before it can be asked again", "table.py", "max(self.reset(lease, now, spare), wait)", "self.reset(lease, now, spare)", TABLE),
    Mutant("a refund unasks", "table.py", "            self.refunded += here\n", "", STATS),
    Mutant("an outage is a wait", "table.py", "                self.outage.asked += cost // self.cost\n", "", STATS),
    Mutant("the parent's lock", "node.py", "            member.table.renew(self.lock)\n", "", HABITS),
    Mutant("the parent's queues", "node.py", "        self.waiting, self.leaving, self.wheel = {}, Farewells(), Wheel()\n", "", HABITS),
    Mutant("everybody finds out whether Redis is back", "node.py", "few = 1 if down else BATCH", "few = BATCH", HABITS),
    Mutant("no back-off", "backend.py", "self._retry = min(2 * self._retry, LAST_RETRY)", "self._retry = FIRST_RETRY", HABITS),
    Mutant("who is ill is asked about", "member.py", "if node.backend.down is None and now >= lease.ill:", "if node.backend.down is None:", HABITS),
    Mutant("the number of processes is forgotten at once", "node.py", "self.seen = max(reply.nodes, self.seen + (reply.nodes - self.seen) // 16)", "self.seen = reply.nodes", HABITS),
    Mutant("the number of processes is never forgotten", "node.py", "self.seen = max(reply.nodes, self.seen + (reply.nodes - self.seen) // 16)", "self.seen = max(reply.nodes, self.seen)", HABITS),
    Mutant("a reset in an outage keeps the debt", "member.py", "            lease.forgive()\n", "            pass\n", HABITS),
    Mutant("a debt that leaves is forgotten", "farewells.py", "told = (lease.lid and lease.worth()) or lease.debt or lease.refund", "told = lease.lid and lease.worth()", HABITS),
    Mutant("a refund is told some time", "member.py", "            if not self.table.refund(key, permits):\n                lease.due = now\n", "            if not self.table.refund(key, permits):\n", HABITS),
    Mutant("who joins late does not hear of the outage", "node.py", "            member.outage.down = self.backend.down\n            member.outage.alone", "            member.outage.alone", HABITS),
    Mutant("a new key thinks it is alone", "member.py", "                lease.nodes = self.node.seen\n", "", HABITS),
    Mutant("the latest goes first", "member.py", "(lease.debt > 0, lease.asked_at)", "(lease.debt > 0, -lease.asked_at)", HABITS),
    Mutant("debts go first", "member.py", "(lease.debt > 0, lease.asked_at)", "lease.asked_at", HABITS),
]  # fmt: skip

LUA = [
    ("refill ignores what is leased out", "* law.rate, top_of(s, law, law.room)), law.room", "* law.rate, law.room), law.room"),
    ("an expired lease is refunded", "  free = free - overhang(s, law)\n", "  if s.exp == FOREVER and s.nodes == 0 then free = free + law.cost end\n"),
    ("a burn before the refill", "  local free, ceiling = load(s, law, now)\n  local loaded", "  if now >= s.exp then burn(s, now, node) end\n  local free, ceiling = load(s, law, now)\n  local loaded"),
    ("a lease is cut short", "held > 0 and max(exp, record.exp) or exp", "exp"),
    ("no sequence check", "if record and ask.seq <= record.seq then", "if record and ask.seq < 0 then"),
    ("a return is not cut", "max(0, min(ask.returned - record.returned, record.out - held))", "max(0, ask.returned - record.returned)"),
    ("a lost grant is not taken back", "    s.out = s.out - record.lease\n", ""),
    ("the key expires before its leases", "3600000000, 91000000", "3600000000, 1000"),
    ("all records in one call", "for i = 1, size, 1000 do redis.call('HSET', s.key, unpack(pairs_, i, min(i + 999, size))) end", "redis.call('HSET', s.key, unpack(pairs_))"),
    ("a lowered quota owes what is leased", "return law.windowed and top or max(top, 0)", "return top"),
    ("digits are lost", "string.format('%.0f:%.0f:%.0f", "string.format('%.14g:%.14g:%.14g"),
]  # fmt: skip

MUTANTS += [Mutant(f"Lua: {name}", "script.py", old, new, TWINS) for name, old, new in LUA]


def mutated(mutant: Mutant, place: Path) -> tuple[Path, str]:
    """The file below *place* that *mutant* changes, and what it says then."""
    path = Path(place, "src/headgate/hybrid", mutant.file).resolve()
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: its place is found {text.count(mutant.old)} times"
    return path, text.replace(mutant.old, mutant.new)


def survives(mutant: Mutant | None) -> bool:
    """Whether the tests stay green with *mutant* in the source."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(
            ROOT / "src", Path(place, "src"), ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        )
        shutil.copytree(ROOT / "tests", Path(place, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs", Path(place, "docs"))
        if mutant:
            path, text = mutated(mutant, Path(place))
            path.write_text(text)
        tests = sorted({one.tests for one in MUTANTS}) if mutant is None else [mutant.tests]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        command += ["--rootdir", place, *(f"{place}/tests/hybrid/{name}" for name in tests)]
        environment = os.environ | {"PYTHONPATH": f"{place}/src:{place}", "HEADGATE_MACHINE_SHRINK": "0"}
        environment.pop("HEADGATE_EXPECT_COMPILED", None)
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode not in (0, 1) or (mutant is None and done.returncode):
            raise RuntimeError(done.stdout + done.stderr)
        return done.returncode == 0


def chosen(words: list[str]) -> Iterator[Mutant]:
    return (mutant for mutant in MUTANTS if all(word in mutant.name for word in words))


def main() -> None:
    for mutant in MUTANTS:
        mutated(mutant, ROOT)
    survives(None)
    alive = 0
    for mutant in chosen(sys.argv[1:]):
        lives = survives(mutant)
        alive += lives
        print(f"{'SURVIVES' if lives else 'killed  '}  {mutant.name}", flush=True)
    print(f"{alive} survive")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
