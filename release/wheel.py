"""Build what a release has, check it, and run the tests against each wheel as it is installed, without a compiler.

    python -m release.wheel [--python PYTHON] [PYTEST ARGUMENT ...]

Into dist go the source archive and, built from it, the wheel for all platforms and the one of this platform for the
interpreter PYTHON (by default the one that runs this). The tests are those of the source archive, and see no package
but the installed one. Without pytest arguments nothing is tested.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from release.contents import ROOT, python_files, sdist_faults, wheel_faults

WORK = ROOT / "build/wheel"
DIST = ROOT / "dist"
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "c99")
GROUPS = ("test", "web", "docs", "build")  # what the tests of `make check` import
HERE = Path(sys.executable).parent  # the tools of the group `release`
FREE_THREADED = "import sysconfig as s, sys; sys.exit(not s.get_config_var('Py_GIL_DISABLED'))"
BUILT = "import headgate, sys; print(headgate.__file__); sys.exit(headgate.COMPILED != bool(int(sys.argv[1])))"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--python", default=sys.executable)
    options, pytest_arguments = parser.parse_known_args()
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", _commit_time())  # so that a build can be repeated, byte by byte

    sdist = build_sdist()
    wheels = build_wheels(sdist, options.python)
    archives = list(map(str, [sdist, *wheels]))
    _run([HERE / "twine", "check", "--strict", *archives])
    _run([HERE / "check-wheel-contents", *archives[1:]])
    if pytest_arguments:
        for wheel in wheels:
            test_installed(wheel, options.python, pytest_arguments)
    for path in (sdist, *wheels):
        _say(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


def build_sdist() -> Path:
    _say("the source archive")
    _run([sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT])
    (sdist,) = DIST.glob("*.tar.gz")
    _refuse(sdist, sdist_faults(sdist))
    return sdist


def build_wheels(sdist: Path, python: str) -> list[Path]:
    """The wheel for all platforms, and the compiled one where there is a compiler.

    A third build runs where there is none, with no switch: it must fall back to the same plain files.
    """
    can_compile = shutil.which(os.environ.get("CC", "cc")) is not None
    _say("wheels from it: pure, without a compiler" + (" and compiled" if can_compile else "; there is no compiler"))
    builder = _environment(WORK / "builder", python)
    switches = {"pure": {"HEADGATE_PURE": "1"}, "fallback": without_compiler()}
    if can_compile:
        switches["compiled"] = {"HEADGATE_REQUIRE_COMPILED": "1"}
    builds = {
        name: _start([builder, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", WORK / name, sdist], switch)
        for name, switch in switches.items()
    }
    for name, started in builds.items():
        _wait(started, f"the build {name}")
    made = {name: _only_wheel(WORK / name) for name in builds}
    _refuse(made["fallback"], wheel_faults(made["fallback"], compiled=False))
    if python_files(made["fallback"]) != python_files(made["pure"]):
        _fail("the wheel that was built without a compiler differs from that of HEADGATE_PURE=1")
    _refuse(made["pure"], wheel_faults(made["pure"], compiled=False))
    wheels = [Path(shutil.copy(made["pure"], DIST))]
    if can_compile:
        wheels.append(_for_other_machines(made["compiled"]))
        _refuse(wheels[-1], wheel_faults(wheels[-1], compiled=True))
    return wheels


def _for_other_machines(wheel: Path) -> Path:
    """Give a Linux wheel the tag of the oldest C library that it runs on; without one it could not be uploaded."""
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, DIST))
    _run([HERE / "auditwheel", "repair", "--wheel-dir", WORK / "repaired", wheel], PATH=_path(HERE))
    return Path(shutil.copy(_only_wheel(WORK / "repaired"), DIST))


def test_installed(wheel: Path, python: str, pytest_arguments: list[str]) -> None:
    """Install the wheel with its extras from wheels alone, and run the tests of the source archive against it."""
    compiled = "none-any" not in wheel.name
    _say(f"{wheel.name}: installed without a compiler, and tested")
    begun = time.monotonic()
    environment = _environment(WORK / ("compiled-env" if compiled else "pure-env"), python)
    if subprocess.run([environment, "-c", FREE_THREADED], check=False).returncode == 0:
        # grpcio and psycopg have no wheels for it, and the tests compare with protobuf's C: headgate alone, then.
        _run([environment, "-m", "pip", "install", "--no-index", wheel], **without_compiler())
        print(_run([environment, "-I", ROOT / "release/smoke.py", "compiled" if compiled else "plain"]), end="")
        return
    groups = [word for name in GROUPS for word in ("--group", f"{ROOT / 'pyproject.toml'}:{name}")]
    wanted = [*groups, f"headgate[all] @ {wheel.as_uri()}"]
    barred = without_compiler()
    _run([environment, "-m", "pip", "install", "--only-binary", ":all:", *wanted], **barred)
    found = _run([environment, "-I", "-c", BUILT, str(int(compiled))], **barred)
    if not Path(found.strip()).is_relative_to(environment.parents[1]):
        _fail(f"the tests would import {found.strip()}, not the installed wheel")
    tree = _tree()
    settings = barred | {"HEADGATE_EXPECT_COMPILED": str(int(compiled)), "PYTHONPATH": ""}
    done = subprocess.run([environment, *pytest_arguments], cwd=tree, env=os.environ | settings, check=False)
    if done.returncode:
        _fail(f"the tests of {wheel.name} failed")
    _say(f"passed in {time.monotonic() - begun:.0f} s")


def without_compiler() -> dict[str, str]:
    """An environment in which every C compiler fails: by name on the path, and by the variables that builds read."""
    folder = WORK / "no-compiler"
    folder.mkdir(exist_ok=True)
    for name in COMPILERS:
        script = folder / name
        script.write_text(f"#!/bin/sh\necho '{name}: there is no compiler here' >&2\nexit 127\n")
        script.chmod(0o755)
    return {"PATH": _path(folder), "CC": str(folder / "cc"), "CXX": str(folder / "c++")}


def _tree() -> Path:
    """The source archive, unpacked."""
    tree = WORK / "tree"
    if not tree.exists():
        with tarfile.open(next(DIST.glob("*.tar.gz"))) as opened:
            opened.extractall(WORK / "unpacked", filter="data")
        (unpacked,) = (WORK / "unpacked").iterdir()
        unpacked.rename(tree)
    return tree


def _environment(folder: Path, python: str) -> Path:
    """A new virtual environment; returns its interpreter."""
    _run([python, "-m", "venv", folder])
    made = folder / "bin/python"
    _run([made, "-m", "pip", "install", "--upgrade", "pip>=25.1"])  # the first that installs groups
    return made


def _only_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def _path(first: Path) -> str:
    return f"{first}{os.pathsep}{os.environ['PATH']}"


def _commit_time() -> str:
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(int(time.time()))


def _start(command: list[object], switches: dict[str, str]) -> subprocess.Popen[str]:
    env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | switches
    words = list(map(str, command))
    return subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _wait(started: subprocess.Popen[str], what: str) -> str:
    output, _ = started.communicate()
    if started.returncode:
        _fail(f"{what} failed:\n{output}")
    return output


def _run(command: list[object], **switches: str) -> str:
    return _wait(_start(command, switches), " ".join(map(str, command)))


def _refuse(archive: Path, faults: Iterator[str]) -> None:
    found = list(faults)
    if found:
        _fail(f"{archive.name}:\n  " + "\n  ".join(found))


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


def _fail(text: str) -> NoReturn:
    sys.exit(f"release: {text}")


if __name__ == "__main__":
    main()
