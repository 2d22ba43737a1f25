"""The store of a worker: which one it is, its connections before the first check, and how many there are."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import cast

from headgate.algorithms import ALGORITHMS
from headgate.errors import StoreUnavailable
from headgate.rule import Rule
from headgate.service.envoy_rules import EnvoyRules
from headgate.service.envoy_settings import EnvoyDomain
from headgate.service.settings import BadFile, RuleSettings, Settings, quotas_for
from headgate.service.shared_counters import IDLE, IN_USE, WAITING
from headgate.stores.base import ConnectedStore, Store, StoreOptions, open_store
from headgate.stores.memory import MemoryStore

OWN_STORE = "store"  # the directory of `own_store` in the folder of the service
OWN_KEYS = 50_000  # of each rule in it, at most: about 30 MB with the default rule under all algorithms
CONNECTION_SETTINGS = ("min_connections", "max_connections", "retries")
WARM_UP_TIMEOUT = 1.0  # seconds that a start may take to connect


def make_store(settings: Settings, folder: Path | None = None) -> Store:
    """Open the store that all limiters of a worker share; *folder* is that of the running service."""
    if settings.store != "memory://":
        return open_store(settings.store, None, store_options(settings))[0]
    if folder is not None and (folder / OWN_STORE).is_dir():
        return own_store(settings, folder)
    return MemoryStore(max_keys=settings.max_keys)


def own_store(settings: Settings, folder: Path) -> Store:
    """The store of several workers that were given none: in memory, and removed with the service."""
    from headgate.stores.shared import SharedStore

    each = settings.max_keys // (len(settings.rules) + len(ALGORITHMS))  # each rule has a file of its own
    return SharedStore(f"shared://{folder / OWN_STORE}", max_keys=max(1_000, min(each, OWN_KEYS)))


def store_options(settings: Settings) -> StoreOptions:
    """The settings of connections that were given; a store has its own defaults."""
    given = {name: getattr(settings, name) for name in CONNECTION_SETTINGS}
    return cast("StoreOptions", {name: value for name, value in given.items() if value is not None})


async def warm_up(store: Store) -> None:
    """Connect to the store before the first check. If that fails, the checks and the health say so."""
    if isinstance(store, ConnectedStore):
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(WARM_UP_TIMEOUT):
                await store.awarm_up()


def update_connections(gauges: memoryview[int], store: Store) -> None:
    """Write how many connections there are."""
    if isinstance(store, ConnectedStore):
        found = store.connections()
        gauges[IN_USE], gauges[IDLE], gauges[WAITING] = found["in_use"], found["idle"], found["waiting"]


def check_store(settings: Settings) -> None:
    """Raise `BadFile` if the store's URL is wrong, a package is missing or a directory is not right. No connections."""
    try:
        make_store(settings)
    except (ValueError, ImportError, StoreUnavailable) as error:
        raise BadFile(f"store: {error}") from None


def make_own_store(settings: Settings, domains: list[EnvoyDomain], folder: Path) -> str:
    """Make the store that several workers share if none was named. Returns why that was not possible, or nothing."""
    (folder / OWN_STORE).mkdir(mode=0o700)
    try:
        store = own_store(settings, folder)
        for name, rule in {"default": RuleSettings(), **settings.rules}.items():
            for kind in ALGORITHMS if name == "default" else [rule.algorithm.lower()]:
                store.open(Rule(quotas_for(name, rule, kind), kind, name))
        EnvoyRules(domains, settings.envoy, store)  # opens a limiter for each of its limits
    except (StoreUnavailable, ValueError) as error:
        shutil.rmtree(folder / OWN_STORE)
        return str(error)
    return ""
