"""Login throttling: failures count for the address and the username, exactly; a success is forgotten, and no more."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flask
import pytest
from starlette.requests import Request
from werkzeug.test import EnvironBuilder

from headgate.testing import ManualClock
from headgate.web.limit import SetupError
from headgate.web.login import LoginRefused, LoginThrottle, normalised
from tests.support.servers import Server
from tests.test_examples import EXAMPLES, run

HOME, WORK, EVIL = "192.0.2.1", "192.0.2.2", "198.51.100.66"


class Logins:
    """Tries logins, in a thread or in an event loop. The password of everybody is "right"."""

    def __init__(self, colour: str, **options: Any) -> None:
        self.clock = ManualClock()
        self.throttle = LoginThrottle(**{"clock": self.clock, **options})
        self.colour = colour

    def __call__(self, address: Any, username: str, password: str = "wrong") -> str:
        """What the client hears: "welcome", "wrong" or "later"."""
        if self.colour == "asyncio":
            return asyncio.run(self.try_async(address, username, password))
        try:
            with self.throttle.attempt(address, username) as attempt:
                if password == "right":
                    attempt.succeeded()
                    return "welcome"
                return "wrong"
        except LoginRefused:
            return "later"

    async def try_async(self, address: Any, username: str, password: str = "wrong") -> str:
        try:
            async with self.throttle.attempt(address, username) as attempt:
                await asyncio.sleep(0)
                if password == "right":
                    attempt.succeeded()
                    return "welcome"
                return "wrong"
        except LoginRefused:
            return "later"

    def failures(self, address: str, username: str, most: int = 30) -> int:
        """How many failures in a row are let through."""
        return next((n for n in range(most) if self(address, username) == "later"), most)


@pytest.fixture(params=["threads", "asyncio"])
def logins(request: pytest.FixtureRequest) -> Logins:
    return Logins(request.param)


def test_failures_of_a_username(logins: Logins) -> None:
    """Five, and then one for each three minutes; the right password is not looked at meanwhile."""
    assert logins.failures(EVIL, "ann") == 5
    assert logins(EVIL, "ann", "right") == "later"
    logins.clock.advance(180)
    assert logins(EVIL, "ann", "right") == "welcome"


def test_many_addresses_and_one_username(logins: Logins) -> None:
    """They share the allowance of the username."""
    assert [logins(f"198.51.100.{n}", "ann") for n in range(7)] == ["wrong"] * 5 + ["later"] * 2


def test_many_usernames_and_one_address(logins: Logins) -> None:
    """They share the allowance of the address, whether the usernames exist or not."""
    assert [logins(EVIL, f"user{n}") for n in range(22)] == ["wrong"] * 20 + ["later"] * 2
    assert logins(HOME, "user1") == "wrong"


def test_a_success_is_forgotten(logins: Logins) -> None:
    """Any number of logins may succeed, and the failures before one do not count after it."""
    assert [logins(HOME, "ann", "right") for _ in range(50)] == ["welcome"] * 50
    for _ in range(4):
        assert [logins(HOME, "ann") for _ in range(4)] == ["wrong"] * 4
        assert logins(HOME, "ann", "right") == "welcome"


def test_a_success_elsewhere_forgets_nothing_here(logins: Logins) -> None:
    """The owner's login does not give an attacker another five guesses, at this address or from another."""
    assert [logins(EVIL, "ann") for _ in range(3)] == ["wrong"] * 3
    assert logins(HOME, "ann", "right") == "welcome"
    assert logins.failures(EVIL, "ann") == 2
    assert logins(WORK, "ann") == "later"


def test_an_own_account_does_not_clean_an_address(logins: Logins) -> None:
    """An attacker who logs in with an account of their own between guesses has no more guesses."""
    tried = 0
    for n in range(30):
        tried += logins(EVIL, f"victim{n}") == "wrong"
        logins(EVIL, "attacker", "right")
    assert tried == 20


