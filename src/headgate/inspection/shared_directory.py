"""What a limiter would find in the directory of a shared:// store, without a change to anything in it.

Rights are tried with files in a folder of the doctor's own inside of the directory, which is removed in the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from headgate.errors import StoreUnavailable
from headgate.inspection.finding import Finding
from headgate.stores.shared.files import make_directory
from headgate.stores.shared.store import SharedStore, settings_of


@contextmanager
def trial_store(url: str) -> Iterator[tuple[SharedStore | None, Finding]]:
    """A store inside of the directory of *url*, or None where there is none, and what there is to say of it.

    Raises `ValueError` if *url* is no shared store.
    """
    directory, max_keys = settings_of(url)
    if not os.path.lexists(directory):
        yield None, _of_missing(directory)
        return
    folder = ""
    try:
        make_directory(directory)  # it is there: this checks whose it is
        folder = tempfile.mkdtemp(prefix="doctor-", dir=directory)
        store = SharedStore(f"shared://{quote(folder)}", max_keys=max_keys)
    except (OSError, StoreUnavailable) as error:
        yield None, Finding("directory", "problem", str(error))
        return
    try:
        yield store, _of_files(directory)
    finally:
        store.close()
        shutil.rmtree(folder, ignore_errors=True)


def _of_missing(directory: Path) -> Finding:
    there = next(parent for parent in directory.parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("directory", "problem", f"{directory} is not there, and cannot be made in {there} by this user")
    return Finding("directory", "warning", f"{directory} is not there yet; the first limiter makes it")


def _of_files(directory: Path) -> Finding:
    sizes = [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(directory) if entry.is_file()]
    return Finding("directory", "ok", f"{directory} has files of rules: {len(sizes)}, {sum(sizes):,} bytes")
