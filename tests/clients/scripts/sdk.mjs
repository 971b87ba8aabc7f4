// openai (JavaScript), the Vercel AI SDK's openai provider, and Mistral's SDK.
import { converse, load, order } from "./common.mjs";

async function speaker() {
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
  const { generateSpeech } = await load("ai");
  const model = createOpenAI({ baseURL: `${order.url}/v1`, apiKey: "none" }).speech("tts-1");
  return async function* (text) {
    const { audio } = await generateSpeech({ model, text, voice: order.voice, outputFormat: "wav" });
    yield audio.uint8Array;
  };
}

const names = { "openai-js": ["openai"], mistral: ["@mistralai/mistralai"] }[order.service] ?? ["ai", "@ai-sdk/openai"];
await converse(await speaker(), names);
