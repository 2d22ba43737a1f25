"""A PostgreSQL that refuses, has no connection left, does not know the password, or is a standby; and a fork."""

import asyncio
import logging
import os
import time

import psycopg
import pytest

from headgate import AsyncLimiter, Limiter
from headgate.errors import StoreUnavailable
from headgate.stores import PostgreSQLStore
from tests.support.callers import in_threads
from tests.support.clocks import until
from tests.support.postgres import PASSWORD, USER, PostgresServer


def test_read_only(postgres_server: PostgresServer) -> None:
    """The policy answers while the database takes no writes, and the breaker stays closed: it does answer."""
    with Limiter("3/30d", store=postgres_server.url, on_store_error="allow") as limiter:
        assert limiter.try_acquire("k").remaining == 2
        postgres_server.admin("ALTER DATABASE limits SET default_transaction_read_only = on")
        try:
            limiter.close()  # the setting is that of new connections
            decision = limiter.try_acquire("k")
            assert decision.allowed and decision.degraded
            assert limiter.store_health().state == "closed"
            assert limiter.health().reason == "read-only"
        finally:
            postgres_server.admin("ALTER DATABASE limits RESET default_transaction_read_only")
        until(lambda: not limiter.try_acquire("k").degraded)


@pytest.mark.store_timeout(1.0)
def test_too_many_connections(postgres_server: PostgresServer) -> None:
    """A server without a free connection is answered for, and used again when it has one."""
    others = f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{USER}'"
    until(lambda: postgres_server.admin(others) == [(0,)])  # a server is still ending those of the test before
    postgres_server.admin(f"ALTER ROLE {USER} CONNECTION LIMIT 1")
    try:
        with Limiter("3/30d", store=postgres_server.url, on_store_error="deny") as limiter:
            with psycopg.connect(postgres_server.bare_url):
                decision = limiter.try_acquire("k")
                assert not decision.allowed and decision.degraded
                assert "too many connections" in limiter.store_health().last_error
                for _ in range(3):
                    assert limiter.try_acquire("k").degraded
                assert limiter.store_health().state == "open"
            until(lambda: not limiter.peek("k", 0).degraded)
    finally:
        postgres_server.admin(f"ALTER ROLE {USER} CONNECTION LIMIT -1")


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_wrong_password(colour: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture) -> None:
    """It is said, and neither the right password nor the wrong one is."""
    url = postgres_server.url.replace(PASSWORD, "another-s3cret")
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []

    async def ask() -> None:
        async with AsyncLimiter("3/30d", store=url, on_store_error="raise") as limiter:
            for _ in range(4):
                with pytest.raises(StoreUnavailable) as caught:
                    await limiter.try_acquire("k")
                seen.append(f"{caught.value} {caught.value.__cause__!r} {limiter!r}")
            seen.append(repr(await limiter.health()))

    if colour == "async":
        asyncio.run(ask())
    else:
        with Limiter("3/30d", store=url, on_store_error="raise") as limiter:
            for _ in range(4):
                with pytest.raises(StoreUnavailable) as caught:
                    limiter.try_acquire("k")
                seen.append(f"{caught.value} {caught.value.__cause__!r} {limiter!r}")
            seen.append(repr(limiter.health()))
    assert "password authentication failed" in seen[0]
    assert all("s3cret" not in text and PASSWORD not in text for text in [*seen, caplog.text])


@pytest.mark.store_timeout(0.3)
def test_row_locked_by_another(postgres_server: PostgresServer) -> None:
    """A caller waits no longer than its time-out for a row that an administrator has locked; nothing is spent later."""
    with Limiter("3/30d", store=postgres_server.url, on_store_error="deny") as limiter:
        until(lambda: not limiter.try_acquire("k").degraded)
        limiter.reset("k")
        limiter.try_acquire("k")
        with psycopg.connect(postgres_server.bare_url) as other:
            other.execute("SELECT * FROM headgate_state FOR UPDATE")
            begun = time.monotonic()
            assert limiter.try_acquire("k").degraded
            assert time.monotonic() - begun < 5
            busy = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%headgate_check%' AND state = 'active'"
            until(lambda: postgres_server.admin(busy + " AND pid <> pg_backend_pid()") == [(0,)])
            other.rollback()
        until(lambda: limiter.peek("k", 0).remaining == 2)


