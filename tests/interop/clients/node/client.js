// What an application does with grpc-js and nothing but our .proto files: node client.js ADDRESS
// PROTO_FOLDER TASK. Prints what it got as one line of JSON.
"use strict";

const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protoFolder, taskFile] = process.argv.slice(2);
const task = JSON.parse(fs.readFileSync(taskFile, "utf8"));
const definition = loader.loadSync("pdmesh/v1/inference.proto", {
  includeDirs: [protoFolder],
  keepCase: true,
  enums: String,
  defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).pdmesh.v1;
const client = new Inference(address, grpc.credentials.createInsecure());
const greedy = { temperature: 0, max_tokens: task.max_tokens };
const endless = { temperature: 0, max_tokens: 1900, ignore_eos: true };

const chat = (text) => ({ messages: [{ role: "user", content: text }], params: greedy });
const column = (bytes) => Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readUInt32LE(4 * i));
const column32 = (ids) => {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, i) => bytes.writeUInt32LE(id, 4 * i));
  return bytes;
};

// The whole of one call: text, ids, how it ended, and the receipt of its trailers. `onMessage` may
// cancel the call.
function generate(request, { deadline, onMessage } = {}) {
  return new Promise((resolve) => {
    const call = client.Generate(request, deadline ? { deadline } : {});
    const got = { text: "", ids: [], messages: 0, finish: "", usage: null };
    call.on("data", (message) => {
      got.messages += 1;
      got.text += message.text;
      got.ids.push(...column(message.token_ids));
      if (message.finish_reason !== "FINISH_REASON_UNSPECIFIED") {
        got.finish = message.finish_reason;
        got.usage = message.usage;
      }
      if (onMessage) onMessage(call);
    });
    call.on("error", () => {}); // its status comes with the next event
    call.on("status", (status) => {
      const json = (name) => {
        const [value] = status.metadata.get(name);
        return value === undefined ? null : JSON.parse(value);
      };
      resolve({
        ...got,
        status: grpc.status[status.code],
        details: status.details,
        receipt: json("pdmesh-receipt"),
        error: json("pdmesh-error"),
      });
    });
  });
}

const unary = (method, request) =>
  new Promise((resolve, reject) => {
    client[method](request, (error, reply) => (error ? reject(error) : resolve(reply)));
  });

async function main() {
  const models = (await unary("ListModels", {})).models;
  const ids = column((await unary("Tokenize", { text: task.text })).token_ids);
  const result = {
    models: models.map((model) => [model.name, model.max_model_len]),
    num_ids: ids.length,
    first: await generate(chat(task.prompts[0])),
    all: (await Promise.all(task.prompts.map((text) => generate(chat(text))))).map((it) => it.text),
    from_text: await generate({ text: task.text, params: greedy }),
    from_ids: await generate({ token_ids: column32(ids), params: greedy }),
    wrong_model: await generate({ ...chat("Hello!"), model: "no-such-model" }),
    wrong_value: await generate({ text: "Hello!", params: { temperature: 9 } }),
    nothing: await generate({}),
    late: await generate({ text: "The", params: endless }, { deadline: Date.now() + 250 }),
    left: await generate({ text: "The", params: endless }, { onMessage: (call) => call.cancel() }),
  };
  client.close();
  process.stdout.write(JSON.stringify(result) + "\n");
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
