"""Several workers: a scrape at any of them shows all."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from headgate import Limiter
from headgate.telemetry import workers
from headgate.telemetry.prometheus import Collector
from headgate.telemetry.workers import SharedFigures, shared_figures
from tests.support.web_servers import served
from tests.telemetry.conftest import Figures

pytestmark = pytest.mark.once

APP = """
import os
from prometheus_client import CollectorRegistry, generate_latest
from headgate import Limiter
from headgate.coordination import Lock
from headgate.telemetry.prometheus import Collector

limiter = Limiter("100000/hour", name="shop")
held = Lock(f"of {{os.getpid()}}")
registry = CollectorRegistry()
registry.register(Collector(directory={directory!r}))

def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    if environ["PATH_INFO"] == "/metrics":
        return [generate_latest(registry)]
    limiter.try_acquire(environ["PATH_INFO"])
    if not held.held:
        held.acquire()
    return [str(os.getpid()).encode()]
"""
ALLOWED = r'headgate_decisions_total\{.*limiter="shop".*result="allowed".*\} ([0-9.e+]+)'


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=50) as answer:
        text: str = answer.read().decode()
    return text


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def allowed(text: str) -> float:
    found = re.findall(ALLOWED, text.replace('degraded="false",', ""))
    return max(map(float, found), default=0.0)


def held(text: str) -> int:
    return len(re.findall(r"^headgate_lock_held\{.*\} 1\.0$", text, re.MULTILINE))


@pytest.mark.server
@pytest.mark.parametrize("preload", [False, True], ids=["", "preload"])
def test_gunicorn(tmp_path: Path, preload: bool) -> None:
    """Two workers: a scrape at either has the sums. A worker that is killed keeps its counters; its gauges go."""
    source = APP.format(directory=str(tmp_path / "figures"))
    words = ["gunicorn", "--workers=2", "--threads=2", *(["--preload"] if preload else []), "shop:app"]
    with served(tmp_path, source, *words) as url:
        pids: list[str] = []

        def ask() -> int:
            pids.append(get(f"{url}/k"))
            return len(set(pids))

        until(lambda: ask() == 2, "both workers answer")
        if not preload:  # else the name of the lock is that of the master, for both
            until(lambda: held(get(f"{url}/metrics")) == 2, "both hold their lock")
        until(lambda: allowed(get(f"{url}/metrics")) == len(pids), "the sum of both workers")
        os.kill(int(pids[-1]), signal.SIGKILL)
        if not preload:
            until(lambda: held(get(f"{url}/metrics")) == 1, "the gauge of the dead worker goes")
        else:
            files = f"{pids[-1]}-*"
            until(lambda: get(f"{url}/metrics") and not list((tmp_path / "figures").glob(files)), "its files go")
        assert allowed(get(f"{url}/metrics")) == len(pids), "its counters stay"
        pids.append(get(f"{url}/k"))
        until(lambda: allowed(get(f"{url}/metrics")) == len(pids), "and the others count on")


CHILD = """
import sys
from headgate import Limiter
from headgate.telemetry.workers import SharedFigures, shared_figures
figures = shared_figures(sys.argv[1])
limiter = Limiter("5/hour", name=sys.argv[2])
limiter.try_acquire("k")
if sys.argv[3] == "stays":
    print("ready", flush=True)
    sys.stdin.read()
