"""A server that fails under load: no call raises or waits long, and the server is used again by itself."""

import time

import pytest

from headgate import Limiter
from headgate.errors import StoreUnavailable
from headgate.rule import OnStoreError
from tests.support.clusters import Node, wait_until
from tests.support.load import Answer, Load
from tests.support.outages import OUTAGES
from tests.support.proxy import FaultyProxy

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

BUDGET = 0.4  # seconds that a call may take; to wait twice as long is seen, whatever else the machine does
TIMEOUTS = f"?timeout={BUDGET}&connect_timeout={BUDGET}"
RETURN = 2.0  # seconds after the server's return until it must be in use again
LIMIT = 50

# Each outage, and each policy in two of them at least: tests/stores/test_outages.py compares the policies.
CASES = [("killed", "local"), ("killed", "raise"), ("frozen", "deny"), ("replies lost", "local")]
CASES += [("requests lost", "raise"), ("late", "deny")]
CASES += [(name, "allow") for name in OUTAGES if name not in dict(CASES)]


@pytest.mark.parametrize("how", ["threads", "tasks"])
@pytest.mark.parametrize(("outage", "policy"), CASES)
def test_an_outage_under_load(outage: str, policy: OnStoreError, how: str, node: Node) -> None:
    quota = f"{LIMIT}/30d" if policy == "local" else "1000000/30d"
    with FaultyProxy(node.port) as proxy:
        url = node.bare_url if outage == "killed" else proxy.bare_url  # connections are refused then, as in life
        with Load(how, url + TIMEOUTS, quota, on_store_error=policy) as load:
            load.wait_for(lambda answer: answer.by_store)
            with OUTAGES[outage](node, proxy):
                begin = time.monotonic()
                time.sleep(1.0)
                load.wait_for(lambda answer: True, since=begin)  # a machine may stand still for that second
                end = time.monotonic()
            back = time.monotonic()
            again = load.wait_for(lambda answer: answer.by_store, since=back)
            wait_until(lambda: _all_are_back(load), "all callers use the store again")
    _check_policy(policy, [answer for answer in load.between(begin, end) if answer.ended < end])
    unforeseen = [error for error in load.errors if not isinstance(error, StoreUnavailable) or policy != "raise"]
    assert not unforeseen
    slowest = max(answer.took for answer in load.answers)
    assert slowest <= BUDGET + load.slack, f"hiccups of {load.pulse.hiccup:.3f} s"
    assert again.ended - back <= RETURN + load.slack


def _all_are_back(load: Load) -> bool:
    now = time.monotonic()
    recent = load.between(now - 0.2, now)
    return len(recent) > 20 and sum(answer.by_store for answer in recent) >= 0.9 * len(recent)


def _check_policy(policy: OnStoreError, down: list[Answer]) -> None:
    assert down, "no call was answered"
    assert not any(answer.by_store for answer in down)
    admitted = sum(answer.admitted for answer in down)
    if policy == "allow":
        assert admitted == len(down)
    elif policy == "local":
        assert admitted <= LIMIT
    else:
        assert admitted == 0
    if policy == "raise":
        assert all(isinstance(answer.error, StoreUnavailable) for answer in down)


@pytest.mark.parametrize("policy", ["allow", "deny", "local"])
@pytest.mark.parametrize("outage", ["killed", "frozen"])
def test_the_policy_answers_at_once(outage: str, policy: OnStoreError, node: Node) -> None:
    """After a few calls no call waits for the server any more: 99 of 100 take less than 100 microseconds."""
    with (
        FaultyProxy(node.port) as proxy,
        Limiter("10/30d", store=node.bare_url + TIMEOUTS, on_store_error=policy) as limiter,
    ):
        assert not limiter.with_timeout(20).try_acquire("k").degraded
        with OUTAGES[outage](node, proxy):
            for _ in range(20):
                assert limiter.try_acquire("k").degraded
            rounds = []
            for _ in range(10):
                times = []
                for _ in range(500):
                    begun = time.perf_counter()
                    decision = limiter.try_acquire("k")
                    times.append(time.perf_counter() - begun)
                    assert decision.degraded
                rounds.append(sorted(times)[494])
            assert min(rounds) < 100e-6, "the best of ten rounds: others use this machine too"


def test_local_admits_no_second_quota(durable_node: Node) -> None:
    """What this process has seen in Redis counts in the outage, and what it admitted then counts in Redis after."""
    with Limiter(f"{LIMIT}/30d", store=durable_node.bare_url + "?timeout=20", on_store_error="local") as limiter:
        admitted = sum(limiter.try_acquire("k").allowed for _ in range(LIMIT))
        assert admitted == LIMIT
        durable_node.kill()
        admitted += sum(limiter.try_acquire("k").allowed for _ in range(LIMIT))
        durable_node.restart()
        wait_until(lambda: not limiter.try_acquire("other").degraded, "it recovers")
        admitted += sum(limiter.try_acquire("k").allowed for _ in range(LIMIT))
        assert admitted < 2 * LIMIT
