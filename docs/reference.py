"""The public names that the reference shows, by page; Zensical reads their docstrings from the sources.

`PAGES` is also what tests/test_docstrings.py goes through. Members that are not listed are for headgate itself. An
async twin lists only what its twin lacks, as every other method is the same, awaited.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One page: its *title*, a sentence or two, and the public names with the members that are shown."""

    title: str
    text: str
    names: dict[str, tuple[str, ...]]


PAGES = {
    "limiters": Page(
        "Limiters",
        "How much, who, and the answer. [Which algorithm](../algorithms.md), [which store](../stores.md).",
        {
            "headgate.Limiter": (
                *("try_acquire", "acquire", "peek", "refund", "reset", "limit", "pace", "paced", "book", "cancel_slot"),
                *("with_timeout", "health", "store_health", "close"),
            ),
            "headgate.AsyncLimiter": ("aclose",),
            "headgate.HybridLimiter": ("stats",),
            "headgate.AsyncHybridLimiter": ("try_acquire_now", "stats_async", "release"),
            "headgate.Quota": ("parse", "capacity"),
            "headgate.Decision": (),
            "headgate.booking.BookedSlot": (),
            "headgate.Slot": ("cancel",),
            "headgate.AsyncSlot": (),
            "headgate.joint.JointCheck": (),
            "headgate.joint.try_acquire_all": (),
            "headgate.joint.try_acquire_all_async": (),
        },
    ),
    "budgets": Page(
        "Budgets",
        "Amounts that are reserved before a call and settled after it: [the guide](../budgets.md).",
        {
            "headgate.Budget": ("reserve", "remaining", "pause", "unsettled", "capacity", "close"),
            "headgate.AsyncBudget": ("aclose",),
            "headgate.budget.Hold": ("spend", "settle"),
            "headgate.budget.AsyncHold": (),
            "headgate.budget.UnsettledHold": (),
        },
    ),
    "coordination": Page(
        "Coordination",
        "Lock, semaphore, circuit breaker, pool and queue: [the guide](../coordination.md).",
        {
            "headgate.coordination.Lock": (
                *("acquire", "release", "held", "fence", "ensure_held", "lost", "locked", "force_release", "close"),
            ),
            "headgate.coordination.AsyncLock": ("aclose",),
            "headgate.coordination.Semaphore": ("acquire", "status", "force_release", "close"),
            "headgate.coordination.AsyncSemaphore": ("aclose",),
            "headgate.coordination.SemaphoreLease": ("held", "lost", "ensure_held", "overloaded", "release"),
            "headgate.coordination.AsyncSemaphoreLease": (),
            "headgate.coordination.SemaphoreStatus": ("available",),
            "headgate.coordination.Adaptive": (),
            "headgate.coordination.CircuitBreaker": (
                *("call", "state", "failure_count", "record_success", "record_failure", "try_recover"),
                *("force_open", "force_closed", "reset", "close"),
            ),
            "headgate.coordination.AsyncCircuitBreaker": ("aclose",),
            "headgate.coordination.Pool": ("add", "retire", "acquire", "status", "close"),
            "headgate.coordination.AsyncPool": ("aclose",),
            "headgate.coordination.Leased": ("observe", "ignore_errors", "renew", "release", "lost", "unanswered"),
            "headgate.coordination.AsyncLeased": (),
            "headgate.coordination.PoolStatus": (),
            "headgate.coordination.WaitQueue": ("enqueue", "dequeue", "wait", "cancel", "position", "close"),
            "headgate.coordination.AsyncWaitQueue": ("size", "aclose"),
        },
    ),
    "web": Page(
        "Web frameworks",
        "The same object, with the same arguments, in every framework: [the guide](../web/README.md).",
        {
            "headgate.web.core.RateLimitsBase": ("limit", "reset", "close", "aclose"),
            "headgate.web.limit.LimitOptions": (),
            "headgate.web.fastapi.RateLimits": ("limit", "exempt", "install", "messages"),
            "headgate.web.starlette.RateLimits": ("exempt", "install", "messages"),
            "headgate.web.flask.RateLimits": ("exempt", "init_app"),
            "headgate.web.quart.RateLimits": ("exempt", "init_app"),
            "headgate.web.litestar.RateLimits": ("exempt",),
            "headgate.web.aiohttp.RateLimits": ("exempt",),
            "headgate.web.sanic.RateLimits": ("exempt", "init_app"),
            "headgate.web.asgi.RateLimitMiddleware": (),
            "headgate.web.wsgi.RateLimitMiddleware": (),
            "headgate.web.django.ratelimit": ("exempt",),
            "headgate.web.django.RateLimitMiddleware": (),
            "headgate.web.login.LoginThrottle": ("attempt", "reset", "close", "aclose"),
            "headgate.web.login.LoginRefused": (),
        },
    ),
    "clients": Page(
        "HTTP and LLM clients",
        "Transports that keep a fleet of callers inside the limits of a server: [the guide](../coordination.md).",
        {
            "headgate.clients.httpx.PoolTransport": (),
            "headgate.clients.httpx.AsyncPoolTransport": (),
            "headgate.clients.requests.PoolAdapter": (),
            "headgate.clients.aiohttp.PoolMiddleware": (),
            "headgate.clients.llm.BudgetTransport": (),
            "headgate.clients.llm.AsyncBudgetTransport": (),
            "headgate.clients.retries.Retries": (),
            "headgate.clients.authorize.header": (),
        },
    ),
    "jobs": Page(
        "Job queues",
        "Jobs at the pace of a limit: [the guide](../jobs.md).",
        {
            "headgate.jobs.JobSlots": ("delay",),
            "headgate.jobs.AsyncJobSlots": (),
        },
    ),
    "stores": Page(
        "Stores",
        "Most programs write a URL. A store object is for limiters that share their connections, or for a client that "
        "you have already: [stores](../stores.md).",
        {
            "headgate.stores.MemoryStore": (),
            "headgate.stores.SharedStore": (),
            "headgate.stores.RedisStore": ("from_url", "warm_up", "awarm_up", "connections", "health"),
            "headgate.stores.PostgreSQLStore": ("from_url", "schema_sql", "migrate", "warm_up", "awarm_up", "health"),
            "headgate.stores.ServiceStore": (),
            "headgate.stores.SeveralStore": (),
            "headgate.limits.install": (),
        },
    ),
    "telemetry": Page(
        "Telemetry",
        "The figures of any process, for Prometheus and OpenTelemetry: [the guide](../telemetry.md).",
        {
            "headgate.telemetry.prometheus.Collector": ("close",),
            "headgate.telemetry.opentelemetry.instrument": (),
            "headgate.telemetry.snapshot": (),
            "headgate.telemetry.Row": (),
        },
    ),
    "testing": Page(
        "Testing",
        "A clock that your test moves: [the guide](../testing.md).",
        {"headgate.testing.ManualClock": ("advance", "now", "call_later")},
    ),
    "errors": Page(
        "Exceptions",
        "All are `HeadgateError`, and all are in `headgate`. A denial is not an error: `try_acquire` returns it.",
        {
            f"headgate.{name}": ()
            for name in (
                *("HeadgateError", "RateLimited", "StoreUnavailable", "InvalidQuota", "InvalidKey", "InvalidPermits"),
                *("PermitsExceedLimit", "SlotMismatch", "BudgetExceeded", "LockTimeout", "LockLost", "CircuitOpen"),
                *("PoolExhausted", "QueueFull"),
            )
        },
    ),
}


def markdown(page: Page) -> str:
    """The source of *page*: a directive for each name, which mkdocstrings replaces by what the docstrings say."""
    parts = [f"# {page.title}\n\n{page.text}\n"]
    short = [name.rpartition(".")[2] for name in page.names]
    for name, last in zip(page.names, short, strict=True):
        shown = f"[{', '.join(page.names[name])}]" if page.names[name] else "false"
        label = last if short.count(last) == 1 else ".".join(name.split(".")[-2:])  # such as fastapi.RateLimits
        options = [f"members: {shown}", f"inherited_members: {shown}", f"toc_label: {label}"]
        parts.append("\n      ".join([f"::: {name}\n    options:", *options]) + "\n")
    return "\n".join(parts)
