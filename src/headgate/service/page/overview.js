// The live half of the page: what the service decides, how fast, and how its store does.

import { createChart } from "./chart.js";
import { byId, element, say } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { add, rulesByTraffic, since } from "./history.js";

const LEAST_SPAN = 60; // seconds; a chart that has just begun would look empty over five minutes
const RULES_SHOWN = 12;
const ALLOWED = { name: "allowed", label: "Allowed" };
const DENIED = { name: "denied", label: "Denied" };

const STORE = {
  closed: ["Healthy", "good"],
  half_open: ["Coming back", "warn"],
  open: ["Down", "bad"],
};

export function createOverview() {
  const history = [];
  const rows = new Map();
  const decisions = createChart(byId("decisions"), {
    title: "Decisions a second, allowed and denied",
    series: [ALLOWED, DENIED],
    stacked: true,
    format: count,
  });
  const latency = createChart(byId("latency"), {
    title: "Time a check takes, median and 99th percentile",
    series: [{ name: "p50", label: "p50" }, { name: "p99", label: "p99" }],
    format: duration,
  });
  let span = Number(document.querySelector("#span input:checked").value);
  byId("span").addEventListener("change", (change) => {
    span = Number(change.target.value);
    render();
  });

  function update(event) {
    add(history, event);
    tiles(event, history.at(-1));
    keys(event.denied_keys);
    busiest(event.busiest_keys ?? []);
    render();
  }

  function render() {
    const now = history.at(-1);
    if (!now) return;
    const from = Math.max(now.at - span, Math.min(history[0].at, now.at - LEAST_SPAN));
    const samples = since(history, from);
    const rules = rulesByTraffic(samples);
    const any = rules.length > 0;
    byId("no-decisions").hidden = any;
    byId("decisions").hidden = !any;
    byId("rules").hidden = !any;
    decisions.draw(points(samples, (sample) => [sample.allowed, sample.denied]), from, now.at);
    latency.draw(points(samples, (sample) => [sample.p50, sample.p99]), from, now.at);
    ruleRows(rules, samples, from, now);
  }

  function ruleRows(rules, samples, from, now) {
    const shown = rules.slice(0, RULES_SHOWN);
    for (const rule of shown) if (!rows.has(rule.id)) rows.set(rule.id, ruleRow(rule));
    const ordered = shown.map((rule) => rows.get(rule.id).row);
    const table = byId("rules");
    if (ordered.length + 1 !== table.children.length || ordered.some((row, place) => table.children[place + 1] !== row)) {
      table.replaceChildren(headRow(), ...ordered);
    }
    say(table.firstChild.lastChild, `Denied, ${duration(span)}`);
    for (const rule of shown) {
      const { chart, cells } = rows.get(rule.id);
      const rates = now.rules.get(rule.id) ?? { allowed: 0, denied: 0 };
      say(cells.allowed, count(rates.allowed));
      say(cells.denied, count(rates.denied));
      say(cells.share, percent(rule.denied, rule.allowed + rule.denied));
      chart.draw(points(samples, (sample) => [sample.rules.get(rule.id)?.allowed ?? 0, sample.rules.get(rule.id)?.denied ?? 0]), from, now.at);
    }
    const more = rules.length - shown.length;
    byId("more-rules").hidden = more <= 0;
    say(byId("more-rules"), more > 0 ? `and ${more} more with less traffic` : "");
    if (rows.size > 4 * RULES_SHOWN) for (const id of rows.keys()) if (!shown.some((rule) => rule.id === id)) rows.delete(id);
  }

  return { update };
}

const points = (samples, values) => samples.map((sample) => ({ at: sample.at, values: values(sample) }));

