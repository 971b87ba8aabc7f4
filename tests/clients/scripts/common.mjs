// What every client's script does, as far as these can: see `common.py`.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createRequire } from "node:module";

export const order = JSON.parse(readFileSync(process.argv[2], "utf8"));
const packages = createRequire(join(process.argv[3], "package.json"));
export const load = async (name) => import(packages.resolve(name));
const version = (name) => JSON.parse(readFileSync(join(process.argv[3], "node_modules", name, "package.json"))).version;

// `speak(text)` yields the bytes of a WAV file, whose length its header need not tell. `packagesUsed`: their names.
export async function converse(speak, packagesUsed, { interruptions = 0 } = {}) {
  const turns = [];
  const interrupted = [];
  for (const [index, text] of order.texts.entries()) {
    if (index < interruptions) {
      const story = `${order.texts.at(-1 - index)} ${text}`;
      const heard = await listen(speak(story), 44 + 2 * 0.3 * 8000);
      interrupted.push({ text: story, file: written(`interruption-${index}.wav`, heard.parts), words: null, stalled_s: 0 });
    }
    const { parts, first } = await listen(speak(text));
    turns.push({ text, file: written(`turn-${index}.wav`, parts), first_audio_s: first, words: null });
    console.log(`turn ${index + 1}: first audio after ${first?.toFixed(2)} s`);
  }
  const versions = Object.fromEntries([...packagesUsed.map((name) => [`${name} (npm)`, version(name)]), ["node", process.version]]);
  writeFileSync(join(order.folder, "report.json"), JSON.stringify({ versions, turns, interruptions: interrupted }));
}

async function listen(audio, atMost = Infinity) {
  const began = performance.now();
  const parts = [];
  let first = null;
  let bytes = 0;
  for await (const part of audio) {
    first ??= (performance.now() - began) / 1000;
    parts.push(part);
    bytes += part.length;
    if (bytes > atMost) break; // which ends the generator
  }
  return { parts, first };
}

function written(file, parts) {
  writeFileSync(join(order.folder, file), Buffer.concat(parts));
  return file;
}
