"""Print requirements in which every package of an extra of headgate has the oldest version that the extra allows.

    python -m tests.oldest          all extras, and what the tests need
    python -m tests.oldest flask    that extra alone

`make oldest` installs them. The versions are read from pyproject.toml and stand nowhere else; what its group `oldest`
names has the version that it has there.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
GROUPS = ("test", "stores", "web", "jobs", "build")  # what the tests need
NEWER = "oldest"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[\w,-]+\])?\s*(?P<bounds>[^;]*?)\s*(?P<marker>;.*)?")


def lower_bounds(project: dict[str, Any]) -> dict[str, str]:
    """The oldest version of each package of the extras, by its name; raises ValueError where one has none."""
    found: dict[str, str] = {}
    for extra, requirements in project["project"]["optional-dependencies"].items():
        for each in requirements:
            parts = _parts(each)
            bound = re.fullmatch(r">=([\w.]+)", parts["bounds"])
            if bound:
                found[parts["name"]] = bound[1]
            elif parts["name"] != project["project"]["name"]:
                raise ValueError(f"the extra {extra} asks for {each!r}; name the oldest version that works: name>=1.0")
    return found


def requirements(project: dict[str, Any], extra: str = "") -> list[str]:
    """What to install: *extra* alone, or all of them and what their tests need."""
    bounds, extras = lower_bounds(project), project["project"]["optional-dependencies"]
    listed = [each for name, its in extras.items() if extra in ("", name) for each in its]
    if not extra:
        newer = list(_group(project, NEWER))
        bounds = {name: bound for name, bound in bounds.items() if name not in {_parts(each)["name"] for each in newer}}
        listed += [each for group in GROUPS for each in _group(project, group)] + newer
    return sorted({_oldest(each, bounds) for each in listed if _parts(each)["name"] != project["project"]["name"]})


def _oldest(requirement: str, bounds: dict[str, str]) -> str:
    parts = _parts(requirement)
    wanted = f"=={bounds[parts['name']]}" if parts["name"] in bounds else parts["bounds"]
    return f"{parts['name']}{parts['extras']}{wanted}{parts['marker']}"


def _group(project: dict[str, Any], name: str) -> Iterator[str]:
    for each in project["dependency-groups"][name]:
        if isinstance(each, str):
            yield each
        else:
            yield from _group(project, each["include-group"])


def _parts(requirement: str) -> dict[str, str]:
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        raise ValueError(f"{requirement!r} is no requirement that this understands")
    return {name: text or "" for name, text in found.groupdict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", nargs="?", default="", help="default: all")
    print(*requirements(tomllib.loads(PROJECT.read_text()), parser.parse_args().extra), sep="\n")


if __name__ == "__main__":
    main()
