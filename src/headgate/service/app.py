"""One worker: its routes, its state, and what it looks at once a second."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import time
from typing import cast

from headgate.service import batch, checks, docs, health, live, metrics, openapi, playground, static
from headgate.service.address import Locator, network
from headgate.service.board import (
    BREAKER_OPEN,
    BREAKER_OPENED,
    KEYS,
    PROBLEMS,
    RELOAD_OK,
    RELOADED_AT,
    RELOADS,
    RELOADS_FAILED,
    STOPPING,
    Board,
)
from headgate.service.body import Bodies
from headgate.service.delivery import Delivery
from headgate.service.denied import DeniedKeys
from headgate.service.files import BadFile, Sources, Watch
from headgate.service.http import Exchange, Refusal, Reply, Scope, check_framing, problem, request_id_of
from headgate.service.kept import Kept, keep, newest
from headgate.service.logs import configure, masked, unquoted
from headgate.service.rules import Book, Lane
from headgate.service.settings import Settings
from headgate.service.tokens import Tokens
from headgate.stores.base import Store, open_store
from headgate.stores.memory import MemoryStore

logger = logging.getLogger("headgate.service")

Handler = Callable[["App", Scope, Exchange], Awaitable[Reply | None]]  # None: it has answered itself

KEEP_ALIVE = 10  # seconds that a connection may send nothing before it is closed

API = "/api/v1/rate-limit"
ROUTES: dict[str, dict[str, Handler]] = {
    f"{API}/check": {"GET": checks.check, "POST": checks.post, "HEAD": checks.head},
    f"{API}/remaining": {"GET": checks.remaining},
    f"{API}/reset": {"DELETE": checks.reset},
    f"{API}/check/batch": {"POST": batch.batch},
    "/actuator/prometheus": {"GET": metrics.scrape},
    "/metrics": {"GET": metrics.scrape},
    "/actuator/health": {"GET": health.health},
    "/actuator/health/liveness": {"GET": health.liveness},
    "/actuator/health/readiness": {"GET": health.readiness},
    "/actuator/info": {"GET": health.info},
    "/openapi.json": {"GET": openapi.serve},
    "/docs": {"GET": docs.serve},
    "/live": {"GET": live.stream, "HEAD": live.head},
    "/playground/check": {"POST": playground.check},
    "/playground/peek": {"GET": playground.peek},
}


class State:
    """Everything that a reload replaces, at once."""

    def __init__(self, settings: Settings, tokens: Tokens, store: Store, board: Board) -> None:
        self.settings = settings
        self.tokens = tokens
        self.book = Book(settings, store, board)
        trusted = [network(text) for text in settings.trusted_proxies]
        self.locator = Locator(trusted, settings.client_headers, settings.ipv6_prefix)
        self.ietf_headers = settings.ietf_headers
        # what queries that came before ask for: lane, key, key as JSON, cost
        self.seen: dict[str, tuple[Lane, str, str, int]] = {}
        self.shown: Callable[[str], str] = repr if settings.log_keys else masked


class App:
    """What granian runs in each worker."""

    state: State
    store: Store
    debug: bool

    def __init__(self, sources: Sources, settings: Settings, board: Path) -> None:
        self.sources = sources
        self.board = Board(board)
        self._place = board
        self.denied = DeniedKeys()
        self.delivery = Delivery()
        self.playground = playground.Sessions()
        self.page = static.load()
        self.bodies = Bodies()
        self.batches = asyncio.Semaphore(batch.AT_ONCE)
        self.waiting = 0
        self.watchers = 0
        self.error_logged_at = float("-inf")
        self.redis = metrics.RedisNumbers()
        self._settings = settings
        self._opened = 0
        self._parent = os.getppid()

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the first request: take a slab, open the store, make the rules."""
        settings = self._settings
        configure(settings.log_level, settings.log_format)
        slab = self.board.claim()
        self.slab, self.gauges, self.slots, self.timings = slab, slab.gauges, slab.slots, slab.timings
        self.store = make_store(settings)
        kept = newest(self._place)  # newer than those of the start, for one that takes the place of another
        self._adopt(kept)
        self._watch = Watch(kept.stamp)
        self.gauges[RELOAD_OK], self.gauges[RELOADED_AT] = 1, int(time())
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        # A full collection walks over every module and took 10 ms: it was the slowest hundredth of all checks. What is
        # here now stays for ever, and a check leaves nothing behind that needs a collector.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)
        self._ticker = loop.create_task(self._tick())
        self._heed()
        loop.call_later(0.25, self._heed)  # it may come between this line and granian's handler

    def _heed(self) -> None:
        """Stop if told so before there was a handler for it. Not again later: that would end what is in flight."""
        if self.board.header[STOPPING]:
            signal.raise_signal(signal.SIGTERM)

    def __rsgi_del__(self, loop: asyncio.AbstractEventLoop) -> None:
        """After the last answer."""
        self._ticker.cancel()
        loop.run_until_complete(self.store.aclose())

    async def __rsgi__(self, scope: Scope, exchange: Exchange) -> None:
        request_id = ""
        method = scope.method
        fields = scope.headers
        try:
            if len(fields.get_all("host")) != 1 or "transfer-encoding" in fields:
                check_framing(scope.http_version, fields)
            route = ROUTES.get(scope.path)
            handler = route.get(method) if route else None
            reply = await (handler(self, scope, exchange) if handler else self._other(route, scope, exchange))
            if reply is None:
                return
        except Refusal as refusal:
            request_id = request_id_of(fields) or secrets.token_hex(8)
            reply = problem(refusal.status, refusal.detail, *refusal.headers, request_id=request_id)
            self.gauges[PROBLEMS] += 1
            if self.debug:
                shown = refusal.detail if self.state.settings.log_keys else unquoted(refusal.detail)
                logger.debug("%d: %s", refusal.status, shown, extra={"request_id": request_id})
        except Exception:
            request_id = request_id_of(fields) or secrets.token_hex(8)
            reply = problem(500, "an error of the service, not of the request; its log has more", request_id=request_id)
            self.gauges[PROBLEMS] += 1
            logger.exception("Error answering %s, request %s", method, request_id, extra={"request_id": request_id})
        status, headers, body = reply
        if request_id or (request_id := request_id_of(fields)):
            headers.append(("x-request-id", request_id))
        if method == "HEAD":
            exchange.response_empty(status, headers)
        elif type(body) is str:
            exchange.response_str(status, headers, body)
        else:
            exchange.response_bytes(status, headers, cast("bytes", body))

    async def _other(self, route: dict[str, Handler] | None, scope: Scope, exchange: Exchange) -> Reply | None:
        """HEAD and OPTIONS where there is a GET, the page's files, and what there is not."""
        path, method = scope.path, scope.method
        file = self.page.get(path) if route is None else None
        if route is None and file is None:
            raise Refusal(404, f"there is nothing at {path!r:.80}; see /docs")
        methods = ["GET"] if route is None else list(route)
        if "GET" in methods and "HEAD" not in methods:
            methods.append("HEAD")
        if method == "OPTIONS":
            return 204, [("allow", ", ".join([*methods, "OPTIONS"]))], b""
        if method not in methods:
            allow = ", ".join([*methods, "OPTIONS"])
            raise Refusal(405, f"{method:.20} is not possible here; {allow} are", ("allow", allow))
        if file is not None:
            return file.reply(scope)
        assert route is not None
        return await route["GET"](self, scope, exchange)

    def reload(self) -> None:
        """Read the file again. A bad one changes nothing but the log and the metric."""
        stamp = self.sources.stamp()
        self._watch = Watch(stamp)
        try:
            settings = self.sources.reread(self.state.settings)
            kept = Kept(settings, self.sources.tokens(settings), stamp)
            self._adopt(kept)
            keep(self._place, kept)
        except (BadFile, Refusal, ValueError) as error:
            self.gauges[RELOADS_FAILED] += 1
            self.gauges[RELOAD_OK] = 0
            logger.error("The new settings are not used, the old ones stay in force: %s", error)
            return
        self.gauges[RELOADS] += 1
        self.gauges[RELOAD_OK], self.gauges[RELOADED_AT] = 1, int(time())
        logger.warning("Settings read again: rules %s", ", ".join(self.state.book.rules))
        for name in ("host", "port", "workers", "store", "max_keys", "log_format"):
            if getattr(settings, name) not in (getattr(self._settings, name), 0):  # port 0 was any that is free
                logger.warning("The new %s needs a restart", name)

    def _adopt(self, kept: Kept) -> None:
        self.state = State(kept.settings, Tokens(kept.tokens), self.store, self.board)
        logging.getLogger("headgate").setLevel(kept.settings.log_level.upper())
        self.debug = logger.isEnabledFor(logging.DEBUG)

    async def _tick(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            try:
                self._look(seconds)
            except Exception:
                logger.exception("Error in a worker's own look at itself")

    def _look(self, seconds: int) -> None:
        """Once a second: how the store is, who is denied, whether there is a new file and still a parent."""
        seen = self.state.book.lane(None, None).limiter.store_health()
        self.gauges[BREAKER_OPEN] = seen.state == "open"
        self.gauges[BREAKER_OPENED] += seen.opened - self._opened  # the slab may have had another worker before
        self._opened = seen.opened
        if isinstance(self.store, MemoryStore):
            self.gauges[KEYS] = len(self.store)
        if seconds % KEEP_ALIVE == 0:
            self.delivery.rotate()
        if seconds % 60 == 0:
            self.denied.fade()
        self.slab.write(self.denied.encoded())
        if self._watch.is_new(self.sources.stamp()):
            self.reload()
        if os.getppid() != self._parent:
            logger.error("The main process is gone: this worker stops")
            signal.raise_signal(signal.SIGTERM)


def make_store(settings: Settings) -> Store:
    """The store that all limiters of a worker share."""
    if settings.store == "memory://":
        return MemoryStore(max_keys=settings.max_keys)
    return open_store(settings.store, None, {})[0]
