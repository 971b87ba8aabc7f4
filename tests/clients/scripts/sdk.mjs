// openai (JavaScript) and the Vercel AI SDK's openai provider: what `common.py` does, as far as these can.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createRequire } from "node:module";

const order = JSON.parse(readFileSync(process.argv[2], "utf8"));
const packages = createRequire(join(process.argv[3], "package.json"));
const load = async (name) => import(packages.resolve(name));
const version = (name) => JSON.parse(readFileSync(join(process.argv[3], "node_modules", name, "package.json"))).version;

async function speakers() {
  if (order.service === "openai-js") {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: `${order.url}/v1`, apiKey: "none" });
    return async function* (text) {
      const response = await client.audio.speech.create({ model: "tts-1", voice: order.voice, input: text, response_format: "wav" });
      for await (const part of response.body) yield part;
    };
  }
  if (order.service === "mistral") {
    const { Mistral } = await load("@mistralai/mistralai");
    const client = new Mistral({ serverURL: order.url, apiKey: "none" });
    return async function* (text) {
      const answer = await client.audio.speech.complete({ model: "voxtral-mini-tts", input: text, voiceId: order.voice, responseFormat: "wav" });
      yield Buffer.from(answer.audioData, "base64");
    };
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const { experimental_generateSpeech: generateSpeech } = await load("ai");
  const model = createOpenAI({ baseURL: `${order.url}/v1`, apiKey: "none" }).speech("tts-1");
  return async function* (text) {
    const { audio } = await generateSpeech({ model, text, voice: order.voice, outputFormat: "wav" });
    yield audio.uint8Array;
  };
}

const speak = await speakers();
const turns = [];
for (const [index, text] of order.texts.entries()) {
  const began = performance.now();
  let first = null;
  const parts = [];
  for await (const part of speak(text)) {
    first ??= (performance.now() - began) / 1000;
    parts.push(part);
  }
  const file = `turn-${index}.wav`;
  writeFileSync(join(order.folder, file), Buffer.concat(parts));
  turns.push({ text, file, first_audio_s: first, words: null });
  console.log(`turn ${index + 1}: first audio after ${first?.toFixed(2)} s`);
}
const names = { "openai-js": ["openai"], mistral: ["@mistralai/mistralai"] }[order.service] ?? ["ai", "@ai-sdk/openai"];
const versions = Object.fromEntries(names.map((name) => [`${name} (npm)`, version(name)]));
writeFileSync(join(order.folder, "report.json"), JSON.stringify({ versions, turns, interruptions: [] }));
