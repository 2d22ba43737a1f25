"""Where the states are: the operations of a storage in this process, and on Redis."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from headgate._plan import arun, run
from headgate.algorithms import ALGORITHMS, VARIANTS
from headgate.algorithms.sliding_window_counter import READ_LUA, SlidingWindowCounter
from headgate.errors import StoreUnavailable
from headgate.limits.operations import MOST, Operations, Plan, safe_key
from headgate.limits.options import is_memory, memory_store, redis_store
from headgate.redis.script import LuaScript, ScriptCall, text
from headgate.rule import Rule, check_policy
from headgate.stores.base import Health
from headgate.stores.memory import MemoryStore
from headgate.stores.redis import RedisStore

_READ = LuaScript(READ_LUA, repeatable=True)
_UNLINK = LuaScript("return redis.call('UNLINK', unpack(KEYS))", repeatable=True)

_LONGEST = 3660 * 86400  # seconds: no window ends later
_MOST_BACKENDS = 1000  # on Redis, where a backend can be made again; more come of quotas that are computed

# A fixed window of the clock is what `limits` does not have.
_KINDS = [kind for kind in (*ALGORITHMS, *VARIANTS) if kind != "fixed_window"]


def operations(uri: str, options: dict[str, Any], *, blocking: bool) -> MemoryOperations | RedisOperations:
    """The operations on the store of *uri*, for threads if *blocking*, else for asyncio."""
    return MemoryOperations(options) if is_memory(uri) else RedisOperations(uri, options, blocking=blocking)


class MemoryOperations(Operations):
    """In this process. No operation waits, so threads and event loops use the same backends."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options
        self.store: MemoryStore = memory_store(options)

    def open(self, rule: Rule) -> Any:
        return self.store.open(rule)

    def other_readers(self, kind: str, seconds: float | None) -> list[Any]:
        known = list(self.backends.items())
        return [backend for (name, _, period), backend in known if name == kind and seconds in (None, period)]

    def counters(self, backend: Any, key: str) -> Plan[tuple[SlidingWindowCounter, int, int]]:
        yield from ()
        with backend.lock:
            return backend.algorithm, backend.states.get(key, 0), backend.now()

    def clear(self, key: str) -> Plan[None]:
        yield from ()
        for backend in list(self.backends.values()):
            backend.reset(safe_key(key))

    def reset(self) -> Plan[int]:
        yield from ()
        count = len(self.store)
        self.store, self.backends = memory_store(self._options), {}
        return count

    def check(self) -> Plan[bool]:
        yield from ()
        return True


class RedisOperations(Operations):
    """On Redis, where the name of a key's state does not depend on its quota."""

    def __init__(self, uri: str, options: dict[str, Any], *, blocking: bool) -> None:
        super().__init__()
        self._policy = check_policy(options.get("on_store_error", "raise"))
        rest = {name: value for name, value in options.items() if name != "on_store_error"}
        self.store: RedisStore = redis_store(uri, rest, blocking=blocking)
        self._blocking = blocking

    def open(self, rule: Rule) -> Any:
        if len(self.backends) >= _MOST_BACKENDS:
            self.backends = {}
        return self.store.open(rule, self._policy) if self._blocking else self.store.open_async(rule, self._policy)

    def other_readers(self, kind: str, seconds: float | None) -> list[Any]:
        return [self.backend(kind, MOST, seconds or _LONGEST)]

    def counters(self, backend: Any, key: str) -> Plan[tuple[SlidingWindowCounter, int, int]]:
        algorithm = backend.fallback.rule.algorithm
        try:
            (seconds, part), fields = yield self._execute(_READ, _READ.call(backend.script.keys(key)))
        except (RedisError, OSError) as error:
            if self._policy == "raise":
                raise self._unavailable(error) from error
            return algorithm, 0, 0
        now = int(text(seconds)) * 1_000_000 + int(text(part))
        return algorithm, algorithm.from_redis(*(int(text(field) or 0) for field in fields)), now

    def clear(self, key: str) -> Plan[None]:
        names = [name for kind in _KINDS for name in self.backend(kind, 1, 1).script.keys(safe_key(key))]
        try:
            yield self._execute(_UNLINK, _UNLINK.call(names))
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def reset(self) -> Plan[int]:
        executor = self._executor()
        try:
            count: int = yield (run if self._blocking else arun)(executor.unlink(self.store.prefix), executor.answer)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        return count

    def check(self) -> Plan[bool]:
        seen: Health = yield self.store.health() if self._blocking else self.store.ahealth()
        return seen.healthy and not any(breaker.open for breaker in self._executor().breakers())

    def _executor(self) -> Any:
        return self.store.sync_executor() if self._blocking else self.store.async_executor()

    def _execute(self, script: LuaScript, call: ScriptCall) -> Any:
        return self._executor().execute(script, call)

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self.store.display_name} did not answer: {error}")