def test_an_owner_is_not_locked_out_at_home(logins: Logins) -> None:
    """Where a user has logged in before, others who try the username are not in the way; and guesses there are held."""
    assert logins(HOME, "ann", "right") == "welcome"
    assert logins.failures(EVIL, "ann") == 5
    assert logins(HOME, "ann", "right") == "welcome"
    assert logins(WORK, "ann", "right") == "later"
    assert logins.failures(HOME, "ann") == 5
    assert logins(HOME, "ann", "right") == "later"


def test_an_address_is_known_for_a_while(logins: Logins) -> None:
    logins(HOME, "ann", "right")
    logins.clock.advance(31 * 86_400)
    assert logins.failures(EVIL, "ann") == 5
    assert logins(HOME, "ann", "right") == "later"


def test_exceptions_and_clients_that_leave_count() -> None:
    logins = Logins("threads")
    for _ in range(4):
        with pytest.raises(LookupError), logins.throttle.attempt(EVIL, "ann"):
            raise LookupError

    def right_password() -> None:
        with logins.throttle.attempt(HOME, "ann") as attempt:
            attempt.succeeded()
            raise LookupError

    with pytest.raises(LookupError):
        right_password()

    async def leave() -> None:
        async with logins.throttle.attempt(EVIL, "ann"):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    assert logins(EVIL, "ann") == "later"


SPELLINGS = [
    ("Ann", "ann"), (" ann ", "ann"), ("a\tb", "a b"), ("a  b", "a b"), ("ＡＮＮ", "ann"), ("an\u200bn", "ann"),
    ("ﬁne", "fine"), ("STRASSE", "straße"), ("e\u0301", "é"), ("a \u200b b", "a b"), ("\ud800ann", "ann"),
    ("x" * 5000, "x" * 1000),
]  # fmt: skip


@pytest.mark.parametrize("spelling, same", SPELLINGS)
def test_spellings_of_a_username(spelling: str, same: str) -> None:
    logins = Logins("threads", per_username="1/hour")
    assert normalised(spelling) == normalised(same)
    assert (logins(EVIL, spelling), logins(EVIL, same), logins(EVIL, "bob")) == ("wrong", "later", "wrong")


def test_usernames_are_not_in_the_store(redis_server: Server) -> None:
    logins = Logins("threads", store=redis_server.url, clock=None)
    logins(HOME, "ann@example.com")
    logins(HOME, "ann@example.com", "right")
    names = " ".join(redis_server.names())
    assert HOME in names and "ann" not in names.lower()


def requests(address: str, forwarded: str) -> list[Any]:
    """A request from *address* as each framework gives it."""
    headers = {"X-Forwarded-For": forwarded}
    made = EnvironBuilder(environ_base={"REMOTE_ADDR": address}, headers=headers)  # type: ignore[arg-type]  # its types err
    scope = {"type": "http", "headers": [(b"x-forwarded-for", forwarded.encode())], "client": (address, 80)}
    environ = made.get_environ()
    return [environ, made.get_request(flask.Request), scope, Request(scope), SimpleNamespace(META=environ)]


def test_address_of_a_request() -> None:
    """That of the peer, or the one that a trusted proxy names: forged headers change nothing."""
    plain, proxied = LoginThrottle(), LoginThrottle(trusted_proxies=["10.0.0.0/8"])
    for request in requests("192.0.2.7", "203.0.113.9"):
        assert plain.address(request) == proxied.address(request) == "192.0.2.7"
    for request in requests("10.0.0.1", "203.0.113.9"):
        assert (plain.address(request), proxied.address(request)) == ("10.0.0.1", "203.0.113.9")
    assert plain.address("2001:db8::1") == "2001:db8::/64"
    with pytest.raises(SetupError, match="give a request"):
        plain.address(object())
    with pytest.raises(SetupError, match="username is text"):
        plain.attempt(HOME, None)  # type: ignore[arg-type]


