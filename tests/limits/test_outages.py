"""A Redis that is gone: what a storage raises, what `check` says, and that all is well when it is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from limits import RateLimitItemPerHour
from limits.errors import StorageError

from headgate import StoreUnavailable
from tests.limits.conftest import Place
from tests.support.callers import COLOURS
from tests.support.clocks import until
from tests.support.servers import Server

KEY = RateLimitItemPerHour(5).key_for("k")

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "incr": lambda storage: storage.incr(KEY, 3600),
    "get": lambda storage: storage.get(KEY),
    "get_expiry": lambda storage: storage.get_expiry(KEY),
    "clear": lambda storage: storage.clear(KEY),
    "reset": lambda storage: storage.reset(),
    "acquire_entry": lambda storage: storage.acquire_entry(KEY, 5, 3600),
    "get_moving_window": lambda storage: storage.get_moving_window(KEY, 5, 3600),
    "acquire_sliding_window_entry": lambda storage: storage.acquire_sliding_window_entry(KEY, 5, 3600),
    "get_sliding_window": lambda storage: storage.get_sliding_window(KEY, 3600),
    "clear_sliding_window": lambda storage: storage.clear_sliding_window(KEY, 3600),
    "take": lambda storage: storage.take("gcra", KEY, 5, 3600, 1),
    "test": lambda storage: storage.test("gcra", KEY, 5, 3600, 1),
    "stats": lambda storage: storage.stats("gcra", KEY, 5, 3600),
}


@pytest.mark.parametrize("colour", COLOURS)
def test_outage(colour: str, mortal_server: Server, loop: Any) -> None:
    """Every operation raises, wrapped where that is asked for; `check` says False, and True when the server is back."""
    with Place(mortal_server.url, colour, loop) as place:
        plain, wrapped = place.storage(), place.storage(wrap_exceptions=True)
        assert plain.incr(KEY, 3600) == wrapped.get(KEY) == 1
        mortal_server.kill()
        for operation in OPERATIONS.values():
            with pytest.raises(StoreUnavailable):
                operation(plain)
            with pytest.raises(StorageError) as caught:
                operation(wrapped)
            assert isinstance(caught.value.storage_error, StoreUnavailable)
        assert not plain.check()
        mortal_server.restart()
        until(plain.check)
        for operation in OPERATIONS.values():
            operation(plain)


@pytest.mark.parametrize("colour", COLOURS)
def test_policy(colour: str, mortal_server: Server, loop: Any) -> None:
    """With an option the storage answers by headgate's policy instead: a hit passes, or does not."""
    with Place(mortal_server.url, colour, loop) as place:
        mortal_server.kill()
        for policy, allowed in (("allow", True), ("deny", False)):
            storage = place.storage(on_store_error=policy)
            for strategy in ("fixed-window", "moving-window", "sliding-window-counter", "token-bucket"):
                limiter = place.limiter(strategy, storage)
                assert limiter.hit(RateLimitItemPerHour(5), "k") is allowed
                assert limiter.get_window_stats(RateLimitItemPerHour(5), "k").remaining >= 0


def test_error_of_another_kind_is_not_wrapped(memory: Place) -> None:
    """A limit that headgate cannot count is a mistake of the application, not an outage."""
    with pytest.raises(ValueError, match="1,000,000,000"):
        memory.limiter("fixed-window", memory.storage(wrap_exceptions=True)).hit(RateLimitItemPerHour(10**10), "k")
