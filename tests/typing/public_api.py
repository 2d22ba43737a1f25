"""Every documented constructor as a user writes it, read by mypy and pyright and never run.

Both report an ignore that is not needed, so a line with one states that the mistake in it is seen.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import aiohttp
import httpx
import redis
import redis.asyncio
import requests

from headgate import (
    AsyncBudget,
    AsyncHybridLimiter,
    AsyncLimiter,
    Budget,
    Decision,
    HybridLimiter,
    Limiter,
    Quota,
    Slot,
)
from headgate.clients.aiohttp import PoolMiddleware
from headgate.clients.httpx import AsyncPoolTransport, PoolTransport
from headgate.clients.llm import AsyncBudgetTransport, BudgetTransport
from headgate.clients.requests import PoolAdapter
from headgate.coordination import (
    Adaptive,
    AsyncCircuitBreaker,
    AsyncLock,
    AsyncPool,
    AsyncSemaphore,
    AsyncWaitQueue,
    CircuitBreaker,
    Lock,
    Pool,
    Semaphore,
    WaitQueue,
)
from headgate.joint import JointCheck, try_acquire_all, try_acquire_all_async
from headgate.stores import MemoryStore, RedisStore, SeveralStore
from headgate.stores.base import JointStore, Store
from headgate.testing import ManualClock

URL = "redis://localhost:6379/0"


def stores() -> list[Store]:
    clock = ManualClock()
    return [
        MemoryStore(max_keys=10, clock=clock),
        RedisStore(URL, prefix="app", hash_keys=True, timeout=0.5, connect_timeout=0.1, max_connections=5, clock=clock),
        RedisStore(URL, min_connections=2, retries=1, retry_pause=0.01),
        RedisStore(redis.Redis()),
        RedisStore(redis.asyncio.Redis()),
        SeveralStore([URL, RedisStore(URL)], "first"),
    ]


def limiters(store: Store) -> None:
    Limiter("100/minute")
    Limiter(Quota(limit=100, period=60.0, burst=None))
    Limiter(["10/second", "1000/hour"], algorithm="sliding_window")
    Limiter("10/second burst 100", algorithm="gcra", store=URL, name="login", on_store_error="deny", prefix="app")
    Limiter("5/minute", store=MemoryStore())
    Limiter("5/minute", store=RedisStore(URL))
    Limiter("5/minute", store=store, on_store_error="local")
    HybridLimiter("5/minute", store=URL, accuracy="medium", cold="optimistic", max_local_keys=10)
    HybridLimiter("5/minute", store=URL, accuracy=30.0)
    HybridLimiter("5/minute", store=RedisStore(URL), algorithm="fixed_window", on_store_error="raise")
    Limiter("5/minute", store=[URL, RedisStore(URL)], agree="majority")
    Limiter("5/minute", store=[URL, URL], agree="most")  # type: ignore[arg-type]
    AsyncLimiter("5/minute", store=(URL, store), agree="first", timeout=0.2)
    AsyncLimiter("5/minute", store=MemoryStore())
    AsyncLimiter("5/minute", store=RedisStore(URL), clock=ManualClock())
    AsyncHybridLimiter("5/minute", store=RedisStore(URL))
    HybridLimiter("5/minute", store=[URL, RedisStore(URL), URL], agree="majority")
    AsyncHybridLimiter("5/minute", store=(URL, RedisStore(URL), URL), agree="majority", timeout=0.2)
    HybridLimiter("5/minute", store=[URL, RedisStore(URL)], agree="first")
    AsyncHybridLimiter("5/minute", store=(URL, RedisStore(URL)), agree="first", timeout=0.2)
    HybridLimiter("5/minute", store=[URL, 3], agree="majority")  # type: ignore[list-item]
    Limiter("5/minute", algorithm="fixed_window", start="first")
    Limiter("5/minute", algorithm="fixed_window", start="now")  # type: ignore[arg-type]
    Limiter("5/minute", algorithm="tokenbucket")  # type: ignore[arg-type]
    AsyncLimiter("5/minute", on_store_error="alow")  # type: ignore[arg-type]
    HybridLimiter("5/minute", algorithm="gcra ")  # type: ignore[arg-type]
    Limiter("5/minute").try_acquire(5)  # type: ignore[arg-type]
    Limiter("5/minute").try_acquire("k", permits="5")  # type: ignore[arg-type]


def joint_stores() -> list[JointStore]:
    return [MemoryStore(), RedisStore(URL)]


def joint(limiter: Limiter, hybrid: HybridLimiter) -> bool:
    decisions: list[Decision] = try_acquire_all([JointCheck(limiter, "k"), JointCheck(hybrid, "other", permits=2)])
    try_acquire_all([JointCheck(limiter, 5)])  # type: ignore[arg-type]
    return all(decisions)


async def joint_async(limiter: AsyncLimiter, plain: Limiter) -> bool:
    decisions = await try_acquire_all_async([JointCheck(limiter, "k"), JointCheck(limiter, "other", 2)])
    await try_acquire_all_async([JointCheck(plain, "k")])  # type: ignore[arg-type]
    return all(decisions)


def coordination(store: Store) -> None:
    for given in (URL, store, MemoryStore(), RedisStore(URL)):
        Lock("reindex", store=given, ttl=30.0, timeout=5.0, max_hold=60.0)
        CircuitBreaker("api", store=given, failures=3, open_for=600.0, successes=3, ignore=(ValueError,))
        Pool("agents", store=given, lease=30.0, slots=2, quota="80/10 minutes", failures=3)
        WaitQueue("tokens", store=given, timeout=60.0, max_length=10)
        Semaphore("erp", limit=50, store=given, lease=30.0, max_hold=60.0)
        Semaphore("erp", limit=50, store=given, adaptive=Adaptive(min=5, max=200, overload=lambda error: True))
        AsyncLock("reindex", store=given)
        AsyncSemaphore("erp", limit=50, store=given, cancel_when_lost=True)
        AsyncCircuitBreaker("api", store=given)
        AsyncPool("agents", store=given)
        AsyncWaitQueue("tokens", store=given)


def budgets(store: Store) -> None:
    org = Budget(requests="500/minute", usd=["5/hour", "50/day"], store=store, name="gpt", hold=60.0, on_lost="spent")
    user = Budget(tokens=Quota(5, 1.0), inside=org, on_store_error="deny")
    Budget(tokens="5/day", on_lost="forget")  # type: ignore[arg-type]
    with user.reserve(["org", "user"], id="job", timeout=30.0, tokens=5, usd="0.5") as hold:
        hold.spend(tokens=1)
        settled: bool = hold.settle(tokens=3)
    httpx.Client(transport=BudgetTransport(org, key="account", timeout=None))
    httpx.AsyncClient(transport=AsyncBudgetTransport(AsyncBudget(requests="5/s"), key=lambda request: "account"))
    print(settled, org.remaining("org"), org.unsettled())


def calls(limiter: Limiter) -> Decision:
    with limiter, Lock("x") as lock, CircuitBreaker("y"), Pool("z").acquire(timeout=1.0) as leased:
        fence: int = lock.fence
        member: str = leased.member
        with Semaphore("w", limit=2).acquire(timeout=1.0, weight=2) as lease:
            lease.ensure_held()
            held: bool = lease.held and lease.fence > fence
        decision = limiter.acquire(member, permits=fence, timeout=2.0)
    remaining: int = decision.remaining
    wait: float = decision.retry_after
    return limiter.try_acquire("k", permits=remaining) if wait and held else limiter.peek("k")


async def async_calls(limiter: AsyncLimiter) -> Decision:
    semaphore = AsyncSemaphore("w", limit=2)
    async with limiter, AsyncLock("x") as lock, AsyncCircuitBreaker("y"), semaphore.acquire(weight=2) as lease:
        fence: int = lock.fence
        in_use: int = (await semaphore.status()).in_use + lease.weight
        return await limiter.acquire("k", permits=fence + in_use, timeout=2.0)


def decorated(limiter: Limiter) -> float:
    @limiter.limit("k", timeout=1.0)
    def half(number: int) -> float:
        return number / 2

    return half(3)


def clients(pool: Pool, shared: AsyncPool) -> None:
    session = requests.Session()
    session.mount("https://", PoolAdapter(pool, lambda request, member: None))
    httpx.Client(transport=PoolTransport(pool, lambda request, member: None))
    httpx.AsyncClient(transport=AsyncPoolTransport(shared, lambda request, member: None))
    aiohttp.ClientSession(middlewares=[PoolMiddleware(shared, lambda request, member: None)])


def mistakes(limiter: Limiter) -> None:
    Limiter("5/minute", algorithm="token_buckets")  # type: ignore[arg-type]
    Limiter("5/minute", on_store_error="denied")  # type: ignore[arg-type]
    AsyncLimiter("5/minute", algorithm="tocken_bucket")  # type: ignore[arg-type]
    HybridLimiter("5/minute", on_store_error="fail")  # type: ignore[arg-type]
    HybridLimiter("5/minute", accuracy="hi")  # type: ignore[arg-type]
    limiter.try_acquire(5)  # type: ignore[arg-type]
    limiter.try_acquire("k", floor="0.2")  # type: ignore[arg-type]
    slot: Slot = limiter.book("k", id="job", permits=1, within=900.0, grace=10.0)
    given_up: bool = slot.cancel() and limiter.cancel_slot("k", "job")
    limiter.book("k", with_in=5, id=str(given_up))  # type: ignore[call-arg]
    Limiter("5/minute", store=redis.Redis())  # type: ignore[arg-type]
    HybridLimiter("5/minute", store=MemoryStore())  # type: ignore[arg-type]
    PoolTransport(limiter, lambda request, member: None)  # type: ignore[arg-type]
