"""Every link in the documentation leads somewhere, what it shows as Python runs, and as output comes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.resp import ServiceInThread
from tests.support.servers import Server

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "docs", "docs/ko", "docs/web", "benchmarks", "deploy")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]

# What is the reader's own.
STAND_INS = """
from types import SimpleNamespace
row, write, call = {}, lambda row, fence: None, lambda: None
url, answer = "https://api.example.com/", SimpleNamespace(status_code=200, headers={})
requests = SimpleNamespace(get=lambda url, headers: answer)
"""


def headings(page: Path) -> set[str]:
    """As GitHub names them in an address."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not heading or heading in headings(target), f"{link}: there is no such heading"


def test_there_are_pages() -> None:
    assert ROOT / "README.md" in PAGES and len(PAGES) > 7


@pytest.fixture
def service_url() -> Iterator[str]:
    """A service that takes limits from clients."""
    service = ServiceInThread()
    yield f"headgate://127.0.0.1:{service.port}?timeout=20"
    service.forget()


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs(page: Path, redis_server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One block after the other, as a reader would type them; those marked `py` need what is not installed here."""
    blocks = re.findall(r"^```python\n(.+?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    code = STAND_INS + "".join(blocks).replace("redis://localhost:6379/0", redis_server.patient_url)
    code = code.replace("shared://myapp", f"shared://{tmp_path}")
    if (spare := "redis://spare:6379/0") in code:
        code = code.replace(spare, request.getfixturevalue("mortal_server").patient_url)
    if (database := "postgresql://app:secret@localhost:5432/app") in code:
        code = code.replace(database, request.getfixturevalue("postgres_server").patient_url)
    if (service := "headgate://:secret@localhost:6380") in code:
        code = code.replace(service, request.getfixturevalue("service_url"))
    code = code.replace("    web.run_app(app)\n", "    pass\n")  # it serves until it is stopped
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_first_result() -> None:
    """What the README shows as the output of the first example is what comes."""
    shown = re.search(r"first_steps\.py\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown
    example = [sys.executable, str(ROOT / "examples" / "first_steps.py")]
    printed = subprocess.run(example, capture_output=True, text=True, timeout=50, check=True).stdout.splitlines()
    lines = [line for line in shown[1].splitlines() if line != "..."]
    assert [line.split(":")[0] for line in lines] == ["call 1", "call 6"]
    for line in lines:
        assert any(line.split(" in ")[0] in found for found in printed), (line, printed)
