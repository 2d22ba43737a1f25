"""Tables and functions are made on first use, by one process at a time; what is not ours is left as it is."""

import subprocess
import sys

import pytest

from headgate import Limiter
from headgate.errors import StoreUnavailable
from headgate.postgresql.schema import FUNCTIONS, VERSION
from headgate.stores import PostgreSQLStore
from tests.support.callers import in_threads
from tests.support.clocks import until
from tests.support.postgres import PASSWORD, PostgresServer

NAMES = ("lease", "ledger", "log", "slot", "state", "version")
OURS = [f"headgate_{name}" for name in NAMES]


def migrate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headgate", "migrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_made_on_first_use(postgres_server: PostgresServer) -> None:
    with Limiter("5/minute", store=postgres_server.url, on_store_error="raise") as limiter:
        assert postgres_server.tables() == []
        assert limiter.try_acquire("k")
    assert postgres_server.tables() == OURS
    assert postgres_server.rows("SELECT version FROM headgate_version") == [(VERSION,)]


def test_many_at_once(postgres_server: PostgresServer) -> None:
    """Sixteen stores make them at the same moment, and none fails."""

    def first_use() -> bool:
        with Limiter("100/30d", store=postgres_server.url, on_store_error="raise") as limiter:
            return limiter.try_acquire("k").allowed

    assert in_threads(16, first_use) == [True] * 16
    assert postgres_server.rows("SELECT version FROM headgate_version") == [(VERSION,)]


def test_prefix(postgres_server: PostgresServer) -> None:
    """Stores of two prefixes in one database know nothing of each other."""
    for prefix in ("one", "two"):
        with Limiter("1/30d", store=postgres_server.url, prefix=prefix, on_store_error="raise") as limiter:
            assert limiter.try_acquire("k") and not limiter.try_acquire("k")
    assert postgres_server.tables() == [f"{prefix}_{name}" for prefix in ("one", "two") for name in NAMES]


