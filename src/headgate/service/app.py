"""One worker: its routes, its state, and what it does once a second."""

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

import msgspec

from headgate.service import (
    batch,
    bookings,
    checks,
    envoy_json,
    events,
    forward,
    health,
    live_rules,
    metrics,
    openapi,
    pages,
    playground,
    slots,
)
from headgate.service.busy_keys import BusyKeys
from headgate.service.client_limits import ClientLimits
from headgate.service.concurrency_rules import refuse_slots_apart
from headgate.service.doors import HTTPConnections
from headgate.service.envoy_rules import EnvoyMeter, EnvoyRules
from headgate.service.event_log import OutageLog
from headgate.service.events import DeniedKeys
from headgate.service.files import LastGoodConfig, Sources
from headgate.service.hybrid_rules import HybridLimiters
from headgate.service.lease_settings import rule_refusal
from headgate.service.listeners import Listener, close_listeners, open_listeners
from headgate.service.logs import configure, hide_quoted, masked
from headgate.service.paced import PacedChecks
from headgate.service.redis_figures import RedisFigures
from headgate.service.reloads import Reloads
from headgate.service.reports import make_report
from headgate.service.request import BodyReader
from headgate.service.resolve import RequestClientIP
from headgate.service.resp.limit import post_commands
from headgate.service.responses import Delivery
from headgate.service.rsgi import HTTPError, HTTPProtocol, Response, Scope, check_framing, request_id_of
from headgate.service.rule_minutes import RuleMinutes, this_minute
from headgate.service.rules import CompiledRule, RuleSet
from headgate.service.settings import Settings
from headgate.service.shared_counters import (
    BREAKER_OPEN,
    BREAKER_OPENED,
    COUNTERS_FILE,
    IN_USE,
    KEYS,
    PROBLEMS,
    RELOAD_OK,
    RELOADED_AT,
    STOPPING,
    WAITING,
    SharedCounters,
)
from headgate.service.store import make_store, update_connections, warm_up
from headgate.service.tokens import Tokens
from headgate.stores.base import LeaseStore, Store, is_in_process, is_per_process
from headgate.stores.memory import MemoryStore
from headgate.web.client_ip import parse_network
from headgate.web.problem import problem

logger = logging.getLogger("headgate.service")

Handler = Callable[["App", Scope, HTTPProtocol], Awaitable[Response | None]]  # None: the handler has sent its response

KEEP_ALIVE = 10  # seconds that a connection may send nothing before it is closed
LAST_ANSWERS = 5  # seconds that clients have to read their answers, once a worker that stops has given the last one

API = "/api/v1/rate-limit"
ROUTES: dict[str, dict[str, Handler]] = {
    f"{API}/check": {"GET": checks.check, "POST": checks.post, "HEAD": checks.head},
    f"{API}/remaining": {"GET": checks.remaining},
    f"{API}/reset": {"DELETE": checks.reset},
    f"{API}/check/batch": {"POST": batch.batch},
    f"{API}/book": {"POST": bookings.book, "DELETE": bookings.cancel},
    f"{API}/commands": {"POST": post_commands},
    f"{API}/acquire": {"POST": slots.acquire},
    f"{API}/renew": {"POST": slots.renew},
    f"{API}/release": {"POST": slots.release, "DELETE": slots.release},
    "/json": {"POST": envoy_json.post},
    "/actuator/prometheus": {"GET": metrics.scrape},
    "/metrics": {"GET": metrics.scrape},
    "/actuator/health": {"GET": health.health},
    "/actuator/health/liveness": {"GET": health.liveness},
    "/actuator/health/readiness": {"GET": health.readiness},
    "/actuator/info": {"GET": health.info},
    "/openapi.json": {"GET": openapi.serve},
    "/docs": {"GET": pages.docs},
    "/live": {"GET": events.stream, "HEAD": events.head},
    "/live/rules": {"GET": live_rules.rules},
    "/playground/check": {"POST": playground.check},
    "/playground/peek": {"GET": playground.peek},
}


class State:
    """The objects made from the settings; a reload replaces all of them at once."""

    def __init__(
        self, config: LastGoodConfig, store: Store, counters: SharedCounters, hybrids: HybridLimiters | None = None
    ) -> None:
        settings, tokens = config.settings, Tokens(config.tokens)
        self.settings = settings
        self.tokens = tokens
        self.checks_guarded = "check" in tokens.guarded
        self.rule_set = RuleSet(settings, store, counters, hybrids)
        trusted = [parse_network(text) for text in settings.trusted_proxies]
        self.client_ip = RequestClientIP(trusted, settings.client_headers, settings.ipv6_prefix)
        self.warned_of_proxy = False  # whether the log has the warning that a proxy is not in trusted_proxies
        self.ietf_headers = settings.ietf_headers
        # rule, key, key as JSON and cost of queries that came before
        self.seen: dict[str, tuple[CompiledRule, str, str, int]] = {}
        self.show_key: Callable[[str], str] = repr if settings.log_keys else masked
        # rules that ask Redis for every check, and that leases could serve
        self.asks_redis = frozenset(
            rule.name
            for rule in self.rule_set.compiled()
            if isinstance(store, LeaseStore) and not is_in_process(store)
            if rule.take_leased is None and not rule_refusal(rule.limiter.rule)
        )
        self.envoy: EnvoyRules | None = None  # without [envoy] files