"""


def child(directory: Path, name: str, ends: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(directory), name, ends]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.server
def test_processes_that_end(tmp_path: Path, figures: Figures) -> None:
    """A process writes its last counts when it ends; a scrape that was cut off adds no counter twice."""
    limiter = Limiter("5/hour", name=figures.name)
    for _ in range(2):
        process = child(tmp_path, figures.name, "ends")
        assert process.communicate(timeout=50) and process.returncode == 0
    shared = shared_figures(tmp_path)
    limiter.try_acquire("k")

    def total() -> float:
        rows = [row for row in shared.rows() if figures.name in row.labels.values()]
        return sum(row.value for row in rows if row.name == "headgate.decisions")

    left = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith(shared._token)}
    assert total() == total() == 3
    for name, content in left.items():  # as if the scrape had ended before it removed them
        (tmp_path / name).write_bytes(content)
    assert total() == 3
    assert json.loads((tmp_path / workers.ENDED).read_text())["rows"]
    shared.close()


RUBBISH = [b"", b"\0\xff", b"3", b"null", b"[1]", b'{"a": 1}', b'[["headgate.decisions", 3, 4]]', b'[[["x"], [], 1]]']


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_files_of_others(rubbish: bytes, tmp_path: Path, figures: Figures) -> None:
    """They are left as they are, whatever they contain; files of ours that are broken are left out."""
    others = [tmp_path / name for name in ("settings.json", "settings.toml", "my-app.json", "my-app.lock", "7-x.json")]
    for path in (*others, tmp_path / workers.ENDED, tmp_path / "7-0123456789ab.json"):
        path.write_bytes(rubbish)
    limiter = Limiter("5/hour", name=figures.name)
    limiter.try_acquire("k")
    shared = shared_figures(tmp_path)
    assert decisions(shared, figures.name) == 1
    assert [path.read_bytes() for path in others] == [rubbish] * len(others)
    shared.close()


@pytest.mark.server
def test_a_live_process_is_not_taken_for_dead(tmp_path: Path, figures: Figures) -> None:
    """Its gauges are added up with ours as long as it lives."""
    limiter = Limiter("5/hour", name=figures.name)
    limiter.try_acquire("k")
    process = child(tmp_path, figures.name, "stays")
    assert process.stdout and process.stdout.readline() == "ready\n"
    shared = shared_figures(tmp_path)

    def keys() -> float:
        rows = [row for row in shared.rows() if figures.name in row.labels.values()]
        return sum(row.value for row in rows if row.name == "headgate.keys")

    until(lambda: keys() == 2, "the keys of both processes")
    process.kill()
    process.communicate(timeout=50)
    assert keys() == 1
    shared.close()


def decisions(shared: SharedFigures, name: str) -> float:
    rows = [row for row in shared.rows() if name in row.labels.values()]
    return sum(row.value for row in rows if row.name == "headgate.decisions")


def test_a_fork_counts_nothing_twice(tmp_path: Path, figures: Figures) -> None:
    """A child that is forked after its parent has counted, and ends at once, adds nothing; its files go."""
    limiter = Limiter("5/hour", name=figures.name)
    shared = shared_figures(tmp_path)
    limiter.try_acquire("k")
    assert decisions(shared, figures.name) == 1
    for writes in (False, True):
        pid = os.fork()
        if not pid:
            if writes:
                limiter.try_acquire("k")
                shared.write()
            os._exit(0)
        os.waitpid(pid, 0)
        assert decisions(shared, figures.name) == 1 + writes
        assert not list(tmp_path.glob(f"{pid}-*"))
    shared.close()


def test_several_collectors_of_a_process(tmp_path: Path, figures: Figures) -> None:
    """A registry made for each scrape, or two, count nothing twice, whether they are closed or not."""
    limiter = Limiter("5/hour", name=figures.name)
    limiter.try_acquire("k")
    first, second = shared_figures(tmp_path), shared_figures(tmp_path / ".")
    assert decisions(first, figures.name) == decisions(second, figures.name) == 1
    second.close()
    limiter.try_acquire("k")
    assert decisions(first, figures.name) == 2
    first.close()
    assert decisions(shared_figures(tmp_path), figures.name) == 2
    first.close()


def test_a_directory_that_goes(tmp_path: Path, figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    """It is made again. While that is impossible a scrape has all other metrics, and a fork renews all else."""
    limiter = Limiter("5/hour", name=figures.name)
    collector, registry = Collector(tmp_path / "figures"), CollectorRegistry()
    registry.register(collector)
    Gauge("of_the_application", "Another metric", registry=registry).set(1)
    limiter.try_acquire("k")
    shutil.rmtree(tmp_path / "figures")
    assert figures.name in generate_latest(registry).decode()
    shutil.rmtree(tmp_path / "figures")
    (tmp_path / "figures").write_text("in its way")
    scraped = generate_latest(registry).decode()
    assert "of_the_application 1.0" in scraped and figures.name not in scraped
    assert "a scrape has no figures of headgate" in caplog.text
    pid = os.fork()
    if not pid:
        os._exit(0 if Limiter("5/hour", name=figures.name).try_acquire("k") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    collector.close()
    collector.close()