function tiles(event, sample) {
  const asked = sample.allowed + sample.denied;
  say(byId("now-allowed"), count(sample.allowed));
  say(byId("now-denied"), count(sample.denied));
  say(byId("now-denied-note"), asked ? `a second, ${percent(sample.denied, asked)}` : "a second");
  if (sample.p50 !== null) {
    say(byId("now-p50"), duration(sample.p50));
    say(byId("now-p99"), duration(sample.p99));
  }
  const store = event.store ?? {};
  const [words, look] = STORE[store.state] ?? [store.state ?? "–", "unknown"];
  byId("store").dataset.state = look;
  say(byId("store-state"), words);
  const answered = look === "good" && store.latency > 0 ? `, ${duration(store.latency)}` : "";
  const detail = look === "good" ? "" : store.detail ? `: ${store.detail}` : "";
  say(byId("store-note"), `${store.kind ?? ""}${answered}${detail}`);
  const notice = byId("notice");
  const degraded = look === "bad" || sample.degraded > 0;
  notice.hidden = !degraded;
  notice.classList.toggle("bad", degraded);
  say(notice, degraded ? "The store does not answer. Until it is back, each rule answers by its own on_store_error." : "");
  say(byId("version"), event.version ?? "");
  const workers = event.workers === 1 ? "one worker" : `${event.workers} workers`;
  say(byId("foot"), `headgate ${event.version ?? ""}, ${workers}, up ${duration(event.uptime)}`);
}

function headRow() {
  const cells = [["Rule", ""], ["", "trace"], ["Allowed /s", "number"], ["Denied /s", "number"], ["", "number"]];
  return element(
    "div",
    { role: "row", class: "rule heads" },
    ...cells.map(([text, look]) => element("span", { role: "columnheader", class: look }, text)),
  );
}

function ruleRow(rule) {
  const cell = (look) => element("span", { role: "cell", class: look });
  const cells = { allowed: cell("number allowed"), denied: cell("number denied"), share: cell("number share") };
  const trace = cell("trace chart");
  const name = element("b", { title: rule.name }, rule.name);
  const algorithm = element("small", {}, words(rule.algorithm));
  const row = element(
    "div",
    { role: "row", class: "rule" },
    element("span", { role: "rowheader", class: "name" }, name, algorithm),
    trace,
    cells.allowed,
    cells.denied,
    cells.share,
  );
  const chart = createChart(trace, { title: `Decisions of ${rule.name}`, series: [ALLOWED, DENIED], stacked: true, format: count, small: true });
  return { row, cells, chart };
}

const words = (algorithm) => String(algorithm).toLowerCase().replaceAll("_", " ");

// `denied` is absent for a token that may not see keys, and empty when no key was denied.
function keys(denied) {
  const host = byId("keys");
  if (denied === undefined || denied === null) {
    if (host.dataset.state === "locked") return;
    host.dataset.state = "locked";
    const button = element("button", { type: "button", class: "quiet" }, "Give a token");
    button.addEventListener("click", () => byId("token-open").click());
    host.replaceChildren(
      element("div", { class: "empty" }, element("p", {}, "Keys name your clients, so they are shown to an admin token only."), button),
    );
    return;
  }
  host.dataset.state = "open";
  if (!denied.length) {
    host.replaceChildren(element("div", { class: "empty" }, element("p", {}, element("b", {}, "No key was refused."), " Keys that are refused show up here.")));
    return;
  }
  const most = Math.max(...denied.map((row) => row.denied));
  host.replaceChildren(
    element(
      "ol",
      { class: "keys" },
      ...denied.map((row) => {
        const bar = element("meter", { min: 0, max: most, value: row.denied, "aria-hidden": "true" });
        const key = element("code", { title: row.key }, row.key);
        return element("li", {}, key, element("small", {}, row.rule), element("b", {}, count(row.denied)), bar);
      }),
    ),
  );
}

// Only in events for an admin token. A hint says where a hybrid rule would save round trips.
function busiest(rows) {
  const host = byId("busiest");
  host.hidden = !rows.length;
  const most = Math.max(...rows.map((row) => row.perSecond));
  host.replaceChildren(
    element("h3", {}, "Busiest keys, checks a second"),
    element(
      "ol",
      { class: "keys" },
      ...rows.slice(0, 5).map((row) => {
        const bar = element("meter", { min: 0, max: most, value: row.perSecond, "aria-hidden": "true" });
        const key = element("code", { title: row.key }, row.key);
        const line = element("li", {}, key, element("small", {}, row.rule), element("b", {}, count(row.perSecond)), bar);
        if (row.hint) line.append(element("small", { class: "hint" }, row.hint));
        return line;
      }),
    ),
  );
}
