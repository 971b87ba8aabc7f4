// LiveKit's agents for Node with one of its plugins, used as its agents use it.
import { converse, load, order } from "./common.mjs";

const { initializeLogger, tts: base } = await load("@livekit/agents");
initializeLogger({ pretty: false, level: "warn" });

// Nothing but the address and the voice is set.
async function plugin() {
  const { url, voice } = order;
  const { TTS } = await load(`@livekit/agents-plugin-${order.service}`);
  switch (order.service) {
    case "openai":
      return new TTS({ baseURL: `${url}/v1`, apiKey: "none", voice });
    case "deepgram":
      return new TTS({ baseUrl: url, apiKey: "none", model: voice });
    case "elevenlabs":
      return new TTS({ baseURL: `${url}/v1`, apiKey: "none", voiceId: voice });
  }
  throw new Error(order.service);
}

function header(rate) {
  const bytes = Buffer.alloc(44);
  bytes.write("RIFF\xff\xff\xff\xffWAVEfmt ", "latin1");
  for (const [value, place, size] of [[16, 16, 4], [1, 20, 2], [1, 22, 2], [rate, 24, 4], [2 * rate, 28, 4], [2, 32, 2], [16, 34, 2]])
    bytes.writeUIntLE(value, place, size);
  bytes.write("data\xff\xff\xff\xff", 36, "latin1");
  return bytes;
}

const tts = await plugin();
tts.on("error", ({ error, recoverable }) => {
  console.error(error); // LiveKit's streams end silently then
  if (!recoverable) process.exit(1);
});
await converse(
  async function* (text) {
    const stream = tts.capabilities.streaming ? tts.stream() : tts.synthesize(text);
    if (tts.capabilities.streaming) {
      for (const word of text.split(/(?= )/)) stream.pushText(word);
      stream.flush();
      stream.endInput();
    }
    let begun = false;
    try {
      for await (const event of stream) {
        if (event === base.SynthesizeStream.END_OF_STREAM) return;
        const { data, sampleRate } = event.frame;
        const pcm = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
        yield begun ? pcm : Buffer.concat([header(sampleRate), pcm]);
        begun = true;
      }
    } finally {
      stream.close();
    }
  },
  ["@livekit/agents", `@livekit/agents-plugin-${order.service}`],
  { interruptions: order.interruptions },
);
await tts.close();
process.exit(0); // LiveKit keeps timers
