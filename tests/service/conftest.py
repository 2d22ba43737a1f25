"""Services to ask: one on memory that tests share, and others that a test starts for itself."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.resp import RULES, RespSocket
from tests.support.service import Service

Start = Callable[..., Service]

_keys = itertools.count()


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The defaults, on memory; shared, so each test takes keys of its own."""
    started = Service()
    yield started
    started.forget()


@pytest.fixture(scope="session")
def resp_service() -> Iterator[Service]:
    """One that speaks the Redis protocol too, with rules; shared, so each test takes keys of its own."""
    started = Service("--resp-port", "0", config=RULES)
    yield started
    started.forget()


@pytest.fixture
def client(resp_service: Service) -> Iterator[RespSocket]:
    with RespSocket(resp_service) as made:
        yield made


@pytest.fixture
def within_a_minute() -> None:
    """Let no test begin shortly before a minute ends: windows that start anew with it are not what it is about."""
    left = 60 - time.time() % 60
    if left < 4:
        time.sleep(left)


@pytest.fixture
def within_an_hour() -> None:
    """The same before an hour ends."""
    left = 3600 - time.time() % 3600
    if left < 20:
        time.sleep(left)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"key-{next(_keys)}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start services that end with the test."""
    started: list[Service] = []

    def begin(*arguments: str, **options: object) -> Service:
        started.append(Service(*arguments, **options))  # type: ignore[arg-type]  # handed on as they are
        return started[-1]

    yield begin
    for one in started:
        one.forget()
