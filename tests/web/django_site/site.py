"""Requests to the project, through Django's test clients: as a WSGI server makes them, or as an ASGI server does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from django.test import AsyncClient, Client, override_settings

from headgate.web.django.settings import current
from tests.web.django_site.users import log_in


class PeerClient(AsyncClient):
    """A client whose address a test chooses."""

    peer = ""

    def _base_scope(self, **request: Any) -> Any:
        return {**super()._base_scope(**request), "client": [self.peer, 50000]}


class Site:
    """The project. Each test has its own memory, and its own settings if it changes them."""

    def __init__(self, kind: str = "wsgi") -> None:
        self.kind = kind
        self._settings = ExitStack()
        self._loop = asyncio.new_event_loop()
        self.configure()

    def configure(self, **changed: Any) -> None:
        """Change settings for this test; HEADGATE is what it is in the project, and what is named here."""
        self._close_store()
        changed["HEADGATE"] = {"DEFAULT": "100/hour", **changed.get("HEADGATE", {})}
        self._settings.enter_context(override_settings(**changed))
        self._client: Any = None

    @property
    def client(self) -> Any:
        """A client of the settings as they are now."""
        if self._client is None:
            self._client = (Client if self.kind == "wsgi" else PeerClient)(raise_request_exception=False)
        return self._client

    def log_in(self, number: int) -> None:
        log_in(self.client, number)

    def log_out(self) -> None:
        self.client.cookies.clear()

    def request(self, path: str, method: str = "GET", *, peer: str = "192.0.2.1", **arguments: Any) -> Any:
        """The response."""
        return self._loop.run_until_complete(self.start(path, method, peer=peer, **arguments))

    async def start(self, path: str, method: str = "GET", *, peer: str = "192.0.2.1", **arguments: Any) -> Any:
        call = getattr(self.client, method.lower())
        if self.kind == "wsgi":
            return await asyncio.to_thread(call, path, REMOTE_ADDR=peer, **arguments)
        self.client.peer = peer
        headers = arguments.pop("headers", {})  # by name: older test clients replace hyphens otherwise
        return await call(path, **arguments, **headers)

    def statuses(self, *paths: str, **arguments: Any) -> list[int]:
        return [self.request(path, **arguments).status_code for path in paths]

    def at_once(self, path: str, times: int) -> list[int]:
        """The statuses of so many requests at the same time: threads, or tasks of one event loop."""
        if self.kind == "wsgi":
            with ThreadPoolExecutor(times) as threads:
                made = [threads.submit(Client().get, path, REMOTE_ADDR="192.0.2.1") for _ in range(times)]
            return sorted(one.result().status_code for one in made)

        async def gather() -> list[Any]:
            return await asyncio.gather(*[self.start(path) for _ in range(times)])

        return sorted(response.status_code for response in self._loop.run_until_complete(gather()))

    def run(self, work: Any) -> Any:
        """Run a coroutine on the event loop of this site."""
        return self._loop.run_until_complete(work)

    def _close_store(self) -> None:
        self._loop.run_until_complete(current().aclose())

    def close(self) -> None:
        self._close_store()
        self._settings.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def body(response: Any) -> str:
    """The text of a response, streamed or not."""
    return str(response.content.decode())
