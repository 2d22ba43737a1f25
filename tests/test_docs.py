"""Every link in the documentation leads somewhere, and what it shows as output is what comes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(page for folder in (".", "docs", "benchmarks", "deploy") for page in (ROOT / folder).glob("*.md"))


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


def test_the_first_result_is_the_one_shown() -> None:
    shown = re.search(r"first_steps\.py\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown
    example = [sys.executable, str(ROOT / "examples" / "first_steps.py")]
    printed = subprocess.run(example, capture_output=True, text=True, timeout=50, check=True).stdout.splitlines()
    lines = [line for line in shown[1].splitlines() if line != "..."]
    assert [line.split(":")[0] for line in lines] == ["call 1", "call 6"]
    for line in lines:
        assert any(line.split(" in ")[0] in found for found in printed), (line, printed)
