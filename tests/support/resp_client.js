// A client of the Redis protocol, of the package that it is told: `node resp_client.js OPTIONS`, with options as JSON.
//
//   modules   the folder node_modules with the package
//   package   redis (node-redis) or ioredis
//   port      on 127.0.0.1
//   commands  [[word, ...]]: send them all at once on one connection, and print the replies as a list; an error of the
//             service is printed as {error}
"use strict";
const path = require("node:path");

const options = JSON.parse(process.argv[2]);
const library = require(path.join(options.modules, options.package));

async function main() {
  let send, close;
  if (options.package === "redis") {
    const client = library.createClient({ url: `redis://127.0.0.1:${options.port}` });
    await client.connect();
    send = (words) => client.sendCommand(words);
    close = () => client.close();
  } else {
    const client = new library.Redis(options.port, "127.0.0.1");
    send = ([name, ...words]) => client.call(name, ...words);
    close = () => client.quit();
  }
  const replies = await Promise.all(options.commands.map((words) => send(words).catch((error) => ({ error: error.message }))));
  await close();
  console.log(JSON.stringify(replies));
}

main();
