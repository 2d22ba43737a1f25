"""Draw the way of a check through headgate, for docs/architecture.md: `make docs-plots`."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parent / "img" / "architecture.svg"
WIDTH, HEIGHT = 800, 600
STYLE = """
  .ground { fill: #ffffff } .box { fill: #f6f8fa; stroke: #8c959f } .lane { fill: #eef2f6 }
  .core { fill: #ddf4ff; stroke: #0969da } .bad { fill: #fff1ef; stroke: #cf222e }
  .good { fill: #e9fbee; stroke: #1a7f37 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .name { font-weight: 600 } .head { font-size: 15px; font-weight: 600 } .soft { fill: #57606a; font-size: 12px }
  .middle { text-anchor: middle } .right { text-anchor: end }
  .way { fill: none; stroke: #57606a; stroke-width: 1.6; marker-end: url(#tip) } .tip { fill: #57606a }
  .fail { stroke: #cf222e; stroke-dasharray: 5 4 } .slow { stroke-dasharray: 2 4 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } .box { fill: #161b22; stroke: #6e7681 } .lane { fill: #11161d }
    .core { fill: #0c2d4d; stroke: #58a6ff } .bad { fill: #3a1716; stroke: #ff7b72 }
    .good { fill: #10301a; stroke: #56d364 }
    text { fill: #e6edf3 } .soft, .tip { fill: #9aa4ae } .way { stroke: #9aa4ae } .fail { stroke: #ff7b72 }
  }
"""
TIP = """<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path class="tip" d="M0 0L8 4L0 8z"/></marker>"""
Point = tuple[float, float]


def box(x: float, y: float, width: float, height: float, name: str, *lines: str, kind: str = "box") -> str:
    """A box with a name, and what it does in smaller letters, all centred."""
    middle, top = x + width / 2, y + height / 2 - 8 * len(lines) + 5
    text = [f'<text class="name middle" x="{middle:g}" y="{top:g}">{name}</text>']
    text += [
        f'<text class="soft middle" x="{middle:g}" y="{top + 17 * number:g}">{line}</text>'
        for number, line in enumerate(lines, 1)
    ]
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>\n' + "\n".join(
        text
    )


def way(*points: Point, kind: str = "") -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="way {kind}" d="M{path}"/>'


def label(x: float, y: float, text: str, kind: str = "soft") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{text}</text>'


def lane(y: float, height: float, title: str, cost: str) -> str:
    ground = f'<rect class="lane" x="196" y="{y:g}" width="588" height="{height:g}" rx="9"/>'
    return "\n".join([ground, label(210, y + 22, title, "head"), label(770, y + 22, cost, "soft right")])


def picture() -> str:
    parts = [
        box(16, 60, 150, 46, "your code", "Limiter, decorators"),
        box(16, 116, 150, 46, "web frameworks", "headgate.web"),
        box(16, 172, 150, 46, "clients, jobs", "pools, budgets, slots"),
        box(16, 228, 150, 62, "the service", "HTTP, Redis protocol,", "gRPC for Envoy"),
        box(
            16,
            330,
            150,
            78,
            "limiter",
            "checks the arguments;",
            "its rule: quotas,",
            "algorithm, name",
            kind="core",
        ),
        way((91, 290), (91, 328)),
        # in this process
        lane(16, 116, "memory://, shared://", "0.1 to 0.2 us, no round trip"),
        box(
            214,
            52,
            250,
            64,
            "one step, in Python or C",
            "step(state, now, permits)",
            "state in integers, time is an argument",
            kind="core",
        ),
        box(520, 52, 248, 64, "key table", "bounded: a key at its limit", "is never evicted"),
        way((464, 84), (518, 84)),
        way((518, 100), (466, 100)),
        # on a server
        lane(146, 262, "redis://, postgresql://, headgate://", "one round trip"),
        box(214, 184, 160, 64, "batch", "calls that are awaited", "together travel together"),
        box(404, 184, 120, 64, "breaker", "closed: send", "open: do not"),
        box(
            560,
            184,
            208,
            92,
            "the server",
            "one Lua script or SQL function:",
            "read, step, write, TTL",
            "atomic, by the server's clock",
            kind="core",
        ),
        way((374, 216), (402, 216)),
        way((524, 216), (558, 216)),
        box(
            404, 316, 364, 72, "on_store_error", "allow, deny, local or raise;", "the decision is degraded", kind="bad"
        ),
        way((452, 248), (452, 314), kind="fail"),
        label(462, 286, "open"),
        way((616, 276), (616, 314), kind="fail"),
        label(626, 300, "no answer in time"),
        box(214, 316, 160, 72, "probe", "asks in the background", "until the server is back"),
        way((404, 352), (376, 352), kind="slow"),
        way((294, 316), (294, 282), (420, 282), (420, 250), kind="slow"),
        # hybrid
        lane(422, 162, "HybridLimiter", "0.1 us; reports in the background"),
        box(
            214,
            460,
            200,
            104,
            "lease",
            "permits that this process",
            "may spend without asking;",
            "given back when it ends",
            kind="core",
        ),
        box(
            568,
            460,
            200,
            104,
            "ledger",
            "in the same store:",
            "who holds how much.",
            "Never more than the quota",
            "is out",
            kind="core",
        ),
        way((414, 494), (566, 494), kind="slow"),
        label(491, 486, "spent so far", "soft middle"),
        way((566, 530), (416, 530), kind="slow"),
        label(491, 548, "more permits", "soft middle"),
        # from the limiter
        way((166, 350), (181, 350), (181, 84), (212, 84)),
        way((166, 369), (188, 369), (188, 216), (212, 216)),
        way((166, 388), (181, 388), (181, 512), (212, 512)),
        box(16, 460, 150, 104, "Decision", "allowed, remaining,", "retry_after,", "reset_after, degraded", kind="good"),
        way((91, 408), (91, 458)),
        label(16, 30, "who asks", "head"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>The way of a check: caller, limiter, one of three ways to decide, decision</title>",
            f"<style>{STYLE}</style>",
            TIP,
            f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(picture())
