"""Every example runs, from start to end, without an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from tests.servers import Server

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, redis_server: Server, tmp_path: Path) -> None:
    ours = str(Path(headgate.__file__).parent.parent)
    environment = os.environ | {
        "HEADGATE_EXAMPLE_REDIS": redis_server.url,
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": ours,
    }
    command = [sys.executable, str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
