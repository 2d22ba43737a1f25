"""A reply that is lost after the script ran: it was spent once, whatever the caller was told, and never twice."""

import time

import pytest

from headgate import Limiter
from headgate.errors import StoreUnavailable
from headgate.rule import AlgorithmName
from tests.support.callers import COLOURS, Callers
from tests.support.clusters import Node, wait_until
from tests.support.load import Load
from tests.support.proxy import FaultyProxy
from tests.support.quotas import ALGORITHMS
from tests.support.stores import OpenStore

pytestmark = [pytest.mark.store_timeout(0.5), pytest.mark.xdist_group("faults")]

QUOTA = "100/30d"
TIMEOUTS = "?timeout=0.3&connect_timeout=0.3"
PATIENT = "?timeout=20&connect_timeout=20"

# bytes of the reply "*5 :1 :1 :98 ..." that arrive before the reset
TRUNCATED = [0, 1, 4, 6, 11, 20]


def left(limiter: Limiter) -> int:
    """What the store says, not the policy: a busy machine may make even a direct call late."""
    deadline = time.monotonic() + 20
    while (seen := limiter.peek("k", permits=0)).degraded:
        assert time.monotonic() < deadline, "the store does not answer"
    return seen.remaining


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reset_in_mid_reply(algorithm: AlgorithmName, colour: str, node: Node) -> None:
    """Threads lose one reply, tasks those of a whole batch: each call is allowed, and spent once."""
    calls = 1 if colour == "sync" else 10
    with (
        FaultyProxy(node.port) as proxy,
        Limiter(QUOTA, store=node.url, algorithm=algorithm) as direct,
        Callers(OpenStore(proxy.bare_url), colour) as callers,
    ):
        for length in TRUNCATED:
            limiter = callers.limiter(QUOTA, algorithm=algorithm, on_store_error="allow")
            limiter.try_acquire("k")
            before = left(direct)
            proxy.truncate = length
            assert all(decision.allowed for decision in callers.at_once(limiter.try_acquire, calls, "k"))
            assert left(direct) == before - calls, f"after {length} bytes"
            assert proxy.truncate is None
        assert proxy.truncated == len(TRUNCATED)


def test_raise_says_so(node: Node) -> None:
    """With `raise` the caller hears that the answer is unknown, instead of a second try behind his back."""
    with (
        FaultyProxy(node.port) as proxy,
        Limiter(QUOTA, store=node.url) as direct,
        Limiter(QUOTA, store=proxy.bare_url + PATIENT, on_store_error="raise") as limiter,
    ):
        limiter.try_acquire("k")
        proxy.truncate = 0
        with pytest.raises(StoreUnavailable):
            limiter.try_acquire("k")
        assert left(direct) == 98


def test_a_reply_that_never_comes(node: Node) -> None:
    with (
        FaultyProxy(node.port) as proxy,
        Limiter(QUOTA, store=node.url) as direct,
        Limiter(QUOTA, store=proxy.bare_url + TIMEOUTS) as limiter,
    ):
        limiter.with_timeout(20).try_acquire("k")
        proxy.swallow_replies = True
        begun = time.monotonic()
        assert limiter.try_acquire("k").degraded
        assert time.monotonic() - begun < 15
        wait_until(lambda: left(direct) == 98, "what was not heard of is done")
        proxy.swallow_replies = False
        wait_until(lambda: not limiter.peek("k", permits=0).degraded, "it recovers")
        assert limiter.with_timeout(20).try_acquire("k").remaining == 97


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_many_resets(how: str, node: Node) -> None:
    """Nothing is spent twice: as many are admitted as the limit, less those whose reply was lost."""
    limit = 1000
    with (
        FaultyProxy(node.port) as proxy,
        Load(how, proxy.bare_url + TIMEOUTS, f"{limit}/30d", on_store_error="deny") as load,
    ):
        load.wait_for(lambda answer: answer.by_store)
        for _ in range(5):
            proxy.cut()
            time.sleep(0.05)
        load.wait_for(lambda answer: answer.by_store and not answer.admitted)
    lost = sum(not answer.by_store for answer in load.answers)
    assert not load.errors
    assert limit - lost <= load.admitted <= limit


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_script_flush_under_load(how: str, node: Node) -> None:
    """A server that has forgotten the script is told it again: exactly the limit is admitted, no call is degraded."""
    limit = 2000
    with Load(how, node.bare_url + PATIENT, f"{limit}/30d", on_store_error="deny") as load:
        load.wait_for(lambda answer: answer.by_store)
        while load.answers[-1].admitted or load.answers[-1].error:
            node.ask("SCRIPT", "FLUSH")
            time.sleep(0.02)
    assert all(answer.by_store for answer in load.answers)
    assert load.admitted == limit
