"""CONTRIBUTING.md names files, targets and marks that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_paths() -> None:
    """Every path in it exists, except that of the package which it says is not there yet."""
    named = re.findall(r"`((?:src|tests|docs|deploy|examples|\.github)[\w./]*)`", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] in ([], ["src/headgate/web/"])


def test_targets() -> None:
    """Every target of make in it exists."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)[ `]", PAGE)) - {"it"} <= targets


def test_marks(pytestconfig: pytest.Config) -> None:
    """Every mark of ours is in its table."""
    ours = {"server", "slow", "store_timeout", "bounded"}
    registered = {line.partition(":")[0].partition("(")[0] for line in pytestconfig.getini("markers")}
    assert ours <= registered
    assert ours <= set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE))