class App:
    """The application that granian runs in each worker. *folder* holds what the workers share."""

    state: State
    store: Store
    debug: bool

    def __init__(self, sources: Sources, settings: Settings, folder: Path) -> None:
        self.sources = sources
        self.counters = SharedCounters(folder / COUNTERS_FILE)
        self.denied = DeniedKeys()
        self.busiest = BusyKeys()
        self.delivery = Delivery()
        self.playground = playground.Sessions()
        self.page_files = pages.load_files()
        self.bodies = BodyReader()
        self.batches = asyncio.Semaphore(batch.MAX_BATCHES)
        self.paced = PacedChecks()
        self.client_limits = ClientLimits(self)
        self.waiting = 0
        self.watchers = 0
        self.outages = OutageLog()
        self.redis = RedisFigures()
        self.minutes = RuleMinutes(folder)
        self.http_port = settings.port
        self.http_connections = HTTPConnections(settings.port)
        self.listeners: list[Listener] = []
        self._folder = folder
        self._settings = settings
        self._opened = 0
        self._parent = os.getppid()

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the first request: claim counters, open the store, compile the rules."""
        settings = self._settings
        configure(settings.log_level, settings.log_format)
        self.worker_counters = own = self.counters.claim()
        self.gauges, self.slots, self.timings = own.gauges, own.slots, own.timings
        self.store = make_store(settings, self._folder)
        self.hybrids = HybridLimiters(self.store)
        config = LastGoodConfig.load(self._folder)  # newer than *settings* in a worker that replaces another
        self.adopt(config)
        loop.run_until_complete(warm_up(self.store))
        loop.run_until_complete(self.hybrids.count(own))  # so that every series is there from the start
        self.reloads = Reloads(self, self.sources, settings, self._folder, config.stamp)
        self.gauges[RELOAD_OK], self.gauges[RELOADED_AT] = 1, int(time())
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.reloads.begin)
        self.listeners = open_listeners(self, loop, settings)
        # A full collection visits every module and took 10 ms, the slowest hundredth of all checks. The objects of
        # the start stay for ever, and a check leaves no cycles behind.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)
        self._ticker = loop.create_task(self._tick())
        self._stop_if_told()
        loop.call_later(0.25, self._stop_if_told)  # the signal may come between this line and granian's handler

    def _stop_if_told(self) -> None:
        """Stop if SIGTERM came before this worker had a handler. Later, a second signal would cut requests off."""
        if self.counters.header[STOPPING]:
            signal.raise_signal(signal.SIGTERM)

    def __rsgi_del__(self, loop: asyncio.AbstractEventLoop) -> None:
        """After the last response: close the listeners, give leases back, and close the store."""
        self._ticker.cancel()
        loop.run_until_complete(self._close())

    async def _close(self) -> None:
        await self.reloads.aclose()
        await close_listeners(self.listeners)
        await self.delivery.aclose()
        await self.redis.aclose()
        await self.http_connections.aclose()
        await self.hybrids.aclose()
        await self.store.aclose()

    async def __rsgi__(self, scope: Scope, protocol: HTTPProtocol) -> None:
        request_id = ""
        method = scope.method
        request_headers = scope.headers
        try:
            if len(request_headers.get_all("host")) != 1 or "transfer-encoding" in request_headers:
                check_framing(scope.http_version, request_headers)
            route = ROUTES.get(scope.path)
            handler = route.get(method) if route else None
            response = await (handler(self, scope, protocol) if handler else self._other(route, scope, protocol))
            if response is None:
                return
        except HTTPError as error:
            request_id = request_id_of(request_headers) or secrets.token_hex(8)
            response = problem(error.status, error.detail, *error.headers, requestId=request_id)
            self.gauges[PROBLEMS] += 1
            if self.debug:
                shown = error.detail if self.state.settings.log_keys else hide_quoted(error.detail)
                logger.debug("%d: %s", error.status, shown, extra={"request_id": request_id})
        except Exception:
            request_id = request_id_of(request_headers) or secrets.token_hex(8)
            response = problem(
                500, "an error of the service, not of the request; its log has more", requestId=request_id
            )
            self.gauges[PROBLEMS] += 1
            logger.exception("Error answering %s, request %s", method, request_id, extra={"request_id": request_id})
        status, headers, body = response
        if request_id or ("x-request-id" in request_headers and (request_id := request_id_of(request_headers))):
            headers.append(("x-request-id", request_id))
        if method == "HEAD":
            protocol.response_empty(status, headers)
        elif type(body) is str:
            protocol.response_str(status, headers, body)
        else:
            protocol.response_bytes(status, headers, cast("bytes", body))

    async def _other(self, route: dict[str, Handler] | None, scope: Scope, protocol: HTTPProtocol) -> Response | None:
        """Sub-requests of proxies, HEAD and OPTIONS where there is a GET, the page's files, and errors for the rest."""
        path, method = scope.path, scope.method
        if path.startswith(forward.PREFIX):
            return await forward.forward(self, scope, protocol)
        file = self.page_files.get(path) if route is None else None
        if route is None and file is None:
            raise HTTPError(404, f"there is nothing at {path!r:.80}; see /docs")
        methods = ["GET"] if route is None else list(route)
        if "GET" in methods and "HEAD" not in methods:
            methods.append("HEAD")
        if method == "OPTIONS":
            return 204, [("allow", ", ".join([*methods, "OPTIONS"]))], b""
        if method not in methods:
            allow = ", ".join([*methods, "OPTIONS"])
            raise HTTPError(405, f"{method:.20} is not possible here; {allow} are", ("allow", allow))
        if file is not None:
            return file.response(scope)
        assert route is not None
        return await route["GET"](self, scope, protocol)

    def adopt(self, config: LastGoodConfig) -> None:
        """Put *config* in force; raises for settings that this worker cannot use, and then nothing has changed."""
        settings = config.settings
        if self._settings.workers > 1 and is_per_process(self.store):
            refuse_slots_apart(settings)
        if settings.client_limits_hybrid:
            self.hybrids.check_store()
        state = State(config, self.store, self.counters, self.hybrids)
        if config.domains:
            state.envoy = EnvoyRules(config.domains, settings.envoy, self.store, EnvoyMeter(self))
        state.rule_set.compile_known(self.hybrids.pairs())
        self.state, self.config = state, config
        self.client_limits.follow_settings(settings.client_limits_hybrid)
        self.keep_leases()
        self.sources.envoy_files = settings.envoy.files
        logging.getLogger("headgate").setLevel(config.settings.log_level.upper())
        self.debug = logger.isEnabledFor(logging.DEBUG)

    def keep_leases(self) -> None:
        """Give back the leases of limiters that are in use no more."""
        self.hybrids.keep([*self.state.rule_set.limiters(), *self.client_limits.limiters()])

    async def _tick(self) -> None:
        seconds = idle = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            idle = idle + 1 if self.counters.header[STOPPING] and not self._answers_soon() else 0
            if idle > LAST_ANSWERS:
                await self._leave()
            try:
                self._update(seconds)
                await self.hybrids.count(self.worker_counters)
            except Exception:
                logger.exception("Error in the periodic update of a worker")

    def _answers_soon(self) -> bool:
        """Whether a request waits for permits, is being read, or waits for the store."""
        return bool(self.waiting or self.bodies.reading or self.gauges[IN_USE] or self.gauges[WAITING])

    async def _leave(self) -> None:
        """End this worker, as every request has its answer. granian would wait for clients that do not read theirs."""
        logger.warning("Stopping: clients that have sent half a request, or do not read their answers, are cut off")
        try:
            await self._close()
        except Exception:
            logger.exception("Error in closing a worker")
        logging.shutdown()
        os._exit(0)

    def _update(self, seconds: int) -> None:
        """Once a second: update gauges, publish the most denied keys, look for a new file and for the main process."""
        seen = self.state.rule_set.get(None, None).limiter.store_health()
        self.gauges[BREAKER_OPEN] = seen.state == "open"
        # only the difference: these counters may go on from those of a dead worker, and a reload may have made the
        # default rule hybrid
        self.gauges[BREAKER_OPENED] += max(seen.opened - self._opened, 0)
        self._opened = seen.opened
        self.outages.end_second(seen)
        update_connections(self.gauges, self.store)
        if isinstance(self.store, MemoryStore):  # to count the keys of another store is not for free
            self.gauges[KEYS] = len(self.store)
        for listener in self.listeners:
            listener.close_silent()
        if seconds % KEEP_ALIVE == 0:
            self.delivery.rotate()
        if seconds % 60 == 0:
            self.denied.halve()
        self.minutes.advance(self.counters, this_minute())
        report = make_report(self)
        self.worker_counters.write_report(msgspec.json.encode(report))
        self.busiest.log_hints(report.busiest, self.state.asks_redis)
        self.reloads.look()
        if os.getppid() != self._parent:
            logger.error("The main process is gone: this worker stops")
            signal.raise_signal(signal.SIGTERM)
