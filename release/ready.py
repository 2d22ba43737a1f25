"""Say whether this checkout may be released: version, changelog, tag and archives agree.

    python -m release.ready               before the tag is set: the tree is committed, the tag is free
    python -m release.ready --tag v0.1.0  in the workflow, for the tag that started it
    python -m release.ready --dist dist   the folder holds all that is uploaded: sdist, pure wheel, each compiled wheel

Every fault is printed; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from release.contents import ROOT

# What the matrix of .github/workflows/release.yml runs on: the platform and the processors of cibuildwheel.
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("macos", "x86_64"), ("macos", "arm64"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag")
    parser.add_argument("--dist", type=Path)
    options = parser.parse_args()
    released = version()
    faults = list(of_version(released))
    faults += of_tag(released, options.tag) if options.tag else of_checkout(released)
    expected = identifiers()
    faults += of_classifiers(expected)
    if options.dist:
        faults += of_archives(released, expected, options.dist)
    for fault in faults:
        print(f"release: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)
    print(f"headgate {released}: ready; the workflow builds {len(expected)} compiled wheels")


def version() -> str:
    """As the source says it, which is what the metadata of the archives say."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "src/headgate/__init__.py").read_text(), re.MULTILINE)
    return found[1] if found else "none"


def of_version(released: str) -> Iterator[str]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", released):
        yield f"__version__ is {released}; a release is such as 0.1.0"
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not headings or headings[0].split()[0] != released:
        yield f"the first heading of CHANGELOG.md is {headings[:1]}, not {released}"


def of_tag(released: str, tag: str) -> Iterator[str]:
    if tag != f"v{released}":
        yield f"the tag is {tag}, but the version is {released}"


def of_checkout(released: str) -> Iterator[str]:
    if _git("status", "--porcelain"):
        yield "there are changes that are not committed"
    if _git("tag", "--list", f"v{released}"):
        yield f"the tag v{released} exists: raise __version__"


def identifiers() -> list[str]:
    """The builds of cibuildwheel, such as cp311-manylinux_x86_64, by [tool.cibuildwheel]; nothing is built."""
    tool = Path(sys.executable).parent / "cibuildwheel"
    found: list[str] = []
    for platform, machine in MACHINES:
        command = [str(tool), "--print-build-identifiers", "--platform", platform, "--archs", machine, str(ROOT)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CIBW_")}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found += done.stdout.split()
    return found


def of_classifiers(expected: list[str]) -> Iterator[str]:
    """Each Python that gets a wheel is named in the metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for minor in sorted({found[1] for name in expected if (found := re.match(r"cp3(\d+)", name))}, key=int):
        if f"Programming Language :: Python :: 3.{minor}" not in project["classifiers"]:
            yield f"wheels are built for Python 3.{minor}, which the classifiers do not name"


def of_archives(released: str, expected: list[str], dist: Path) -> Iterator[str]:
    """One archive for each build, and no other file that would be uploaded."""
    names = {path.name for path in dist.iterdir() if path.suffix in (".whl", ".gz")}
    for wanted in (f"headgate-{released}.tar.gz", f"headgate-{released}-py3-none-any.whl"):
        if wanted not in names:
            yield f"{wanted} is missing in {dist}"
        names.discard(wanted)
    for identifier in expected:
        python, platform = identifier.split("-")
        system, _, machine = platform.partition("_")
        pattern = rf"headgate-{re.escape(released)}-{python.rstrip('t')}-{python}-.*{system}_[\w.]*{machine}\.whl"
        built = {name for name in names if re.fullmatch(pattern, name)}
        if len(built) != 1:
            yield f"{dist} has {len(built)} wheels for {identifier}, not one"
        names -= built
    yield from (f"{name} is in {dist}, but not expected" for name in sorted(names))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
