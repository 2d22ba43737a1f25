"""The files of a shared store: where they are, how one is made, and why one is refused.

A store is a directory that belongs to its user alone; each rule has a file in it. A file is made complete under
another name and then linked, so no process sees half of one. A file that is not right is never changed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from headgate.errors import StoreUnavailable
from headgate.rule import Rule
from headgate.stores.shared.layout import (
    ATOMIC,
    EPOCH_AT,
    LOCKED,
    MODES,
    PAGE,
    ForeignFile,
    Geometry,
    Header,
    pack_boot,
    read_header,
)

native: Any = None  # the table in C, where one was compiled
try:
    from headgate.stores.shared import _table as native
except ImportError:
    pass

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_FORM = "write shared://name (letters, digits, '.', '_', '-'), or shared:///an/absolute/directory"

# Memory that two processes map from these is not the same memory, or their byte-range locks are not for both.
_UNFIT = re.compile(
    r"(nfs\d*|cifs|smb\w*|fuse.*|9p|virtiofs|afs|ceph|lustre|gluster\w*|gpfs|ocfs2|gfs2|vboxsf|prl_fs|vmhgfs|vfat|exfat"
    r"|msdos|webdav|osxfuse|macfuse)"
)


def directory_of(url: str) -> tuple[Path, dict[str, str]]:
    """The directory that *url* names, and its parameters."""
    place, _, query = url.removeprefix("shared://").partition("?")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    if place.startswith("/"):
        path = Path(os.path.normpath(unquote(place)))
        if path == Path("/") or "\0" in str(path):
            raise ValueError(f"{url!r:.80} names no directory of its own; {_FORM}")
        return path, parameters
    if not _NAME.fullmatch(place):
        raise ValueError(f"cannot read the store {url!r:.80}; {_FORM}")
    return home() / place, parameters


def home() -> Path:
    """Where the stores are that have only a name: memory, if the machine has a place for that."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else os.environ.get("TMPDIR", "/tmp")
    return Path(root) / f"headgate-{os.geteuid()}"


def make_directory(path: Path) -> None:
    """Make *path* if it is missing, and refuse it if others could replace a file in it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise unusable(path, "it, or a folder that it is in, is another kind of file") from error
    except OSError as error:
        raise unusable(path, f"it cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode):
        raise unusable(path, "it is not a directory")
    for each in (path, path.parent) if path.parent == home() else (path,):
        found = os.lstat(each)
        if found.st_uid != os.geteuid():
            raise unusable(each, f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if found.st_mode & 0o022:
            raise unusable(each, f"others may write to it (mode {found.st_mode & 0o777:o}); set its mode to 700")
    kind = file_system(path)
    if _UNFIT.fullmatch(kind):
        raise unusable(path, f"it is on a file system of type {kind}, which machines share; use a local one")


def file_system(path: Path) -> str:
    """The type of the file system that *path* is on; empty where the system does not say."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= best:  # the last mount of a place hides the others
                    best, kind = len(point), after.split()[0]
    except OSError:
        return ""
    return kind


def file_name(rule: Rule, by_given_clock: bool) -> tuple[str, bytes]:
    """The name of the file of *rule*, and the text that says which limiters share it."""
    quotas = [f"{quota.limit}/{quota.period_us}/{quota.burst}" for quota in rule.quotas]
    words = [rule.name, rule.state_kind, *quotas, "given clock" if by_given_clock else "system clock"]
    text = "\n".join(words).encode()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", rule.name)[:32].strip("-")
    return f"{readable or 'limiter'}-{rule.state_kind}-{hashlib.blake2b(text, digest_size=12).hexdigest()}", text


def unusable(path: Path, why: str) -> StoreUnavailable:
    return StoreUnavailable(f"the shared store cannot use {path}: {why}")


# ----------------------------------------------------------------------------------------------------------- time


def boot_id() -> bytes:
    """16 bytes that are others after each boot of the machine; zeros where the system does not say."""
    with suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip().replace("-", ""))
    if sys.platform == "darwin":
        with suppress(OSError, ValueError, AttributeError):
            text, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
            ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0)
            return bytes.fromhex(text.value.decode().replace("-", ""))[:16].ljust(16, b"\0")
    return bytes(16)


