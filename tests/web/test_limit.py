"""What `limit()` takes: mistakes raise where they are written, and every argument does what it says."""

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from headgate import Quota
from headgate.errors import InvalidPermits, InvalidQuota, PermitsExceedLimit
from headgate.testing import ManualClock
from headgate.web.aiohttp import RateLimits as AiohttpRateLimits
from headgate.web.fastapi import RateLimits as FastAPIRateLimits
from headgate.web.flask import RateLimits as FlaskRateLimits
from headgate.web.limit import SetupError
from headgate.web.litestar import RateLimits as LitestarRateLimits
from headgate.web.quart import RateLimits as QuartRateLimits
from headgate.web.sanic import RateLimits as SanicRateLimits
from headgate.web.starlette import RateLimits as StarletteRateLimits
from headgate.web.subject import name_of
from headgate.web.wsgi import RateLimitMiddleware
from tests.support.door import CoreLimits, Door, Request


def user(request: Request) -> Any:
    return request.user


# ------------------------------------------------------------------------------------------------------- mistakes

# the argument, its value, the error, what the error says
BAD = [
    ("quota", "5 per minut", InvalidQuota, "minut"),
    ("quota", "", InvalidQuota, "quota"),
    ("quota", [], InvalidQuota, "at least one"),
    ("quota", None, InvalidQuota, "None"),
    ("key", "adress", SetupError, "'address'"),
    ("key", "header:", SetupError, "header:NAME"),
    ("key", "header:x y", SetupError, "header:NAME"),
    ("key", None, SetupError, "None"),
    ("key", [], SetupError, "empty list"),
    ("key", ["address", 7], SetupError, "7"),
    ("scope", "a\nb", ValueError, "control character"),
    ("scope", 5, ValueError, "text"),
    ("cost", -1, InvalidPermits, "-1"),
    ("cost", 1.5, InvalidPermits, "1.5"),
    ("cost", True, InvalidPermits, "True"),
    ("cost", 6, PermitsExceedLimit, "^cost must be at most 5"),
    ("methods", "POST", SetupError, "list"),
    ("methods", [1], SetupError, "list of texts"),
    ("methods", ["post", "GTE"], SetupError, "GTE is no method.*GET, HEAD, POST.*WEBSOCKET"),
    ("exempt_when", True, SetupError, "exempt_when must be a function"),
    ("count_if", 200, SetupError, "count_if must be a function"),
    ("on_denied", "denied", SetupError, "on_denied must be a function"),
    ("algorithm", "tokens", ValueError, "token_bucket"),
    ("on_store_error", "ignore", ValueError, "allow, deny"),
    ("shadow", "no", SetupError, "shadow must be True or False"),
    ("timeout", 0, SetupError, "above 0"),
    ("timeout", -1.0, SetupError, "above 0"),
    ("timeout", "2", SetupError, "above 0"),
    ("timeout", True, SetupError, "above 0"),
    ("timeout", float("inf"), SetupError, "above 0"),
    ("timeout", float("nan"), SetupError, "above 0"),
    ("timeout", 10**400, SetupError, "above 0"),
    ("quota", "10/second;1000/hour", ValueError, r"several are a list: \['10/second', '1000/hour'\]"),
    ("quota", "10/s, 1,000/hour", ValueError, r"several are a list: \['10/s', '1,000/hour'\]"),
]


@pytest.mark.parametrize(("argument", "value", "error", "says"), BAD, ids=lambda row: f"{row!r:.30}")
def test_bad_value(argument: str, value: Any, error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"quota": "5/minute", argument: value}
    with pytest.raises(error, match=says):
        CoreLimits().limit(given.pop("quota"), **given)


