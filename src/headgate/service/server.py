"""The main process: read the settings, say what will happen, start the workers, stop them in order."""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
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
from headgate.service.app import KEEP_ALIVE, App, make_store
from headgate.service.board import STOPPING, Board, create
from headgate.service.files import BadFile, Sources
from headgate.service.kept import Kept, keep
from headgate.service.settings import Settings
from headgate.service.tokens import Tokens

HEADER_BYTES = 64 * 1024
CONCURRENT = 16_384  # requests in one worker, those that wait and watch included; more are not read until others end
OPEN_FILES = 65_536
LOOP_DEATHS, LOOP_SECONDS = 5, 30.0  # so many workers dead in so short a time, and none alive: nothing will help
PAUSE = 0.5  # seconds before another one is started in place of one that died soon
GRACE = 10  # seconds beyond the longest wait, until a worker that does not stop is killed


class Interrupt:
    """What the main process waits for, in place of granian's `threading.Event`.

    A signal handler that sets an Event while the same thread is about to wait for it is lost, or never gets the
    Event's lock: two signals at once hung one start in ten. A flag that is looked at has no such moment.
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
    """granian, with SIGHUP for new rules instead of new workers, and a word to the workers before they stop."""

    def __init__(self, board: Path, **options: Any) -> None:
        self._board = Board(board)
        self._deaths: list[float] = []
        super().__init__(**options)
        self.main_loop_interrupt = Interrupt()

    def signal_handler_interrupt(self, *arguments: Any, **options: Any) -> None:
        self._board.header[STOPPING] = 1  # streams end by themselves: they would hold the worker up
        for worker in self.wrks:
            worker.interrupt_by_parent = True  # who gets the same signal from elsewhere has not failed
        super().signal_handler_interrupt(*arguments, **options)

    def shutdown(self, exit_code: int = 0) -> None:
        try:
            super().shutdown(exit_code)
        except SystemExit:
            if exit_code or not self.interrupt_signal:
                raise
            # told to stop: a worker that was told as well, and went before this process heard of it, has not failed

    def signal_handler_reload(self, *arguments: Any, **options: Any) -> None:
        if os.getpid() != self.pid:
            return  # a worker that has not come to its own handlers yet: it reads the newest settings anyway
        for worker in self.wrks:
            if worker.is_alive():
                os.kill(worker.inner.pid, signal.SIGHUP)

    def _respawn_workers(self, workers: list[int], *arguments: Any, **options: Any) -> None:
        """Replace workers that died. granian would end everything when the same one dies twice within seconds."""
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < LOOP_SECONDS] + [now] * len(workers)
        if len(self._deaths) > 1:
            time.sleep(PAUSE)
        super()._respawn_workers(workers, *arguments, **options)
        others = any(worker.is_alive() for worker in self.wrks if worker.idx not in workers)
        if others or len(self._deaths) < LOOP_DEATHS:
            self.respawned_wrks.clear()


def load(sources: Sources, settings: Settings, board: Path) -> App:
    """The application of a worker, made in its process. Only the main process decides when a worker stops."""
    os.setsid()  # else Ctrl-C, which goes to everybody in front of the terminal, stops it too
    return App(sources, settings, board)


def serve(sources: Sources) -> None:
    """Serve until told to stop. Raises `BadFile` for settings that cannot be used, OSError for a port that is taken."""
    stamp = sources.stamp()
    settings = sources.read()
    known = sources.tokens(settings)
    tokens = Tokens(known)
    check_store(settings)
    host, settings.port = _free(settings.host, settings.port)
    _allow_many_connections()
    logs.configure(settings.log_level, settings.log_format)
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # else the kernel would write every count to a disk
    with tempfile.TemporaryDirectory(prefix="headgate-", dir=shared) as folder:
        board = Path(folder) / "board"
        create(board, settings.workers, int(time.time()))
        keep(board, Kept(settings, known, stamp))
        server = Server(
            board,
            target="headgate.service",
            address=host,
            port=settings.port,
            interface=Interfaces.RSGI,
            workers=settings.workers,
            websockets=False,
            backpressure=CONCURRENT,
            http=HTTPModes.http1,  # to find out whether it is 2, granian waits for the first byte for ever
            http1_settings=HTTP1Settings(header_read_timeout=1000 * KEEP_ALIVE, max_buffer_size=HEADER_BYTES),
            log_level=LogLevels.warning,
            log_dictconfig=logs.granian(settings.log_format),
            respawn_failed_workers=True,
            workers_kill_timeout=round(settings.max_wait) + GRACE,
        )
        sys.stderr.write(banner(sources, settings, tokens) + "\n")
        server.serve(target_loader=functools.partial(load, sources, settings, board), wrap_loader=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # told again while Python ends, it would die of it and not say 0


def check_store(settings: Settings) -> None:
    """Raise `BadFile` with what is wrong with the store's URL, or missing. Connects to nothing."""
    try:
        make_store(settings)
    except (ValueError, ImportError) as error:
        raise BadFile(f"store: {error}") from None


def _free(host: str, port: int) -> tuple[str, int]:
    """Address and port, if they are free. Asked here because granian shares ports: two services would take turns."""
    try:
        return _bound(host, port)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror}") from None


def _bound(host: str, port: int) -> tuple[str, int]:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen()
        return str(where[0]), int(probe.getsockname()[1])


def _allow_many_connections() -> None:
    """As many as the system allows, within reason: the usual 1,024 would be the lowest bound of all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def banner(sources: Sources, settings: Settings, tokens: Tokens) -> str:
    """What somebody who starts it wants to see."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    build = "compiled" if headgate.COMPILED else "pure Python"
    rules = list(settings.rules)
    shown = ", ".join(rules[:8]) + (f" and {len(rules) - 8} more" if len(rules) > 8 else "")
    lines = [
        f"headgate {headgate.__version__} ({build})",
        f"  serving  http://{host}:{settings.port}/   (API: /docs, metrics: /metrics)",
        f"  store    {redacted(settings.store)}",
        f"  rules    {shown or 'the defaults only'}   ({sources.file or 'no file'})",
        f"  workers  {settings.workers}",
    ]
    lines += [f"  warning  {text}" for text in (*warnings(settings, tokens), *sources.unread())]
    return "\n".join(lines)


def warnings(settings: Settings, tokens: Tokens) -> list[str]:
    """What is unsafe or surprising about these settings."""
    found = []
    if not _is_loopback(settings.host) and not len(tokens):
        found.append(
            f"{settings.host} is reachable from elsewhere and no token is set: anybody may check and reset any key; "
            "set HEADGATE_ADMIN_TOKEN and HEADGATE_CHECK_TOKEN"
        )
    if settings.store == "memory://" and settings.workers > 1:
        found.append(
            f"each of the {settings.workers} workers counts in its own memory, so limits are up to "
            f"{settings.workers} times as high; use a Redis store, or one worker"
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
    """A store's URL without anybody's password."""
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return url
    try:
        from headgate.redis.url import without_secrets
    except ImportError:
        return f"{scheme}://***"  # without redis-py it is of no use anyway
    return without_secrets(url)
