"""Processes that share a store: exact to the permit, whatever happens to one of them.

What kills a process at each instruction is in `tests.support.stepping`, what kills processes at random moments in
`tests.support.killing`; here a few hundred kills are made. `make soak` makes thousands.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate import Limiter
from tests.stores.test_shared import directory, limiter_at  # noqa: F401  # a fixture
from tests.support import killing, stepping
from tests.support.clocks import until
from tests.support.quotas import LAWS, law

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("HEADGATE_SHARED_KILLS", "24"))  # in each scenario
SECONDS = float(os.environ.get("HEADGATE_SHARED_SECONDS", "1.5"))  # for each trial

Process = subprocess.Popen[str]
pytestmark = [pytest.mark.server, pytest.mark.xdist_group("shared processes")]

needs_stepper = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"),
    reason="needs a compiler, and the registers of x86-64 Linux",
)


def steppable(test: Any) -> Any:
    """A test that goes through the C table instruction by instruction."""
    return pytest.mark.build("compiled")(needs_stepper(test))


@pytest.fixture(scope="module")
def sharers() -> Iterator[list[Process]]:
    command = [sys.executable, "-m", "tests.support.sharers"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def ask(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("keys", "rounds", "limit"), [(1, 2000, 1000), (1000, 4, 7)], ids=["one key", "1,000 keys"])
@pytest.mark.parametrize("algorithm", [*LAWS, "several"])
def test_exact(algorithm: str, keys: int, rounds: int, limit: int, sharers: list[Process], directory: Path) -> None:  # noqa: F811
    """Four processes ask for more than there is: exactly the limit of each key is granted."""
    quotas = [f"{limit}/3660d", f"{limit + 1}/3000d"] if algorithm == "several" else [f"{limit}/3660d"]
    chosen = law("token_bucket" if algorithm == "several" else algorithm)
    order = {"url": f"shared://{directory}?max_keys=5000", "quotas": quotas, "law": chosen}
    for process in sharers:
        ask(process, json.dumps({**order, "keys": keys, "rounds": rounds}))
    assert [hear(process) for process in sharers] == ["ready"] * len(sharers)
    for process in sharers:
        ask(process, "go")
    assert sum(int(hear(process)) for process in sharers) == limit * keys


# --------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.bounded(900)
@pytest.mark.parametrize("trial", killing.TRIALS)
def test_killed_at_random(trial: str) -> None:
    """What was answered was paid; a kill costs at most the call that it ended; a key at its limit stays there."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.support.killing", str(SECONDS), trial]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["unpaid"] == found["freed"] == found["died"] == 0
    assert found["in_vain"] <= found["kills"]
    assert found["kills"] > 4 and found["calls"] > 100, "the trial never came to the point"


@steppable
@pytest.mark.bounded(3600)
@pytest.mark.parametrize("scenario", stepping.SCENARIOS)
def test_killed_at_each_instruction(scenario: str) -> None:
    """Nothing is torn, stuck, freed or given twice, whatever instruction of the C table was the last one."""
    found = step(str(KILLS), scenario)
    print(found)
    assert found["violations"] == []
    assert found["kills"] >= min(KILLS, found["instructions"])
    assert found["slowest_ms"] < 2000  # of a busy machine; alone it is below ten


def step(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.support.stepping", *arguments]
    environment = {**os.environ, "LD_BIND_NOW": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "may not trace" in done.stderr:
        pytest.skip("may not trace processes here")
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@steppable
def test_killed_with_the_lock() -> None:
    """The next call on the set finds that the holder is dead, and goes on within 10 ms."""
    found = step(str(KILLS), "killed")
    print(found)
    assert found["median_ms"] < 10  # a single one may wait for its turn on a busy machine


# ------------------------------------------------------------------------------------------------- stopped, not killed


@steppable
def test_a_holder_that_is_stopped() -> None:
    """A process is stopped with the lock of a set: the policy answers after half a second; after its end the store."""
    found = step("1", "stopped")
    assert found["degraded_while_stopped"] and 0.4 < found["seconds_while_stopped"] < 20
    assert not found["degraded_after"] and found["admitted_of_5"] in (3, 4)


HOLDER = """
import sys, time
from headgate import Limiter
limiter = Limiter("5/hour", store=sys.argv[1])
limiter.try_acquire("k")
table = limiter._backend.table
table.take(table.place("k"))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.build("plain")
def test_a_holder_of_a_kernel_lock(directory: Path) -> None:  # noqa: F811
    """The policy answers after half a second; when the holder is killed, the kernel has freed its lock at once."""
    limiter = limiter_at(directory, on_store_error="deny")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, f"shared://{directory}"], stdout=subprocess.PIPE, text=True
    )
    assert hear(holder) == "held"
    begun = time.monotonic()
    assert limiter.try_acquire("k").degraded
    assert 0.4 < time.monotonic() - begun < 20
    assert not limiter.peek("k").degraded, "a look needs no lock"
    holder.kill()
    holder.communicate()
    begun = time.monotonic()
    assert [limiter.try_acquire("k").allowed for _ in range(5)] == [True] * 4 + [False]
    assert time.monotonic() - begun < 1


@pytest.mark.build("compiled")
def test_stopped_processes_hold_no_warm_key_up(directory: Path) -> None:  # noqa: F811
    """A word is changed without a lock, so it does not matter at which instruction another process stands still."""
    limiter = limiter_at(directory, "1000000000/3660d", max_keys=100)
    code = (
        "import sys; from headgate import Limiter\n"
        "limiter = Limiter('1000000000/3660d', store=sys.argv[1], on_store_error='raise')\n"
        "print('ready', flush=True)\n"
        "while True: limiter.try_acquire('k')"
    )
    limiter.try_acquire("k")
    other = subprocess.Popen([sys.executable, "-c", code, f"shared://{directory}"], stdout=subprocess.PIPE, text=True)
    try:
        assert hear(other) == "ready"
        for _ in range(50):
            os.kill(other.pid, signal.SIGSTOP)
            until(lambda: is_stopped(other.pid))
            assert limiter.try_acquire("k").allowed
            os.kill(other.pid, signal.SIGCONT)
    finally:
        other.kill()
        other.communicate()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] in "Tt"


# -------------------------------------------------------------------------------------------- what waits in one process


def test_waiters_of_two_processes(directory: Path) -> None:  # noqa: F811
    """`acquire` waits for what another process gives back or time brings back."""
    code = (
        "import sys; from headgate import Limiter\n"
        "limiter = Limiter('20/second burst 1', store=sys.argv[1], on_store_error='raise')\n"
        "for _ in range(10): limiter.acquire('k')\n"
        "print('done')"
    )
    begun = time.monotonic()
    command = [sys.executable, "-c", code, f"shared://{directory}"]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [hear(other) for other in others] == ["done"] * 2
    for other in others:
        other.communicate()
    assert time.monotonic() - begun >= 19 / 20
    limiter: Limiter = limiter_at(directory, "20/second burst 1")
    assert limiter.acquire("k", timeout=5)
