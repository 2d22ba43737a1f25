// The comparison: the same requests put to every algorithm, one row each, with a mark for each decision of the last half minute.

import { element, say, shape } from "./dom.js";
import { mark, SPAN } from "./trace.js";

const HEIGHT = 22; // pixels
const FRAME = 50; // milliseconds between two drawings

export function createComparison(host, algorithms) {
  const lanes = new Map();
  for (const [value, label] of algorithms) {
    const drawing = shape("svg", { role: "img", "aria-label": `Decisions of ${label}` });
    const sum = element("span", { class: "sum" });
    host.append(element("div", { class: "lane", role: "listitem" }, element("span", {}, label), drawing, sum));
    lanes.set(value, { drawing, sum, marks: [], allowed: 0, denied: 0 });
  }
  let drawn = 0;

  function clear() {
    for (const lane of lanes.values()) {
      Object.assign(lane, { marks: [], allowed: 0, denied: 0 });
      lane.drawing.replaceChildren();
      say(lane.sum, "");
      lane.sum.removeAttribute("title");
    }
  }

  function add(algorithm, at, allowed) {
    const lane = lanes.get(algorithm);
    lane.marks.push({ at, allowed });
    lane[allowed ? "allowed" : "denied"] += 1;
    say(lane.sum, `${lane.allowed} of ${lane.allowed + lane.denied}`);
  }

  // Show that this algorithm does not support the quota.
  function refuse(algorithm, why) {
    const { sum } = lanes.get(algorithm);
    say(sum, "no such quota");
    sum.title = why;
  }

  function move(now) {
    if (host.hidden || now - drawn < FRAME) return;
    drawn = now;
    for (const lane of lanes.values()) {
      if (!lane.marks.length) continue;
      lane.marks = lane.marks.filter(({ at }) => now - at <= SPAN);
      const { width } = lane.drawing.getBoundingClientRect();
      lane.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      // Allowed decisions are drawn last, on top of the denied ones.
      const ordered = [...lane.marks].sort((one, other) => one.allowed - other.allowed);
      lane.drawing.replaceChildren(...ordered.map(({ at, allowed }) => mark(width * (1 - (now - at) / SPAN), HEIGHT, allowed)));
    }
  }

  return { add, clear, move, refuse };
}