BAD_OPTIONS = [
    ("default", "5 a minute", ValueError, "5 a minute"),
    ("key", "ip", SetupError, "'address'"),
    ("algorithm", "tokens", ValueError, "token_bucket"),
    ("on_store_error", "ignore", ValueError, "allow, deny"),
    ("headers", "X", ValueError, "'ietf'"),
    ("on_denied", 429, SetupError, "on_denied must be a function"),
    ("enabled", "False", SetupError, "enabled must be True or False"),
    ("name", "a\0b", ValueError, "control character"),
    ("name", "", ValueError, "empty"),
    ("trusted_proxies", "10.0.0.0/8", SetupError, r"\['10.0.0.0/8'\]"),
    ("trusted_proxies", ["10.0.0.1/8"], ValueError, "no network"),
    ("trusted_proxies", [5], SetupError, r"trusted_proxies .*'10.0.0.0/8'.*5"),
    ("trusted_proxies", None, SetupError, r"trusted_proxies .*\['10.0.0.0/8'\].*None"),
    ("forwarded", "x-real-ip", SetupError, "list"),
    ("forwarded", [], SetupError, "forwarded .*'x-forwarded-for'.*empty"),
    ("forwarded", [5], SetupError, "forwarded .*'x-forwarded-for'.*5"),
    ("forwarded", None, SetupError, "forwarded .*'x-forwarded-for'.*None"),
    ("ipv6_prefix", 129, SetupError, "1 to 128"),
    ("ipv6_prefix", 0, SetupError, "1 to 128"),
    ("ipv6_prefix", "64", SetupError, "1 to 128"),
    ("store", "redis", ValueError, "unknown store"),
    ("pool", 5, TypeError, "pool"),
]


@pytest.mark.parametrize(("argument", "value", "error", "says"), BAD_OPTIONS, ids=lambda row: f"{row!r:.30}")
def test_bad_option(argument: str, value: Any, error: type[Exception], says: str) -> None:
    """The object itself raises, before there is a limit."""
    with pytest.raises(error, match=says):
        CoreLimits(**{argument: value})


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match=r"CoreLimits takes no defaults; it takes .*default, .*; did you mean default"):
        CoreLimits(defaults="5/minute")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"takes no quot; it takes .*cost, .*name, "):
        RateLimitMiddleware(lambda environ, start_response: [], "5/minute", quot=5)
    with pytest.raises(TypeError, match=r"limit\(\) takes no burst, keys; it takes algorithm, cost, count_if"):
        CoreLimits().limit("5/minute", keys=user, burst=7)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kind", "installation"),
    [
        (AiohttpRateLimits, r"web.Application\(middlewares=\[limits.middleware\]\)"),
        (FastAPIRateLimits, r"limits.install\(app\)"),
        (FlaskRateLimits, r"limits.init_app\(app\)"),
        (LitestarRateLimits, r"Litestar\(\[...\], plugins=\[limits\]\)"),
        (QuartRateLimits, r"limits.init_app\(app\)"),
        (SanicRateLimits, r"limits.init_app\(app\)"),
        (StarletteRateLimits, r"limits.install\(app\)"),
    ],
)
def test_unnamed_argument(kind: Any, installation: str) -> None:
    """A quota belongs to `default`; an application that is no argument gets its limits otherwise."""
    with pytest.raises(TypeError, match=r"needs its name: RateLimits\(default='5/minute'\)"):
        kind("5/minute")
    with pytest.raises(TypeError, match=f"got <object object .*{installation}"):
        kind(object())


def test_repr_says_what_it_is() -> None:
    limits = CoreLimits()
    assert repr(limits.limit("5/minute", key=["address", user])) == "<Limit 5/minute by address, user>"
    assert repr(limits.limit(user)) == "<Limit user by address>"


# -------------------------------------------------------------------------------------------------------- quotas


@pytest.mark.parametrize("quota", ["3/hour", ["3/hour", "100/day"], Quota(3, 3600.0), [Quota(3, 3600.0)]], ids=str)
def test_quota(door: Door, quota: Any) -> None:
    assert door.admitted(door.limits().limit(quota), times=5) == 3


def tier(request: Request) -> str:
    return "4/hour" if request.user == "gold" else "2/hour"


