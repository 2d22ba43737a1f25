"""`python -m tests.support.stepping KILLS SCENARIO...`: kill a process at each instruction of one call of the C table.

A child makes one call; a tracer runs it to the entry of a C function, goes on for n instructions and kills it, for n
from 0 to the return, in as many steps as KILLS allows. Then what is left in the file is judged twice: by a witness that
had the file open all the time, and by an heir that opens it anew and gets the seat of the dead process. Prints one line
of JSON for each scenario: how many kills, how many of them had spent, violations, and the longest that a judge waited.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headgate import Limiter
from headgate.stores import SharedStore
from headgate.stores.shared import files, tables
from headgate.testing import ManualClock

LIMIT = 5
HOUR = 3600.0


def stepper(directory: Path) -> ctypes.CDLL:
    """Compile the tracer."""
    source, made = Path(__file__).with_name("stepper.c"), directory / "stepper.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, source], check=True)
    library = ctypes.CDLL(str(made))
    library.step.restype = ctypes.c_long
    library.step.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_long]
    library.run_to.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.POINTER(ctypes.c_long)]
    return library


def addresses() -> dict[str, int]:
    """Where the functions of the C table are in this process and in its forks."""
    path = files.native.__file__
    with open("/proc/self/maps", encoding="ascii") as maps:
        start = next(int(line.split("-")[0], 16) for line in maps if path in line and line.split()[2] == "00000000")
    listed = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines()]
    return {words[2]: start + int(words[0], 16) for words in lines if len(words) == 3}


class Scenario:
    """One call on a prepared file; the function of the C table in which it is killed, and what must be left."""

    cost = 1

    def __init__(self, entry: str, quotas: Any, algorithm: Any = "token_bucket", *, prepare: str = "warm") -> None:
        self.entry, self.quotas, self.algorithm, self.prepare = entry, quotas, algorithm, prepare

    def open(self) -> Limiter:
        store = SharedStore(f"shared://{self.directory}", max_keys=1, clock=self.clock)
        return Limiter(self.quotas, algorithm=self.algorithm, store=store, on_store_error="raise")

    def set_up(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        tables._open.clear()
        self.directory, self.clock = directory, ManualClock()
        self.witness = self.open()
        getattr(self, f"prepare_{self.prepare}")()

    def prepare_warm(self) -> None:
        assert self.witness.try_acquire("k")
        self.left = LIMIT - 1

    def prepare_new(self) -> None:
        self.left = LIMIT

    def prepare_full(self) -> None:
        """All keys of the set but one are at their limit."""
        for number in range(30):
            assert self.witness.try_acquire(f"limited {number}", LIMIT)
        assert self.witness.try_acquire("least")
        self.left = LIMIT

    def act(self, limiter: Limiter) -> object:
        return limiter.try_acquire("k", self.cost)

    def judge(self, limiter: Limiter, returned: bool) -> str:
        """What is wrong with the file after the kill; empty if nothing is."""
        spent = self.spent_of_each(limiter)
        if len(set(spent)) > 1:
            return f"one quota has spent, another has not: {spent}"
        got = 0
        while got <= 2 * LIMIT and limiter.try_acquire("k"):
            got += 1
        if got not in (self.left, self.left - self.cost):
            return f"{got} admitted, {self.left} were left"
        if returned and self.entry != "find" and got == self.left:
            return f"it returned, and {got} admitted, as many as were left before"
        if self.prepare == "full" and any(limiter.try_acquire(f"limited {number}") for number in range(30)):
            return "a key at its limit was set free"
        self.spent = got != self.left
        return ""

    def spent_of_each(self, limiter: Limiter) -> list[int]:
        """What was spent of each quota."""
        backend: Any = limiter._backend
        if len(limiter.rule.quotas) == 1 or (found := backend.table.read("k")) is None:
            return []
        now, parts = backend.now(), limiter.rule.parts
        states = backend.words.decode(found, now)
        return [part.limit - part.remaining(state, now) for part, state in zip(parts, states, strict=True)]


class Log(Scenario):
    """Three permits in one call; *before* calls were made, and then *seconds* passed."""

    cost = 3

    def __init__(self, before: int, seconds: float, limit: int, *, refund: int = 0) -> None:
        super().__init__("write_state", f"{limit}/hour", "sliding_window", prepare="calls")
        self.before, self.seconds, self.limit, self.refund = before, seconds, limit, refund

    def prepare_calls(self) -> None:
        for _ in range(self.before):
            assert self.witness.try_acquire("k", 2 if self.refund else 1)
        if self.refund:
            assert self.witness.refund("k", self.refund)  # of the last call, in part
        self.clock.advance(self.seconds)
        self.left = self.witness.peek("k", 0).remaining

    def judge(self, limiter: Limiter, returned: bool) -> str:
        left = limiter.peek("k", 0).remaining
        if left not in (self.left, self.left - self.cost) or (returned and left == self.left):
            return f"{left} are left of {self.left}, returned: {returned}"
        self.spent = left < self.left
        got = sum(limiter.try_acquire("k").allowed for _ in range(left + 2))
        if got != left:
            return f"{got} admitted of {left}"
        self.clock.advance(HOUR)  # everything expires in its time, and nothing is left over
        after = limiter.peek("k", 0).remaining
        return "" if after == self.limit else f"{after} of {self.limit} after an hour"


class Refund(Scenario):
    """A refund that is killed gives back one permit or none."""

    cost = -1

    def act(self, limiter: Limiter) -> object:
        return limiter.refund("k")


TWO = [f"{LIMIT}/hour", f"{2 * LIMIT}/2h"]
SCENARIOS: dict[str, Scenario] = {
    "find": Scenario("find", f"{LIMIT}/hour"),
    "swap": Scenario("swap", f"{LIMIT}/hour"),
    "swap of a counter": Scenario("swap", f"{LIMIT}/hour", "sliding_window_counter"),
    "refund": Refund("swap", f"{LIMIT}/hour"),
    "new key": Scenario("add", f"{LIMIT}/hour", prepare="new"),
    "eviction": Scenario("replace", f"{LIMIT}/hour", prepare="full"),
    "two quotas": Scenario("write_state", TWO),
    "two quotas, new key": Scenario("add_state", TWO, prepare="new"),
    "two quotas, eviction": Scenario("replace_state", TWO, prepare="full"),
    "log": Log(2, 1.0, LIMIT),
    "log, all expired": Log(5, HOUR + 1, LIMIT),
    "log, larger ring": Log(16, 1.0, 40),
    "log, smaller ring": Log(32, HOUR + 1, 40),
    "log after a refund": Log(3, 1.0, 12, refund=1),
}


class Hang(Exception):
    pass


def _ring(*_: object) -> None:
    raise Hang


class Run:
    """One scenario: kill, judge, tally."""

    def __init__(self, scenario: Scenario, tracer: ctypes.CDLL, directory: Path, places: dict[str, int]) -> None:
        self.scenario, self.tracer, self.directory = scenario, tracer, directory
        self.address = places[scenario.entry]
        self.kills = self.spent = 0
        self.slowest = 0.0
        self.violations: list[str] = []

    def start(self) -> tuple[int, int]:
        """Start a child and run it to the entry of the function; its number, and the address of the return."""
        pid = os.fork()
        if not pid:
            try:
                tables._open.clear()
                limiter = self.scenario.open()
                assert self.tracer.trace_me() == 0, "may not trace"
                os.kill(os.getpid(), signal.SIGSTOP)
                self.scenario.act(limiter)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        back = ctypes.c_long()
        reached = self.tracer.run_to(pid, self.address, ctypes.byref(back))
        assert reached == 0, reached
        return pid, back.value

    def kill_after(self, steps: int) -> tuple[int, bool]:
        """Set up, kill a child after so many instructions; how many it made, and whether the function returned."""
        self.scenario.set_up(self.directory)
        pid, back = self.start()
        made = self.tracer.step(pid, steps, back)
        assert made >= 0, made
        self.tracer.slay(pid)
        return made, made < steps or steps > 1 << 30

    def run_to_lock(self) -> int:
        """Start a child and leave it stopped at the first instruction after it has taken the lock of the set."""
        self.scenario.set_up(self.directory)
        pid, back = self.start()
        file: Any = self.scenario.witness._backend.file  # type: ignore[attr-defined]  # a SharedRule has one
        while not file.words[file.geometry.first_set]:
            assert self.tracer.step(pid, 1, back) == 1
        return pid

    def kill_with_lock(self, times: int) -> dict[str, Any]:
        """How long another process takes for a call on the set whose lock a killed process has left, in ms."""
        took = []
        for _ in range(times):
            self.tracer.slay(self.run_to_lock())
            begun = time.perf_counter()
            assert self.scenario.witness.try_acquire("k")
            took.append(1000 * (time.perf_counter() - begun))
        return {"kills": times, "median_ms": round(sorted(took)[times // 2], 3), "slowest_ms": round(max(took), 1)}

    def stop_with_lock(self) -> dict[str, Any]:
        """Leave a child stopped with the lock of the set, then kill it."""
        scenario, pid = self.scenario, self.run_to_lock()
        careful = Limiter(scenario.quotas, store=scenario.witness.store, on_store_error="deny")
        begun = time.monotonic()
        during = careful.try_acquire("k")
        seconds = time.monotonic() - begun
        self.tracer.slay(pid)
        after = [careful.try_acquire("k") for _ in range(LIMIT)]
        return {
            "degraded_while_stopped": during.degraded,
            "seconds_while_stopped": seconds,
            "degraded_after": any(decision.degraded for decision in after),
            "admitted_of_5": sum(decision.allowed for decision in after),
        }

    def judge(self, name: str, returned: bool, limiter: Callable[[], Limiter]) -> None:
        self.kills += 1
        self.scenario.spent = False
        signal.alarm(5)
        begun = time.perf_counter()
        try:
            why = self.scenario.judge(limiter(), returned)
        except Hang:
            why = "hangs"
        finally:
            signal.alarm(0)
        self.slowest = max(self.slowest, time.perf_counter() - begun)
        self.spent += self.scenario.spent
        if why:
            self.violations.append(f"{name}: {why}")

    def all(self, kills: int) -> dict[str, Any]:
        total = self.kill_after(1 << 40)[0]
        for steps in range(0, total + 2, max(1, 2 * total // kills)):
            _, returned = self.kill_after(steps)
            self.judge(f"witness, {steps} of {total}", returned, lambda: self.scenario.witness)
            _, returned = self.kill_after(steps)
            tables._open.clear()
            self.judge(f"heir, {steps} of {total}", returned, self.scenario.open)
        return {"instructions": total, "kills": self.kills, "spent": self.spent, "violations": self.violations}


def main() -> None:
    assert "LD_BIND_NOW" in os.environ, "without it, most instructions are those of the dynamic linker"
    kills, names = int(sys.argv[1]), sys.argv[2:] or list(SCENARIOS)
    signal.signal(signal.SIGALRM, _ring)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        tracer, places = stepper(Path(root)), addresses()
        if names[0] in ("stopped", "killed"):
            run = Run(SCENARIOS["two quotas"], tracer, Path(root) / "store", places)
            found = run.stop_with_lock() if names == ["stopped"] else run.kill_with_lock(kills)
            print(json.dumps(found), flush=True)
            return
        for name in names:
            begun = time.monotonic()
            run = Run(SCENARIOS[name], tracer, Path(root) / "store", places)
            result = {"scenario": name, **run.all(kills), "slowest_ms": round(1000 * run.slowest, 1)}
            print(json.dumps({**result, "seconds": round(time.monotonic() - begun, 1)}), flush=True)


if __name__ == "__main__":
    main()
