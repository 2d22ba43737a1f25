"""PostgreSQL servers of our own."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer


@pytest.fixture(scope="session")
def kept_server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture
def server(kept_server: PostgresServer) -> PostgresServer:
    """A server whose database is empty; a test leaves it running."""
    kept_server.rows("DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION headgate")
    return kept_server
