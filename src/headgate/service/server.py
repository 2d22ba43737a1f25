"""The main process: read the settings, print the banner, start the workers, replace dead ones, stop them."""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from granian import Granian
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels

import headgate
from headgate.service import logs
from headgate.service.app import KEEP_ALIVE, App
from headgate.service.files import LastGoodConfig, Sources
from headgate.service.listeners import LISTENERS, bound_socket, check_listeners
from headgate.service.settings import PORTS, Settings
from headgate.service.shared_counters import COUNTERS_FILE, STOPPING, SharedCounters, create
from headgate.service.store import check_store, make_own_store
from headgate.service.tokens import Tokens

HEADER_BYTES = 64 * 1024
MAX_REQUESTS = 16_384  # at once in one worker, waits and event streams included; more are not read until others end
OPEN_FILES = 65_536
LOOP_DEATHS, LOOP_SECONDS = 5, 30.0  # the service gives up after so many deaths in this time, with no worker alive
RESPAWN_PAUSE = 0.5  # seconds before a worker is replaced that died soon after another
STOP_GRACE = 10  # seconds beyond the longest wait, after which a worker that does not stop is killed


class PolledEvent:
    """Replaces the `threading.Event` that granian's main process waits for.

    A signal handler that sets an Event while the same thread is about to wait for it may be lost, or wait for ever for
    the Event's lock: two signals at once hung one start in ten. Polling a flag has no such race.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self) -> None:
        while not self._set:
            time.sleep(0.1)


class Server(Granian):  # type: ignore[misc, valid-type]  # it chooses its class at import
    """granian, but SIGHUP reloads the rules instead of the workers, and workers are told before they are stopped."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._counters = SharedCounters(folder / COUNTERS_FILE)
        self._folder = folder
        self._deaths: list[float] = []
        super().__init__(**options)
        self._first_patience: int = options["workers_kill_timeout"]
        self.main_loop_interrupt = PolledEvent()

    def signal_handler_interrupt(self, *arguments: Any, **options: Any) -> None:
        self._counters.header[STOPPING] = 1  # event streams watch this and end; a worker would wait for them
        for worker in self.wrks:
            worker.interrupt_by_parent = True  # a worker that gets the same signal from elsewhere has not failed
        super().signal_handler_interrupt(*arguments, **options)

    def shutdown(self, exit_code: int = 0) -> None:
        try:
            super().shutdown(exit_code)
        except SystemExit:
            if exit_code or not self.interrupt_signal:
                raise
            # the workers were told to stop as well; one that ended before this process was told has not failed

    def signal_handler_reload(self, *arguments: Any, **options: Any) -> None:
        if os.getpid() != self.pid:
            return  # a worker that has not set its own handlers yet; it will read the newest settings anyway
        for worker in self.wrks:
            if worker.is_alive():
                os.kill(worker.inner.pid, signal.SIGHUP)

    def _stop_workers(self) -> None:
        """Wait for the workers as long as a check may wait by now: a reload may have raised max_wait."""
        now = patience(LastGoodConfig.load(self._folder).settings)
        self.workers_kill_timeout = max(now, self._first_patience)
        super()._stop_workers()

    def _respawn_workers(self, workers: list[int], *arguments: Any, **options: Any) -> None:
        """Replace workers that died. granian itself would stop when the same worker dies twice within seconds."""
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < LOOP_SECONDS] + [now] * len(workers)
        if len(self._deaths) > 1:
            time.sleep(RESPAWN_PAUSE)
        super()._respawn_workers(workers, *arguments, **options)
        others = any(worker.is_alive() for worker in self.wrks if worker.idx not in workers)
        if others or len(self._deaths) < LOOP_DEATHS:
            self.respawned_wrks.clear()


def patience(settings: Settings) -> int:
    """Seconds after which a worker that was told to stop is killed."""
    return round(settings.max_wait) + STOP_GRACE


def load(sources: Sources, settings: Settings, folder: Path) -> App:
    """Make the application of a worker, in the worker's process."""
    os.setsid()  # Ctrl-C reaches the whole process group; only the main process may stop a worker
    return App(sources, settings, folder)