@pytest.mark.parametrize("prefix", ["", "Big", "a-b", "1a", "a" * 41, "a; DROP TABLE x"])
def test_wrong_prefixes(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix must be 1 to 40"):
        PostgreSQLStore("postgresql://host/db", prefix=prefix)


WRONG = {
    "newer": "CREATE TABLE headgate_version (version integer); INSERT INTO headgate_version VALUES (99)",
    "not ours, a version": "CREATE TABLE headgate_version (name text)",
    "not ours, a state": "CREATE TABLE headgate_state (id integer)",
    "not ours, a lease": "CREATE TABLE headgate_lease (id integer)",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tables_of_others(wrong: str, postgres_server: PostgresServer) -> None:
    """They are a clear error for each way to find them, and stay as they are."""
    postgres_server.rows(f"SET ROLE headgate; {WRONG[wrong]}")
    before = postgres_server.tables()
    words = "are of version 99" if wrong == "newer" else "not of headgate"
    store = PostgreSQLStore(postgres_server.url)
    limiter = Limiter("5/minute", store=store, on_store_error="raise")
    with pytest.raises(StoreUnavailable, match=words):
        limiter.try_acquire("k")
    with Limiter("5/minute", store=store, on_store_error="deny") as limiter:
        assert limiter.try_acquire("k").degraded
    for call in (store.warm_up, store.migrate):
        with pytest.raises(StoreUnavailable, match=words):
            call()
    assert store.health().reason == "refuses" and words in store.health().problems[0]
    store.close()
    command = migrate(postgres_server.url)
    assert command.returncode == 1 and words in command.stderr and PASSWORD not in command.stderr
    assert postgres_server.tables() == before


OLDER = """
CREATE TABLE headgate_version (version integer NOT NULL); INSERT INTO headgate_version VALUES (1);
CREATE TABLE headgate_state (key text PRIMARY KEY, tokens bigint);
CREATE FUNCTION headgate_sweep(pages integer, now_us bigint) RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION headgate_check(key text) RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE TABLE headgate_other (id integer);
"""


def test_replace(postgres_server: PostgresServer) -> None:
    """Tables of another version are told how to replace; that drops them and their functions, and nothing else."""
    postgres_server.rows(f"SET ROLE headgate; {OLDER}")
    refused = migrate(postgres_server.url)
    assert refused.returncode == 1 and "headgate migrate --replace URL" in refused.stderr
    with Limiter("5/30d", store=postgres_server.url, on_store_error="raise") as limiter:
        with pytest.raises(StoreUnavailable, match=r"version 1 .*`headgate migrate --replace URL`"):
            limiter.try_acquire("k")
        assert "DROP TABLE" in migrate(postgres_server.url, "--replace", "--sql").stdout
        for left in (4, 3):  # a second time there is nothing to replace
            assert migrate(postgres_server.url, "--replace").returncode == 0
            assert limiter.try_acquire("k").remaining == left
    assert postgres_server.tables() == sorted([*OURS, "headgate_other"])
    functions = postgres_server.rows("SELECT proname FROM pg_proc WHERE proname LIKE 'headgate%'")
    assert sorted(name for (name,) in functions) == sorted(f"headgate_{name}" for name in FUNCTIONS)


def test_tables_that_are_dropped(postgres_server: PostgresServer) -> None:
    """They are made anew by the next call but one."""
    with Limiter("2/30d", store=postgres_server.url, on_store_error="allow") as limiter:
        assert limiter.try_acquire("k", 2)
        postgres_server.rows(f"DROP TABLE {', '.join(OURS)}")
        assert limiter.try_acquire("k").degraded
        decision = limiter.try_acquire("k")
        assert not decision.degraded and decision.remaining == 1


def test_migrate(postgres_server: PostgresServer) -> None:
    """A user that may not make tables can use those that another made."""
    postgres_server.rows(
        "REVOKE ALL ON SCHEMA public FROM headgate; ALTER SCHEMA public OWNER TO admin; "
        "GRANT USAGE ON SCHEMA public TO headgate"
    )
    with Limiter("5/minute", store=postgres_server.url, on_store_error="raise") as limiter:
        with pytest.raises(StoreUnavailable, match="headgate migrate"):
            limiter.try_acquire("k")
        admin = f"postgresql://admin@127.0.0.1:{postgres_server.port}/limits"
        for _ in range(2):
            made = migrate(admin)
            assert made.returncode == 0, made.stderr
        postgres_server.rows(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON headgate_state, headgate_log TO headgate; "
            "GRANT SELECT ON headgate_version TO headgate"
        )
        assert limiter.try_acquire("k").remaining == 4
    assert "CREATE UNLOGGED TABLE mine_state" in migrate(admin, "--prefix", "mine", "--sql").stdout
    assert migrate("redis://localhost").returncode == 2


def test_rows_are_swept(postgres_server: PostgresServer) -> None:
    """Ordinary calls remove what is gone, a page at a time, and leave what is not."""
    store = PostgreSQLStore(postgres_server.url)
    kept = Limiter("5/30d", name="kept", store=store, algorithm="sliding_window", on_store_error="raise")
    brief = Limiter("5/second", name="gone", store=store, algorithm="sliding_window", on_store_error="raise")
    for number in range(300):
        brief.try_acquire(f"k{number}")
        kept.try_acquire(f"k{number % 20}")
    postgres_server.rows("UPDATE headgate_state SET gone = 1 WHERE key LIKE '%gone%'")
    until(lambda: [kept.peek("another") for _ in range(16)] and not gone_rows(postgres_server))
    store.close()
    assert postgres_server.rows("SELECT count(*) FROM headgate_state") == [(20,)]
    assert postgres_server.rows("SELECT count(DISTINCT key) FROM headgate_log") == [(20,)]


def gone_rows(postgres_server: PostgresServer) -> int:
    return int(postgres_server.rows("SELECT count(*) FROM headgate_state WHERE gone = 1")[0][0])
