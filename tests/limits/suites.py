"""Run the tests that ship with Flask-Limiter and with limits on ``headgate.limits.install()``.

    make limits-check        or: python -m tests.limits.suites [--fresh]

The packages are downloaded into build/limits-suites, never kept in the repository, and their tests run in a virtual
environment there. Where they want Redis or Valkey from a container they get servers that this program has started; what
wants Memcached, MongoDB, TLS or a Unix socket from one is left out. A failure without a known reason is an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.support.clusters import SERVICE, Cluster, Sentinels
from tests.support.servers import KINDS, Server

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "build" / "limits-suites"
PYTHON = HOUSE / "venv" / "bin" / "python"

CLASS = "asserts that the storage is an instance of a class of limits"
CLIENT = "makes the outage by patching redis.Redis.execute_command, which headgate does not call"
ROUNDING = "asserts the rounding of limits: part of a hit in view counts as none, and one hit too many is admitted"
KEYS = "asserts the names of the Redis keys of limits"

PREVIOUS = "test_sliding_window_counter_previous_window"


@dataclass
class Suite:
    """One package: what to download, what its tests need, and which of them fail for a reason that is known."""

    package: str  # and its version
    needs: list[str]
    ports: dict[str, Callable[[], tuple[int, Server | Cluster | Sentinels]]]  # of its containers, and what is started
    expected: dict[str, str]  # the end of a test's name, or its start if that ends in [, and the reason
    options: list[str]

    @property
    def folder(self) -> Path:
        return HOUSE / self.package.replace("==", "-")


def single(kind: str) -> tuple[int, Server]:
    server = Server(next((known for known in KINDS if kind in known), KINDS[0]))
    return server.port, server


def cluster() -> tuple[int, Cluster]:
    started = Cluster(KINDS[0])
    return started.members[0].port, started


def sentinels() -> tuple[int, Sentinels]:
    started = Sentinels(KINDS[0])
    return started.sentinels[0].port, started


SUITES = [
    Suite(
        "Flask-Limiter==4.1.1",
        ["Flask-Limiter[cli]==4.1.1", "Flask[async]", "flask-restful", "flask-restx", "pytest-check", "pytest-mock"],
        {"46379": lambda: single("redis")},
        {
            "test_configuration.py::test_constructor_arguments_over_config": CLASS,
            "test_error_handling.py::test_fallback_to_memory_backoff_check": CLIENT,
            "test_error_handling.py::test_fallback_to_memory_with_global_override": CLIENT,
            "test_error_handling.py::test_fallback_to_memory": CLIENT,
        },
        ["-k", "not test_reset_unsupported", "--ignore=tests/test_storage.py"],
    ),
    Suite(
        f"limits=={version('limits')}",
        [f"limits=={version('limits')}", "coredis<6", "flaky", "pytest-asyncio", "pytest-lazy-fixtures", "valkey"],
        {"7379": lambda: single("redis"), "12379": lambda: single("valkey"), "7001": cluster, "26379": sentinels},
        {
            "TestConcreteStorages::test_storage_string[": CLASS,
            f"TestSlidingWindow::{PREVIOUS}[": ROUNDING,
            f"TestAsyncSlidingWindow::{PREVIOUS}[": ROUNDING,
            "TestRedisStorage::test_custom_prefix[": KEYS,
        },
        [
            *("-m", "not benchmark and not memcached and not mongodb and not valkey_cluster"),
            *("-k", "not uds and not ssl and not auth"),
            *("--asyncio-mode=auto", "--no-flaky-report"),
        ],
    ),
]
COMMON = ["hiro", "pymemcache", "pymongo", "pytest", "redis[hiredis]", "setuptools"]


def main() -> int:
    if "--fresh" in sys.argv[1:]:
        shutil.rmtree(HOUSE, ignore_errors=True)
    prepare()
    with ExitStack() as servers:
        runs = [(suite, start(suite, servers)) for suite in SUITES]
        unexpected = [report(suite, run) for suite, run in runs]
    return 1 if any(unexpected) else 0


def prepare() -> None:
    """Make the environment, and download and unpack the packages, unless that was done before."""
    wanted = sorted({*COMMON, *(need for suite in SUITES for need in suite.needs)})
    done = HOUSE / "installed"
    if not done.is_file() or done.read_text() != "\n".join(wanted):
        print("== installing what the suites need into", HOUSE / "venv")
        subprocess.run([sys.executable, "-m", "venv", "--clear", HOUSE / "venv"], check=True)
        pip("install", *wanted)
        done.write_text("\n".join(wanted))
    for suite in SUITES:
        if not suite.folder.is_dir():
            print("== downloading", suite.package)
            pip("download", "--no-binary", ":all:", "--no-deps", "--dest", HOUSE / "sdists", suite.package)
            unpack(suite)


def pip(*arguments: str | Path) -> None:
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})


def unpack(suite: Suite) -> None:
    """Take the tests alone: the package itself is the one that is installed."""
    name = suite.package.replace("==", "-").replace("Flask-L", "flask_l")
    with tarfile.open(HOUSE / "sdists" / f"{name}.tar.gz") as archive:
        wanted = re.compile(f"{re.escape(name)}/tests/(?!benchmarks/)")
        members = [member for member in archive.getmembers() if wanted.match(member.name)]
        for member in members:
            member.name = member.name.removeprefix(f"{name}/")
        archive.extractall(suite.folder, members, filter="data")


def start(suite: Suite, servers: ExitStack) -> subprocess.Popen[str]:
    """Start the servers of *suite* on free ports, write these into a copy of its tests, and begin to run them."""
    copy = suite.folder.with_name(suite.folder.name + "-run")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(suite.folder, copy)
    words = {"mymaster": SERVICE}
    for port, launch in suite.ports.items():
        ours, started = launch()
        servers.callback(started.stop)
        words[port] = str(ours)
    pattern = re.compile("|".join(rf"\b{word}\b" for word in words))
    for path in copy.rglob("*.py"):
        path.write_text(pattern.sub(lambda found: words[found[0]], path.read_text()))
    command: list[str | Path] = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:docker",
    ]
    command += ["-c", os.devnull, "--rootdir", copy, "--junit-xml", copy / "results.xml", *suite.options, "tests"]
    plugin = HOUSE / "plugin"
    plugin.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("suite_plugin.py"), plugin / "tests_plugin.py")
    paths = os.pathsep.join(map(str, [ROOT / "src", plugin]))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def report(suite: Suite, run: subprocess.Popen[str]) -> list[str]:
    """Print how it went; returns the failures that have no known reason."""
    output = run.communicate()[0]
    results = suite.folder.with_name(suite.folder.name + "-run") / "results.xml"
    if not results.is_file():
        print(output)
        return [f"{suite.package} did not run"]
    passed, xfailed, known, unexpected = 0, 0, [], []
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name')}"
        if case.find("skipped") is not None:
            xfailed += 1  # their own mark says so
        elif case.find("failure") is None and case.find("error") is None:
            passed += 1
        elif reason := next((why for part, why in suite.expected.items() if matches(part, name)), ""):
            known.append(f"{name}: {reason}")
        else:
            unexpected.append(name)
    total = passed + xfailed + len(known) + len(unexpected)
    print(f"== {suite.package} on headgate: {passed} passed of {total}, {xfailed} marked by itself as failing")
    for line in known:
        print("   fails as expected:", line)
    for name in unexpected:
        print("   FAILED:", name)
    if unexpected:
        print(output)
    return unexpected


def matches(part: str, name: str) -> bool:
    """Whether *name*, with dots as JUnit reports have them, is of the test that *part* names."""
    wanted = part.replace(".py::", "::").replace("::", ".")
    return wanted in name if wanted.endswith("[") else name.endswith(wanted)


if __name__ == "__main__":
    sys.exit(main())
