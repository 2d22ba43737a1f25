"""What an archive must hold and must not hold. Every function gives the faults that it finds, as text for a person."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/headgate"
GENERATED = ("PKG-INFO", "setup.cfg")  # by setuptools, in an sdist
LIBRARIES = ("headgate/hot_path__mypyc.", "headgate/stores/shared/_table.")  # what a compiled wheel runs on


def sdist_faults(archive: Path) -> Iterator[str]:
    """It holds each file of the package, and nothing that git does not know."""
    with tarfile.open(archive) as opened:
        files = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    for path in sorted(_package_files(("*",)) - {name.removeprefix("src/") for name in files}):
        yield f"src/{path} is missing"
    tracked = _tracked()
    if tracked is not None:
        unknown = (name for name in files - tracked if name not in GENERATED and ".egg-info/" not in name)
        yield from (f"{name} is not in git: commit it or remove it" for name in sorted(unknown))


def wheel_faults(archive: Path, compiled: bool) -> Iterator[str]:
    """It holds every module, its types, the live page and, only if *compiled*, the libraries; no C and no tests."""
    with ZipFile(archive) as opened:
        files = set(opened.namelist())
    for name in sorted(_package_files(("*.py", "py.typed", "service/page/*")) - files):
        yield f"{name} is missing"
    others = [name for name in files if not name.startswith("headgate/") and ".dist-info/" not in name]
    yield from (f"{name} does not belong into a wheel" for name in sorted(others))
    yield from (f"{name} is a source of C" for name in sorted(files) if name.endswith((".c", ".h")))
    libraries = [name for name in files if name.endswith((".so", ".pyd"))]
    for library in LIBRARIES if compiled else ():
        if not any(name.startswith(library) for name in libraries):
            yield f"{library}* is missing: it was not compiled"
    if not compiled:
        yield from (f"{name} is compiled, in a wheel for all platforms" for name in sorted(libraries))
    if archive.name.endswith("-py3-none-any.whl") == compiled:
        yield f"its name does not say whether it is compiled, which is {compiled}"


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(opened.read(name).decode())


def python_files(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel without its .dist-info, which has hashes and the name of the tool that made it."""
    with ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if ".dist-info/" not in name}


def _package_files(patterns: Iterable[str]) -> set[str]:
    found = (path for pattern in patterns for path in PACKAGE.rglob(pattern))
    skipped = (".pyc", ".so", ".pyd")
    return {str(path.relative_to(PACKAGE.parent)) for path in found if path.is_file() and path.suffix not in skipped}


def _tracked() -> set[str] | None:
    """What git knows of; None outside of a checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    return set(done.stdout.decode().split("\0")) if done.returncode == 0 else None
