"""A store that does not answer is a policy, not an exception: allow, deny, local or raise."""

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headgate import AsyncLimiter, Decision, Limiter
from headgate.errors import HeadgateError, InvalidKey, InvalidPermits, RateLimited, StoreUnavailable
from tests.support.clocks import PATIENCE
from tests.support.pulse import Pulse
from tests.support.servers import KINDS, Server, quiet_port

QUOTA = "3/30d"


@pytest.fixture
def nobody() -> str:
    """A URL where nobody listens."""
    return f"redis://127.0.0.1:{quiet_port()}/0"


def test_open_by_default(nobody: str) -> None:
    with Limiter(QUOTA, store=nobody) as limiter:
        for _ in range(5):
            decision = limiter.try_acquire("k")
            assert decision.allowed
            assert decision.degraded
            assert 0 <= decision.remaining <= decision.limit == 3
        assert limiter.peek("k").degraded


def test_deny(nobody: str) -> None:
    with Limiter(QUOTA, store=nobody, on_store_error="deny") as limiter:
        decision = limiter.try_acquire("k")
        assert not decision.allowed
        assert decision.degraded
        assert decision.retry_after > 0
        assert not limiter.peek("k")


def test_local(nobody: str) -> None:
    """A limiter of the same quota, in this process."""
    with Limiter(QUOTA, store=nobody, on_store_error="local") as limiter:
        decisions = [limiter.try_acquire("k") for _ in range(4)]
        assert [decision.allowed for decision in decisions] == [True, True, True, False]
        assert [decision.remaining for decision in decisions] == [2, 1, 0, 0]
        assert all(decision.degraded for decision in decisions)
        assert limiter.try_acquire("other", permits=3)
        limiter.refund("k", permits=2)
        assert limiter.try_acquire("k", permits=2)
        limiter.reset("k")
        assert limiter.try_acquire("k", permits=3)


def test_raise(nobody: str) -> None:
    with Limiter(QUOTA, store=nobody, on_store_error="raise") as limiter:
        with pytest.raises(StoreUnavailable) as caught:
            limiter.try_acquire("k")
        assert isinstance(caught.value, HeadgateError)
        assert caught.value.__cause__ is not None
        for method in (limiter.peek, limiter.refund, limiter.reset, limiter.acquire):
            with pytest.raises(StoreUnavailable):
                method("k")


def test_the_log_says_it_once(mortal_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """When the store is lost and when it is back, and not at each call in between."""
    with Limiter(QUOTA, store=mortal_server.url, name="login") as limiter:
        limiter.try_acquire("k")
        mortal_server.kill()
        for _ in range(10):
            limiter.try_acquire("k")
        mortal_server.restart()
        assert _recovers(limiter)
        limiter.try_acquire("k")
    said = [record for record in caplog.records if record.name == "headgate"]
    assert [record.levelname for record in said] == ["ERROR", "WARNING"]
    assert all(f"127.0.0.1:{mortal_server.port}/0" in record.getMessage() for record in said)


@pytest.mark.parametrize("policy", ["allow", "deny", "local"])
def test_nothing_is_raised_to_a_caller(policy: str, nobody: str) -> None:
    with Limiter(QUOTA, store=nobody, on_store_error=policy) as limiter:
        limiter.refund("k")
        limiter.reset("k")
        assert limiter.peek("k", permits=0).degraded
        if policy == "deny":
            with pytest.raises(RateLimited) as caught:
                limiter.acquire("k", timeout=0)
            assert caught.value.decision.degraded
        else:
            assert limiter.acquire("k", timeout=0).degraded


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_refund_and_reset_tell_whether_the_store_did_it(policy: str, colour: str, mortal_server: Server) -> None:
    """True when it did, False when it could not; raise raises."""

    async def check() -> None:
        limiter = (Limiter if colour == "sync" else AsyncLimiter)(QUOTA, store=mortal_server.url, on_store_error=policy)
        for _ in range(3):
            assert await _awaited(limiter.try_acquire("k"))
        assert await _awaited(limiter.refund("k", 2)) is True
        assert (await _awaited(limiter.peek("k", 0))).remaining == 2
        assert await _awaited(limiter.reset("k")) is True
        assert (await _awaited(limiter.peek("k", 0))).remaining == 3
        assert await _awaited(limiter.reset("never seen")) is True
        mortal_server.kill()
        for call in (limiter.refund, limiter.reset) * 3:  # before and after the breaker opens
            if policy == "raise":
                with pytest.raises(StoreUnavailable):
                    await _awaited(call("k"))
            else:
                assert await _awaited(call("k")) is False
        await _awaited(getattr(limiter, "close" if colour == "sync" else "aclose")())

    asyncio.run(check())


async def _awaited(result: Any) -> Any:
    """What a call of either kind of limiter gives."""
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_bad_input_is_still_bad_input(policy: str, nobody: str) -> None:
    with Limiter(QUOTA, store=nobody, on_store_error=policy) as limiter:
        for arguments in (("",), ("k", 0), ("k", 4)):
            with pytest.raises((InvalidKey, InvalidPermits)):
                limiter.try_acquire(*arguments)


@pytest.mark.parametrize(
    ("policy", "granted"), [("allow", [True] * 8), ("deny", [False] * 8), ("local", [True] * 3 + [False] * 5)]
)
def test_policies_async(policy: str, granted: list[bool], nobody: str) -> None:
    async def check() -> None:
        async with AsyncLimiter(QUOTA, store=nobody, on_store_error=policy) as limiter:
            decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(8)))
            assert [decision.allowed for decision in decisions] == granted
            assert all(decision.degraded for decision in decisions)
            await limiter.refund("k")
            await limiter.reset("k")

    asyncio.run(check())


