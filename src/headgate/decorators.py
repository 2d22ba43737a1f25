"""`limiter.limit(...)` and `limiter.paced(...)`: a limit around a function or a block."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from headgate.decision import Decision

P = ParamSpec("P")
R = TypeVar("R")

Key = str | Callable[..., str]


class Guard:
    """Decorates plain and async functions, and guards a ``with`` block. Made by `Limiter.limit` and `Limiter.paced`."""

    def __init__(self, key: Key, enter: Callable[[str], Decision], for_async: Callable[[], AsyncGuard]) -> None:
        self._key = key
        self._enter = enter
        self._for_async = for_async

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            return self._for_async()(function)  # type: ignore[return-value]  # a coroutine function again, as R was

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self._enter(_key_of(self._key, args, kwargs))
            return function(*args, **kwargs)

        return call

    def __enter__(self) -> Decision:
        return self._enter(_text(self._key))

    def __exit__(self, *exc: object) -> None:
        return None


class AsyncGuard:
    """Decorates async functions, and guards an ``async with`` block. Made by `AsyncLimiter.limit` and `.paced`."""

    def __init__(self, key: Key, enter: Callable[[str], Awaitable[Decision]]) -> None:
        self._key = key
        self._enter = enter

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"AsyncLimiter limits async functions; {function!r} is not one: use Limiter for it")

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            await self._enter(_key_of(self._key, args, kwargs))
            result: R = await function(*args, **kwargs)
            return result

        return call

    async def __aenter__(self) -> Decision:
        return await self._enter(_text(self._key))

    async def __aexit__(self, *exc: object) -> None:
        return None


def _key_of(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return key(*args, **kwargs) if callable(key) else key


def _text(key: Key) -> str:
    if callable(key):
        raise TypeError("a with block has no arguments to make a key from: give limit() a text as key")
    return key
