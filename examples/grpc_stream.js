// Stream an answer over gRPC from Node.
//
// npm install @grpc/grpc-js @grpc/proto-loader
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const definition = loader.loadSync("pdmesh/v1/inference.proto", {
  includeDirs: [path.join(__dirname, "..", "proto")],
  keepCase: true,
  enums: String,
  defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).pdmesh.v1;
const address = process.env.PDMESH_GRPC ?? "127.0.0.1:8001";
const client = new Inference(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${process.env.PDMESH_API_KEY ?? "none"}`);

const question = "The code of the red door is 4821. What is the code of the red door?";
const call = client.Generate(
  { messages: [{ role: "user", content: question }], params: { temperature: 0 } },
  metadata,
  { deadline: Date.now() + 60_000 },
);
call.on("data", (reply) => process.stdout.write(reply.text));
call.on("error", (error) => {
  console.error(`\n${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("status", (status) => {
  const [receipt] = status.metadata.get("pdmesh-receipt");
  if (receipt) console.log(`\nfirst token after ${Math.round(JSON.parse(receipt).ttft_s * 1000)} ms`);
  client.close();
});
