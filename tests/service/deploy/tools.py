"""Find the real programs that these tests run: a browser, nginx, Prometheus.

    python -m tests.service.deploy.tools        fetches what is missing into build/tools

A program on the PATH wins. Otherwise one that was fetched before: the command above unpacks Debian packages below
build/tools, without root and without installing anything, on a Debian-like machine with a network; anywhere else it
says why not and succeeds, and the tests that need the program are skipped. No test downloads anything.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HOUSE = Path(__file__).parents[3]
KEPT = HOUSE / "build" / "tools"
ROOT = KEPT / "root"
FETCH = "python -m tests.service.deploy.tools"
TIME_LIMIT = 240  # seconds for everything: a slow mirror must not hold up the suite


@dataclass(frozen=True)
class Program:
    """Something to run: the names it may have on the PATH, its file inside a Debian package, the package."""

    names: tuple[str, ...]
    unpacked: str
    package: str

    def find(self) -> Path | None:
        for name in self.names:
            found = shutil.which(name)
            if found:
                return Path(found)
        kept = ROOT / self.unpacked
        return kept if kept.is_file() else None


PROGRAMS = {
    "chromium": Program(
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell"),
        "usr/lib/chromium/chromium",
        "chromium",
    ),
    "nginx": Program(("nginx",), "usr/sbin/nginx", "nginx-light"),
    "prometheus": Program(("prometheus",), "usr/bin/prometheus", "prometheus"),
    "promtool": Program(("promtool",), "usr/bin/promtool", "prometheus"),
}
FONT = "fonts-inter"  # only so that pictures of the page look like the page on most machines


def environment() -> dict[str, str]:
    """The environment to run a program in: what was unpacked beside it is found after the machine's own."""
    # some packages keep their libraries one folder deeper
    patterns = [f"{lib}/*-linux-*/{deep}*.so*" for lib in ("lib", "usr/lib") for deep in ("", "*/")]
    libraries = sorted({str(file.parent) for pattern in patterns for file in ROOT.glob(pattern)})
    before = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    return os.environ | ({"LD_LIBRARY_PATH": ":".join(before + libraries)} if libraries else {})


def missing_reason(name: str) -> str:
    return f"no {name} on this machine; `{FETCH}` fetches it where Debian packages can be had"


def missing_packages() -> list[str]:
    """Name the packages whose programs are not there."""
    return sorted({program.package for program in PROGRAMS.values() if program.find() is None})


def fetch(packages: list[str]) -> None:
    """Unpack *packages* and whatever they need that this machine lacks. Raises CalledProcessError or TimeoutExpired."""
    state, cache = KEPT / "apt" / "state", KEPT / "apt" / "cache"
    for folder in (state / "lists" / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State": state,
        "Dir::State::status": "/var/lib/dpkg/status",  # what is installed need not be fetched
        "Dir::Cache": cache,
        "APT::Sandbox::User": "",  # there is no other user to become
        "Debug::NoLocking": "1",  # apt's lock is not ours to take, and nothing is installed
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
    }
    apt = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True, timeout=TIME_LIMIT / 2, stdin=subprocess.DEVNULL)
    wanted = ["install", "--yes", "--no-install-recommends", "--download-only", *packages]
    subprocess.run([*apt, *wanted], check=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL)
    for archive in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(archive), str(ROOT)], check=True, timeout=TIME_LIMIT)
        archive.unlink()  # a few hundred megabytes that nobody reads again


def main() -> None:
    """Fetch what is missing; never fail, because the tests can do without."""
    packages = missing_packages()
    if not packages:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print(f"no apt-get here, so without {', '.join(packages)}: their tests will be skipped")
        return
    print(f"fetching into {KEPT.relative_to(HOUSE)}: {', '.join(packages)}")
    try:
        fetch([*packages, FONT] if "chromium" in packages else packages)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not fetch {', '.join(packages)}, their tests will be skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
