"""Draw the picture of jobs.md: 1,000 jobs that are all there at once, drained in four ways through one limit.

    python docs/jobs_plot.py        writes docs/img/jobs.svg and prints the table of jobs.md; the same each time

A `ManualClock` jumps from one attempt to the next, and a real limiter answers each. A job takes no time itself.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headgate import Decision, Limiter
from headgate.testing import ManualClock

JOBS = 1000
QUOTA = "10/second burst 10"
COLOURS = {"retry": "#c0392b", "jitter": "#d68910", "backoff": "#7d3c98", "slots": "#1e8449"}
WIDTH, HEIGHT, LEFT, TOP, SECONDS = 720, 300, 52, 18, 260


class Drained(NamedTuple):
    """What became of the jobs."""

    starts: list[tuple[float, int]]  # seconds, and the number of the job
    attempts: int

    @property
    def seconds(self) -> float:
        return self.starts[-1][0]

    def overtaken(self) -> int:
        """How many jobs started before one that was enqueued earlier."""
        latest, found = -1, 0
        for _, number in reversed(self.starts):
            if latest >= 0 and number > latest:
                found += 1
            latest = number if latest < 0 else min(latest, number)
        return found


def drain(wait: Callable[[Decision, int, random.Random], float] | None) -> Drained:
    """Let every job ask until it may start: again after *wait* of a denial, or at its slot if there is none."""
    clock, chosen = ManualClock(), random.Random(1)
    limiter, begun = Limiter(QUOTA, clock=clock), clock.now()
    due = [(begun, number, number, 0) for number in range(JOBS)]  # when, in the order of asking, which job, attempts
    starts, asked = [], JOBS
    while due:
        at, _, number, tries = heapq.heappop(due)
        clock.advance((at - clock.now()) / 1e6)
        if wait is None:
            delay = limiter.book("api", id=str(number)).delay
            starts.append(((at - begun) / 1e6 + delay, number))
            continue
        decision = limiter.try_acquire("api")
        if decision:
            starts.append(((at - begun) / 1e6, number))
        else:
            asked += 1
            again = at + round(wait(decision, tries, chosen) * 1e6)
            heapq.heappush(due, (again, asked, number, tries + 1))
    return Drained(starts, asked)


def backoff(decision: Decision, tries: int, chosen: random.Random) -> float:
    """From 15 s on, doubled with each try up to two minutes, the second half of it at random."""
    return min(15.0 * (1 << tries), 120.0) * chosen.uniform(0.5, 1.0)


WAYS: dict[str, Callable[[Decision, int, random.Random], float] | None] = {
    "retry": lambda decision, tries, chosen: decision.retry_after,
    "jitter": lambda decision, tries, chosen: decision.retry_after + chosen.uniform(0.0, 1.0),
    "backoff": backoff,
    "slots": None,
}


def picture(ways: dict[str, Drained]) -> str:
    """Jobs that have started, over time."""
    across, down = (WIDTH - LEFT - 190) / SECONDS, (HEIGHT - 2 * TOP - 22) / JOBS

    def point(seconds: float, jobs: int) -> str:
        return f"{LEFT + seconds * across:.1f},{TOP + (JOBS - jobs) * down:.1f}"

    box, font = f"0 0 {WIDTH} {HEIGHT}", 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for jobs in range(0, JOBS + 1, 250):
        left, level = point(0, jobs).split(",")
        right = point(SECONDS, jobs).split(",")[0]
        lines.append(f'<path d="M{left} {level}H{right}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{float(level) + 4:.1f}" text-anchor="end">{jobs}</text>')
    for seconds in range(0, SECONDS + 1, 50):
        x = point(seconds, 0).split(",")[0]
        lines.append(f'<text x="{x}" y="{HEIGHT - 20}" text-anchor="middle">{seconds} s</text>')
    for place, (name, drained) in enumerate(ways.items()):
        points = " ".join(point(at, count) for count, (at, _) in enumerate(drained.starts, start=1))
        wide = 4 if name == "slots" else 1.5
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{wide}"/>')
        y = TOP + 20 + 40 * place
        lines.append(f'<text x="{WIDTH - 180}" y="{y}" fill="{COLOURS[name]}" font-weight="bold">{name}</text>')
        told = f"{drained.attempts:,} attempts, {drained.seconds:.0f} s"
        lines.append(f'<text x="{WIDTH - 180}" y="{y + 16}">{told}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    ways = {name: drain(wait) for name, wait in WAYS.items()}
    print("| | attempts | done after | out of order |\n|---|---|---|---|")
    for name, drained in ways.items():
        print(f"| {name} | {drained.attempts:,} | {drained.seconds:.1f} s | {drained.overtaken()} |")
    (Path(__file__).parent / "img" / "jobs.svg").write_text(picture(ways))


if __name__ == "__main__":
    main()
