// Follows the live events of the service; connects again after the connection is lost.

const FIRST_WAIT = 500; // milliseconds
const LONGEST_WAIT = 10_000;
const SILENCE = 10_000; // events come each second; after this long without one the connection counts as lost

export class Refused extends Error {
  constructor(status) {
    super(`the service answered ${status}`);
    this.status = status;
  }
}

// Split a stream of text into the data of Server-Sent Events. Returns what is complete and the rest.
export function takeEvents(text) {
  const blocks = text.split(/\r?\n\r?\n/);
  const rest = blocks.pop();
  const events = [];
  for (const block of blocks) {
    const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
    if (lines.length) events.push(lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n"));
  }
  return [events, rest];
}

async function* read(url, token, signal) {
  // Not EventSource, which cannot send a token.
  const headers = { Accept: "text/event-stream" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(url, { headers, signal, cache: "no-store" });
  if (!answer.ok) throw new Refused(answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const [events, kept] = takeEvents(rest + value);
    rest = kept;
    for (const event of events) yield JSON.parse(event);
  }
}

// Call `onEvent` with each event and `onState` with "live", "lost" or "refused". Returns a function that ends it.
export function follow(url, token, onEvent, onState) {
  const end = new AbortController();
  let wait = FIRST_WAIT;

  async function once() {
    const quiet = new AbortController();
    let alarm = setTimeout(() => quiet.abort(), SILENCE);
    try {
      for await (const event of read(url, token, AbortSignal.any([end.signal, quiet.signal]))) {
        clearTimeout(alarm);
        alarm = setTimeout(() => quiet.abort(), SILENCE);
        wait = FIRST_WAIT;
        onState("live");
        onEvent(event);
      }
      return "lost";
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) return "refused";
      return "lost";
    } finally {
      clearTimeout(alarm);
      quiet.abort(); // closes a connection that an exception left open
    }
  }

  async function forEver() {
    while (!end.signal.aborted) {
      const state = await once();
      if (end.signal.aborted) return;
      onState(state);
      if (state === "refused") return; // asking again with the same token changes nothing
      await new Promise((resume) => setTimeout(resume, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT);
    }
  }

  forEver();
  return () => end.abort();
}
