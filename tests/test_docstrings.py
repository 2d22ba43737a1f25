"""Docstrings of public names, as tools parse them: griffe reads the sources, as compiled methods have no docstring."""

import logging
import runpy
from pathlib import Path
from typing import Any

import griffe
import pytest

pytestmark = pytest.mark.slow  # about as long as two seconds, to parse all sources

ROOT = Path(__file__).parents[1]
PAGES = runpy.run_path(str(ROOT / "docs" / "reference.py"))["PAGES"]
SHOWN: dict[str, tuple[str, ...]] = {name: members for page in PAGES.values() for name, members in page.names.items()}
PACKAGES = ("headgate", "headgate.coordination", "headgate.budget", "headgate.jobs")
CONSTANTS = {"headgate.COMPILED", "headgate.AlgorithmName", "headgate.OnStoreError", "headgate.coordination.CRAWLER"}
MADE_FOR_CALLERS = {"BookedSlot", "Slot", "Hold", "Leased", "SemaphoreLease"}  # no caller makes one


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load("headgate", search_paths=[str(ROOT / "src")], allow_inspection=False, docstring_parser="google")


def find(package: Any, name: str) -> Any:
    found = package[name.removeprefix("headgate.")]
    return found.final_target if found.is_alias else found


def documented(public: Any) -> set[str]:
    """What the docstring names: arguments, options that ``**options`` takes, attributes that the constructor sets."""
    names: set[str] = set()
    for section in public.docstring.parse("google", warn_missing_types=False) if public.docstring else []:
        if section.kind.value in ("parameters", "attributes"):
            names.update(each.name.lstrip("*") for each in section.value)
        elif section.kind.value == "other parameters":
            names.add("options")
    return names


def arguments(public: Any) -> set[str]:
    return {each.name for each in public.parameters} - {"self", "cls", "unnamed"}


def missing(package: Any, name: str, members: tuple[str, ...]) -> list[str]:
    """What the docstrings of *name* and of its *members* do not say."""
    public = find(package, name)
    absent = [] if public.docstring else [f"{name} has no docstring"]
    own = public.name.removeprefix("Async")
    sources = [public, find(package, name.replace(public.name, own)), *(public.mro() if public.is_class else ())]
    taken = set() if own in MADE_FOR_CALLERS else arguments(public)
    absent += [f"{name}: {argument}" for argument in sorted(taken - set[str]().union(*map(documented, sources)))]
    for member in members:
        method = public.all_members[member]
        method = method.final_target if method.is_alias else method
        if not method.docstring:
            absent.append(f"{name}.{member} has no docstring")
        elif method.is_function:
            absent += [f"{name}.{member}: {argument}" for argument in sorted(arguments(method) - documented(method))]
    return absent


def test_every_argument_is_named(package: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every public name has a docstring that says what each argument means, and that griffe parses without a warning.

    A class need not repeat the arguments that its base or its twin for threads says.
    """
    with caplog.at_level(logging.WARNING):
        absent = [line for name, members in SHOWN.items() for line in missing(package, name, members)]
    assert absent == []
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("path", PACKAGES)
def test_every_public_name_is_in_the_reference(package: Any, path: str) -> None:
    """What a package exports has its place in docs/reference.py."""
    module = package if path == "headgate" else find(package, path)
    shown = {name.rpartition(".")[2] for name in SHOWN}
    assert {f"{path}.{name}" for name in module.exports if str(name) not in shown} <= CONSTANTS
