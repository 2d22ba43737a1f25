// Try a limit: each press asks the service's own limiter, on a store that is only for this.

import { ALGORITHMS, WINDOWS } from "./algorithms.js";
import { byId, copyButton, element, say } from "./dom.js";
import { count, duration } from "./format.js";
import { showLeft, showNothing } from "./gauge.js";
import { pressAndHold } from "./press_and_hold.js";
import { createComparison } from "./comparison.js";
import { createTrace } from "./trace.js";

const PEEK_EVERY = 250; // milliseconds, while the limit is not yet whole again; up to eight times that when it takes long
const MOST_IN_FLIGHT = 6; // a slow network must not pile requests up
const SPEAK_EVERY = 1500; // milliseconds; a screen reader cannot follow eight verdicts a second

export function createPlayground(token) {
  const trace = createTrace(byId("trace"));
  const comparison = createComparison(byId("lanes"), ALGORITHMS);
  let run; // what belongs to one limit; a new one forgets the old, and late answers to the old are dropped
  let typed = null; // a limit that is being typed and has not begun yet
  let spoken = -Infinity;

  function start() {
    clearTimeout(typed);
    typed = null;
    const limit = { session: randomText(), algorithm: picked(), quota: byId("quota").value.trim() };
    run = { limit, allowed: 0, denied: 0, flying: 0, freeAt: 0, wholeAt: 0, latest: 0, refused: false };
    trace.clear();
    comparison.clear();
    say(byId("quota-problem"), "");
    byId("quota").removeAttribute("aria-invalid");
    tally();
    snippet();
    verdict("idle", "Ready when you are.");
    look(run);
  }

  const picked = () => document.querySelector("#algorithms input:checked").value;
  const permits = () => Math.max(1, Math.floor(Number(byId("permits").value)) || 1);

  // An answer, or null when there is none or a newer limit was started meanwhile.
  async function get(url, options, asked) {
    const headers = { ...options.headers, ...(token() ? { Authorization: `Bearer ${token()}` } : {}) };
    try {
      const answer = await fetch(url, { ...options, headers, cache: "no-store" });
      const body = await answer.json();
      return asked === run ? { status: answer.status, body } : null;
    } catch {
      if (asked === run) verdict("bad", "The service does not answer.");
      return null;
    }
  }

  // What the service says about the chosen limit, put on the gauge; or null.
  async function ask(url, options, asked) {
    const answer = await get(url, options, asked);
    if (!answer) return null;
    const { status, body } = answer;
    if (status !== 200) {
      problem(status, body.detail ?? body.title ?? `The service answered ${status}.`);
      return null;
    }
    // With several workers the figures jump, and that must not look like what a limit does.
    say(byId("playground-note"), body.note ?? "");
    byId("playground-note").hidden = !body.note;
    // Answers may overtake each other: the one that the service decided last says how things stand.
    if (body.at >= asked.latest) {
      Object.assign(asked, { latest: body.at, remaining: body.remaining, capacity: body.limit });
      asked.wholeAt = body.resetAfterSeconds > 0 ? performance.now() + 1000 * body.resetAfterSeconds : 0;
      showLeft(body.remaining, body.limit);
    }
    return body;
  }

  function request(asked, algorithm) {
    const text = JSON.stringify({ ...asked.limit, algorithm, permits: permits() });
    return { method: "POST", headers: { "Content-Type": "application/json" }, body: text };
  }

  async function send() {
    if (typed !== null) start();
    const asked = run;
    if (asked.refused || asked.flying >= MOST_IN_FLIGHT) return;
    asked.flying += 1;
    const [body] = await Promise.all([ask("playground/check", request(asked, asked.limit.algorithm), asked), compare(asked)]);
    asked.flying -= 1;
    if (!body) return;
    asked[body.allowed ? "allowed" : "denied"] += 1;
    trace.add(performance.now(), asked.remaining, asked.capacity, body.allowed);
    comparison.add(asked.limit.algorithm, performance.now(), body.allowed);
    tally();
    asked.freeAt = body.allowed ? 0 : performance.now() + 1000 * body.retryAfterSeconds;
    if (body.allowed) verdict("good", "Allowed");
    speak(body.allowed ? `Allowed, ${body.remaining} of ${body.limit} left` : `Denied, try again in ${duration(body.retryAfterSeconds)}`);
  }

  // The same request to the other algorithms, when they are to be seen.
  async function compare(asked) {
    if (!byId("compare").checked) return;
    const others = ALGORITHMS.map(([value]) => value).filter((value) => value !== asked.limit.algorithm);
    await Promise.all(
      others.map(async (algorithm) => {
        const answer = await get("playground/check", request(asked, algorithm), asked);
        if (answer?.status === 200) comparison.add(algorithm, performance.now(), answer.body.allowed);
        else if (answer?.status === 400) comparison.refuse(algorithm, answer.body.detail);
      }),
    );
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
    stopSending();
    run.refused = status === 400; // anything else may pass
    if (status === 400) {
      byId("quota").setAttribute("aria-invalid", "true");
      say(byId("quota-problem"), text);
      verdict("idle", "That is not a limit yet.");
      showNothing();
    } else {
      verdict("bad", text);
    }
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

  const pace = () => Math.min(50, Math.max(1, Number(byId("pace").value) || 1));
  const stopSending = pressAndHold(byId("send"), send, pace);

  // The countdown, and what moves; almost nothing while the limit rests.
  let peeked = 0;
  function frame(now) {
    const waiting = run.freeAt - now;
    if (waiting > 0) verdict("bad", `Denied. Next in ${countdown(waiting)}`);
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
    comparison.move(now);
    requestAnimationFrame(frame);
  }

  const choices = ALGORITHMS.map(([value, label], place) => {
    const input = element("input", { type: "radio", name: "algorithm", value, ...(place === 0 ? { checked: "" } : {}) });
    return element("label", {}, input, element("span", {}, label));
  });
  byId("algorithms").append(...choices);

  function chosen() {
    const [, , quotas, about] = ALGORITHMS.find(([value]) => value === picked());
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
  byId("compare").addEventListener("change", (change) => {
    byId("lanes").hidden = !change.target.checked;
    start(); // all from the same beginning
  });
  copyButton(byId("copy"), () => byId("snippet").textContent);

  chosen();
  start();
  requestAnimationFrame(frame);
}

function countdown(milliseconds) {
  return milliseconds < 60_000 ? `${(Math.ceil(milliseconds / 100) / 10).toFixed(1)} s` : duration(milliseconds / 1000);
}

// crypto.randomUUID is absent on plain HTTP beyond this machine.
function randomText() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
