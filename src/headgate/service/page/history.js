// What the last minutes looked like: events in, rates out. No document: the tests call these directly.

export const KEPT = 900; // seconds
export const GAP = 3; // seconds without an event after which a line breaks off

export const ruleName = (rule) => `${rule.rule}\u0000${rule.algorithm}`;

// Counts are since the last event, which may be late: divide by the time that really passed.
export function sampleOf(event, before) {
  const passed = before ? event.at - before.at : 1;
  const seconds = passed > 0 && passed <= GAP ? passed : 1;
  const rules = new Map();
  const sample = { at: event.at, allowed: 0, denied: 0, degraded: 0, rules, p50: null, p99: null };
  for (const rule of event.rules ?? []) {
    const rates = { allowed: rule.allowed / seconds, denied: rule.denied / seconds };
    // Most rules are quiet most of the time; a quarter of an hour of zeros would be megabytes.
    if (rule.allowed || rule.denied) rules.set(ruleName(rule), { ...rates, name: rule.rule, algorithm: rule.algorithm });
    sample.allowed += rates.allowed;
    sample.denied += rates.denied;
    sample.degraded += (rule.degraded ?? 0) / seconds;
  }
  // Without a check in the last second there is no latency to show, whatever the event repeats.
  if (sample.allowed + sample.denied > 0) {
    sample.p50 = event.latency?.p50 ?? null;
    sample.p99 = event.latency?.p99 ?? null;
  }
  return sample;
}

export function add(history, event) {
  const last = history.at(-1);
  if (last && event.at <= last.at) {
    if (event.at > last.at - GAP) return; // told twice
    history.length = 0; // the server's clock went back: the old times mean nothing now
  }
  history.push(sampleOf(event, history.at(-1)));
  while (history[0].at < event.at - KEPT) history.shift();
}

export function since(history, from) {
  const first = history.findIndex((sample) => sample.at >= from);
  return first < 0 ? [] : history.slice(Math.max(0, first - 1));
}

// Every rule that was asked in these samples, the busiest first.
export function rulesByTraffic(samples) {
  const found = new Map();
  for (const sample of samples) {
    for (const [id, rates] of sample.rules) {
      const sum = found.get(id) ?? { id, name: rates.name, algorithm: rates.algorithm, allowed: 0, denied: 0 };
      sum.allowed += rates.allowed;
      sum.denied += rates.denied;
      found.set(id, sum);
    }
  }
  return [...found.values()].sort(
    (one, other) => other.allowed + other.denied - one.allowed - one.denied || (one.id < other.id ? -1 : 1),
  );
}
