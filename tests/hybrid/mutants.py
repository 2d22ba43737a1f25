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
        "(now - self.at) * law.rate, law.room - self.out * law.cost), law.room",
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
        "            self._burn(now)\n        free -= self._overhang()\n\n",
        "            was = self.out\n            self._burn(now)\n            free += (was - self.out) * law.cost\n"
        "        free -= self._overhang()\n\n",
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
    Mutant("a lease outlives its window", "lease.py", "lasts = min(self.ttl, reply.ends * 1000) if reply.ends else self.ttl", "lasts = self.ttl"),
    Mutant(
        "what goes back stays here",
        "lease.py",
        "        self.balance -= times(give, law.cost)\n",
        "        self.balance -= 0\n",
    ),
    Mutant("a key met again claims to know nothing", "../../../tests/hybrid/fleet.py", "Lease(\"k\", process.seq,", "Lease(\"k\", 0,"),
    Mutant("a lease that nobody knows is spent on", "lease.py", "                self.balance = self.mark = self.lid = self.expires = 0\n", "                self.lid = 0\n", LEASE),
]  # fmt: skip

LUA = [
    ("refill ignores what is leased out", "* law.rate, law.room - s.out * law.cost), law.room", "* law.rate, law.room), law.room"),
    ("an expired lease is refunded", "  free = free - overhang(s, law)\n", "  if s.exp == FOREVER and s.nodes == 0 then free = free + law.cost end\n"),
    ("a burn before the refill", "  local free, ceiling = load(s, law, now)\n  local loaded", "  if now >= s.exp then burn(s, now, node) end\n  local free, ceiling = load(s, law, now)\n  local loaded"),
    ("a lease is cut short", "held > 0 and max(exp, record.exp) or exp", "exp"),
    ("no sequence check", "if record and ask.seq <= record.seq then", "if record and ask.seq < 0 then"),
    ("a return is not cut", "max(0, min(ask.returned - record.returned, record.out - held))", "max(0, ask.returned - record.returned)"),
    ("a lost grant is not taken back", "    s.out = s.out - record.lease\n", ""),
    ("digits are lost", "string.format('%.0f:%.0f:%.0f", "string.format('%.14g:%.14g:%.14g"),
]  # fmt: skip

MUTANTS += [Mutant(f"Lua: {name}", "script.py", old, new, TWINS) for name, old, new in LUA]


def survives(mutant: Mutant | None) -> bool:
    """Whether the tests stay green with *mutant* in the source."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(
            ROOT / "src", Path(place, "src"), ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
        )
        shutil.copytree(ROOT / "tests", Path(place, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs", Path(place, "docs"))
        if mutant:
            path = Path(place, "src/headgate/hybrid", mutant.file).resolve()
            text = path.read_text()
            assert text.count(mutant.old) == 1, f"{mutant.name}: its place is found {text.count(mutant.old)} times"
            path.write_text(text.replace(mutant.old, mutant.new))
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
