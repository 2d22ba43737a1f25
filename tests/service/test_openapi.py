"""The description is true: schemathesis sends what it allows, and what it does not, and finds nothing wrong."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import Start

STRICT = "max_wait = 0.05\n"  # else it would wait for what it asks for
SLOTS = "[rules.uploads]\nconcurrency = 3\n"


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not for this Python yet")
def test_schemathesis_finds_nothing(start: Start, tmp_path: Path) -> None:
    service = start(config=STRICT + SLOTS)
    command = [Path(sys.executable).parent / "schemathesis", "run", f"http://127.0.0.1:{service.port}/openapi.json"]
    options = ["--max-examples", "5", "--seed", "7", "--request-timeout", "60", "--no-color"]
    options += ["--exclude-path-regex", "/forward/"]  # there every method is right: tests/service/test_forward.py
    done = subprocess.run(
        [str(part) for part in (*command, *options)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: 18" in done.stdout
    assert "Traceback" not in service.log()
