"""Draw the pictures of algorithms.md: one trace of calls, asked of every algorithm as it really is.

    python docs/plots.py        writes docs/img/*.svg; the same bytes each time

A `ManualClock` walks through the trace in small steps and real limiters answer. Nothing here knows how they decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import get_args

from headgate import AsyncLimiter, Decision, Limiter, RateLimited
from headgate.rule import AlgorithmName
from headgate.testing import ManualClock

LIMIT = 10
PERIOD = 10.0
QUOTA = f"{LIMIT}/10s"
START, END = 6.0, 42.0  # the clock stands at a window's edge at 0, so the edges are at 10, 20, 30 and 40
TICK = 0.05

# (first call, seconds between calls, how many)
TRACE = [(7.5, 0.25, 10), (10.0, 0.25, 10), (14.0, 0.5, 20), (36.0, 0.25, 14)]
PHASES = [(7.5, 12.25, "bursts"), (14, 23.5, "twice the rate"), (36, 39.25, "burst")]
CALLS = sorted(first + i * gap for first, gap, count in TRACE for i in range(count))

ALGORITHMS: tuple[AlgorithmName, ...] = get_args(AlgorithmName)


@dataclass
class Run:
    """What became of the trace. Times are seconds; `starts` differs from `admitted` only where calls queue."""

    admitted: list[float] = field(default_factory=list)
    denied: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    standing: list[tuple[float, Decision]] = field(default_factory=list)

    @property
    def most(self) -> int:
        """The most calls that started in any stretch [t, t + PERIOD)."""
        return max(sum(t <= start < t + PERIOD for start in self.starts) for t in self.starts)


def ask(algorithm: AlgorithmName) -> Run:
    """Walk a limiter through the trace with `try_acquire`."""
    clock = ManualClock()
    limiter = Limiter(QUOTA, algorithm=algorithm, clock=clock)
    clock.advance(START)
    run = Run()
    for now in _ticks():
        run.standing.append((now, limiter.peek("client", 0)))
        for _ in range(CALLS.count(now)):
            (run.admitted if limiter.try_acquire("client") else run.denied).append(now)
            run.standing.append((now, limiter.peek("client", 0)))
        clock.advance(TICK)
    run.starts = run.admitted
    return run


def queue() -> Run:
    """The same with `pace` on a leaky bucket: a call that is admitted sleeps until its turn."""
    return asyncio.run(_queue())


async def _queue() -> Run:
    clock = ManualClock()
    limiter = AsyncLimiter(QUOTA, algorithm="leaky_bucket", clock=clock)
    clock.advance(START)
    run = Run()
    starts: dict[int, float] = {}
    now = START

    async def call(number: int, asked: float) -> None:
        try:
            await limiter.pace("client")
        except RateLimited:
            run.denied.append(asked)
        else:
            run.admitted.append(asked)
            starts[number] = now

    calls: set[asyncio.Task[None]] = set()
    for now in _ticks(END + 8):  # on until the last of the queue has started
        await _settle()
        run.standing.append((now, await limiter.peek("client", 0)))
        for _ in range(CALLS.count(now)):
            calls.add(asyncio.create_task(call(len(calls), now)))
            await _settle()
            run.standing.append((now, await limiter.peek("client", 0)))
        clock.advance(TICK)
    await asyncio.gather(*calls)
    run.admitted.sort()
    run.starts = [starts[number] for number in sorted(starts)]
    return run


async def _settle() -> None:
    """Let every task run until all of them sleep on the clock, which takes a few turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


def _ticks(end: float = END) -> Iterable[float]:
    return (round(START + i * TICK, 2) for i in range(round((end - START) / TICK) + 1))


# ---------------------------------------------------------------------------------------------------- drawing

