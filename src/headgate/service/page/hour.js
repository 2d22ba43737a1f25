// The rules: what each decided in the last hour, minute by minute, and its settings to copy.

import { createBars } from "./bars.js";
import { byId, copyButton, element, say } from "./dom.js";
import { count, percent } from "./format.js";

const EVERY = 5000; // milliseconds between two looks; the last minute grows meanwhile
const SHOWN = 12;

export function createHour(token) {
  const rows = new Map();
  let timer = null;
  let asked = 0; // answers may overtake each other: only the one that was asked for last counts

  async function get(query) {
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const answer = await fetch(`live/rules?${new URLSearchParams(query)}`, { headers, cache: "no-store" });
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    return answer.json();
  }

  async function refresh() {
    clearTimeout(timer);
    timer = setTimeout(refresh, EVERY);
    if (document.hidden) return;
    asked += 1;
    const mine = asked;
    try {
      const found = await get(sought() ? { find: sought() } : {});
      if (mine === asked) draw(found);
    } catch {
      if (mine === asked) byId("hour").hidden = true; // the stream of events says why
    }
  }

  const sought = () => byId("find-rule").value.trim();

  function draw({ rules, minutes, more }) {
    byId("hour").hidden = false;
    const shown = rules.slice(0, SHOWN);
    const left = rules.length - shown.length + more;
    if (left > 0) byId("find-rule-line").hidden = false;
    for (const { rule } of shown) if (!rows.has(rule)) rows.set(rule, makeRow(rule, open));
    const ordered = shown.map(({ rule }) => rows.get(rule).line);
    const body = byId("hour-rules");
    if (body.children.length !== ordered.length || ordered.some((line, place) => body.children[place] !== line)) body.replaceChildren(...ordered);
    for (const rule of shown) rows.get(rule.rule).fill(rule, minutes);
    for (const name of rows.keys()) if (rows.size > 4 * SHOWN && !shown.some(({ rule }) => rule === name)) rows.delete(name);
    const words = shown.length ? `and ${count(left)} more with less traffic` : "No rule has such a name.";
    byId("hour-more").hidden = shown.length > 0 && left <= 0;
    say(byId("hour-more"), words);
  }

  async function open(rule) {
    say(byId("rule-title"), rule);
    say(byId("rule-toml"), "");
    byId("rule-dialog").showModal();
    try {
      say(byId("rule-toml"), (await get({ rule })).toml);
    } catch (error) {
      say(byId("rule-toml"), `# cannot be shown: ${error.message}\n`);
    }
  }

  copyButton(byId("rule-copy"), () => byId("rule-toml").textContent);
  byId("rule-close").addEventListener("click", () => byId("rule-dialog").close());
  byId("find-rule").addEventListener("input", refresh);
  document.addEventListener("visibilitychange", refresh);
  refresh();
  return { refresh };
}

function makeRow(name, open) {
  const cell = (look) => element("td", { class: look });
  const about = element("small");
  const head = element("th", { scope: "row" }, element("b", { title: name }, name), about);
  const [trace, allowed, denied, share, more] = ["trace", "number", "number", "number wide", "number"].map(cell);
  const button = element("button", { type: "button", class: "quiet", "aria-label": `Settings of ${name}`, "aria-haspopup": "dialog" }, "Settings");
  button.addEventListener("click", () => open(name));
  const line = element("tr", {}, head, trace, allowed, denied, share, more);
  const draw = createBars(trace, `Decisions of ${name} by minute`);

  function fill(rule, minutes) {
    say(about, words(rule));
    say(allowed, count(rule.allowed));
    say(denied, count(rule.denied));
    say(share, percent(rule.denied, rule.allowed + rule.denied));
    // Rules of Envoy's files have no settings here.
    if (rule.algorithm && !button.isConnected) more.append(button);
    const by = rule.perMinute ?? { allowed: Array(minutes).fill(0), denied: Array(minutes).fill(0) };
    draw(by.allowed, by.denied);
  }
  return { line, fill };
}

function words({ algorithm, quotas, concurrency, leaseSeconds, shadow, hybrid }) {
  if (!algorithm) return "";
  const more = [shadow ? "shadow" : "", hybrid ? "hybrid" : ""].filter(Boolean);
  if (concurrency) return [`${count(concurrency)} at once, lease ${count(leaseSeconds)} s`, ...more].join(", ");
  return [quotas.join(" and "), algorithm.toLowerCase().replaceAll("_", " "), ...more].join(", ");
}