def test_quota_function(door: Door) -> None:
    """Tiers: each request has the quota that the function gives for it."""
    limit = door.limits().limit(tier, key=user)
    assert door.admitted(limit, times=6, user="gold") == 4
    assert door.admitted(limit, times=6, user="tin") == 2


@pytest.mark.parametrize("gives", ["five", "", 5])
def test_bad_quota_of_a_function(door: Door, gives: Any) -> None:
    """It is an error, and never a request without a limit."""
    with pytest.raises(InvalidQuota):
        door.get(door.limits().limit(lambda request: gives))


def test_many_quotas_do_not_fill_memory(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota function may give any number of different quotas."""
    monkeypatch.setattr("headgate.web.limiters.MAX_LIMITERS", 10)
    limits = door.limits()
    limit = limits.limit(lambda request: f"{request.user}/hour")
    for number in range(1, 40):
        assert door.get(limit, user=number)
    assert len(limits.known_limiters()) == 10


def test_limits_made_again_and_again(door: Door) -> None:
    """A limit that is made for each request still counts them together, and nothing grows."""
    limits = door.limits()
    assert sum(bool(door.get(limits.limit("3/hour", key=lambda request: request.user), user=7)) for _ in range(6)) == 3
    assert len(limits.known_limiters()) == 1


# ---------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("key", [user, lambda request: request.user])
def test_key_function(door: Door, key: Any) -> None:
    limit = door.limits().limit("2/hour", key=key)
    assert [door.admitted(limit, times=3, user=name) for name in ("a", "b", 7)] == [2, 2, 2]


def later(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An async function that gives the same."""

    async def awaited(of: Any) -> Any:
        await asyncio.sleep(0)
        return function(of)

    return awaited


def test_async_functions(async_door: Door) -> None:
    """Each function of the application may be an async one."""
    limit = async_door.limits().limit(
        later(tier),
        key=later(user),
        cost=later(lambda request: 2),
        exempt_when=later(lambda request: request.user == "admin"),
        count_if=later(lambda response: response.status_code == 200),
    )
    assert [async_door.admitted(limit, times=5, user=name) for name in ("gold", "tin", "admin")] == [2, 1, 5]
    assert async_door.admitted(limit, times=5, user="new", answer=404) == 5


@pytest.mark.parametrize("function", ["key", "cost", "quota", "exempt_when", "count_if"])
def test_async_function_in_a_thread(function: str) -> None:
    """It cannot be awaited there: an error says so."""
    with Door("threads") as door:
        given: dict[str, Any] = {"quota": "2/hour", function: later(lambda of: "1")}
        with pytest.raises(SetupError, match="async function"):
            door.get(door.limits().limit(given.pop("quota"), **given))


class Nameless:
    """Its text would be another one for each object."""


NOTHING: list[Any] = [None, "", "  ", False, True, b"", [], (), {}, (None, None)]
WITHOUT_A_TEXT = [*NOTHING, Nameless(), [Nameless()], (n for n in "ab"), len, later(len)]


@pytest.mark.parametrize("gives", WITHOUT_A_TEXT, ids=lambda value: f"{value!r:.20}")
def test_key_function_that_gives_nothing(door: Door, gives: Any) -> None:
    """It is an error that says which function: never one bucket for all of them."""
    with pytest.raises(SetupError, match=r"the key function user returned .*exempt_when"):
        door.get(door.limits().limit("2/hour", key=user), user=gives)


@pytest.mark.parametrize(
    "gives",
    ["x" * 10_000, "a\nb", "\ud800", "é" * 300, "a{b}c%", 0, 2**70, b"\xff", 1.5, UUID(int=7)],
    ids=lambda value: f"{value!a:.20}",
)
def test_any_other_key_is_a_client(door: Door, gives: Any, redis_url: str) -> None:
    """Of any length and any characters."""
    limit = door.limits(store=redis_url).limit("2/hour", key=user)
    assert door.admitted(limit, times=3, user=gives) == 2
    assert door.get(limit, user="another")


def test_header(door: Door) -> None:
    """By the value of a header, whatever its case; clients without it by their address."""
    limit = door.limits().limit("2/hour", key="header:X-API-Key")
    assert door.admitted(limit, times=3, headers={"X-Api-Key": "one"}) == 2
    assert door.admitted(limit, times=3, headers={"x-api-key": "two"}) == 2
    assert door.admitted(limit, times=3) == 2
    assert door.admitted(limit, times=3, headers={"x-api-key": " "}) == 0
    assert door.admitted(limit, times=3, peer="192.0.2.2") == 2


@pytest.mark.parametrize("value", ["k" * 50_000, "käse", "\udce4", "a\tb", "{x}"], ids=lambda value: f"{value!a:.20}")
def test_header_of_any_value(door: Door, value: str) -> None:
    limit = door.limits().limit("2/hour", key="header:x-api-key")
    assert door.admitted(limit, times=3, headers={"x-api-key": value}) == 2


def test_header_is_a_secret(door: Door, redis_server: Any) -> None:
    """Its value is not in the store."""
    assert door.get(door.limits(store=redis_server.url).limit("2/hour", key="header:x"), headers={"x": "s3cret"})
    assert redis_server.names() and not any("s3cret" in name for name in redis_server.names())


# ------------------------------------------------------------------------------------------------ several subjects


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.server)])
def test_several_subjects_are_all_or_nothing(door: Door, store: str, request: pytest.FixtureRequest) -> None:
    """A request that one subject refuses spends nothing of the others."""
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    limit = door.limits(store=url).limit("3/hour", key=[user, "address"])
    assert door.admitted(limit, times=5, user="a", peer="192.0.2.1") == 3
    assert door.admitted(limit, times=5, user="b", peer="192.0.2.1") == 0  # by the address
    assert door.admitted(limit, times=5, user="a", peer="192.0.2.2") == 0  # by the user
    assert door.admitted(limit, times=5, user="b", peer="192.0.2.2") == 3


