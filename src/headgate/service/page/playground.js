// Try a limit: each press asks the service's own limiter, on a store that is only for this.

import { createTrace } from "./trace.js";
import { byId, element, say } from "./dom.js";
import { count, duration } from "./format.js";

const BUCKETS = ["5/10s", "10/second burst 20", "1/second burst 5", "80/10 minutes"];
const WINDOWS = ["5/10s", "10/second", "30/minute", "80/10 minutes"];
const ALGORITHMS = [
  ["TOKEN_BUCKET", "Token bucket", BUCKETS, "Tokens drip in at a steady rate and wait in a bucket. A full bucket lets a burst through, then requests pass at the rate of the drip."],
  ["LEAKY_BUCKET", "Leaky bucket", BUCKETS, "Requests fill a bucket that leaks at a steady rate. What would overflow is refused, so the outflow stays even."],
  ["GCRA", "GCRA", BUCKETS, "Remembers one number: when the next request is due on an even schedule. Behaves like a token bucket and keeps the least."],
  ["FIXED_WINDOW", "Fixed window", WINDOWS, "Counts in windows that start on the clock. Cheap, but twice the quota can pass around the edge of two windows."],
  ["SLIDING_WINDOW", "Sliding window", WINDOWS, "Remembers each request. No stretch of that length ever holds more than the quota."],
  ["SLIDING_WINDOW_COUNTER", "Sliding counter", WINDOWS, "Two counters, the older one weighted by how much of it is still in view: nearly a sliding window at the price of a fixed one."],
];
const PEEK_EVERY = 250; // milliseconds, while the limit is not yet whole again; up to eight times that when it takes long
const MOST_IN_FLIGHT = 6; // a slow network must not pile requests up
const MOST_PIPS = 60;
const SPEAK_EVERY = 1500; // milliseconds; a screen reader cannot follow eight verdicts a second

