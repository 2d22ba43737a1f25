"""By a manual clock no time passes; for Redis it does, and state of a quota by the second would be gone in two."""

from collections.abc import Iterator
from typing import Any

import pytest

from headgate.algorithms import ALGORITHMS, VARIANTS, AlgorithmSpec
from tests.support.callers import Callers
from tests.support.stores import OpenStores, rows, service

HOUR = 3600


@pytest.fixture(autouse=True)
def state_outlives_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let keys live an hour longer; how long they do live is for tests/stores/test_redis_keys.py."""
    tables: list[dict[Any, AlgorithmSpec]] = [ALGORITHMS, VARIANTS]
    for table in tables:
        for name, algorithm in table.items():
            assert "q.ttl)" in algorithm.lua
            lasting = algorithm.lua.replace("q.ttl)", f"q.ttl + {HOUR})")
            monkeypatch.setitem(table, name, algorithm._replace(lua=lasting))


@pytest.fixture(params=rows(lambda row: row.whole or row.outages or row.open is service))
def callers(request: pytest.FixtureRequest, open_stores: OpenStores) -> Iterator[Callers]:
    """Callers of memory and of every kind of server."""
    name, colour = request.param
    with Callers(open_stores.empty(name), colour) as callers:
        yield callers
