"""Replies that are lost, late or doubled, stores that stop answering, holders that are killed: all counted once."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headgate import Budget
from headgate.budget.records import packed, spec_of
from headgate.budget.state import budget_machine
from headgate.coordination.states.machine import Operation
from tests.coordination.test_lost_replies import CALLERS, FAULTS, READS, DistantTwins
from tests.support.clusters import wait_until
from tests.support.proxy import FaultyProxy
from tests.support.servers import Server
from tests.support.twins import Twins

ROOT = Path(__file__).parent.parent.parent
LONG = 20.0
SECOND = 1_000_000
MACHINE = budget_machine("default")
SPEC = spec_of([("-", "a", 10**11, 1), ("x", "b", 5 * 10**10, 1)])
TERMS = (10 * SECOND, "", "charge", 0, "")
READS[MACHINE.prefix] = Operation("available", ("", SPEC, packed([0, 0])))

STEPS: list[tuple[Any, ...]] = [
    ("reserve", "a", SPEC, packed([20_000_000_000, 10_000_000_000]), *TERMS),
    ("reserve", "b", SPEC, packed([70_000_000_000, 30_000_000_000]), *TERMS),
    ("reserve", "c", SPEC, packed([20_000_000_000, 10_000_000_000]), 10 * SECOND, "", "charge", 5 * SECOND, "x"),
    ("extend", "a", SPEC, packed([25_000_000_000, 10_000_000_000]), 10 * SECOND, packed([5, 6])),
    ("extend", "b", SPEC, packed([90_000_000_000, 30_000_000_000]), 10 * SECOND, packed([1, 1])),
    ("settle", "a", SPEC, packed([1, 2]), "", 0),
    ("available", "", SPEC, packed([0, 0])),
    ("reserve", "c", SPEC, packed([20_000_000_000, 10_000_000_000]), 10 * SECOND, "", "charge", 5 * SECOND, "x"),
    ("withdraw", "c", SPEC, packed([0, 0]), "", 0),
    ("settle", "unknown", SPEC, packed([5, 5]), "", 1),
    ("holds", "", SPEC, packed([0, 0])),
    ("pause", "", SPEC, packed([5, 0]), 1_000_000),
    (11.0,),
    ("settle", "b", SPEC, packed([5, 5]), "", 0),
    ("available", "", SPEC, packed([0, 0])),
]


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_operation(kind: str, caller: str, redis_server: Server) -> None:
    """An operation that is sent again after a broken reply has its effect once."""
    fault = FAULTS[kind]
    with FaultyProxy(redis_server.port) as proxy:
        twins = DistantTwins(MACHINE, redis_server, proxy.url, fault.timeout, caller)
        twins.ask(MACHINE, "warm-up", Operation(STEPS[0][0], STEPS[0][1:]))
        for op, *arguments in STEPS:
            twins.clock.advance(op if isinstance(op, float) else 0.000_001)
            if isinstance(op, str):
                before = fault.count(proxy)
                fault.begin(proxy)
                twins.step(op, *arguments)
                assert fault.count(proxy) == before + 1, "no reply was broken"
        twins.close()


def test_a_late_reservation(redis_server: Server) -> None:
    """A reservation that was delayed in the network and arrives after its settle holds nothing."""
    twins = Twins(MACHINE, redis_server)
    assert twins.step("reserve", "a", SPEC, packed([5, 5]), *TERMS)[0] == 1
    assert twins.step("settle", "a", SPEC, packed([5, 5]), "", 0) == [1]
    assert twins.step("reserve", "a", SPEC, packed([5, 5]), *TERMS)[0] == -1
    assert twins.step("withdraw", "b", SPEC, packed([0, 0]), "", 0) == [0]
    assert twins.step("reserve", "b", SPEC, packed([5, 5]), *TERMS)[0] == -1, "withdrawn before it arrived"
    assert twins.step("reserve", "a", SPEC, packed([5, 5]), 10 * SECOND, "another", "charge", 0, "")[0] == 1
    twins.close()


@pytest.mark.store_timeout(0.2)
def test_settle_without_any_reply(redis_server: Server, name: str) -> None:
    """A settle whose replies are lost is repeated in the background, and counts once."""
    with FaultyProxy(redis_server.port) as proxy:
        llm = Budget(tokens="100/30d", store=proxy.bare_url + "?timeout=0.2", name=name)
        direct = Budget(tokens="100/30d", store=redis_server.url, name=name)
        hold = llm.reserve("a", tokens=50, timeout=LONG)
        proxy.swallow_replies = True
        assert hold.settle(tokens=30)
        wait_until(lambda: direct.remaining("a") == {"tokens": 70}, "the charge")
        proxy.swallow_replies = False
        wait_until(lambda: llm.remaining("a") == {"tokens": 70}, "the charge")
        assert direct.unsettled("a") == []


def test_what_an_outage_granted_is_charged(redis_server: Server, name: str) -> None:
    """A hold that was granted while the store did not answer is charged to it when it is back, once."""
    with FaultyProxy(redis_server.port) as proxy:
        llm = Budget(tokens="100/30d", store=proxy.bare_url + "?timeout=0.2", name=name)
        assert llm.remaining("a") == {"tokens": 100}
        proxy.swallow_requests = True
        hold = llm.reserve("a", tokens=50, timeout=LONG)
        assert hold.degraded and hold.settle(tokens=30)
        proxy.swallow_requests = False
        proxy.cut()
        direct = Budget(tokens="100/30d", store=redis_server.url, name=name)
        wait_until(lambda: direct.remaining("a") == {"tokens": 70}, "the charge")
        assert direct.unsettled("a") == []


HOLDER = """
import sys
from headgate import Budget
llm = Budget(tokens="1000/30d", store=sys.argv[1], name=sys.argv[2], hold=2.0, on_lost=sys.argv[2])
hold = llm.reserve("a", tokens=300)
hold.spend(tokens=280)  # reserves more, and reports
hold.spend(tokens=5)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.xdist_group("budget-processes")
def test_killed_holders(redis_server: Server) -> None:
    """When the hold of a killed process is over, exactly what the policy says is charged."""
    holders = {}
    for policy in ("charge", "release", "spent"):
        command = [sys.executable, "-c", HOLDER, redis_server.url, policy]
        holders[policy] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    for process in holders.values():
        assert process.stdout and process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = {"charge": 420, "release": 1000, "spent": 720}
    for policy, tokens in left.items():
        llm = Budget(tokens="1000/30d", store=redis_server.url, name=policy)
        wait_until(lambda: not llm.unsettled("a"), "the charge")  # noqa: B023  # waits here
        assert llm.remaining("a") == {"tokens": tokens}, policy


