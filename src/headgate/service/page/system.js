// What the service stands on: the doors that clients come in by, the servers of Redis, and the leases of hybrid rules.

import { byId, element, say } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { leaseRates } from "./leases.js";

const DOORS = {
  http: ["HTTP", "--port"],
  resp: ["Redis protocol", "--resp-port"],
  grpc: ["gRPC", "--grpc-port"],
};

const DASHES = ["number wide", "number", "number wide", "number wide", "number wide"].map((look) => ["–", look]);

export function createSystem() {
  const past = []; // the lease figures of the last minute
  return {
    update(event) {
      doors(event.doors ?? []);
      servers(event.store?.servers ?? []);
      leases(event.hybrid ? leaseRates(past, event.at, event.hybrid) : null);
    },
  };
}

function fill(id, rows) {
  const body = byId(id);
  while (body.children.length > rows.length) body.lastChild.remove();
  rows.forEach((cells, place) => {
    let line = body.children[place];
    if (!line || line.children.length !== cells.length) {
      line = element("tr", {}, ...cells.map((_, column) => element(column ? "td" : "th", column ? {} : { scope: "row" })));
      if (body.children[place]) body.children[place].replaceWith(line);
      else body.append(line);
    }
    cells.forEach(([text, look = "", title = ""], column) => {
      const cell = line.children[column];
      say(cell, text);
      cell.className = look;
      if (title) cell.title = title;
      else cell.removeAttribute("title");
    });
  });
}

function doors(rows) {
  fill(
    "doors",
    rows.map(({ name, port, tls, connections }) => {
      const [words, option] = DOORS[name] ?? [name, ""];
      if (port === null) return [[words, "off"], ["closed", "state off"], [`${option} opens it`, "off"], ["", "number"]];
      const known = connections !== null;
      return [
        [words],
        [String(port), "state good"],
        [tls ? "TLS" : "no TLS"],
        [known ? count(connections) : "–", "number", known ? "" : "This system does not tell the connections of HTTP."],
      ];
    }),
  );
}

function servers(rows) {
  byId("servers-card").hidden = !rows.length;
  fill(
    "servers",
    rows.map((row) => {
      const { inUse, idle, waiting } = row.connections;
      const parts = [[inUse, "in use"], [idle, "idle"], [waiting, "wait"]].filter(([number, words]) => number || words === "idle");
      const ours = [parts.map(([number, words]) => `${count(number)} ${words}`).join(", "), "number"];
      if (row.status !== "UP") return [[row.server, "address"], ["down", "state bad", row.problem], ...DASHES, ours];
      const memory = row.memoryMaxBytes ? `${bytes(row.memoryUsedBytes)} of ${bytes(row.memoryMaxBytes)}` : bytes(row.memoryUsedBytes);
      return [
        [row.server, "address"],
        ["up", "state good"],
        [duration(row.responseSeconds), "number wide"],
        [memory, "number"],
        [count(row.commandsPerSecond), "number wide"],
        [count(row.connectedClients), "number wide"],
        [count(row.evictedKeys), row.evictedKeys ? "number warn wide" : "number wide"],
        ours,
      ];
    }),
  );
}

function leases(found) {
  byId("leases-card").hidden = !found;
  if (!found) return;
  fill(
    "leases",
    found.rules.map((row) => [
      [row.rule],
      [percent(row.local, row.local + row.redis), "number"],
      [count(row.held), "number"],
      [count(row.keys), "number"],
      [count(row.unreported), "number wide"],
    ]),
  );
  const failed = found.failed ? `, ${count(found.failed)} failed in the last minute` : "";
  say(byId("leases-trips"), found.up ? `${count(found.trips)} round trips a second${failed}` : "A worker cannot report its leases to Redis.");
  byId("leases-trips").classList.toggle("problem", !found.up);
}
