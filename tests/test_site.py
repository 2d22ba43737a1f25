"""The site: it builds without a warning, every link in it leads somewhere, and it asks no other host for anything."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = [pytest.mark.slow, pytest.mark.bounded(300), pytest.mark.xdist_group("site")]  # one build for all of them


class Links(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loads.add(values["href"])
        elif "src" in values:
            self.loads.add(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as `make docs` does, in a folder of its own: others may build it in this checkout now."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    subprocess.run([sys.executable, str(DOCS / "stage.py"), str(folder)], check=True, timeout=50)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0 and "No issues found" in built.stderr, built.stdout + built.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text()) for page in site.rglob("*.html")}


def target_of(link: str, page: Path, site: Path) -> Path:
    """The file that a browser gets for *link*, if the site is served at the root of a host."""
    path = unquote(urlsplit(link).path)
    target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return target / "index.html" if target.is_dir() else target


def test_links(site: Path, pages: dict[Path, Links]) -> None:
    """Every link, picture and script is there, and every anchor."""
    assert len(pages) > 60
    dead = []
    for page, found in pages.items():
        for link in found.links | found.loads:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target = target_of(link, page, site)
            anchor = unquote(urlsplit(link).fragment)
            known = pages[target].anchors if target in pages else {anchor}
            if not target.is_file() or (anchor and anchor not in known and not anchor.startswith("__")):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_other_hosts(site: Path, pages: dict[Path, Links]) -> None:
    """No page loads a font, a script or a picture from elsewhere."""
    foreign = {load for found in pages.values() for load in found.loads if urlsplit(load).netloc}
    assert foreign == set()


def test_reference_has_signatures(site: Path) -> None:
    """The reference shows arguments, defaults and exceptions, which only the sources have."""
    page = (site / "reference" / "limiters" / "index.html").read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
    assert "try_acquire" in text and "on_store_error" in text and "RateLimited" in text and "Raises" in text


def test_navigation() -> None:
    """Every page of docs can be found without a search: it is in the navigation."""
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - listed == set()
