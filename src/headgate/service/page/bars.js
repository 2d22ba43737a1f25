// Counts by minute as bars, denied on top of allowed: a picture as wide as its table cell.

import { shape } from "./dom.js";
import { count } from "./format.js";

const HEIGHT = 34;
const GAP = 0.25; // of a bar's width

export function createBars(host, title) {
  const drawing = shape("svg", { role: "img", "aria-label": title, preserveAspectRatio: "none" });
  host.replaceChildren(drawing);

  return (allowed, denied) => {
    const most = Math.max(...allowed.map((number, place) => number + denied[place]));
    drawing.setAttribute("viewBox", `0 0 ${allowed.length} ${HEIGHT}`);
    drawing.setAttribute("aria-label", `${title}, at most ${count(most)} a minute`);
    const bars = { allowed: "", denied: "" };
    for (const [place, number] of allowed.entries()) {
      bars.allowed += bar(place, number, 0, most);
      bars.denied += bar(place, denied[place], number, most);
    }
    const base = shape("path", { class: "grid", d: `M0 ${HEIGHT - 0.5}H${allowed.length}`, "vector-effect": "non-scaling-stroke" });
    drawing.replaceChildren(base, ...["allowed", "denied"].map((name) => shape("path", { class: `bar ${name}`, d: bars[name] })));
  };
}

// The outline of one bar that stands on `below`; a count that is not zero is never too low to be seen.
function bar(place, number, below, most) {
  if (!number) return "";
  const scale = (HEIGHT - 2) / most;
  const bottom = HEIGHT - 1 - below * scale;
  const height = Math.max(number * scale, 1.5);
  return `M${place + GAP / 2} ${bottom.toFixed(2)}v${-height.toFixed(2)}h${1 - GAP}v${height.toFixed(2)}z`;
}
