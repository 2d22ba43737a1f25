"""Every example runs, from start to end, without an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from tests.support.servers import Server

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


def run(example: Path, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    ours = str(Path(headgate.__file__).parent.parent)
    environment = {"PYTHONWARNINGS": "error"} | os.environ | {"HEADGATE_EXAMPLE_REDIS": url, "PYTHONPATH": ours}
    command = [sys.executable, str(example)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, redis_server: Server, tmp_path: Path) -> None:
    done = run(example, redis_server.patient_url, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


WITH_REDIS = ("concurrency", "crawler", "hybrid", "regions", "shared_through_redis")
NEED_REDIS = [example for example in EXAMPLES if example.stem in WITH_REDIS]


@pytest.mark.slow
@pytest.mark.parametrize("example", NEED_REDIS, ids=lambda path: path.stem)
def test_without_redis(example: Path, tmp_path: Path) -> None:
    """An example that needs a Redis says so, without a traceback."""
    done = run(example, "redis://127.0.0.1:1", tmp_path)
    assert done.returncode == 1
    assert "HEADGATE_EXAMPLE_REDIS" in done.stderr
    assert "Traceback" not in done.stderr