export function createPlayground(token) {
  const trace = createTrace(byId("trace"));
  let run; // what belongs to one limit; a new one forgets the old, and late answers to the old are dropped
  let typed = null; // a limit that is being typed and has not begun yet
  let held = null;
  let spoken = -Infinity;

  function start() {
    clearTimeout(typed);
    typed = null;
    const algorithm = document.querySelector("#algorithms input:checked").value;
    const limit = { session: randomText(), algorithm, quota: byId("quota").value.trim() };
    run = { limit, allowed: 0, denied: 0, flying: 0, freeAt: 0, wholeAt: 0, latest: 0, refused: false };
    trace.clear();
    say(byId("quota-problem"), "");
    byId("quota").removeAttribute("aria-invalid");
    tally();
    snippet();
    verdict("idle", "Ready when you are.");
    look(run);
  }

  const permits = () => Math.max(1, Math.floor(Number(byId("permits").value)) || 1);

  async function ask(url, options, asked) {
    const headers = { ...options.headers, ...(token() ? { Authorization: `Bearer ${token()}` } : {}) };
    let answer, body;
    try {
      answer = await fetch(url, { ...options, headers, cache: "no-store" });
      body = await answer.json();
    } catch {
      if (asked === run) verdict("bad", "The service does not answer.");
      return null;
    }
    if (asked !== run) return null;
    if (!answer.ok) {
      problem(answer.status, body.detail ?? body.title ?? `The service answered ${answer.status}.`);
      return null;
    }
    // Answers may overtake each other: the one that the service decided last says how things stand.
    if (body.at >= asked.latest) {
      Object.assign(asked, { latest: body.at, remaining: body.remaining, capacity: body.limit });
      asked.wholeAt = body.resetAfterSeconds > 0 ? performance.now() + 1000 * body.resetAfterSeconds : 0;
      gauge(body.remaining, body.limit);
    }
    return body;
  }

  async function send() {
    if (typed !== null) start();
    const asked = run;
    if (asked.flying >= MOST_IN_FLIGHT) return;
    asked.flying += 1;
    const text = JSON.stringify({ ...asked.limit, permits: permits() });
    const headers = { "Content-Type": "application/json" };
    const body = await ask("playground/check", { method: "POST", headers, body: text }, asked);
    asked.flying -= 1;
    if (!body) return;
    asked[body.allowed ? "allowed" : "denied"] += 1;
    trace.add(performance.now(), asked.remaining, asked.capacity, body.allowed);
    tally();
    asked.freeAt = body.allowed ? 0 : performance.now() + 1000 * body.retryAfterSeconds;
    if (body.allowed) verdict("good", "Allowed");
    speak(body.allowed ? `Allowed, ${body.remaining} of ${body.limit} left` : `Denied, try again in ${duration(body.retryAfterSeconds)}`);
  }

  // How things stand: asking for no permits spends none and leaves none out.
  async function look(asked) {
    if (asked.looking) return;
    asked.looking = true;
    const body = await ask(`playground/peek?${new URLSearchParams({ ...asked.limit, permits: 0 })}`, {}, asked);
    asked.looking = false;
    if (body) trace.add(performance.now(), asked.remaining, asked.capacity, null);
  }

  function problem(status, text) {
    stop();
    run.refused = true;
    if (status === 400) {
      byId("quota").setAttribute("aria-invalid", "true");
      say(byId("quota-problem"), text);
      verdict("idle", "That is not a limit yet.");
      gauge(null, null);
    } else {
      verdict("bad", text);
    }
  }

  function gauge(remaining, capacity) {
    say(byId("remaining"), remaining === null ? "–" : count(remaining));
    say(byId("limit-text"), capacity === null ? "of –" : `of ${count(capacity)} left`);
    const pips = byId("pips");
    const discrete = capacity !== null && capacity <= MOST_PIPS;
    const wanted = capacity === null ? 0 : discrete ? capacity : 1;
    if (pips.children.length !== wanted || pips.classList.contains("bar") === discrete) {
      pips.classList.toggle("bar", !discrete);
      pips.replaceChildren(...Array.from({ length: wanted }, () => element("i")));
    }
    if (discrete) [...pips.children].forEach((pip, place) => pip.classList.toggle("full", place < remaining));
    else if (wanted) pips.firstChild.style.width = `${(100 * remaining) / capacity}%`;
  }

  function verdict(state, text) {
    byId("verdict").dataset.state = state;
    say(byId("verdict"), text);
  }

  function tally() {
    say(byId("sent-allowed"), count(run.allowed));
    say(byId("sent-denied"), count(run.denied));
  }

  function speak(text) {
    const now = performance.now();
    if (now - spoken < SPEAK_EVERY) return;
    spoken = now;
    say(byId("spoken"), text);
  }

  function snippet() {
    const { algorithm, quota } = run.limit;
    say(byId("snippet"), `Limiter(${JSON.stringify(quota)}, algorithm="${algorithm.toLowerCase()}")`);
  }

  // Hold to send: by pointer, Space or Enter. `begin` sends at once, then at the chosen pace.
  const button = byId("send");
  function begin() {
    if (held !== null || (run.refused && typed === null)) return;
    button.classList.add("held");
    send();
    const pace = Math.min(50, Math.max(1, Number(byId("pace").value) || 1));
    held = setTimeout(() => {
      held = setInterval(send, 1000 / pace);
    }, 350); // long enough that a click is one request
  }
  function stop() {
    button.classList.remove("held");
    clearTimeout(held); // one kind of id for both, says HTML
    held = null;
  }
  const presses = (key) => key.key === " " || key.key === "Enter";
  button.addEventListener("pointerdown", (press) => {
    if (press.button === 0) begin();
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave", "blur"]) button.addEventListener(end, stop);
  button.addEventListener("keydown", (key) => {
    if (!presses(key)) return;
    key.preventDefault();
    if (!key.repeat) begin();
  });
  button.addEventListener("keyup", (key) => {
    if (presses(key)) stop();
  });
  // Screen readers and voice control click without a pointer or a key.
  button.addEventListener("click", (click) => {
    if (click.detail === 0 && held === null) send();
  });
  button.addEventListener("contextmenu", (menu) => menu.preventDefault()); // a long press on a phone
  document.addEventListener("visibilitychange", stop);

  // The countdown and the moving trace; nothing runs while the limit rests and the trace is empty.
  let peeked = 0;
  function frame(now) {
    const waiting = run.freeAt - now;
    if (waiting > 0) verdict("bad", `Denied. Next in ${waiting < 60_000 ? `${(Math.ceil(waiting / 100) / 10).toFixed(1)} s` : duration(waiting / 1000)}`);
    else if (run.freeAt && byId("verdict").dataset.state === "bad") {
      run.freeAt = 0;
      verdict("idle", "Go ahead.");
    }
    const pause = PEEK_EVERY * Math.min(8, Math.max(1, (run.wholeAt - now) / 20_000));
    if (!run.refused && run.wholeAt && now - peeked > pause && run.flying === 0) {
      peeked = now;
      look(run);
    }
    trace.move(now);
    requestAnimationFrame(frame);
  }

  const choices = ALGORITHMS.map(([value, label], place) => {
    const input = element("input", { type: "radio", name: "algorithm", value, ...(place === 0 ? { checked: "" } : {}) });
    return element("label", {}, input, element("span", {}, label));
  });
  byId("algorithms").append(...choices);

  function chosen() {
    const [, , quotas, about] = ALGORITHMS.find(([value]) => value === document.querySelector("#algorithms input:checked").value);
    say(byId("about"), about);
    byId("presets").replaceChildren(
      ...quotas.map((quota) => {
        const preset = element("button", { type: "button", class: "chip" }, quota);
        preset.addEventListener("click", () => {
          byId("quota").value = quota;
          start();
        });
        return preset;
      }),
    );
    // A burst means nothing to a window; take it along only where it does.
    if (quotas === WINDOWS) byId("quota").value = byId("quota").value.replace(/\s*burst.*$/i, "");
  }

  byId("algorithms").addEventListener("change", () => {
    chosen();
    start();
  });
  byId("limit").addEventListener("input", (input) => {
    if (input.target.name === "algorithm" || input.target.id === "pace") return;
    clearTimeout(typed);
    typed = setTimeout(start, 300);
  });
  byId("limit").addEventListener("submit", (submit) => {
    submit.preventDefault();
    start();
  });
  byId("again").addEventListener("click", start);
  const copy = byId("copy");
  copy.hidden = !navigator.clipboard; // absent on plain HTTP beyond this machine
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("snippet").textContent);
    say(copy, "Copied");
    setTimeout(() => say(copy, "Copy"), 1500);
  });

  chosen();
  start();
  requestAnimationFrame(frame);
}

// crypto.randomUUID is absent on plain HTTP beyond this machine.
function randomText() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