WIDTH = 800
LEFT, RIGHT = 132, 776
STYLE = """
  .ground { fill: #ffffff } .phase { fill: #e7ecf1 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .head { font-size: 17px; font-weight: 600 } .soft { fill: #57606a }
  .number { font-size: 15px; font-weight: 600 } .right { text-anchor: end } .middle { text-anchor: middle }
  .edge { stroke: #8c959f; stroke-dasharray: 2 3 } .grid { stroke: #d0d7de }
  .cap { stroke: #57606a; stroke-dasharray: 6 4 }
  .yes { stroke: #0969da; stroke-width: 2.4 } .no { stroke: #cf222e; stroke-width: 2.4 }
  .start { stroke: #1a7f37; stroke-width: 2.4 } .wait { stroke: #1a7f37; stroke-width: 0.8; opacity: 0.55 }
  .asked { stroke: #57606a; stroke-width: 2.4 } .thin { stroke-width: 1.6 }
  .line { fill: none; stroke: #0969da; stroke-width: 1.8; stroke-linejoin: round }
  .sum { fill: none; stroke: #8250df; stroke-width: 1.8; stroke-linejoin: round } .over { fill: #cf222e; opacity: 0.22 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .phase { fill: #252c35 }
    text { fill: #e6edf3 } .soft { fill: #9aa4ae }
    .edge { stroke: #6e7681 } .grid { stroke: #30363d } .cap { stroke: #9aa4ae }
    .yes, .line { stroke: #58a6ff } .no { stroke: #ff7b72 } .start, .wait { stroke: #56d364 }
    .asked { stroke: #9aa4ae } .sum { stroke: #bc8cff } .over { fill: #ff7b72 }
  }
"""


@dataclass
class Panel:
    """A strip of the picture with a scale from 0 to *top*."""

    y: float
    height: float
    top: float

    def at(self, value: float) -> float:
        return self.y + self.height * (1 - value / self.top)


