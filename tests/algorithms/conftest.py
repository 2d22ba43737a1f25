"""By a manual clock no time passes; for Redis it does, and state of a quota by the second would be gone in two."""

import pytest

from headgate.algorithms import ALGORITHMS

HOUR = 3600


@pytest.fixture(autouse=True)
def state_outlives_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let keys live an hour longer; how long they do live is for tests/test_redis_keys.py."""
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.lua.count("q.ttl)") == 1
        lasting = algorithm.lua.replace("q.ttl)", f"q.ttl + {HOUR})")
        monkeypatch.setitem(ALGORITHMS, name, algorithm._replace(lua=lasting))