def time_namespace_us() -> int:
    """Microseconds that this container's monotonic clock is ahead of the machine's."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/timens_offsets").read_text("ascii").splitlines():
            name, seconds, nanoseconds = line.split()
            if name == "monotonic":
                return int(seconds) * 1_000_000 + int(nanoseconds) // 1000
    return 0


def machine_us() -> int:
    """The monotonic clock of the machine."""
    return time.monotonic_ns() // 1000 - time_namespace_us()


# ---------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of the store. The locks are of *fd*; the map has an opened file of its own, which a fork may keep."""

    path: Path
    fd: int
    map: mmap.mmap
    header: Header
    device: int
    inode: int

    def is_current(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if found.st_size < self.header.geometry.file_bytes and (found.st_dev, found.st_ino) == self.identity:
            raise unusable(self.path, f"it was truncated to {found.st_size} bytes")
        return (found.st_dev, found.st_ino) == self.identity

    @property
    def identity(self) -> tuple[int, int]:
        return self.device, self.inode


def open_file(path: Path, rule: bytes, geometry: Geometry, max_keys: int) -> OpenFile:
    """Open the file at *path*, or make it; raises `StoreUnavailable` if it cannot be used."""
    try:
        while True:
            with suppress(FileNotFoundError):
                return _open_existing(path, rule, geometry)
            _make(path, rule, geometry, max_keys)
    except ForeignFile as error:
        raise unusable(path, str(error)) from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.ELOOP:
            why = "it is a symbolic link"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"no space is left for {geometry.table_bytes:,} bytes; give a smaller max_keys"
        raise unusable(path, why) from error


def _open_existing(path: Path, rule: bytes, geometry: Geometry) -> OpenFile:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFile("it is not a regular file")
        if found.st_uid != os.geteuid():
            raise ForeignFile(f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if found.st_mode & 0o077:
            raise ForeignFile(f"others may use it (mode {found.st_mode & 0o777:o}); its mode must be 600")
        header = read_header(os.pread(fd, PAGE, 0), found.st_size, rule)
        sizes = header.geometry
        if (sizes.header, sizes.near, sizes.far) != (geometry.header, geometry.near, geometry.far):
            raise ForeignFile("its states have other sizes: another version of headgate has made it")
        if header.mode == ATOMIC and native is None:
            raise ForeignFile(
                "a compiled headgate has made it, and this one is plain Python, which cannot take part: install "
                "the same build for all processes, or give this one another name"
            )
        epoch = _renew_epoch(fd, header)
        mapped = os.open(path, flags)
        try:
            if os.fstat(mapped).st_ino != found.st_ino:
                raise FileNotFoundError(path)  # replaced in between: look again
            view = mmap.mmap(mapped, header.geometry.file_bytes)
        finally:
            os.close(mapped)
        header = Header(header.mode, header.geometry, header.max_keys, epoch, header.boot, header.secret, header.rule)
        return OpenFile(path, fd, view, header, found.st_dev, found.st_ino)
    except BaseException:
        os.close(fd)
        raise


def _renew_epoch(fd: int, header: Header) -> int:
    """The epoch of the file. The first process after a boot sets it anew: the monotonic clock has started again."""
    boot = boot_id()
    if header.boot == boot:
        return header.epoch
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        packed = os.pread(fd, 24, EPOCH_AT)
        if packed[8:] != boot:
            packed = pack_boot(time.time_ns() // 1000 - machine_us(), boot)
            os.pwrite(fd, packed, EPOCH_AT)
        return int.from_bytes(packed[:8], sys.byteorder, signed=True)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _make(path: Path, rule: bytes, geometry: Geometry, max_keys: int) -> None:
    """Make a whole file, and give it its name if no other process was quicker."""
    _remove_unfinished(path)
    mode = LOCKED if native is None else ATOMIC
    epoch = time.time_ns() // 1000 - machine_us()
    header = Header(mode, geometry, max_keys, epoch, boot_id(), os.urandom(32), rule)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(6).hex()}")
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # as long as it is held, no other process takes the file for a left-over
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, geometry.file_bytes)
        allocate(fd, 0, geometry.table_bytes)
        os.pwrite(fd, header.pack(), 0)
        with suppress(FileExistsError, FileNotFoundError):
            os.link(unfinished, path, follow_symlinks=False)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        os.close(fd)


def _remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed while they made this file have left."""
    for left in path.parent.glob(f".{path.name}.*"):
        with suppress(OSError):
            fd = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
            finally:
                os.close(fd)


def allocate(fd: int, start: int, size: int) -> None:
    """Have the file system set space aside, so that a full one is an error here and no SIGBUS later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, size)


def describe(header: Header) -> str:
    sizes = header.geometry
    return f"{MODES[header.mode]}, {header.max_keys:,} keys, {sizes.table_bytes:,} bytes"
