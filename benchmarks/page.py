"""Write docs/benchmarks.md, and its pictures, from the figures of a run.

    python -m benchmarks.page build/bench.json > docs/benchmarks.md
    python -m benchmarks.page first.json second.json --pictures docs/img

Several files count as one run: of a part that is in more than one, the last is taken. A part without figures is named
with the reason.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import promises, table, times
from benchmarks.page_pictures import PICTURES, headlines
from benchmarks.page_text import INTRODUCTION, READING, REPEAT, SECTIONS, Section


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one; the parts of later ones replace those of earlier ones."""
    whole: dict[str, Any] = {**runs[-1], "parts": {}, "bars": [], "seconds": {}, "missing": {}, "versions": {}}
    for run in runs:
        whole["bars"] = [bar for bar in whole["bars"] if bar["part"] not in run["seconds"]] + run["bars"]
        for name in ("parts", "seconds", "missing", "versions"):
            whole[name] |= run[name]
        whole["server"] = run["server"] or whole["server"]
    whole["commits"] = list(dict.fromkeys(run["commit"] for run in runs if run.get("commit")))
    whole["runs"] = len(runs)
    whole["rounds"] = min(run["rounds"] for run in runs)
    whole["quick"] = any(run["quick"] for run in runs)
    whole["started"] = min(run["started"] for run in runs)
    whole["builds"] = sorted({build for run in runs for build in run["builds"]})
    return whole


def measured_on(run: dict[str, Any]) -> str:
    machine = run["machine"]
    processor = f", {machine['processor']}" if machine.get("processor") else ""
    peers = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()) if name != "headgate")
    builds = " and ".join("compiled" if build == "compiled" else "plain Python" for build in run["builds"])
    commits = run.get("commits") or [run["commit"]] * bool(run.get("commit"))
    rows = [
        ("date", run["started"][:10]),
        ("machine", f"{machine['cores']} cores, {machine['system']} {machine['arch']}{processor}"),
        ("Python", run["python"]),
        ("headgate", f"{builds}, commit {', '.join(commits)}" if commits else builds),
        ("server", run["server"] or "none"),
        ("peers", peers or "none"),
        ("rounds", f"{run['rounds']}, after one of warm-up; medians are shown"),
        ("took", f"{sum(run['seconds'].values()) / 60:.0f} minutes"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def in_short(run: dict[str, Any]) -> list[str]:
    found = headlines(run["parts"])
    bars = run["bars"]
    met = [bar for bar in bars if bar["met"]]
    links = {section.part: f"[{section.heading}](#{anchor(section.heading)})" for section in SECTIONS}
    blocks = ["## In short"]
    if "memory" in run["parts"]:
        blocks.append("![Times as fast as limits](img/bench_ratios.svg)")
    rows = [(what, times(value), links[part]) for what, value, part in found]
    blocks.append(table(("beside the fastest strategy of limits", "times as fast", "more"), rows))
    blocks.append(f"Of {len(bars)} promises that this run could check, {len(met)} were met. Missed:")
    missed = [bar for bar in bars if not bar["met"]]
    blocks[-1] = blocks[-1] if missed else f"All {len(bars)} promises that this run could check were met."
    if missed:
        cells = [(bar["what"], bar["need"], bar["measured"], links.get(bar["part"], bar["part"])) for bar in missed]
        blocks.append(table(("promise", "needed", "measured", "more"), cells))
    return blocks


def anchor(heading: str) -> str:
    """A heading's name in an address."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c == "-")


def section(one: Section, run: dict[str, Any]) -> list[str]:
    blocks = [f"## {one.heading}", one.meaning]
    if one.part in run["parts"]:
        blocks += one.show(run["parts"])
        blocks.append(promises([bar for bar in run["bars"] if bar["part"] == one.part]))
    else:
        why = run["missing"].get(one.part, "this run left it out")
        blocks.append(f"*Not measured: {why}.*")
    return blocks


def page(run: dict[str, Any]) -> str:
    blocks = ["# Benchmarks", INTRODUCTION]
    if run["quick"]:
        blocks.append(
            "**This was a quick run with a tenth of the traffic: it shows that everything works, not how fast.**"
        )
    if run.get("runs", 1) > 1:
        blocks.append(
            f"**The parts are from {run['runs']} runs, one after another, not from one: their figures may be of "
            "different commits (`+`: with changes that were not committed) and of a machine that was busier in some.**"
        )
    if run["rounds"] < 3:
        blocks.append("**Fewer than three rounds: a single slow moment of the machine can decide a figure.**")
    blocks += [measured_on(run), *in_short(run), READING]
    for one in SECTIONS:
        blocks += section(one, run)
    return "\n\n".join(block for block in [*blocks, REPEAT] if block) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="docs/benchmarks.md from a run")
    parser.add_argument("runs", nargs="+", type=Path, help="what `python -m benchmarks --json FILE` has written")
    parser.add_argument("--pictures", type=Path, default=Path("docs/img"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    run = merged([json.loads(path.read_text()) for path in options.runs])
    for name, (draw, part) in PICTURES.items():
        if part in run["parts"]:
            (options.pictures / name).write_text(draw(run["parts"]))
    print(page(run), end="")


if __name__ == "__main__":
    main()
