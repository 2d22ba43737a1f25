// The six algorithms as the playground offers them: name, label, quotas to try, and what it does in two sentences.

const BUCKETS = ["5/10s", "10/second burst 20", "1/second burst 5", "80/10 minutes"];
export const WINDOWS = ["5/10s", "10/second", "30/minute", "80/10 minutes"]; // a window has no burst

export const ALGORITHMS = [
  ["TOKEN_BUCKET", "Token bucket", BUCKETS, "Tokens drip in at a steady rate and wait in a bucket. A full bucket lets a burst through, then requests pass at the rate of the drip."],
  ["LEAKY_BUCKET", "Leaky bucket", BUCKETS, "Requests fill a bucket that leaks at a steady rate. What would overflow is refused, so the outflow stays even."],
  ["GCRA", "GCRA", BUCKETS, "Remembers one number: when the next request is due on an even schedule. Behaves like a token bucket and keeps the least."],
  ["FIXED_WINDOW", "Fixed window", WINDOWS, "Counts in windows that start on the clock. Cheap, but twice the quota can pass around the edge of two windows."],
  ["SLIDING_WINDOW", "Sliding window", WINDOWS, "Remembers each request. No stretch of that length ever holds more than the quota."],
  ["SLIDING_WINDOW_COUNTER", "Sliding counter", WINDOWS, "Two counters, the older one weighted by how much of it is still in view: nearly a sliding window at the price of a fixed one."],
];
