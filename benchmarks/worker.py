"""The child's side: load some contenders, then run one round of one of them whenever the parent names it.

A worker holds still between rounds, so the parent can interleave rounds of workers that run different builds.
Protocol, one JSON value a line: first out is what was loaded; then in comes `[library, algorithm]` and out go any
number of `{"progress": share}` and one `{"result": ...}` or `{"error": text}`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from benchmarks.workload import QUOTA, Sample, Scale

Round = Callable[[], Any]


def speed_rounds(part: str, library: str, scale: Scale, url: str) -> dict[str, Callable[[], Sample]]:
    """Give the rounds of *library* in *part*. The module is imported here: not every part needs every package."""
    module, function = {
        "memory": ("benchmarks.memory", "rounds"),
        "redis": ("benchmarks.sync_redis", "rounds"),
        "redis threads": ("benchmarks.sync_redis", "threads_rounds"),
        "async": ("benchmarks.async_redis", "rounds"),
        "hybrid": ("benchmarks.hybrid", "rounds"),
        "shared": ("benchmarks.shared", "rounds"),
        "async memory": ("benchmarks.async_redis", "memory_rounds"),
    }[part]
    rounds: dict[str, Callable[[], Sample]] = getattr(importlib.import_module(module), function)(library, scale, url)
    return rounds


def sampled(round_: Callable[[], Sample]) -> dict[str, Any]:
    return asdict(round_())


def size_rounds(library: str, keys: int, tell: Callable[[float], None]) -> dict[str, Round]:
    from benchmarks import size

    if library == "flood":
        return {quota: partial(size.flood, quota, keys, tell) for quota in (QUOTA, size.SPENT)}
    return {name: partial(size.live, library, name, keys, tell) for name in size.CONTENDERS[library]}


def loaded(libraries: list[str]) -> dict[str, Any]:
    """Say which releases this worker runs, and whether its headgate is the compiled one."""
    versions = {}
    for library in libraries:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue  # not a distribution: a floor, or headgate on the path of a checkout
    compiled = importlib.import_module("headgate").COMPILED if "headgate" in libraries else None
    return {"versions": versions, "compiled": compiled}


def serve(order: dict[str, Any], requests: TextIO, replies: TextIO) -> None:
    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    def tell(share: float) -> None:
        reply({"progress": share})

    rounds: dict[tuple[str, str], Round] = {}
    for library in order["libraries"]:
        if order["part"] == "size":
            found = size_rounds(library, order["keys"], tell)
        elif order["part"] == "hybrid figures":
            hybrid = importlib.import_module("benchmarks.hybrid")
            found = {name: partial(getattr(hybrid, name), order["url"]) for name in ("figures", "weight")}
        else:
            speed = speed_rounds(order["part"], library, Scale(**order["scale"]), order["url"])
            found = {algorithm: partial(sampled, round_) for algorithm, round_ in speed.items()}
        rounds.update({(library, algorithm): round_ for algorithm, round_ in found.items()})
    reply(loaded(order["libraries"]) | {"contenders": list(rounds)})
    for line in requests:
        library, algorithm = json.loads(line)
        try:
            reply({"result": rounds[library, algorithm]()})
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a peer prints must not mix with the replies
    serve(json.loads(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
