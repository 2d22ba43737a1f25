"""CONTRIBUTING.md names files, targets and marks that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = sorted(path.parent for path in (ROOT / "src/headgate").rglob("__init__.py"))

NAMES_IN_FILE = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`) in `([\w./]+\.\w+)`")


def test_paths() -> None:
    """Every path in it exists."""
    named = re.findall(r"`((?:src|tests|docs|deploy|examples|\.github)[\w./]*)`", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_file_names() -> None:
    """Every file that it names without a path exists."""
    named = set(re.findall(r"`(\w+\.py)`", PAGE))
    assert {"table.py", "sync_client.py"} <= named
    assert named <= {path.name for path in [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.py")]}


def test_names() -> None:
    """What it says is in a file is defined there: a class, a function or a table."""
    pairs = [(name, path) for names, path in NAMES_IN_FILE.findall(PAGE) for name in re.findall(r"`(\w+)`", names)]
    assert {name for name, _ in pairs} >= {"AlgorithmName", "SCHEMES", "LAYERS", "ROUTES", "HOT_PATH", "Backend"}
    for name, path in pairs:
        definition = rf"^(?:export const |class |(?:async )?def )?{name}\b"
        assert re.search(definition, (ROOT / path).read_text(), re.MULTILINE), f"{path} does not define {name}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_maps(package: Path) -> None:
    """Each package lists its files in one line each, and no others."""
    text = (package / "__init__.py").read_text()
    listed = re.findall(r"^(?:# )?(\w+(?:\.py|/))  ", text, re.MULTILINE)
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    folders = {f"{path.parent.name}/" for path in package.glob("*/*") if path.is_file()} - {"__pycache__/"}
    assert sorted(listed) == sorted([*modules, *folders])


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
