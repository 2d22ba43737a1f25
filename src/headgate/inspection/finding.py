"""One thing that the doctor looked at, and the findings that servers of any kind share."""

from __future__ import annotations

from typing import Literal, NamedTuple

FindingState = Literal["ok", "warning", "problem", "unknown"]

SKEW = 1.0  # seconds that a server's clock may differ from this host's
CROWDED = 0.9  # of the connections that a server allows


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    state: FindingState
    detail: str


def clock_finding(skew: float) -> Finding:
    """*skew*: seconds that the server is ahead of this host."""
    return Finding("clock", "ok" if abs(skew) <= SKEW else "warning", f"{skew:+.3f} s beside this host's")


def connections_finding(used: int, most: int) -> Finding:
    """Of all clients of the server, not of headgate alone."""
    return Finding("connections", "ok" if used < CROWDED * most else "warning", f"{used:,} of {most:,} in use")
