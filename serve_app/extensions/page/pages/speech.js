// Requests and plays an utterance, and keeps its audio for replay, saving and the drawings.

import { joined, openPlayer, Samples, stoodStill, wake } from "./player.js";
import { ask } from "./server.js";

export class Speech {
  constructor(fields, pressedAt) {
    Object.assign(this, { fields, pressedAt, rate: 24000, parts: [], words: [], came: [], played: [], dry: [] });
    Object.assign(this, { ignored: [], serverMs: null, firstMs: null, soundMs: null, outputMs: 0, isWhole: false });
    this.leaving = new AbortController();
  }

  get lengthS() { return this.parts.reduce((sum, part) => sum + part.length, 0) / this.rate; }

  get samples() {
    if (this.parts.length > 1) this.parts = [joined(this.parts)];
    return this.parts[0] ?? new Float32Array(0);
  }

  since() { return (performance.now() - this.pressedAt) / 1000; }

  // Speaks until playback ends. Optional callbacks in `on`: came() and heard(). Throws Refused.
  async speak(on) {
    wake();
    const opening = openPlayer(this.rate, this.listeners(on)); // while the server works
    const answer = await ask("v1/audio/speech", {
      json: { ...this.fields, response_format: "pcm", stream_format: "sse", word_timestamps: true },
      headers: { "x-server-timing": "1" },
      signal: this.leaving.signal,
    });
    this.firstMs = performance.now() - this.pressedAt;
    this.serverMs = timing(answer.headers.get("server-timing"));
    this.estimated = answer.headers.get("x-word-times") === "estimated";
    this.cutsText = /\binput\b/.test(answer.headers.get("x-ignored") ?? "");
    this.rate = Number(answer.headers.get("x-sample-rate")) || this.rate;
    this.player = await opening;
    if (this.rate !== 24000) this.player = await openPlayer(this.rate, this.listeners(on));
    if (this.leaving.signal.aborted) this.player.stop();
    const samples = new Samples();
    for await (const event of events(answer.body)) {
      if (event.type === "speech.audio.delta") {
        const pcm = samples.take(Uint8Array.from(atob(event.audio), (letter) => letter.charCodeAt(0)));
        if (!pcm.length) continue;
        this.parts.push(pcm.slice());
        this.came.push([this.since(), pcm.length / this.rate]);
        this.player.push(pcm);
      } else if (event.type === "speech.audio.words") this.words.push(...event.words);
      else if (event.type === "speech.audio.done") {
        this.ignored = event.ignored ?? [];
        this.isWhole = true;
      } else if (event.type === "speech.audio.error") throw new Error(event.error.message);
      on.came?.();
    }
    if (!this.isWhole) throw new Error("The server closed the connection before the end of the audio.");
    this.player.end();
    const told = new AbortController();
    await Promise.race([this.over.then(() => told.abort()), stoodStill(2000, told.signal)]);
    if (this.leaving.signal.aborted) throw new DOMException("stopped", "AbortError");
    if (!told.signal.aborted) { this.player.stop(); throw new Error("The browser plays no sound. Check the audio output."); }
  }

  listeners(on) {
    this.over = new Promise((done) => { this.finish = done; });
    return {
      begun: () => this.played.push([this.since(), Infinity]),
      heard: () => {
        if (this.soundMs !== null) return;
        this.soundMs = performance.now() - this.pressedAt;
        this.outputMs = this.player?.outputMs ?? 0;
        on.heard?.();
      },
      dry: () => { this.dry.push(this.since()); this.pause(); },
      ended: () => { this.pause(); this.finish(); },
    };
  }

  // Ends the current stretch of played audio in the drawing.
  pause() {
    const last = this.played.at(-1);
    if (last && last[1] === Infinity) last[1] = this.since();
  }

  get playedRows() { return this.played.map(([from, to]) => [from, to === Infinity ? this.since() : to]); }

  get playedS() { return Math.min(this.lengthS, this.player?.playedS ?? 0); }

  stop() {
    this.leaving.abort();
    this.player?.stop();
    this.pause();
    this.finish?.();
  }

  // Plays the kept audio again, from `fromS` seconds.
  async replay(fromS, ended) {
    this.player?.stop();
    const player = await openPlayer(this.rate, { ended });
    this.player = player;
    const rest = this.samples.slice(Math.round(fromS * this.rate));
    if (!rest.length) { ended(); return; }
    player.push(rest);
    player.end();
  }
}

// Returns the server's share of the time to first audio: the sum of its stages.
export function timing(header) {
  if (!header) return null;
  return [...header.matchAll(/;dur=([\d.]+)/g)].reduce((sum, [, dur]) => sum + Number(dur), 0);
}

async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}