class Picture:
    """An SVG with time from left to right, from START at *left* to *end* at *right*."""

    def __init__(self, height: int, title: str, about: str, left: float, right: float, end: float) -> None:
        self.height, self.left, self.right, self.end = height, left, right, end
        self.title, self.about = title, about
        self.parts: list[str] = []

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * (seconds - START) / (self.end - START)

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{_class(style)}>{escape(text, quote=False)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        size = f'width="{_n(width)}" height="{_n(height)}"'
        self.parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" {size} class="{style}"/>')

    def path(self, points: Iterable[tuple[float, float]], style: str, close: str = "") -> None:
        way = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.parts.append(f'<path d="M{way}{close}" class="{style}"/>')

    def marks(self, times: Iterable[float], y: float, height: float, style: str) -> None:
        """An upright stroke for each of *times*, all in one path."""
        way = "".join(f"M{_n(self.x(time))},{_n(y)}v{_n(height)}" for time in times)
        if way:
            self.parts.append(f'<path d="{way}" class="{style}"/>')

    def axis(self, top: float, bottom: float) -> None:
        """Times below *bottom*, and a dotted line from *top* at each edge of a fixed window."""
        for second in range(0, int(self.end) + 1, 5):
            if second < START:
                continue
            x = self.x(second)
            if second % PERIOD == 0:
                self.path([(x, top), (x, bottom)], "edge")
            self.text(x, bottom + 17, f"{second} s", "soft middle")

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title about">',
            f'<title id="title">{escape(self.title, quote=False)}</title>',
            f'<desc id="about">{escape(self.about, quote=False)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{self.height}" class="ground"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def _steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line that keeps its value until the next point."""
    corners = points[:1]
    for time, value in points[1:]:
        if value != corners[-1][1]:
            corners += [(time, corners[-1][1]), (time, value)]
    return [*corners, (points[-1][0], corners[-1][1])]


def _corners(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out the points that lie on the straight line between their neighbours."""
    kept = points[:1]
    for here, after in pairwise(points[1:]):
        (x0, y0), (x1, y1), (x2, y2) = kept[-1], here, after
        if abs((x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)) > 1e-6:
            kept.append(here)
    return [*kept, points[-1]]


def _recent(starts: list[float], end: float) -> list[tuple[float, float]]:
    """How many calls started in the last period, as it changes."""
    times = sorted({START, end, *starts, *(start + PERIOD for start in starts if start + PERIOD <= end)})
    return [(time, sum(time - PERIOD < start <= time for start in starts)) for time in times]


# ------------------------------------------------------------------------------------------------ the pictures

CAPTIONS = {
    "token_bucket": ("Remaining", "permits", "The bucket empties in a burst, then gains a permit each second."),
    "fixed_window": ("Remaining", "permits", "The count starts again at each edge, so two bursts pass side by side."),
    "sliding_window": ("Remaining", "permits", "A permit comes back when the call that took it is one period old."),
    "sliding_window_counter": (
        "Remaining",
        "permits",
        "The last window fades evenly, whenever its calls really came.",
    ),
    "gcra": (
        "Seconds",
        "until full",
        "Decides as the token bucket does, and keeps one number: when all is free again.",
    ),
    "leaky_bucket": ("Level:", "calls in it", "Asked through pace(): a call is refused, or waits for its turn."),
}


def _values(algorithm: AlgorithmName, run: Run) -> list[tuple[float, float]]:
    if algorithm == "gcra":
        return _corners([(time, standing.reset_after) for time, standing in run.standing])
    if algorithm == "leaky_bucket":
        return _steps([(time, LIMIT - standing.remaining) for time, standing in run.standing])
    return _steps([(time, standing.remaining) for time, standing in run.standing])


def _verdict(run: Run) -> str:
    asked = len(run.admitted) + len(run.denied)
    return f"{asked} asked, {len(run.admitted)} admitted, {len(run.denied)} denied"


def draw(algorithm: AlgorithmName, run: Run) -> str:
    """One algorithm: what happened to each call, its state, and the calls of the last period."""
    queued = run.starts != run.admitted
    end = run.standing[-1][0]
    extra = 44 if queued else 0
    name, unit, story = CAPTIONS[algorithm]
    picture = Picture(
        height=440 + extra,
        title=f"{algorithm}, {QUOTA}, on the common trace",
        about=f"{story} {_verdict(run)}. The most calls in any {PERIOD:g} seconds: {run.most}.",
        left=LEFT,
        right=RIGHT,
        end=end,
    )
    picture.text(20, 30, f"{algorithm}, {QUOTA}", "head")
    picture.text(RIGHT, 30, _verdict(run), "right")
    picture.text(20, 51, story, "soft")

    lanes, panel = 88, Panel(182 + extra, 84, LIMIT * 1.1)
    top = max(LIMIT, run.most)
    recent = Panel(panel.y + 108, 96, top * 1.1)
    bottom = recent.y + recent.height

    _phases(picture, 64, bottom)
    picture.axis(lanes, bottom)

    # where calls queue, the refused ones go on top: nothing leads on from them
    yes, no = (lanes + 36, lanes + 4) if queued else (lanes + 4, lanes + 48)
    picture.text(LEFT - 12, yes + 18, "Admitted", "right")
    picture.marks(run.admitted, yes, 28, "yes")
    picture.text(LEFT - 12, no + 14, "Denied", "right")
    picture.marks(run.denied, no, 20, "no")
    if queued:
        picture.text(LEFT - 12, lanes + 106, "Starts", "right")
        picture.marks(run.starts, lanes + 88, 28, "start")
        for asked, start in zip(run.admitted, run.starts, strict=True):
            picture.path([(picture.x(asked), yes + 28), (picture.x(start), lanes + 88)], "wait")

    _scale(picture, panel, [name, unit], LIMIT)
    picture.path([(picture.x(time), panel.at(value)) for time, value in _values(algorithm, run)], "line")

    _scale(picture, recent, ["Started in" if queued else "Admitted in", f"the last {PERIOD:g} s"], top)
    corners = _steps(_recent(run.starts, end))
    if top > LIMIT:
        above = [(picture.x(time), recent.at(max(value, LIMIT))) for time, value in corners]
        base = recent.at(LIMIT)
        picture.path([(LEFT, base), *above, (picture.x(end), base)], "over", "Z")
    picture.path([(LEFT, recent.at(LIMIT)), (RIGHT, recent.at(LIMIT))], "cap")
    picture.text(LEFT + 4, recent.at(LIMIT) - 5, f"limit {LIMIT}", "soft")
    picture.path([(picture.x(time), recent.at(value)) for time, value in corners], "sum")
    picture.text(20, bottom + 40, f"Dotted: edges of the fixed windows. Most in any {PERIOD:g} s: {run.most}.", "soft")
    return picture.svg()


def _scale(picture: Picture, panel: Panel, name: list[str], top: int) -> None:
    for value in (0, top):
        picture.path([(LEFT, panel.at(value)), (RIGHT, panel.at(value))], "grid")
        picture.text(LEFT - 6, panel.at(value) + 4, str(value), "soft right")
    for i, line in enumerate(name):
        picture.text(LEFT - 28, panel.y + panel.height / 2 + 2 + 16 * i, line, "right")


def _phases(picture: Picture, top: float, bottom: float) -> None:
    for since, until, label in PHASES:
        left, right = picture.x(since) - 4, picture.x(until) + 4
        picture.rect(left, top, right - left, bottom - top, "phase")
        picture.text((left + right) / 2, top + 15, label, "soft middle")


def overview(runs: dict[str, Run]) -> str:
    """All algorithms side by side: a lane of calls as they start, and two numbers."""
    step, top = 36, 92
    bottom = top + (1 + len(runs)) * step
    picture = Picture(
        height=bottom + 58,
        title=f"Six algorithms, {QUOTA}, the same {len(CALLS)} calls",
        about="; ".join(
            f"{name}: {len(run.admitted)} admitted, at most {run.most} in any {PERIOD:g} seconds"
            for name, run in runs.items()
        ),
        left=188,
        right=640,
        end=max(run.standing[-1][0] for run in runs.values()),
    )
    picture.text(20, 30, f"Six algorithms, {QUOTA}, the same {len(CALLS)} calls", "head")
    picture.text(20, 51, "A stroke is a call that starts.", "soft")
    _phases(picture, 60, bottom)
    picture.axis(top - 8, bottom)
    picture.text(706, 60, "admitted", "soft right")
    picture.text(784, 60, "most in", "soft right")
    picture.text(784, 75, f"any {PERIOD:g} s", "soft right")
    lanes = [("all calls", CALLS, "asked", str(len(CALLS)), "")]
    for name, run in runs.items():
        style = "start" if run.starts != run.admitted else "yes"
        lanes.append((name, run.starts, style, str(len(run.admitted)), str(run.most)))
    for row, (name, starts, style, admitted, most) in enumerate(lanes):
        y = top + row * step
        picture.path([(20, y + step - 3), (784, y + step - 3)], "grid")
        picture.text(20, y + 20, name)
        picture.marks(starts, y + 4, 22, f"{style} thin")
        picture.text(706, y + 20, admitted, "number right" if most else "soft right")
        picture.text(784, y + 20, most, "number right")
    picture.text(
        20, bottom + 40, f"Dotted: edges of the fixed windows. The limit is {LIMIT} each {PERIOD:g} s.", "soft"
    )
    return picture.svg()


def pictures() -> dict[str, str]:
    """Every picture: {file name: SVG}."""
    runs = {algorithm: ask(algorithm) for algorithm in ALGORITHMS}
    paced = queue()
    drawn = {f"{name}.svg": draw(name, paced if name == "leaky_bucket" else run) for name, run in runs.items()}
    rows: dict[str, Run] = {str(name): run for name, run in runs.items()}
    return {"overview.svg": overview({**rows, "leaky_bucket by pace()": paced}), **drawn}


def main() -> None:
    directory = Path(__file__).parent / "img"
    directory.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (directory / name).write_text(svg, encoding="utf-8", newline="\n")
        print(f"docs/img/{name}")


if __name__ == "__main__":
    main()
