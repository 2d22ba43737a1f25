"""docs/benchmarks.md says what the figures of a run say, and names what was not measured."""

from typing import Any

from benchmarks.page import merged, page
from benchmarks.page_pictures import latency, ratios


def row(worker: str, library: str, algorithm: str, us: float) -> dict[str, Any]:
    figures = {"us": us, "us_min": us, "us_max": us, "checks_per_second": 1e6 / us, "admitted": 0.5}
    return {"worker": worker, "library": library, "algorithm": algorithm, "error": None, **figures}


MEMORY = [
    row("compiled", "headgate", "token_bucket", 0.2),
    row("compiled", "limits", "fixed_window", 3.0),
    row("peers", "throttled-py", "token_bucket", 0.8),
]
BAR: dict[str, Any] = {
    "part": "memory",
    "what": "memory, compiled: times as fast",
    "need": ">= 20",
    "measured": "15.00",
    "met": False,
}


def run(parts: dict[str, Any], bars: list[dict[str, Any]], missing: dict[str, str]) -> dict[str, Any]:
    return {
        "started": "2026-11-18T10:00:00+00:00",
        "commit": "abc1234",
        "machine": {"cores": 2, "arch": "x86_64", "system": "Linux", "processor": "Some CPU"},
        "python": "3.11.7",
        "builds": ["compiled"],
        "versions": {"limits": "5.8.0"},
        "server": "redis 6.2.5",
        "quick": False,
        "rounds": 3,
        "seconds": dict.fromkeys(parts, 60.0),
        "missing": missing,
        "parts": parts,
        "bars": bars,
    }


def test_ratios_and_missed_promises() -> None:
    """The same algorithm is compared, the headline names the ratio, and a missed promise stands at the top."""
    text = page(run({"memory": MEMORY}, [BAR], {}))
    assert "| `token_bucket` | 0.200 µs | 5,000,000 |  | 4.0x |" in text
    short = text.partition("## How to read it")[0]
    assert "| in memory, compiled | 15x |" in short
    assert "Of 1 promises that this run could check, 0 were met" in short and BAR["what"] in short
    assert "2 cores, Linux x86_64, Some CPU" in short and "redis 6.2.5" in short and "abc1234" in short
    assert "15x" in ratios({"memory": MEMORY})


def test_what_was_not_measured() -> None:
    """Each part without figures says why."""
    text = page(run({"memory": MEMORY}, [], {"grpc": "there is no h2load on the path"}))
    assert "*Not measured: there is no h2load on the path.*" in text
    assert text.count("*Not measured: this run left it out.*") == 15


def test_a_part_that_was_measured_again() -> None:
    """The later figures and promises of a part replace the earlier ones; other parts stay."""
    first = run({"memory": MEMORY, "lock": {}}, [BAR, {**BAR, "part": "lock"}], {"web": "no server"})
    again = run({"memory": [row("compiled", "headgate", "gcra", 0.1)]}, [{**BAR, "met": True}], {})
    whole = merged([first, again])
    assert len(whole["parts"]["memory"]) == 1 and "lock" in whole["parts"]
    assert [(bar["part"], bar["met"]) for bar in whole["bars"]] == [("lock", False), ("memory", True)]
    assert whole["missing"] == {"web": "no server"}
    assert "The parts are from 2 runs" in page({**whole, "parts": {}})
    assert "The parts are from" not in page(merged([again]))


def test_a_picture_has_every_line() -> None:
    names = ["(PING)", "Limiter", "limits, and what remains", "HybridLimiter, warm key"]
    names += ["limits, 256 tasks", "AsyncLimiter, 256 tasks"]
    by = {name: {"p50": 100.0, "p99": 200.0, "checks": 60} for name in names}
    drawn = latency({"latency": {"delays": {"0": by, "50": by}}})
    assert drawn.count('class="line') == len(names) and all(name in drawn for name in names)
