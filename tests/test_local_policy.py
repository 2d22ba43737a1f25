"""`on_store_error="local"`: an outage is not worth a second quota."""

import os
import signal

import pytest

from headgate import Limiter
from tests.support.clocks import until
from tests.support.places import ALGORITHMS
from tests.support.servers import Server

pytestmark = pytest.mark.store_timeout(0.5)


def _back(limiter: Limiter) -> None:
    until(lambda: not limiter.peek("k", permits=0).degraded)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_before_during_and_after_make_one_quota(algorithm: str, mortal_server: Server) -> None:
    """30 of 50 are spent in Redis, the rest while it hangs, and then nothing is left, in this process or another."""
    store = mortal_server.url
    with (
        Limiter("50/300d", algorithm=algorithm, store=store, on_store_error="local") as limiter,
        Limiter("50/300d", algorithm=algorithm, store=store) as other,
    ):
        assert sum(limiter.within(20).try_acquire("k").allowed for _ in range(30)) == 30
        os.kill(mortal_server.process.pid, signal.SIGSTOP)
        during = [limiter.try_acquire("k") for _ in range(40)]
        os.kill(mortal_server.process.pid, signal.SIGCONT)
        assert all(decision.degraded for decision in during)
        assert sum(decision.allowed for decision in during) == 20
        _back(limiter)
        assert not limiter.within(20).try_acquire("k")
        assert other.within(20).peek("k", permits=0).remaining == 0


def test_what_was_given_back_is_not_owed(mortal_server: Server) -> None:
    with Limiter("50/300d", store=mortal_server.url, on_store_error="local") as limiter:
        limiter.within(20).try_acquire("k")
        os.kill(mortal_server.process.pid, signal.SIGSTOP)
        for _ in range(5):
            limiter.try_acquire("k", permits=2)
        limiter.refund("k", permits=4)
        os.kill(mortal_server.process.pid, signal.SIGCONT)
        _back(limiter)
        settled = 50 - 1 - 6 - 1
        sent = 3 * 2  # calls that the breaker let through: the server may have run them when it woke
        assert settled - sent <= limiter.within(20).try_acquire("k").remaining <= settled


def test_a_key_never_seen_starts_full(mortal_server: Server) -> None:
    with Limiter("5/300d", store=mortal_server.url, on_store_error="local") as limiter:
        limiter.within(20).try_acquire("k")
        os.kill(mortal_server.process.pid, signal.SIGSTOP)
        assert sum(limiter.try_acquire("new").allowed for _ in range(8)) == 5
        os.kill(mortal_server.process.pid, signal.SIGCONT)
