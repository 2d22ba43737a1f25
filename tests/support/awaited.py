"""Write a test once for the tools of threads and for those of asyncio.

A test takes the fixture `tools` and awaits everything: `lock = tools.Lock(name); await lock.acquire()`. With asyncio
these are the Async tools themselves. With threads each is an `Awaited`, which calls the plain tool when it is awaited,
in the thread of the test; so such a test must not wait for another task while it is inside a plain tool.
"""

from collections.abc import Callable, Generator
from typing import Any

from headgate import budget, coordination
from headgate.budget import Hold
from headgate.coordination import Leased, SemaphoreLease

AWAITED_PROPERTIES = ("state", "failure_count")  # of the Async tools: asking for them takes a round trip


class Result:
    """The result of a plain call: to be awaited, or to be used with ``async with``."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._entered: Any = None

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()
        value = self._call()
        return Awaited(value) if isinstance(value, Hold | Leased | SemaphoreLease) else value

    async def __aenter__(self) -> Any:
        self._entered = await self
        return await self._entered.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._entered.__aexit__(*error)


class Awaited:
    """A plain tool with the surface of its Async twin."""

    def __init__(self, tool: Any) -> None:
        self.__dict__["tool"] = tool

    def __getattr__(self, name: str) -> Any:
        if name in AWAITED_PROPERTIES:
            return Result(lambda: getattr(self.tool, name))
        value = getattr(self.tool, {"aclose": "close"}.get(name, name))
        if not callable(value):
            return value
        return lambda *args, **kwargs: Result(lambda: value(*args, **kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.tool, name, value)

    def size(self) -> Result:
        return Result(self.tool.__len__)

    async def __aenter__(self) -> "Awaited":
        self.tool.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return self.tool.__exit__(*error)


class Tools:
    """Makes the tools of one kind, by the plain names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Callable[..., Any]:
        module = budget if name == "Budget" else coordination
        if self.kind == "asyncio":
            return getattr(module, f"Async{name}")  # type: ignore[no-any-return]  # by its name
        plain = getattr(module, name)
        return lambda *args, **kwargs: Awaited(plain(*args, **{key: _plain(value) for key, value in kwargs.items()}))


def _plain(value: Any) -> Any:
    return value.tool if isinstance(value, Awaited) else value