class By:
    """A key function that is an object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, request: Request) -> Any:
        return getattr(request, self.name)


SAME_NAMES = {
    "lambdas": [lambda request: request.user, lambda request: request.peer],
    "partials": [functools.partial(lambda name, request: getattr(request, name), name) for name in ("user", "peer")],
    "objects": [By("user"), By("peer")],
}


@pytest.mark.parametrize("functions", SAME_NAMES.values(), ids=SAME_NAMES)
def test_subjects_with_one_name(door: Door, functions: list[Any]) -> None:
    """Each has permits of its own, though the functions have the same name and may give the same text."""
    limit = door.limits().limit("3/hour", key=functions)
    assert door.admitted(limit, times=5, user="192.0.2.1", peer="192.0.2.2") == 3
    assert door.admitted(limit, times=5, user="192.0.2.2", peer="192.0.2.1") == 3


def test_a_subject_that_is_named_twice_is_one(door: Door) -> None:
    assert len(door.limits().limit("3/hour", key=["address", user, "address", user]).subjects) == 2


class Unready:
    """What cannot be used before the application runs, as a lazy object."""

    __class__ = property(lambda self: 1 / 0)

    def __repr__(self) -> str:
        raise RuntimeError("not yet")


def test_function_that_holds_what_is_not_ready(door: Door) -> None:
    """Nor is a function that calls itself looked into for ever."""

    def by_user(request: Request) -> Any:
        return request.user if held else by_user(request)

    held, limits = Unready(), door.limits()
    both = [limits.limit("3/hour", key=lambda request: held and by_user(request), scope="x") for _ in range(2)]
    assert door.admitted(both, times=5, user="a") == 3
    assert len(limits.known_limiters()) == 1


def named(name: str, function: Any) -> Any:
    """The function, as if another module had defined it by this name."""
    function.__qualname__ = name
    return function


TWO_SUBJECTS: dict[str, list[Any]] = {
    "lambdas": [lambda request: request.user, lambda request: request.peer],
    "objects": [By("user"), By("peer")],
    "methods": [By("user").__call__, By("peer").__call__],
    "closures over objects": [(lambda by: lambda request: by(request))(By(name)) for name in ("user", "peer")],
    "functions of one name": [user, named("user", lambda request: request.peer)],
    "a word and a function": ["address", named("address", lambda request: request.user)],
}


@pytest.mark.parametrize("scope", ["", "search"])
@pytest.mark.parametrize("functions", TWO_SUBJECTS.values(), ids=TWO_SUBJECTS)
def test_two_limits_by_two_subjects(door: Door, functions: list[Any], scope: str) -> None:
    """Two clients of the same text, of two functions, are two clients; the names go by the order of the limits."""
    limits = door.limits()
    both = [limits.limit("3/hour", key=function, scope=scope) for function in functions]
    assert door.admitted(both[1], times=5, user="192.0.2.1") == 3
    assert door.admitted(both[0], times=5, user="192.0.2.1") == 3
    again = [limits.limit("3/hour", key=function, scope=scope) for function in functions]
    assert door.admitted(again, times=5, user="192.0.2.1") == 0


NAMES = """
import functools
from headgate.web.subject import name_of
def by(name, of=("x", None)):
    return lambda request: request[name] if name in {"a", "b", "c"} else 1.5
