// The playground's last half minute: what was left, and a mark for each decision.

import { shape } from "./dom.js";
import { steps } from "./format.js";

export const SPAN = 30_000; // milliseconds
const LANE = 26; // pixels at the top, for the marks
const EDGE = { right: 34, bottom: 18 };
const FRAME = 50; // milliseconds between two drawings

export function createTrace(host) {
  const drawing = shape("svg", { role: "img", "aria-label": "What was left over the last half minute, and each decision" });
  host.replaceChildren(drawing);
  let samples = []; // { at, remaining, limit, allowed }; allowed is null for a look
  let drawn = 0;
  let stale = true;

  function clear() {
    samples = [];
    stale = true;
  }

  function add(at, remaining, limit, allowed) {
    samples.push({ at, remaining, limit, allowed });
    stale = true;
  }

  // Draw as the time `now` has it; cheap when there is nothing to see.
  function move(now) {
    if (!stale && (samples.length < 2 || now - drawn < FRAME)) return;
    drawn = now;
    stale = false;
    const first = samples.findIndex(({ at }) => at >= now - SPAN);
    if (first < 0) samples = samples.slice(-1); // the line goes on where it stood
    else samples = samples.slice(Math.max(0, first - 1));
    render(now);
  }

  function render(now) {
    const box = drawing.getBoundingClientRect();
    if (!box.width) {
      stale = true;
      return;
    }
    const width = box.width - EDGE.right;
    const floor = box.height - EDGE.bottom;
    const limit = samples.at(-1)?.limit ?? 1;
    const x = (at) => Math.max(0, width * (1 - (now - at) / SPAN));
    const y = (value) => LANE + 8 + (floor - LANE - 8) * (1 - value / limit);

    const parts = [];
    const marks = steps(limit, 2).filter((mark) => mark < 0.85 * limit && Number.isInteger(mark));
    for (const mark of [...marks, limit]) {
      parts.push(shape("path", { class: mark === limit ? "grid cap" : mark ? "grid" : "grid base", d: `M0 ${y(mark).toFixed(1)}H${width}` }));
      parts.push(shape("text", { class: "tick", x: width + 6, y: (y(mark) + 4).toFixed(1) }, String(mark)));
    }
    for (const ago of [0, 10, 20]) {
      const place = x(now - 1000 * ago).toFixed(1);
      parts.push(shape("text", { class: "tick", x: place, y: box.height - 3, "text-anchor": ago ? "middle" : "end" }, ago ? `−${ago} s` : "now"));
    }
    if (samples.length) {
      let line = `M${x(samples[0].at).toFixed(1)} ${y(samples[0].remaining).toFixed(1)}`;
      for (const { at, remaining } of samples.slice(1)) line += `H${x(at).toFixed(1)}V${y(remaining).toFixed(1)}`;
      line += `H${width}`;
      parts.push(shape("path", { class: "area left", d: `${line}V${y(0)}H${x(samples[0].at).toFixed(1)}Z` }));
      parts.push(shape("path", { class: "line left", d: line }));
    }
    for (const { at, allowed } of samples) {
      if (allowed === null || now - at > SPAN) continue;
      parts.push(mark(x(at), LANE, allowed));
    }
    drawing.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    drawing.replaceChildren(...parts);
  }

  new ResizeObserver(() => (stale = true)).observe(drawing);
  return { add, clear, move };
}

// One decision in a lane of that height: a bar or a cross, so that shape tells them apart as well as colour.
export function mark(x, height, allowed) {
  const place = x.toFixed(1);
  if (allowed) return shape("path", { class: "mark allowed", d: `M${place} 4V${height - 4}` });
  return shape("path", { class: "mark denied", d: `M${place} ${height / 2}m-3.5 -3.5l7 7m0 -7l-7 7` });
}
