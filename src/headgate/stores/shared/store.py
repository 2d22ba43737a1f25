"""A store without a server that all processes of one machine share: `SharedStore`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headgate._lifecycle import renew_after_fork
from headgate.algorithms.sliding_window import SlidingWindow
from headgate.clock import Clock
from headgate.errors import StoreUnavailable
from headgate.rule import Rule, check_policy
from headgate.stores.base import NO_PICKLE, Health, InProcessAsync
from headgate.stores.shared.backend import (
    SharedInteger,
    SharedLog,
    SharedRule,
    SharedStates,
)
from headgate.stores.shared.files import directory_of, file_name, make_directory
from headgate.stores.shared.layout import MODES
from headgate.stores.shared.tables import SharedFile, shared_file

if TYPE_CHECKING:
    from headgate.hybrid.shared_leases import SharedLeases


class SharedStore:
    """States in files that all processes of this machine map; exact over them, and private to their user.

    Args:
        url: ``shared://name`` (in memory: /dev/shm) or ``shared:///directory``
        max_keys: for each rule, chosen when its file is made: 100,000 if not given, about 50 bytes each for buckets
        clock: for tests
    """

    kind = "shared"
    in_process = True

    def __init__(self, url: str, *, max_keys: int | None = None, clock: Clock | None = None) -> None:
        self.directory, max_keys = settings_of(url, max_keys)
        self.url = url
        self.max_keys = max_keys
        self.clock = clock
        self.files: dict[Path, SharedFile] = {}
        self.backends: dict[tuple[Path, str], SharedRule] = {}
        self.shared_objects: dict[str, Any] = {}  # what hybrid keeps with the store
        self._lock = threading.RLock()
        make_directory(self.directory)
        renew_after_fork(self)

    @classmethod
    def from_url(cls, url: str, clock: Clock | None = None, **options: Any) -> SharedStore:
        """The store of *url*; of *options* it takes max_keys."""
        return cls(url, max_keys=options.get("max_keys"), clock=clock)

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_PICKLE)

    def __len__(self) -> int:
        """How many keys are kept of the rules that were opened here. Reads whole files."""
        with self._lock:
            return sum(one.count() for one in {path: one for (path, _), one in self.backends.items()}.values())

    def __repr__(self) -> str:
        return f"SharedStore({self.url!r})"

    def open(self, rule: Rule, on_store_error: str = "allow") -> SharedRule:
        """The states of one rule; limiters of the same rule share them, in all processes.

        Raises `StoreUnavailable`, whatever *on_store_error* is, if the file cannot be used or made.
        """
        name, text = file_name(rule, self.clock is not None)
        path = self.directory / name
        policy = check_policy(on_store_error)
        with self._lock:
            file = shared_file(path, text, rule.algorithm, self.max_keys)
            known = self.backends.get((path, policy))
            if known is not None and known.file is file:
                return known
            kind: type[SharedRule] = SharedInteger
            if file.geometry.header:
                kind = SharedLog if isinstance(rule.algorithm, SlidingWindow) else SharedStates
            made = self.backends[path, policy] = kind(file, rule, self.clock, policy)
            self.files[path] = file
            return made

    def open_async(self, rule: Rule, on_store_error: str = "allow") -> InProcessAsync:
        """The same for asyncio; the states are shared with those of `open`."""
        return InProcessAsync(self.open(rule, on_store_error))

    def leases(self) -> SharedLeases:
        """What keeps the leases of `HybridLimiter` here."""
        from headgate.hybrid.shared_leases import SharedLeases  # it runs the ledger

        return SharedLeases(self)

    def health(self) -> Health:
        """Whether the files can be used."""
        modes = {MODES[file.opened.header.mode] for file in list(self.files.values())}
        try:
            make_directory(self.directory)
            for file in list(self.files.values()):
                file.check()
        except (OSError, StoreUnavailable) as error:
            return Health(False, "down", (str(error),), role="shared", version=", ".join(modes))
        return Health(True, role="shared", version=", ".join(sorted(modes)))

    async def ahealth(self) -> Health:
        return self.health()

    def close(self) -> None:
        """Let go of the files; one that no limiter uses any more is closed."""
        with self._lock:
            self.files.clear()
            self.backends.clear()

    async def aclose(self) -> None:
        self.close()


def settings_of(url: str, max_keys: int | None = None) -> tuple[Path, int | None]:
    """The directory that *url* names and how many keys a rule has there; `ValueError` if it is no shared store."""
    directory, parameters = directory_of(url)
    if "max_keys" in parameters and max_keys is None:
        text = parameters["max_keys"]
        max_keys = int(text) if text.isascii() and text.isdigit() else 0
    if unknown := parameters.keys() - {"max_keys"}:
        raise ValueError(f"shared:// takes only ?max_keys=, got {', '.join(sorted(unknown))}")
    if isinstance(max_keys, bool) or not (max_keys is None or (isinstance(max_keys, int) and max_keys > 0)):
        raise ValueError(f"max_keys must be a whole number of at least 1, got {max_keys!r}")
    return directory, max_keys
