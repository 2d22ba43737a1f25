"""Write the pages of the site into build/docs, from where Zensical builds them: `make docs`.

    python docs/stage.py [DIRECTORY]        DIRECTORY/build/docs; the checkout if none is given

The pages of docs are copied. What they link to outside of docs, such as an example or a file of `deploy`, becomes a
page of the site too, so that no link depends on where the repository is. The reference gets a page for each row of
docs/reference.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import reference

DOCS = Path(__file__).parent
ROOT = DOCS.parent
KEPT = "repository"  # the folder of the site with what is not in docs
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples")  # in mkdocs.yml
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
SKIPPED = re.compile(r"/(__pycache__/|\.)[^/]*$")  # Zensical takes no page whose name begins with a dot
LANGUAGES = {"py": "python", "yml": "yaml", "conf": "nginx", "": "text"}  # where the suffix is not its name


class Stage:
    """Pages on their way into *target*, and the files outside of docs that they have linked to."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.wanted: list[Path] = [ROOT / name for name in PROJECT]
        self.done: set[Path] = set()
        self.written: set[Path] = set()

    def write(self) -> None:
        for file in sorted(DOCS.rglob("*")):
            if file.suffix == ".md":
                self._put(file.relative_to(DOCS), self._page(file, file.relative_to(DOCS)))
            elif file.is_file() and file.suffix not in (".py", ".pyc"):
                self._put(file.relative_to(DOCS), file.read_bytes())
        for name, page in reference.PAGES.items():
            self._put(Path("reference", f"{name}.md"), reference.markdown(page))
        while self.wanted:
            file = self.wanted.pop()
            if file not in self.done:
                self.done.add(file)
                self._keep(file)
        for stale in {file for file in self.target.rglob("*") if file.is_file()} - self.written:
            stale.unlink()

    def _keep(self, file: Path) -> None:
        """Make a page of something that is not in docs: a file, or what is in a folder."""
        place = self._place(file)
        name = file.relative_to(ROOT)
        if file.suffix == ".md":
            self._put(place, self._page(file, place))
        elif file.is_dir():
            inside = [each for each in sorted(file.rglob("*")) if each.is_file() and not SKIPPED.search(str(each))]
            rows = [f"- [{each.relative_to(file)}]({self._link(each, place)}){_summary(each)}" for each in inside]
            self._put(place, "\n".join([f"# {name}\n", *rows, ""]))
        else:
            text = file.read_text()
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            language = LANGUAGES.get(file.suffix[1:], file.suffix[1:])
            self._put(place, f"# {name}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n")

    def _page(self, file: Path, place: Path) -> str:
        """The text of *file*, with links as they must be at *place*; code is not touched."""
        text = file.read_text()
        parts, end = [], 0
        for fence in FENCE.finditer(text):
            parts += [self._relink(text[end : fence.start()], file, place), fence[0]]
            end = fence.end()
        return "".join([*parts, self._relink(text[end:], file, place)])

    def _relink(self, text: str, file: Path, place: Path) -> str:
        def link(found: re.Match[str]) -> str:
            path, mark, anchor = found[2].partition("#")
            if not path or "://" in path:
                return found[0]
            target = Path(os.path.normpath(file.parent / path))
            if file.is_relative_to(DOCS) and _is_page(target):
                return found[0]
            return f"{found[1]}{self._link(target, place)}{mark}{anchor}{found[3]}"

        return LINK.sub(link, text)

    def _link(self, target: Path, place: Path) -> str:
        return os.path.relpath(self._place(target), place.parent)

    def _place(self, target: Path) -> Path:
        """Where *target* is in the site; what is not there yet is wanted."""
        if target == ROOT / "README.md":
            return Path("index.md")
        if _is_page(target):
            return target.relative_to(DOCS)
        self.wanted.append(target)
        name = Path(KEPT, target.relative_to(ROOT))
        if target.is_dir():
            return name / "index.md"
        return name if target.suffix == ".md" else name.with_name(name.name + ".md")

    def _put(self, place: Path, content: str | bytes) -> None:
        """Write a file, unless it is there: `zensical serve` builds anew what has changed."""
        file = self.target / place
        content = content.encode() if isinstance(content, str) else content
        self.written.add(file)
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _is_page(target: Path) -> bool:
    """Whether docs brings it into the site as it is; its scripts are files like those elsewhere."""
    return target.is_relative_to(DOCS) and target.suffix != ".py"


def _summary(file: Path) -> str:
    """What an example says of itself in its first line."""
    said = re.match(r'"""(.+?)(?:"""|\n)', file.read_text()) if file.suffix == ".py" else None
    return f": {said[1]}" if said else ""


if __name__ == "__main__":
    Stage(Path(sys.argv[1] if sys.argv[1:] else ROOT) / "build" / "docs").write()
