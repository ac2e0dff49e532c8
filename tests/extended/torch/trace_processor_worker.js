// Runs Perfetto's trace processor, which is built for a web worker, and speaks for its message port: requests on stdin
// and answers on stdout, each behind its length in 4 bytes (little-endian). The argument is the folder that it is in.
"use strict";
const fs = require("fs");
const path = require("path");
const folder = process.argv[2];

// The worker's synchronous download of its WebAssembly module.
class XMLHttpRequest {
  open(method, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
}

function answer(bytes) {
  const message = Buffer.alloc(4 + bytes.length);
  message.writeUInt32LE(bytes.length);
  message.set(bytes, 4);
  for (let sent = 0; sent < message.length; ) sent += fs.writeSync(1, message, sent);
}

// `process` is hidden: the bundle refuses to run where it sees Node.
const worker = { location: { href: "file:///engine_bundle.js" } };
const code = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function("self", "XMLHttpRequest", "WorkerGlobalScope", "process", code)(worker, XMLHttpRequest, Object);

const port = { postMessage: answer };
worker.onmessage({ data: port });
let received = Buffer.alloc(0);
process.stdin.on("data", (chunk) => {
  received = Buffer.concat([received, chunk]);
  while (received.length >= 4 && received.length >= 4 + received.readUInt32LE()) {
    const end = 4 + received.readUInt32LE();
    port.onmessage({ data: new Uint8Array(received.subarray(4, end)) });
    received = received.subarray(end);
  }
});
