"""A signal handler may call the limiter whatever it interrupts, and nothing hangs, is lost or comes twice."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

import headgate
from headgate import HybridLimiter
from tests.support.servers import Server
from tests.support.signals import interrupt

HERE = str(Path(headgate.__file__).parent / "hybrid")
PLENTY = 1000  # lines, more than any call has


def ours(name: str) -> bool:
    return name.startswith(HERE) or name.endswith("threading.py")


@pytest.mark.parametrize(
    "interrupted, known, spent",
    [
        ("take", True, [9 + 70 - 1]),  # of that many not all are on lease, so it requests Redis
        ("take", False, [70, 70 - 1]),  # nothing was taken yet when it came, or all of it
        ("refund", True, [9 - 2 - 1]),
        ("refund", False, [0]),
        ("peek", True, [9 - 1]),
    ],
)
def test_handler_between_any_two_lines(interrupted: str, known: bool, spent: list[int], redis_server: Server) -> None:
    """A handler that calls the limiter between any two lines is answered, and every permit is counted once."""
    degraded = lines = 0
    with HybridLimiter("100/day", store=redis_server.patient_url, on_store_error="deny") as limiter:
        calls = {
            "take": lambda key: limiter.try_acquire(key, 70),
            "refund": lambda key: limiter.refund(key, 2),
            "peek": lambda key: limiter.peek(key, 3),
        }
        more = True
        while more and lines < PLENTY:
            lines += 1
            key = f"k{lines}"
            assert not known or limiter.try_acquire(key, 9)

            def handler(key: str = key) -> None:
                nonlocal degraded
                limiter.refund(key, 1)
                degraded += limiter.try_acquire(f"{key} from within").degraded

            more = interrupt(lines, partial(calls[interrupted], key), handler, at="line", files=ours)
    assert 2 < lines < PLENTY and degraded < lines  # compiled there are few
    with HybridLimiter("100/day", store=redis_server.patient_url) as other:
        for line in range(1, lines):
            assert 100 - other.peek(f"k{line}", 0).remaining in spent, f"before line {line}"


@pytest.mark.parametrize("interrupted", ["take", "refund", "peek"])
def test_handler_closes_the_limiter(interrupted: str, redis_server: Server) -> None:
    """A handler may close the limiter between any two lines; it works afterwards."""
    with HybridLimiter("100/day", store=redis_server.patient_url, on_store_error="deny") as limiter:
        calls = {
            "take": lambda key: limiter.try_acquire(key, 7),
            "refund": lambda key: limiter.refund(key, 2),
            "peek": lambda key: limiter.peek(key, 3),
        }
        lines = 0
        more = True
        while more and lines < PLENTY:
            lines += 1
            call = partial(calls[interrupted], f"k{lines}")
            more = interrupt(lines, call, limiter._backend.close, at="line", files=ours)
        assert 6 < lines < PLENTY
        assert limiter.try_acquire("afterwards") and not limiter.try_acquire("afterwards", 7).degraded


class Interrupted(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


@pytest.mark.parametrize("interrupted", ["take", "refund"])
def test_handler_raises(interrupted: str, redis_server: Server) -> None:
    """An exception of a handler, raised wherever a function returns, leaves no lock held."""
    with HybridLimiter("100/day", store=redis_server.patient_url, on_store_error="deny") as limiter:
        calls = {"take": lambda key: limiter.try_acquire(key, 7), "refund": lambda key: limiter.refund(key, 2)}
        answers: list[bool] = []

        def handler() -> None:
            raise Interrupted

        returns, more = 0, True
        while more and returns < PLENTY:
            returns += 1
            more = False
            try:
                interrupt(returns, partial(calls[interrupted], f"k{returns}"), handler, at="return", files=ours)
            except Interrupted:
                more = True
            request = threading.Thread(
                target=lambda key=f"again{returns}": answers.append(limiter.try_acquire(key).allowed), daemon=True
            )
            request.start()
            request.join(30)
            assert not request.is_alive(), f"it hangs after an exception at return {returns}"
        assert 3 < returns < PLENTY and all(answers)
