"""An sdist has everything that a build needs."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

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
