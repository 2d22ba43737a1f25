// A client of Envoy's rate-limit service that uses @grpc/grpc-js: `node grpc_client.js OPTIONS`, with options as JSON.
//
//   modules    the folder node_modules with @grpc/grpc-js
//   target     host:port
//   tls        {ca, key, cert}, names of files; key and cert may be missing
//   calls      [{what, value, metadata, deadline}]: make them all at once, and print their results as a list
//   callers    so many call one after the other until standard input ends; the number of answers is printed now and then
//   ready      calls wait for a connection
"use strict";
const fs = require("node:fs");
const path = require("node:path");

const options = JSON.parse(process.argv[2]);
const grpc = require(path.join(options.modules, "@grpc/grpc-js"));
const loader = require(path.join(options.modules, "@grpc/proto-loader"));

const proto = loader.loadSync(path.join(__dirname, "rls.proto"), { keepCase: true, enums: String, defaults: true });
const { RateLimitService } = grpc.loadPackageDefinition(proto).envoy.service.ratelimit.v3;
const read = (file) => (file ? fs.readFileSync(file) : null);
const { tls } = options;
const credentials = tls
  ? grpc.credentials.createSsl(read(tls.ca), read(tls.key), read(tls.cert))
  : grpc.credentials.createInsecure();
const client = new RateLimitService(options.target, credentials, { "grpc.use_local_subchannel_pool": 1 });

function call({ what, value, metadata = {}, deadline = 30 }) {
  const request = { domain: "demo", descriptors: [{ entries: [{ key: what, value: String(value) }] }] };
  const sent = new grpc.Metadata({ waitForReady: Boolean(options.ready) });
  for (const [name, text] of Object.entries(metadata)) sent.set(name, text);
  return new Promise((resolve) => {
    client.ShouldRateLimit(request, sent, { deadline: Date.now() + 1000 * deadline }, (error, answer) => {
      if (error) resolve({ status: grpc.status[error.code], why: error.details });
      else resolve({ status: "OK", code: answer.overall_code, remaining: answer.statuses[0]?.limit_remaining });
    });
  });
}

async function callAgainAndAgain() {
  const seen = { answered: 0, failed: [] };
  let ended = false;
  process.stdin.on("end", () => (ended = true)).resume();
  async function caller(number) {
    for (let turn = 0; !ended; turn++) {
      const what = options.asked[turn % options.asked.length];
      const found = await call({ what, value: number });
      if (found.code === "OK") seen.answered++;
      else seen.failed.push(found);
      if (seen.answered % 100 === 0 || found.code !== "OK") console.log(JSON.stringify(seen));
    }
  }
  await Promise.all(Array.from({ length: options.callers }, (_, number) => caller(number)));
  console.log(JSON.stringify(seen));
}

async function main() {
  if (options.callers) await callAgainAndAgain();
  else console.log(JSON.stringify(await Promise.all(options.calls.map(call))));
  client.close();
}

main();
