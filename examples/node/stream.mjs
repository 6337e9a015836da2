// Stream a chat over gRPC, straight from the .proto files.
//
//   cd examples/node && npm install
//   node stream.mjs "What is the capital of France?" [127.0.0.1:50051]
//
// OCTAVO_ADDRESS gives the address as well, OCTAVO_API_KEY the key where the service asks for one.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [question = "Say hello.", address = process.env.OCTAVO_ADDRESS ?? "127.0.0.1:50051"] = process.argv.slice(2);
const protos = fileURLToPath(new URL("../../protos", import.meta.url));

// longs: String keeps 64-bit numbers (the seed) exact; oneofs: true tells which event came.
const definition = protoLoader.loadSync("octavo/v1/generation.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).octavo.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const metadata = new grpc.Metadata();
if (process.env.OCTAVO_API_KEY) metadata.set("authorization", `Bearer ${process.env.OCTAVO_API_KEY}`);

const call = client.GenerateStream(
  {
    input: {
      chat: { messages: [{ role: "user", content: question }] },
      sampling: { temperature: 0.7, seed: "7" },
      stopping: { max_tokens: 64 },
    },
  },
  metadata,
  { deadline: Date.now() + 120_000 }, // when it is over, the service stops working on the request
);

try {
  for await (const message of call) {
    if (message.event === "started") console.error(`[${message.started.prompt_tokens} tokens]`);
    else if (message.event === "delta") process.stdout.write(message.delta.text);
    else if (message.event === "finished") {
      const { finish_reason, completion_tokens } = message.finished;
      console.error(`\n[${finish_reason}: ${completion_tokens} tokens]`);
    }
  }
} catch (error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