print([name_of(f) for f in (by("a"), by("b"), lambda r: r.x, lambda r: r.y, functools.partial(by, "a"), by)])
"""


def test_names_of_functions_are_the_same_in_every_process() -> None:
    """Else each process would count alone; and functions that differ have names that differ."""
    told = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path("src").resolve())}
        done = subprocess.run(
            [sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, check=True
        )
        told.add(done.stdout)
    names = eval(told.pop())
    assert not told
    assert len(set(names)) == 6 and names[-1] == "by"
    assert name_of(user) == "user"


# ---------------------------------------------------------------------------------------------------------- scope


def test_scope_is_shared(door: Door) -> None:
    """Limits of one scope and quota share their permits; without a scope each route has its own."""
    limits = door.limits()
    search, more = limits.limit("3/hour", scope="search"), limits.limit("3/hour", scope="search")
    assert door.admitted(search, times=2, route="GET /a") == 2
    assert door.admitted(more, times=5, route="GET /b") == 1
    alone = limits.limit("3/hour")
    assert [door.admitted(alone, times=5, route=route) for route in ("GET /a", "GET /b", "")] == [3, 3, 3]


def test_two_limits_of_one_scope_count_a_request_once(door: Door) -> None:
    """On a router and on its route, for example; the dearer one decides what it costs."""
    limits = door.limits()
    router, route, dear = (limits.limit("9/hour", scope="api", cost=cost) for cost in (1, 1, 3))
    assert door.get([router, route]).remaining == 8
    assert door.get(router, route).remaining == 7
    assert door.get(router, dear).remaining == 4
    assert door.get([dear, router], route).remaining == 1
    assert door.reset(limits, "192.0.2.1")
    assert door.get(router, dear, limits.limit("9/hour", scope="api", cost=3)).remaining == 6


def test_parts_of_a_name_are_told_apart(door: Door, redis_url: str) -> None:
    """Whatever spaces are in the name of an application, in a scope and in the name of a key function."""

    def by(request: Request) -> str:
        return request.peer

    for name, scope, called in (("a b", "c", "by"), ("a", "b c", "by"), ("a", "b", "c by"), ("a%20b", "c", "by")):
        by.__qualname__ = called
        limit = door.limits(store=redis_url, name=name).limit("2/hour", scope=scope, key=by)
        assert door.admitted(limit, times=3) == 2


def test_the_same_limit_twice_counts_once(door: Door) -> None:
    limit = door.limits().limit("9/hour")
    assert door.get([limit, limit], limit).remaining == 8


def test_scope_of_any_text_is_a_header(door: Door) -> None:
    """Whatever it is called, the header of the policy has plain ASCII and no line ends."""
    limits = door.limits(headers="ietf")
    answers = [door.get(limits.limit("3/hour", scope=scope)) for scope in ('a"b;q=1, "c', "поиск", "GET /é/{x}")]
    names = [answer.headers["ratelimit"].partition(";")[0] for answer in answers]
    assert names == ['"a-b-q-1-c"', '"limit"', '"GET-x"']


def test_long_scopes(door: Door) -> None:
    limit = door.limits(name="n" * 200).limit("2/hour", scope="s" * 256)
    assert door.admitted(limit, times=3) == 2


# ----------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("cost", [2, lambda request: request.user])
def test_cost(door: Door, cost: Any) -> None:
    assert door.admitted(door.limits().limit("5/hour", cost=cost), times=5, user=2) == 2


@pytest.mark.parametrize("cost", [0, lambda request: 0])
def test_free_requests(door: Door, cost: Any) -> None:
    """A request that costs nothing is not limited, and has no headers."""
    limit = door.limits().limit("1/hour", cost=cost)
    answers = [door.get(limit) for _ in range(3)]
    assert all(answers) and not any(answer.headers for answer in answers)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_cost_above_the_capacity(door: Door, timeout: float | None) -> None:
    """Refused at once, also where others would wait, and not to be tried again; nothing is spent of any limit."""
    limits = door.limits()
    options: Any = {} if timeout is None else {"timeout": timeout}
    dear, other = limits.limit("5/hour", cost=lambda request: 6, **options), limits.limit("7/hour")
    answer = door.get([dear, other])
    assert not answer and answer.headers["x-ratelimit-limit"] == "5" and answer.remaining == 5
    assert "retry-after" not in answer.headers and "retryAfterSeconds" not in answer.body
    assert "can never be admitted" in answer.body["detail"] and "5/hour" in answer.body["detail"]
    assert door.get(other).remaining == 6
    assert door.admitted(other, times=9) == 6
    assert "retry-after" not in door.get([dear, other]).headers and "retry-after" not in door.get([other, dear]).headers


@pytest.mark.parametrize("gives", [-1, 1.5, None, "2"])
def test_bad_cost_of_a_function(door: Door, gives: Any) -> None:
    with pytest.raises(InvalidPermits):
        door.get(door.limits().limit("5/hour", cost=lambda request: gives))


# ------------------------------------------------------------------------------------------ methods and exemptions


def test_methods(door: Door) -> None:
    """Requests with other methods are not counted. HEAD runs what GET does, so it counts with GET."""
    limit = door.limits().limit("2/hour", methods=["get"])
    assert door.admitted(limit, times=4, method="POST") == 4
    assert door.admitted(limit, times=1, method="GET") == 1
    assert door.admitted(limit, times=4, method="HEAD") == 1


def test_exempt_when(door: Door) -> None:
    limit = door.limits().limit("2/hour", exempt_when=lambda request: request.user == "admin")
    assert door.admitted(limit, times=4, user="admin") == 4
    assert door.admitted(limit, times=4, user="me") == 2


def test_preflight_is_never_counted(door: Door) -> None:
    limit = door.limits().limit("1/hour")
    asking = {"Access-Control-Request-Method": "POST", "Origin": "https://example.com"}
    answers = [door.get(limit, method="OPTIONS", headers=asking) for _ in range(3)]
    assert all(answers) and not any(answer.headers for answer in answers)
    assert door.admitted(limit, times=3, method="OPTIONS") == 1  # without that header it is a request like others


# ------------------------------------------------------------------------------------------------------ algorithm


def test_algorithm(door: Door) -> None:
    """Each limit may have its own; a sliding window gives nothing back within its period, a bucket does."""
    clock = ManualClock()
    limits = door.limits(algorithm="sliding_window", clock=clock)
    window, bucket = limits.limit("2/hour", scope="w"), limits.limit("2/hour", scope="b", algorithm="token_bucket")
    assert [door.admitted(limit, times=3) for limit in (window, bucket)] == [2, 2]
    clock.advance(1801.0)
    assert [door.admitted(limit, times=3) for limit in (window, bucket)] == [0, 1]