def test_raise_async(nobody: str) -> None:
    async def check() -> None:
        async with AsyncLimiter(QUOTA, store=nobody, on_store_error="raise") as limiter:
            calls = (limiter.try_acquire("k"), limiter.peek("k"), limiter.refund("k"), limiter.reset("k"))
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, StoreUnavailable)

    asyncio.run(check())


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of each kind that the test may kill."""
    server = Server(request.param, port=quiet_port)
    yield server
    server.stop()


def test_killed_and_back(server: Server) -> None:
    """It is noticed at once, answered by the policy, and forgotten as soon as the server is back."""
    with Limiter(QUOTA, store=server.url) as limiter:
        for _ in range(2):
            assert not limiter.try_acquire("k").degraded
            server.kill()
            for _ in range(3):
                decision = limiter.try_acquire("k")
                assert decision.allowed
                assert decision.degraded
            server.restart()
            assert _recovers(limiter)
            assert limiter.peek("k", permits=0).remaining == 2, "a new server has forgotten everything"


def _recovers(limiter: Limiter) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not limiter.try_acquire("k").degraded:
            return True
    return False


def test_killed_and_back_async(server: Server) -> None:
    async def check() -> None:
        async with AsyncLimiter("1000/30d", store=server.url) as limiter:
            assert not any(d.degraded for d in await asyncio.gather(*(limiter.try_acquire("k") for _ in range(100))))
            server.kill()
            decisions = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(100)))
            assert all(decision.allowed and decision.degraded for decision in decisions)
            server.restart()
            deadline = time.monotonic() + PATIENCE
            while any([d.degraded for d in await asyncio.gather(*(limiter.try_acquire("k") for _ in range(100)))]):
                assert time.monotonic() < deadline, "it does not recover"

    asyncio.run(check())


@pytest.mark.store_timeout(None)
def test_a_server_that_hangs_is_not_waited_for(server: Server) -> None:
    """And when it goes on, nobody gets an answer that was meant for somebody else."""
    with Limiter("1000/30d", store=server.url) as limiter:
        patient = limiter.within(20)
        patient.try_acquire("a", permits=100)
        patient.try_acquire("b", permits=200)
        os.kill(server.process.pid, signal.SIGSTOP)
        with Pulse() as pulse:
            begun = time.monotonic()
            hung = [limiter.peek("a", permits=0), limiter.peek("b", permits=0)]
            took = time.monotonic() - begun
        assert all(decision.degraded for decision in hung)
        assert took < 1.0 + pulse.slack
        os.kill(server.process.pid, signal.SIGCONT)
        for _ in range(20):
            assert patient.peek("b", permits=0).remaining == 800
            assert patient.peek("a", permits=0).remaining == 900


@pytest.mark.store_timeout(None)
def test_a_server_that_hangs_is_not_waited_for_async(server: Server) -> None:
    async def check() -> None:
        async with AsyncLimiter("1000/30d", store=server.url) as limiter:
            patient = limiter.within(20)
            await asyncio.gather(patient.try_acquire("a", permits=100), patient.try_acquire("b", permits=200))
            os.kill(server.process.pid, signal.SIGSTOP)
            with Pulse() as pulse:
                begun = time.monotonic()
                hung = await asyncio.gather(*(limiter.peek(key, permits=0) for key in "ab" * 50))
                took = time.monotonic() - begun
            assert all(decision.degraded for decision in hung)
            assert took < 1.0 + pulse.slack
            os.kill(server.process.pid, signal.SIGCONT)
            deadline = time.monotonic() + PATIENCE
            while (await patient.peek("a", permits=0)).degraded:  # until a probe has found it
                assert time.monotonic() < deadline, "nobody finds it"
                await asyncio.sleep(0.01)
            for _ in range(5):
                decisions: list[Decision] = await asyncio.gather(*(patient.peek(key, permits=0) for key in "ab" * 50))
                assert [decision.remaining for decision in decisions] == [900, 800] * 50

    asyncio.run(check())


def test_out_of_memory_is_answered_by_the_policy(server: Server) -> None:
    with Limiter(QUOTA, store=server.url) as limiter, server.client() as client:
        assert not limiter.try_acquire("k").degraded
        client.config_set("maxmemory", "1")
        assert limiter.try_acquire("k").degraded
        client.config_set("maxmemory", "0")
        assert limiter.try_acquire("k").remaining == 1


def test_a_read_only_replica_is_answered_by_the_policy(server: Server) -> None:
    with Limiter(QUOTA, store=server.url) as limiter, server.client() as client:
        assert not limiter.try_acquire("k").degraded
        client.replicaof("127.0.0.1", str(quiet_port()))
        decision = limiter.try_acquire("k")
        assert decision.allowed
        assert decision.degraded
        client.replicaof("NO", "ONE")
        assert limiter.try_acquire("k").remaining == 1


def test_a_foreign_value_under_our_key_is_answered_by_the_policy(server: Server) -> None:
    with Limiter(QUOTA, store=server.url) as limiter, server.client() as client:
        client.rpush("rate_limiter:token_bucket:{k}", "not ours")
        assert limiter.try_acquire("k").degraded
        assert not limiter.try_acquire("other").degraded
