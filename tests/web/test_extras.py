"""A wire whose framework is not installed says what to install."""

import subprocess
import sys

WIRES = ("aiohttp", "fastapi", "flask", "litestar", "quart", "sanic", "starlette")

IMPORTS = """
import importlib, sys
for name in {wires}:
    sys.modules[name] = None
for name in {wires}:
    try:
        importlib.import_module(f"headgate.web.{{name}}")
    except ImportError as error:
        print(error)
"""


def test_missing_framework() -> None:
    """The error names the extra."""
    code = IMPORTS.format(wires=WIRES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(WIRES)
    for name, line in zip(WIRES, said, strict=True):
        assert f"headgate.web.{name} needs" in line and f"pip install 'headgate[{name}]'" in line
