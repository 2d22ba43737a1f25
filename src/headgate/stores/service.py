"""Limits kept by a running headgate service: a process that uses it needs no credentials of the service's store."""

from __future__ import annotations

from typing import Unpack

from redis.exceptions import RedisError, ResponseError

from headgate.clock import Clock
from headgate.redis.topology import Unreached
from headgate.redis.url import RedisOptions
from headgate.remote.commands import UNFIT, UNSURE, BookingCommands, JointCommands, LimiterCommands
from headgate.remote.url import parse_service_url
from headgate.rule import Rule
from headgate.stores.base import StoreOptions
from headgate.stores.remote import RuleForTasks, RuleForThreads, RuleOnServer
from headgate.stores.remote_joint import JointScripts
from headgate.stores.resp_store import RespStore
from headgate.stores.settings import check_flag


class RuleOnService(RuleOnServer):
    """What both backends share: the rule's commands, and what errors mean for a call."""

    store_errors, refusals, unsent = (RedisError, OSError), ResponseError, Unreached

    def __init__(self, store: ServiceStore, rule: Rule, on_store_error: str) -> None:
        super().__init__(store, rule, on_store_error)
        self.script: LimiterCommands = LimiterCommands(rule, store.hash_keys)
        if rule.is_bucket:
            self.booking = BookingCommands(self.script)

    def refused(self, error: Exception) -> bool:
        """Whether the service answered, with an error. Raises ValueError for a call that it can never make."""
        if str(error).startswith(UNFIT):
            raise ValueError(str(error).removeprefix(UNFIT).strip()) from None
        return super().refused(error)

    def may_have_run(self, error: Exception) -> bool:
        """Whether the call may have been made: the service says so if its own store did not answer."""
        return super().may_have_run(error) or str(error).startswith(UNSURE)


class ServiceBackend(RuleOnService, RuleForThreads):
    """One rule on one service, for threads."""


class AsyncServiceBackend(RuleOnService, RuleForTasks):
    """One rule on one service, for asyncio."""


class ServiceStore(RespStore):
    """One headgate service, for limiters of either kind. It must allow limits of clients: `headgate serve` says how.

    Args:
        url: headgate://:token@host:6380, its port of the Redis protocol; headgates:// for TLS. Where that port is
            closed: headgate+http://:token@host:8080, or headgate+https://
        hash_keys: send a digest of the client's key instead of the key: the service sees no addresses
        clock: tests only: of callers that wait for permits; the service decides by its own

    Keyword Args:
        timeout: seconds that a check may take in all; then on_store_error answers
        connect_timeout: seconds of those to connect
        min_connections: that `warm_up` opens; nothing connects before it or the first check
        max_connections: for threads; a caller that finds none free waits within the time-out. An event loop has at most
            four
        retries: how often a call is sent again where that is safe, within its time-out (see `RetryPolicy`)
        retry_pause: seconds before each
    """

    kind = "service"
    backends = (ServiceBackend, AsyncServiceBackend)

    def __init__(
        self, url: str, *, hash_keys: bool = False, clock: Clock | None = None, **options: Unpack[RedisOptions]
    ) -> None:
        known = RedisOptions.__annotations__
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"ServiceStore has no option {unknown[0]!r}; known are {', '.join(known)}, hash_keys, clock"
            )
        super().__init__(parse_service_url(url, **options), "headgate")
        self.hash_keys = check_flag("hash_keys", hash_keys)
        self.clock = clock
        self.joint_scripts = JointScripts(JointCommands)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Unpack[StoreOptions]) -> ServiceStore:
        """The store of a service's URL, without the options that are another store's."""
        options.pop("max_keys", None)
        options.pop("prefix", None)
        return cls(url, clock=clock, **options)  # type: ignore[misc]  # those are not there any more