def test_isolation(postgres_server: PostgresServer) -> None:
    """A database whose transactions are serializable by default is asked as any other."""
    postgres_server.admin("ALTER DATABASE limits SET default_transaction_isolation = 'serializable'")
    try:
        store = PostgreSQLStore(postgres_server.url)
        limiter = Limiter("30/30d", store=store, on_store_error="raise")
        assert sum(in_threads(8, lambda: sum(bool(limiter.try_acquire("k")) for _ in range(10)))) == 30
        connections, deadline = store.sync_executor().connections, time.monotonic() + 20
        found = connections.on_connection(deadline, lambda connection: connection.ask("SHOW transaction_isolation"))
        assert found.get_value(0, 0) == b"read committed"
        store.close()
    finally:
        postgres_server.admin("ALTER DATABASE limits RESET default_transaction_isolation")


def test_fork(postgres_server: PostgresServer) -> None:
    """A child has connections of its own, and the parent keeps its session when the child ends."""
    with Limiter("10/30d", store=postgres_server.url, on_store_error="raise") as limiter:
        assert limiter.try_acquire("k").remaining == 9
        session = "SELECT pid FROM pg_stat_activity WHERE application_name = 'headgate'"
        before = postgres_server.admin(session)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if limiter.try_acquire("k").remaining == 8 else 2
                limiter.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert limiter.try_acquire("k").remaining == 7
        assert postgres_server.admin(session) == before


def test_batch_is_one_statement(postgres_server: PostgresServer) -> None:
    """A hundred checks of several limiters, awaited at the same time, are one statement; two loops never deadlock."""

    async def burst(limiters: list[AsyncLimiter], keys: list[str]) -> int:
        asked = [limiter.try_acquire(key) for limiter in limiters for key in keys]
        return sum(bool(decision) for decision in await asyncio.gather(*asked))

    async def main() -> None:
        store = PostgreSQLStore(postgres_server.url)
        algorithms = ["token_bucket", "sliding_window", "fixed_window", "sliding_window_counter"]
        limiters = [
            AsyncLimiter(["3/30d", "50/60d"], algorithm=name, store=store, on_store_error="raise")  # type: ignore[arg-type]
            for name in algorithms
        ]
        keys = [f"k{number}" for number in range(25)]
        await limiters[0].peek("k")
        executor = store.async_executor()
        before = executor.round_trips
        assert await burst(limiters, keys) == 100
        assert executor.round_trips - before == 1
        other = PostgreSQLStore(postgres_server.url)
        others = [
            AsyncLimiter(["3/30d", "50/60d"], algorithm=name, store=other, on_store_error="raise")  # type: ignore[arg-type]
            for name in algorithms
        ]
        rounds = [burst(limiters, keys) if n % 2 else burst(others, keys[::-1]) for n in range(8)]
        before = executor.round_trips
        assert sum(await asyncio.gather(*rounds)) == 200, "three each, of which one was taken before"
        trips = executor.round_trips - before, other.async_executor().round_trips
        assert max(trips) <= 4, "a deadlock would have sent every call once more"
        await store.aclose()
        await other.aclose()

    asyncio.run(main())


async def all_is_back(limiter: AsyncLimiter) -> bool:
    return (await limiter.peek("k", 0)).remaining == 5


def test_cancelled_call(postgres_server: PostgresServer) -> None:
    """What a task took that was cancelled before it had the answer is given back."""

    async def main() -> None:
        async with AsyncLimiter("5/30d", store=postgres_server.url, on_store_error="raise") as limiter:
            await limiter.peek("k")
            for _ in range(20):
                task = asyncio.ensure_future(limiter.try_acquire("k"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(20):
                while not await all_is_back(limiter):
                    pass

    asyncio.run(main())
