"""The ledgers of leases in files that all processes of one machine share: `headgate.hybrid.ledger` under a file lock.

A shared store has a directory for them beside the files of its rules:

lock      the process that has locked it (flock, which the kernel ends with its holder) may change the other files; it
          holds the boot of the machine and the epoch, as the files of rules do
00 to ff  the ledgers whose digest starts so, one in a line: digest of the key, when it is gone, the fields as JSON

A file is replaced as a whole, so a process that is killed leaves the old one or the new one. The ledger of a key stands
for itself, so a batch of which only a part was written is like a reply that was lost. A holder that stands still keeps
others waiting for as long as a call has; then the policy answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any

from headgate._lifecycle import renew_after_fork
from headgate._plan import arun, run
from headgate.errors import StoreUnavailable
from headgate.hybrid.ledger import LONGEST_LEASE, Ledger, NodeRecord
from headgate.hybrid.protocol import LeaseReply, QuotaParams
from headgate.keys import label
from headgate.rule import Rule
from headgate.stores.base import LeaseCall
from headgate.stores.shared.files import boot_id, make_directory, time_namespace_us, unusable
from headgate.stores.shared.layout import pack_boot
from headgate.stores.shared.locked import PATIENCE

if TYPE_CHECKING:
    from headgate.stores.base import AsyncExchange
    from headgate.stores.shared.store import SharedStore

Replies = list[LeaseReply | str]
HEAD = "headgate leases 2"  # the first line of a file; a change of what stands below raises the number
DIGEST = 32  # characters
SWEEP_EVERY = 16  # exchanges: then one file is looked through for ledgers that are gone
LONGEST_NAP = 0.001  # seconds between two looks at the lock


class SharedLeases:
    """See `headgate.stores.base.LeaseBackend`. An event loop makes the calls itself: one takes about 0.1 ms a key."""

    partitioned = False

    def __init__(self, store: SharedStore) -> None:
        self._clock = store.clock
        self._directory = store.directory / ("leases" if store.clock is None else "leases-given-clock")
        self._boot = boot_id()
        self._ahead = time_namespace_us()
        self._open: set[int] = set()  # descriptors of the lock file
        self._dice = random.Random()
        self._swept = 0
        make_directory(self._directory)
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Close the copies of locks that threads of the parent hold: they would outlast the death of the parent."""
        for fd in self._open:
            os.close(fd)
        self._open = set()

    def key_function(self, rule: Rule) -> Callable[[str], str]:
        """The function that turns a client's key into the digest by which its ledger is found."""
        before = f"{rule.kind}:{label(rule.name)}:"
        return lambda key: blake2b((before + key).encode(), digest_size=DIGEST // 2).hexdigest()

    def partition(self, key: str) -> int:
        """All files have one lock."""
        return 0

    def exchange(self, calls: Sequence[LeaseCall], timeout: float | None = None) -> Replies:
        return run(self._replies(calls, PATIENCE if timeout is None else min(timeout, PATIENCE)), time.sleep)

    async def exchange_async(self, calls: Sequence[LeaseCall]) -> Replies:
        return await arun(self._replies(calls, PATIENCE), asyncio.sleep)

    def closing_exchange(self, timeout: float) -> AbstractAsyncContextManager[AsyncExchange | None]:
        """`exchange_async`, which needs no connection."""
        return nullcontext(self.exchange_async)

    async def close_loop(self) -> None:
        """An event loop has nothing open."""

    def _replies(self, calls: Sequence[LeaseCall], patience: float) -> Generator[float, None, Replies]:
        """The plan (see `headgate._plan`) of an exchange; it yields the seconds to sleep while the lock is taken."""
        try:
            fd = yield from self._lock(monotonic() + patience)
            try:
                return self._answer(calls, self._time(fd))
            finally:
                self._close(fd)
        except OSError as error:
            raise StoreUnavailable(f"the shared store cannot use {self._directory}: {error}") from error

    # ----------------------------------------------------------------------------------------------- lock and time

    def _lock(self, deadline: float) -> Generator[float, None, int]:
        """The descriptor of the locked file; raises a TimeoutError if another process holds it until *deadline*."""
        path, nap = self._directory / "lock", 0.0
        while True:
            fd = self._open_lock()
            try:
                while True:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if monotonic() > deadline:
                            raise TimeoutError("another process holds the lock and does not run") from None
                    yield nap
                    nap = min(nap + 0.00002, LONGEST_NAP)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.lstat(path)):
                        return fd
            except BaseException:
                self._close(fd)
                raise
            self._close(fd)  # the file was removed or replaced: lock the one that is there now

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._directory / "lock", flags, 0o600)
        except FileNotFoundError:
            make_directory(self._directory)  # a cleaner of temporary files has removed it
            fd = os.open(self._directory / "lock", flags, 0o600)
        self._open.add(fd)
        return fd

    def _close(self, fd: int) -> None:
        if fd in self._open:  # else this is the child of a fork, which has closed it
            self._open.discard(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked just now has a copy, which would keep the lock
            os.close(fd)

    def _time(self, fd: int) -> int:
        """Microseconds since the epoch: the machine's monotonic clock, tied to the wall clock once after a boot."""
        if self._clock is not None:
            return self._clock.now()
        now, packed = time.monotonic_ns() // 1000 - self._ahead, os.pread(fd, 24, 0)
        if packed[8:] != self._boot:
            packed = pack_boot(time.time_ns() // 1000 - now, self._boot)
            os.pwrite(fd, packed, 0)
        return now + int.from_bytes(packed[:8], sys.byteorder, signed=True)

    # --------------------------------------------------------------------------------------------------- the ledgers

    def _answer(self, calls: Sequence[LeaseCall], now: int) -> Replies:
        files: dict[str, dict[str, str]] = {}
        changed: set[str] = set()
        replies: Replies = []
        for key, params, profile, request in calls:
            name = key[:2]
            lines = files.get(name)
            if lines is None:
                lines = files[name] = self._read(name)
            ledger, gone = _thaw(lines.get(key, ""), now)
            replies.append(ledger.sync(now, params, profile, request))
            if request.op != "peek":
                gone = max(gone, now + _full_in(ledger, params) + max(ledger.late - now, LONGEST_LEASE))
                lines[key] = f"{key} {gone} {_freeze(ledger)}"
                changed.add(name)
        self._swept += 1
        if self._swept % SWEEP_EVERY == 0:
            name = f"{self._dice.randrange(256):02x}"
            files.setdefault(name, self._read(name))
            changed.add(name)
        for name in changed:
            self._write(name, [line for line in files[name].values() if int(line.split(" ", 2)[1]) > now])
        return replies

    def _read(self, name: str) -> dict[str, str]:
        """The lines of a file by their digest."""
        try:
            head, *lines = (self._directory / name).read_text("utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return {}
        if head != HEAD:
            raise unusable(self._directory / name, "it is of another version of headgate, or not of headgate")
        return {line[:DIGEST]: line for line in lines if line}

    def _write(self, name: str, lines: list[str]) -> None:
        """Replace a file, in one step; one without lines is removed."""
        path = self._directory / name
        if not lines:
            path.unlink(missing_ok=True)
            return
        new = self._directory / "new"  # only the holder of the lock writes it
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write("\n".join([HEAD, *lines, ""]))
        os.replace(new, path)


def _freeze(ledger: Ledger) -> str:
    nodes = {node: {name: getattr(record, name) for name in record.__slots__} for node, record in ledger.nodes.items()}
    return json.dumps({**vars(ledger), "nodes": nodes}, separators=(",", ":"))


def _thaw(line: str, now: int) -> tuple[Ledger, int]:
    """The ledger of a line, and when it is gone. One that is gone, or damaged, is that of a key never seen."""
    ledger = Ledger()
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        _, gone, text = line.split(" ", 2)
        if int(gone) <= now:
            return ledger, 0
        fields: dict[str, Any] = json.loads(text)
        nodes, params = fields.pop("nodes"), QuotaParams(*fields.pop("params"))
        made = Ledger()
        for name, value in fields.items():
            setattr(made, name, value)
        made.params = params
        for node, numbers in nodes.items():
            record = made.nodes[node] = NodeRecord(0)
            for name, value in numbers.items():
                setattr(record, name, value)
        return made, int(gone)
    return ledger, 0


def _full_in(ledger: Ledger, params: QuotaParams) -> int:
    """Microseconds until time alone has given everything back."""
    return 2 * params.period if params.period else (params.capacity_units - ledger.free) // params.rate + 1
