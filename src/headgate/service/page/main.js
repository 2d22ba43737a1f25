// Put the page together: the live stream feeds the overview, the playground stands on its own.

import { byId, say } from "./dom.js";
import { follow } from "./events.js";
import { createHour } from "./hour.js";
import { createOverview } from "./overview.js";
import { createPlayground } from "./playground.js";
import { createSystem } from "./system.js";

const TOKEN = "headgate-token"; // of this tab: sessionStorage
const STATES = {
  live: "Live",
  lost: "Connection lost, trying again",
  refused: "A token is needed",
};

const overview = createOverview();
const system = createSystem();
const hour = createHour(token);
let end = () => {};

function connect() {
  end();
  end = follow("live", token(), show, (state) => {
    const status = byId("status");
    status.dataset.state = state;
    document.body.dataset.live = state; // figures that have stopped are shown as such
    say(status, STATES[state]);
    if (state !== "refused") return;
    const notice = byId("notice");
    notice.hidden = false;
    say(notice, token() ? "The service did not accept this token." : "This service shows its figures to those with a token only.");
  });
}

function show(event) {
  overview.update(event);
  system.update(event);
}

function token() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

function keep(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
  byId("notice").hidden = true;
  connect();
  hour.refresh();
}

const dialog = byId("token-dialog");
byId("token-open").addEventListener("click", () => {
  byId("token").value = token();
  dialog.showModal();
});
byId("token-form").addEventListener("submit", () => keep(byId("token").value.trim()));
byId("token-forget").addEventListener("click", () => {
  dialog.close();
  keep("");
});
byId("token-close").addEventListener("click", () => dialog.close());

const check = new URL("api/v1/rate-limit/check?key=hello", document.baseURI);
say(byId("first-check"), `curl "${check}"`);
byId("send-some").addEventListener("click", async () => {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  check.searchParams.set("key", "live-page");
  const note = byId("send-some-note");
  try {
    const answers = await Promise.all(Array.from({ length: 10 }, () => fetch(check, { method: "POST", headers })));
    const refused = answers.find(({ status }) => ![200, 429].includes(status));
    say(note, refused ? `The service answered ${refused.status}.` : "Sent.");
  } catch {
    say(note, "The service does not answer.");
  }
});

createPlayground(token);
connect();