def test_reset(logins: Logins) -> None:
    """An operator may forget a username, an address, or what was tried for one at the other."""
    assert logins(HOME, "ann", "right") == "welcome"
    for address, forgotten in ((HOME, {"username": "ANN", "address": HOME}), (EVIL, {"username": "ann"})):
        assert logins.failures(address, "ann") == 5
        assert logins.throttle.reset(**forgotten)
        assert logins.failures(address, "ann") == 5
    assert logins.failures(EVIL, "bob") == 5 and logins.failures(EVIL, "carl") == 5 and logins(EVIL, "dora") == "later"
    logins.throttle.reset(address=EVIL)
    assert logins(EVIL, "dora") == "wrong"


def test_the_refusal() -> None:
    logins = Logins("threads", per_username="1/minute")
    logins(EVIL, "ann")
    with pytest.raises(LoginRefused, match="retry in 60 s") as caught, logins.throttle.attempt(EVIL, "ann"):
        pass
    status, headers, body = caught.value.answer()
    assert (status, headers["retry-after"], headers["cache-control"]) == (429, "60", "no-store")
    assert b'"detail":"Too many failed logins; retry in 60 s"' in body and b"ann" not in body


def test_switched_off() -> None:
    logins = Logins("threads", enabled=False)
    assert logins.failures(EVIL, "ann") == 30
    logins.throttle.enabled = True
    assert logins.failures(EVIL, "ann") == 5


@pytest.mark.server
@pytest.mark.parametrize("colour", ["threads", "asyncio"])
def test_exact(colour: str, redis_server: Server) -> None:
    """60 at once against 20 an hour: exactly 20 passwords are looked at, and all that were right are given back."""
    options = {"store": redis_server.url, "clock": None, "per_username": "20/hour", "per_address": "20/hour"}
    both = [Logins(colour, **options) for _ in range(2)]

    def all_at_once(password: str, username: str) -> list[str]:
        if colour == "asyncio":
            return asyncio.run(gather([each.try_async for each in both], username, password))
        barrier = threading.Barrier(60)

        def one(number: int) -> str:
            barrier.wait()
            return both[number % 2](EVIL, username, password)

        with ThreadPoolExecutor(60) as pool:
            return list(pool.map(one, range(60)))

    assert all_at_once("right", "ann").count("welcome") >= 20
    assert sorted(all_at_once("wrong", "bob")) == ["later"] * 40 + ["wrong"] * 20
    for each in both:
        each.throttle.close()


async def gather(tries: list[Callable[..., Awaitable[str]]], username: str, password: str) -> list[str]:
    return await asyncio.gather(*[tries[number % 2](EVIL, username, password) for number in range(60)])


@pytest.mark.server
@pytest.mark.parametrize("framework, yes, no", [("flask", 200, 401), ("fastapi", 200, 401), ("django", 302, 200)])
def test_recipes(framework: str, yes: int, no: int, tmp_path: Path) -> None:
    """The example of each framework: typing errors are forgotten, guesses are held, and the owner gets in."""
    example = next(path for path in EXAMPLES if path.stem == f"web_login_{framework}")
    done = run(example, "", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == [
        str([yes, no, no, yes, no]),
        str([no, no, no, 429]),
        str([yes]),
        str([no, no, no, 429]),
    ]


def test_warning_names_the_throttle(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A throttle in the memory of each worker is named, so that it is not taken for the `RateLimits` beside it."""
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    throttle = LoginThrottle()
    flask_request = flask.Flask(__name__).test_request_context(
        headers={"X-Forwarded-For": WORK}, environ_base={"REMOTE_ADDR": "10.0.0.1"}
    )
    with flask_request, throttle.attempt(flask.request, "ann") as attempt:
        attempt.succeeded()
    workers, proxy = (record.getMessage() for record in caplog.records)
    assert workers.startswith("LoginThrottle is on memory://") and "WEB_CONCURRENCY is 4" in workers
    assert proxy.endswith("trusted_proxies=['10.0.0.1'] of LoginThrottle")
