// A chart over time as SVG, so that colours come from the style sheet and follow light and dark.
//
//   series   [{ name, label }]; `name` is also the CSS class
//   stacked  areas on top of each other instead of lines
//   format   how a value reads
//   small    no axes, no reading
//
// `draw(points, from, to)` takes points { at, values }; a value of null, and a gap in time, break the line.

import { element, say, shape } from "./dom.js";
import { duration, steps } from "./format.js";

const EDGE = { top: 6, right: 52, bottom: 20, left: 0 };
const NO_EDGE = { top: 2, right: 0, bottom: 2, left: 0 };

export function createChart(host, { title, series, stacked = false, format, small = false, gap = 3 }) {
  const edge = small ? NO_EDGE : EDGE;
  const drawing = shape("svg", { role: "img", "aria-label": title });
  const legend = element("div", { class: "legend" });
  const readings = series.map(({ name, label }) => {
    const reading = element("b", {}, "–");
    legend.append(element("span", { class: `key ${name}` }, element("i"), `${label} `, reading));
    return reading;
  });
  const when = element("span", { class: "when" });
  legend.append(when);
  host.replaceChildren(...(small ? [drawing] : [legend, drawing]));

  let shown = { points: [], from: 0, to: 1 };
  let pointed = null; // the time that the reader points at

  function draw(points, from, to) {
    shown = { points, from, to };
    render();
  }

  function render() {
    const box = drawing.getBoundingClientRect();
    if (!box.width) return; // hidden
    const { points, from, to } = shown;
    const [width, height] = [box.width - edge.left - edge.right, box.height - edge.top - edge.bottom];
    const heights = points.map(({ values }) => (stacked ? pile(values) : values));
    const most = heights.flat().reduce((high, value) => Math.max(high, value ?? 0), 0);
    const marks = most > 0 ? steps(most) : [0];
    const top = (small ? most : marks.at(-1)) || 1;
    const x = (at) => edge.left + (width * (at - from)) / (to - from);
    const y = (value) => edge.top + height * (1 - value / top);

    const parts = [];
    if (!small) parts.push(...grid(marks, y, edge.left + width), ...times(from, to, x, box.height));
    const order = series.map((_, place) => place);
    if (stacked) order.reverse(); // the sum first, so that the lower ones lie over it
    for (const place of order) {
      const line = points.map(({ at }, index) => ({ at, value: heights[index][place] }));
      for (const run of runs(line, gap)) {
        const path = run.map(({ at, value }) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
        if (stacked) {
          const [first, last] = [x(run[0].at).toFixed(1), x(run.at(-1).at).toFixed(1)];
          parts.push(shape("path", { class: `area ${series[place].name}`, d: `M${first} ${y(0)}L${path}L${last} ${y(0)}Z` }));
        }
        parts.push(shape("path", { class: `line ${series[place].name}`, d: `M${path}` }));
      }
    }
    const chosen = pointed === null ? points.length - 1 : nearest(points, pointed);
    if (pointed !== null && chosen >= 0) {
      const place = x(points[chosen].at).toFixed(1);
      parts.push(shape("path", { class: "hair", d: `M${place} ${edge.top}V${edge.top + height}` }));
    }
    drawing.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    drawing.replaceChildren(...parts);
    read(points[chosen], to);
  }

  function read(point, to) {
    if (small) return;
    readings.forEach((reading, place) => say(reading, point?.values[place] == null ? "–" : format(point.values[place])));
    say(when, pointed === null || !point ? "" : `${duration(Math.round(to - point.at))} ago`);
    const words = series.map(({ label }, place) => `${label} ${readings[place].textContent}`);
    drawing.setAttribute("aria-label", `${title}. Now: ${words.join(", ")}`);
  }

  function grid(marks, y, right) {
    return marks.flatMap((mark) => [
      shape("path", { class: mark ? "grid" : "grid base", d: `M${edge.left} ${y(mark).toFixed(1)}H${right}` }),
      shape("text", { class: "tick", x: right + 8, y: (y(mark) + 4).toFixed(1) }, format(mark)),
    ]);
  }

  function times(from, to, x, bottom) {
    const size = [5, 10, 15, 30, 60, 120, 300].find((step) => (to - from) / step <= 5) ?? 300;
    const found = [];
    for (let ago = 0; ago <= to - from + 1e-9; ago += size) {
      const anchor = ago === 0 ? "end" : x(to - ago) < 24 ? "start" : "middle";
      const text = ago === 0 ? "now" : `−${duration(ago)}`;
      found.push(shape("text", { class: "tick", x: x(to - ago).toFixed(1), y: bottom - 4, "text-anchor": anchor }, text));
    }
    return found;
  }

  if (!small) {
    drawing.addEventListener("pointermove", (move) => {
      const box = drawing.getBoundingClientRect();
      const share = (move.clientX - box.left - edge.left) / (box.width - edge.left - edge.right);
      pointed = shown.from + Math.min(1, Math.max(0, share)) * (shown.to - shown.from);
      render();
    });
    for (const leave of ["pointerleave", "pointercancel"]) {
      drawing.addEventListener(leave, () => {
        pointed = null;
        render();
      });
    }
  }
  new ResizeObserver(render).observe(drawing);
  return { draw };
}

// Each value on top of the ones before it.
function pile(values) {
  let sum = 0;
  return values.map((value) => (sum += value ?? 0));
}

// The stretches of a line between values that are missing and times that are too far apart.
function runs(line, gap) {
  const found = [];
  let last = null;
  for (const point of line) {
    if (point.value != null) {
      if (last && point.at - last.at <= gap) found.at(-1).push(point);
      else found.push([point]);
    }
    last = point.value == null ? null : point;
  }
  // A single point would draw nothing.
  return found.map((run) => (run.length > 1 ? run : [{ at: run[0].at - gap / 6, value: run[0].value }, run[0]]));
}

function nearest(points, at) {
  let best = -1;
  points.forEach((point, index) => {
    if (best < 0 || Math.abs(point.at - at) < Math.abs(points[best].at - at)) best = index;
  });
  return best;
}