WORKER = """
import json, random, sys, threading, time
from headgate import Budget, RateLimited
url, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
llm = Budget(requests="40/30d", tokens="4000/30d", store=url, hold=60.0)
sys.stdin.readline()
until, guard = time.monotonic() + seconds, threading.Lock()

def caller(number):
    dice = random.Random(seed * 1000 + number)
    while time.monotonic() < until:
        tokens = dice.randrange(1, 400)
        try:
            with llm.reserve("a", requests=1, tokens=tokens, timeout=30.0) as hold:
                if dice.random() < 0.3:
                    time.sleep(dice.random() / 50)
                hold.settle(requests=0, tokens=0)
                with guard:
                    counts[0] += 1
        except RateLimited:
            counts[1] += 1

counts = [0, 0]
threads = [threading.Thread(target=caller, args=[number]) for number in range(20)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(counts), flush=True)
"""


@pytest.mark.xdist_group("budget-processes")
def test_a_hundred_callers(redis_server: Server) -> None:
    """100 callers in 5 processes with a budget for 40: never over at any instant, none lost, all back in the end."""
    command = [sys.executable, "-c", WORKER, redis_server.url]
    workers = [
        subprocess.Popen([*command, str(seed), "1.0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        for seed in range(5)
    ]
    llm = Budget(requests="40/30d", tokens="4000/30d", store=redis_server.url)
    seen, over, most, done = 0, [], 0, threading.Event()

    def watch() -> None:
        nonlocal seen, most
        while not done.is_set():
            holds = llm.unsettled("a")  # one atomic look at all records
            requests = sum(int(hold.amounts["requests"]) for hold in holds)
            tokens = sum(int(hold.amounts["tokens"]) for hold in holds)
            seen, most = seen + 1, max(most, requests)
            if requests > 40 or tokens > 4000:
                over.append((requests, tokens))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for worker in workers:
        assert worker.stdin
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
    counts = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
    done.set()
    watcher.join()
    served, refused = (sum(each[column] for each in counts) for column in (0, 1))
    assert not over and seen > 10 and most > 3
    assert served > 100 and refused == 0, counts
    assert llm.remaining("a") == {"requests": 40, "tokens": 4000} and llm.unsettled("a") == []
