"""An sdist has everything that a build needs, and what is released is checked before it is uploaded."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from release.contents import PACKAGE, wheel_faults
from release.ready import of_archives, of_version, version
from tests.oldest import lower_bounds, requirements

ROOT = Path(__file__).parents[1]


def test_sdist(tmp_path: Path) -> None:
    """It holds each file of src, the C of the shared store too: without it an install would be plain Python."""
    tree = tmp_path / "tree"
    sources = shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT / "src", tree / "src", ignore=sources)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "made")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    [made] = (tmp_path / "made").iterdir()
    with tarfile.open(made) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {str(path.relative_to(tree)) for path in (tree / "src/headgate").rglob("*") if path.is_file()}
    assert "src/headgate/stores/shared/_table.c" in wanted
    assert wanted <= held


@pytest.mark.parametrize(
    ("added", "removed", "words"),
    [
        ("", "", []),
        ("", "headgate/py.typed", ["headgate/py.typed is missing"]),
        ("", "headgate/service/page/index.html", ["headgate/service/page/index.html is missing"]),
        ("tests/test_x.py", "", ["tests/test_x.py does not belong into a wheel"]),
        ("headgate/stores/x.so", "", ["headgate/stores/x.so is compiled, in a wheel for all platforms"]),
        ("headgate/x.c", "", ["headgate/x.c is a source of C"]),
    ],
    ids=["as it is", "no types", "no page", "tests", "library", "C"],
)
def test_contents_of_a_wheel(added: str, removed: str, words: list[str], tmp_path: Path) -> None:
    """What is missing or too much in a wheel is named."""
    wheel = tmp_path / "headgate-0-py3-none-any.whl"
    with ZipFile(wheel, "w") as opened:
        for path in (
            path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed", ".html", ".js", ".css", ".svg")
        ):
            if (name := str(path.relative_to(PACKAGE.parent))) != removed:
                opened.writestr(name, "")
        if added:
            opened.writestr(added, "")
    assert list(wheel_faults(wheel, compiled=False)) == words
    assert any("was not compiled" in fault for fault in wheel_faults(wheel, compiled=True))


def test_what_is_uploaded(tmp_path: Path) -> None:
    """One archive for each build and no other; the changelog begins with the version."""
    builds = ["cp311-manylinux_x86_64", "cp314t-macosx_arm64"]
    names = ["-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "-cp314-cp314t-macosx_11_0_arm64.whl"]
    for name in (".tar.gz", "-py3-none-any.whl", *names):
        (tmp_path / f"headgate-1.2.3{name}").touch()
    assert list(of_archives("1.2.3", builds, tmp_path)) == []
    assert len(list(of_archives("1.2.4", builds, tmp_path))) == 8
    (tmp_path / f"headgate-1.2.3{names[1]}").rename(tmp_path / "headgate-1.2.3-cp314-cp314-macosx_11_0_arm64.whl")
    assert len(list(of_archives("1.2.3", builds, tmp_path))) == 2, "one is missing, and one is not expected"
    assert list(of_version(version())) == []
    assert list(of_version("1.2.3rc1")) != []


def test_oldest_versions() -> None:
    """`make oldest` installs each package of an extra at the bound that it names; one without a bound is an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"redis", "fastapi", "psycopg", "granian"} <= lower_bounds(project).keys()
    extras = {"a": ["web[fast]>=2.3; python_version > '3'", "own[b]"], "b": ["b>=1"]}
    groups = {"test": [{"include-group": "web"}], "web": ["web>=2", "tool>=1,<2"], "oldest": ["b<3"]}
    groups |= {name: [] for name in ("stores", "jobs", "build")}
    made = {"project": {"name": "own", "optional-dependencies": extras}, "dependency-groups": groups}
    assert requirements(made) == ["b<3", "b>=1", "tool>=1,<2", "web==2.3", "web[fast]==2.3; python_version > '3'"]
    assert requirements(made, "b") == ["b==1"]
    extras["b"] = ["b"]
    with pytest.raises(ValueError, match="the extra b asks for 'b'; name the oldest version"):
        lower_bounds(made)
