"""One rule of a limiter on one Redis: its script, and what the errors of redis-py mean for a call.

`headgate.stores.remote` has the calls; `RedisBackend` makes them for threads, `AsyncRedisBackend` for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.exceptions import RedisError, ResponseError

from headgate.redis.script import LimiterScript
from headgate.redis.topology import Unreached
from headgate.rule import Rule
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer

if TYPE_CHECKING:
    from headgate.stores.redis import RedisStore

STORE_ERRORS = (RedisError, OSError)  # of a call, all of which `on_store_error` answers


class RuleOnRedis(RuleOnServer):
    """What both backends share: the rule's script, and what the errors of redis-py mean."""

    store_errors = STORE_ERRORS
    unsent = Unreached

    def __init__(self, store: RedisStore, rule: Rule, on_store_error: str) -> None:
        super().__init__(store, rule, on_store_error)
        self.script: LimiterScript = LimiterScript(rule, store.prefix, store.hash_keys, store.clock)

    def refused(self, error: Exception) -> bool:
        return refused(error)

    def may_have_run(self, error: Exception) -> bool:
        return may_have_run(error)


def refused(error: Exception) -> bool:
    """Whether the server answered, with an error."""
    return isinstance(error, ResponseError)


def may_have_run(error: Exception) -> bool:
    """Whether the server may have run the script although no reply came."""
    return not isinstance(error, ResponseError | Unreached)


class RedisBackend(RuleOnRedis, RuleForThreads):
    """One rule on one Redis, for threads."""


class AsyncRedisBackend(RuleOnRedis, RuleForTasks):
    """One rule on one Redis, for asyncio."""
