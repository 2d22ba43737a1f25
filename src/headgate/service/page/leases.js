// Rates of leases from totals: what the last minute looked like. No document: the tests call this directly.

const KEPT = 60; // seconds

// Remember the totals of `hybrid` at time `at` in `past`, and give what happened since the oldest that is kept.
export function leaseRates(past, at, hybrid) {
  const last = past.at(-1);
  // The clock was set back, or the service was started again: the old totals mean nothing now.
  if (last && (at <= last.at || hybrid.trips < last.hybrid.trips)) past.length = 0;
  past.push({ at, hybrid });
  while (past.length > 2 && past[1].at <= at - KEPT) past.shift();
  const first = past[0];
  const seconds = Math.max(at - first.at, 1);
  const before = new Map(first.hybrid.rules.map((row) => [`${row.rule} ${row.algorithm}`, row]));
  const rules = hybrid.rules.map((row) => {
    // With one event only, and for a rule that is new, all that there is.
    const old = past.length > 1 ? before.get(`${row.rule} ${row.algorithm}`) : undefined;
    const [local, redis] = [row.local - (old?.local ?? 0), row.redis - (old?.redis ?? 0)];
    return local + redis > 0 ? { ...row, local, redis } : row; // quiet in this minute: its share since the start
  });
  const [trips, failed] = past.length > 1 ? [hybrid.trips - first.hybrid.trips, hybrid.failedTrips - first.hybrid.failedTrips] : [0, 0];
  return { rules, trips: trips / seconds, failed, up: hybrid.up };
}
