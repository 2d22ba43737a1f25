"""The core of headgate.web, from threads and from asyncio; a Django project, from WSGI and from ASGI."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.door import COLOURS, Door


@pytest.fixture(params=COLOURS)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Requests of each colour in turn."""
    with Door(request.param) as door:
        yield door


@pytest.fixture
def async_door() -> Iterator[Door]:
    with Door("asyncio") as door:
        yield door


def _site(kind: str) -> Iterator[Any]:
    from tests.web.django_site.site import Site  # configures Django, which other tests do not need

    site = Site(kind)
    yield site
    site.close()


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The Django project of the tests, as each kind of server runs it."""
    yield from _site(request.param)


@pytest.fixture
def wsgi_site() -> Iterator[Any]:
    yield from _site("wsgi")


@pytest.fixture
def asgi_site() -> Iterator[Any]:
    yield from _site("asgi")
