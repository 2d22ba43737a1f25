"""Write what headgate and each of its extras bring along: a CycloneDX file for each, made by cyclonedx-py.

    python -m release.sbom WHEEL [EXTRA ...]

Each extra is installed into an environment of its own, from wheels, by the newest versions that it allows on this
platform and interpreter; what is installed is what the file lists, with versions, licences and who needs whom.
Without EXTRA: headgate alone, then every extra that its metadata name.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from release.contents import ROOT, metadata

WORK = ROOT / "build/sbom"
DIST = ROOT / "dist"
HERE = Path(sys.executable).parent


def main() -> None:
    wheel, *extras = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    told = metadata(wheel)
    WORK.mkdir(parents=True, exist_ok=True)
    DIST.mkdir(exist_ok=True)
    project = WORK / "pyproject.toml"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # its version is dynamic, which the tool leaves out
    project.write_text(text.replace('dynamic = ["version"]', f'version = "{told["Version"]}"'), encoding="utf-8")
    for extra in extras or ["", *told.get_all("Provides-Extra", [])]:
        path = DIST / f"headgate-{told['Version']}{'-' * bool(extra)}{extra}.cdx.json"
        write(wheel, extra, project, path)
        print(f"{path.relative_to(ROOT)}: {len(components(path))} packages", flush=True)


def write(wheel: Path, extra: str, project: Path, path: Path) -> None:
    """Install *extra*, and have the tool describe what is there."""
    folder = WORK / (extra or "headgate")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False)  # or pip itself would be listed
    python = folder / "bin/python"
    wanted = f"headgate{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--only-binary", ":all:", wanted], check=True)
    tool = [str(HERE / "cyclonedx-py"), "environment", "--output-reproducible", "--mc-type", "library"]
    subprocess.run([*tool, "--pyproject", str(project), "-o", str(path), str(python)], check=True)
    shutil.rmtree(folder)


def components(path: Path) -> list[str]:
    """The packages that a file lists, as name==version; raises if headgate itself has no version in it."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not re.fullmatch(r"\d+\.\d+\.\d+\S*", found["metadata"]["component"].get("version", "")):
        raise SystemExit(f"{path.name} does not say which version of headgate it is about")
    return sorted(f"{each['name']}=={each['version']}" for each in found.get("components", []))


if __name__ == "__main__":
    main()