def serve(sources: Sources) -> None:
    """Serve until told to stop. Raises `BadFile` for settings that cannot be used, OSError for a port that is taken."""
    stamp = sources.stamp()
    settings = sources.read()
    stamp = sources.stamp(stamp)  # the settings name more files
    domains = sources.envoy_domains(settings)
    known = sources.tokens(settings)
    tokens = Tokens(known)
    check_store(settings)
    check_listeners(settings)
    host = _reserve_ports(settings)
    _allow_many_connections()
    logs.configure(settings.log_level, settings.log_format)
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # elsewhere the kernel would write counts to a disk
    with tempfile.TemporaryDirectory(prefix="headgate-", dir=shared) as name:
        folder = Path(name)
        create(folder / COUNTERS_FILE, settings.workers, int(time.time()))
        LastGoodConfig(settings, known, stamp, domains).save(folder)
        apart = settings.store == "memory://" and settings.workers > 1 and make_own_store(settings, domains, folder)
        server = Server(
            folder,
            target="headgate.service",
            address=host,
            port=settings.port,
            interface=Interfaces.RSGI,
            workers=settings.workers,
            websockets=False,
            backpressure=MAX_REQUESTS,
            http=HTTPModes.http1,  # to detect HTTP/2, granian would wait for the first byte without a time-out
            http1_settings=HTTP1Settings(header_read_timeout=1000 * KEEP_ALIVE, max_buffer_size=HEADER_BYTES),
            log_level=LogLevels.warning,
            log_dictconfig=logs.granian_logging(settings.log_format),
            respawn_failed_workers=True,
            workers_kill_timeout=patience(settings),
        )
        sys.stderr.write(banner(sources, settings, tokens, apart or "") + "\n")
        server.serve(target_loader=functools.partial(load, sources, settings, folder), wrap_loader=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second signal while Python exits would change the exit code


def _reserve_ports(settings: Settings) -> str:
    """Put a free port where *settings* has 0; returns the address to listen on. Raises OSError for a port in use.

    Workers share ports (SO_REUSEPORT), so without this check two services on one port would take turns.
    """
    host, probes = settings.host, []
    try:
        for name in PORTS:
            port = getattr(settings, name)
            if port is None:
                continue
            try:
                probes.append(probe := bound_socket(settings.host, port))
                probe.listen()
            except OSError as error:
                option = f"--{name.replace('_', '-')}"
                why = f"{settings.host}:{port}: {error.strerror}; choose others with --host and {option}"
                raise OSError(why) from None
            host = str(probe.getsockname()[0])
            setattr(settings, name, int(probe.getsockname()[1]))
    finally:
        for probe in probes:  # open until now, so that no two get the same free port
            probe.close()
    return host


def _allow_many_connections() -> None:
    """Raise the limit of open files, usually 1,024, as far as the system allows, up to OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def banner(sources: Sources, settings: Settings, tokens: Tokens, apart: str) -> str:
    """The text that is printed at the start; *apart* is why workers cannot share the memory store, if they cannot."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    build = "compiled" if headgate.COMPILED else "pure Python"
    rules = list(settings.rules)
    shown = ", ".join(rules[:8]) + (f" and {len(rules) - 8} more" if len(rules) > 8 else "")
    lines = [
        f"headgate {headgate.__version__} ({build})",
        f"  serving  http://{host}:{settings.port}/   (API: /docs, metrics: /metrics)",
        *_listener_lines(settings, host),
        f"  store    {redacted(settings.store)}{_shared_note(settings, apart)}",
        f"  rules    {shown or 'the defaults only'}   ({sources.file or 'no file'})",
        f"  workers  {settings.workers}",
    ]
    lines += [f"  warning  {text}" for text in (*warnings(settings, tokens, apart), *sources.warnings())]
    return "\n".join(lines)


def _listener_lines(settings: Settings, host: str) -> list[str]:
    """A line for each listener beside HTTP."""
    ports = {name: getattr(settings, f"{name}_port") for name in LISTENERS}
    tls = settings.tls is not None
    return [f"  {name:<7}  {LISTENERS[name].schemes[tls]}://{host}:{port}/" for name, port in ports.items() if port]


def _shared_note(settings: Settings, apart: str) -> str:
    return "   (shared by the workers)" if settings.store == "memory://" and settings.workers > 1 and not apart else ""


def warnings(settings: Settings, tokens: Tokens, apart: str = "") -> list[str]:
    """Warnings about settings that are unsafe or surprising."""
    found = []
    if not _is_loopback(settings.host) and not len(tokens):
        found.append(
            f"{settings.host} is reachable from elsewhere and no token is set: any client may check and reset any key; "
            "set HEADGATE_ADMIN_TOKEN and HEADGATE_CHECK_TOKEN"
        )
    if settings.tls and all(getattr(settings, name) is None for name in PORTS[1:]):
        found.append(f"[tls] is for {' and '.join(PORTS[1:])}, and none is set; HTTP is served without TLS")
    if apart:
        found.append(
            f"each of the {settings.workers} workers counts in its own memory, so limits are up to "
            f"{settings.workers} times as high; use one worker, or another store ({apart})"
        )
    if any(text in ("0.0.0.0/0", "::/0") for text in settings.trusted_proxies):
        found.append("trusted_proxies has every address: clients can choose their own")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def redacted(url: str) -> str:
    """A store's URL without passwords."""
    scheme = url.partition("://")[0]
    if scheme in ("memory", "shared"):
        return url
    try:
        from headgate.stores.settings import without_secrets
    except ImportError:
        return f"{scheme}://***"  # without redis-py the URL cannot be used anyway
    return without_secrets(url)
