"""The stores of a limiter in a region: the region's Redis, which keeps the leases, and home, which the region asks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headgate.clock import Clock
from headgate.hybrid.protocol import quota_params
from headgate.hybrid.stock import MOST_SHARES, SHARES, check_regional, check_share
from headgate.rule import Rule
from headgate.stores.base import AsyncBackend, Backend, Health, Store, StoreOptions, open_store

if TYPE_CHECKING:
    from headgate.hybrid.region_leases import RegionLeases
    from headgate.stores.redis import RedisStore

FLOOR = 0.05
HOME_TIMEOUT = 2.0  # seconds, unless home's URL says another: home may be far away
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass(frozen=True, slots=True)
class RegionState:
    """A limiter's region, as this process knows it."""

    name: str
    floor: float  # the share of the quota that the region always has
    home: Literal["up", "down", "unknown"]  # by the last fetch of this process; unknown: there was none yet
    fetches: int  # that home answered, one for each key
    fetched: int  # permits that home gave
    failures: int
    trip_seconds: float  # to home and back, on average
    error: str  # why home does not answer; empty while it does


class RegionStore:
    """A `LeaseStore`: the region's Redis with a home. Each limiter has its own."""

    kind = "redis"

    def __init__(
        self, region_store: RedisStore, owns_region: bool, home: RedisStore, owns_home: bool, region: str, share: int
    ) -> None:
        from headgate.hybrid.region_leases import RegionFigures  # which needs redis-py

        self.region_store, self.home = region_store, home
        self.region, self.share = region, share
        self.clock: Clock | None = region_store.clock
        self.shared_objects: dict[str, Any] = {}
        self.figures = RegionFigures()
        self._owned: list[RedisStore] = [region_store] * owns_region + [home] * owns_home
        self._leases: list[RegionLeases] = []

    def __repr__(self) -> str:
        return f"<RegionStore: {self.region} at {self.region_store!r}, home {self.home!r}>"

    def open(self, rule: Rule, on_store_error: str = "allow") -> Backend:
        """Refuse rules that regions cannot serve, and clients for asyncio. No limiter uses the backend itself."""
        self._check(rule)
        self.home.open(rule, on_store_error)
        return self.region_store.open(rule, on_store_error)

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> AsyncBackend:
        """The same for asyncio."""
        self._check(rule)
        self.home.open_async(rule, on_store_error)
        return self.region_store.open_async(rule, on_store_error)

    def _check(self, rule: Rule) -> None:
        params = quota_params(rule)
        check_regional(params)
        check_share(params, self.share)

    def leases(self) -> RegionLeases:
        from headgate.hybrid.region_leases import RegionLeases

        made = RegionLeases(self)
        self._leases.append(made)
        return made

    def health(self) -> Health:
        """That of the region's Redis: a region works without home."""
        return self.region_store.health()

    async def ahealth(self) -> Health:
        return await self.region_store.ahealth()

    def state(self) -> RegionState:
        seen = self.figures
        home: Literal["up", "down", "unknown"] = "down" if seen.error else "up" if seen.fetches else "unknown"
        return RegionState(
            self.region, self.share / SHARES, home, seen.fetches, seen.fetched, seen.failures, seen.trip_seconds,
            seen.error,
        )  # fmt: skip

    def close(self) -> None:
        for store in self._owned:
            store.close()

    async def aclose(self) -> None:
        for leases in self._leases:
            await leases.end_fetches()
        for store in self._owned:
            await store.aclose()


def region_store(store: Store, owned: bool, home: str | Store, region: str | None, floor: float | None) -> RegionStore:
    """*store*, the Redis of *region*, with its home; raise ValueError if that cannot be."""
    from headgate.stores.redis import RedisStore

    try:
        name, share = check_region(region), check_floor(floor)
        if not isinstance(store, RedisStore):
            raise ValueError(f"a region keeps its leases in a Redis; store is {type(store).__name__}")
        clock = store.clock
        if isinstance(home, str):
            same: StoreOptions = {"prefix": store.prefix, "hash_keys": store.hash_keys}
            if "timeout=" not in home:
                same["timeout"] = HOME_TIMEOUT
            opened, owns_home = open_store(home, clock, same)
        else:
            opened, owns_home = open_store(home, None, {})
        if not isinstance(opened, RedisStore) or opened.partitioned:
            what = "a Redis Cluster" if isinstance(opened, RedisStore) else type(opened).__name__
            raise ValueError(f"home must be one Redis server, or a service behind Sentinels; got {what}")
    except BaseException:
        if owned:
            store.close()
        raise
    return RegionStore(store, owned, opened, owns_home, name, share)


def check_region(region: str | None) -> str:
    if region is None:
        raise ValueError("a limiter with a home needs the name of its region too, such as region='eu'")
    if not isinstance(region, str) or not _NAME.fullmatch(region):
        raise ValueError(f"region must be 1 to 40 letters, digits, - or _, such as 'eu-west', got {region!r:.60}")
    return region


def check_floor(floor: float | None) -> int:
    """A floor in parts of SHARES."""
    floor = FLOOR if floor is None else floor
    most = MOST_SHARES / SHARES
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 1 / SHARES <= floor <= most:
        raise ValueError(f"floor must be a share of the quota from {1 / SHARES:g} to {most:g}, got {floor!r:.40}")
    share = round(floor * SHARES)
    if abs(share - floor * SHARES) > 1e-6:
        raise ValueError(f"floor must be a whole number of thousandths, such as {share / SHARES:g}, got {floor!r}")
    return share
