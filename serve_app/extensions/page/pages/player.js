// Player of streamed samples. It uses an AudioWorklet on a secure page, and buffer sources elsewhere.

import { at } from "./dom.js";

let context = null, loading = null;

const bufferS = () => (at("playback").value === "immediate" ? 0 : 0.1); // audio to buffer before playback starts

// Resumes the audio context. The first call must be in a click or key press, because browsers otherwise block sound.
// Without a `rate`, keep the current rate.
export function wake(rate = context?.sampleRate ?? 24000) {
  if (context?.sampleRate !== rate) {
    context?.close();
    context = new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    loading = context.audioWorklet?.addModule(new URL("page/worklet.js", document.baseURI)) ?? null;
  }
  context.resume();
  return context;
}

// Resolves when the audio clock has stopped for `forMs`. The clock stops in some browsers without an audio output.
export async function stoodStill(forMs, signal) {
  for (let last = -1; !signal.aborted && context.currentTime !== last;) {
    last = context.currentTime;
    await new Promise((done) => setTimeout(done, forMs));
  }
}

export const isSmooth = () => Boolean(context?.audioWorklet);

// Optional callbacks in `on`: begun(), heard(), dry(), ended().
export async function openPlayer(rate, on = {}) {
  wake(rate);
  await loading;
  return context.audioWorklet ? new WorkletPlayer(on) : new SourcePlayer(on);
}

class Player {
  constructor(on) {
    Object.assign(this, { on, underruns: 0, isOver: false });
  }

  tell(name) { this.on[name]?.(); }

  get outputMs() { return 1000 * (context.outputLatency || context.baseLatency || 0); }
}

class WorkletPlayer extends Player {
  constructor(on) {
    super(on);
    this.samples = 0;
    this.toldAt = null;
    this.node = new AudioWorkletNode(context, "pieces", { outputChannelCount: [1], processorOptions: { bufferS: bufferS() } });
    this.node.port.onmessage = ({ data }) => this.take(data);
    this.node.connect(context.destination);
  }

  take({ begun, played, heard, dry, ended }) {
    if (this.isClosed) return;
    this.samples = played;
    this.toldAt = dry || ended ? null : performance.now();
    if (begun) this.tell("begun");
    if (heard) this.tell("heard");
    if (dry) { this.underruns++; this.tell("dry"); }
    if (ended) this.tell("ended");
  }

  push(pcm) { this.isOver = false; this.node.port.postMessage({ pcm }, [pcm.buffer]); }

  end() { this.isOver = true; this.node.port.postMessage({ over: true }); }

  // Seconds of played audio, including audio on the way to the loudspeaker.
  get playedS() {
    const since = this.toldAt === null ? 0 : Math.min(0.1, (performance.now() - this.toldAt) / 1000);
    return this.samples / context.sampleRate + since;
  }

  stop() {
    if (this.isClosed) return;
    this.isClosed = true;
    this.node.port.postMessage({ close: true });
    this.node.disconnect();
  }
}

class SourcePlayer extends Player {
  constructor(on) {
    super(on);
    Object.assign(this, { sources: new Set(), due: 0, given: 0, isHeard: false });
  }

  push(pcm) {
    this.isOver = false;
    const now = context.currentTime, buffer = context.createBuffer(1, pcm.length, context.sampleRate);
    buffer.copyToChannel(pcm, 0);
    const isDry = this.given > 0 && this.due < now;
    if (isDry) { this.underruns++; this.tell("dry"); }
    if (isDry || !this.given) this.tell("begun");
    this.due = Math.max(this.due, now + (this.given ? 0.04 : bufferS()));
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    source.start(this.due);
    source.onended = () => {
      this.sources.delete(source);
      if (!this.sources.size && this.isOver && !this.isClosed) { this.given = 0; this.isHeard = false; this.tell("ended"); }
    };
    this.sources.add(source);
    const loud = this.isHeard ? -1 : pcm.findIndex((value) => Math.abs(value) > 0.003);
    if (loud >= 0) {
      this.isHeard = true;
      setTimeout(() => this.isClosed || this.tell("heard"), 1000 * (this.due - now + loud / context.sampleRate));
    }
    this.due += buffer.duration;
    this.given += buffer.duration;
    this.total = (this.total ?? 0) + buffer.duration;
  }

  end() {
    this.isOver = true;
    if (!this.sources.size) { this.given = 0; this.tell("ended"); }
  }

  get playedS() { return Math.max(0, (this.total ?? 0) - Math.max(0, this.due - context.currentTime)); }

  stop() {
    if (this.isClosed) return;
    this.isClosed = true;
    for (const source of this.sources) { source.onended = null; source.stop(); source.disconnect(); }
  }
}

// Converts s16le bytes to samples from -1 to 1. The network may split a sample between two calls.
export class Samples {
  constructor() { this.odd = new Uint8Array(0); }

  take(value) {
    const bytes = new Uint8Array(this.odd.length + value.length);
    bytes.set(this.odd);
    bytes.set(value, this.odd.length);
    const whole = bytes.length & ~1;
    this.odd = bytes.slice(whole);
    return Float32Array.from(new Int16Array(bytes.buffer, 0, whole / 2), (sample) => sample / 32768);
  }
}

export function joined(parts) {
  const whole = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) { whole.set(part, place); place += part.length; }
  return whole;
}

export function asWav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (place, letters) => [...letters].forEach((letter, index) => view.setUint8(place + index, letter.charCodeAt(0)));
  const size = 2 * samples.length;
  text(0, "RIFF"); view.setUint32(4, 36 + size, true); text(8, "WAVEfmt "); view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); view.setUint16(22, 1, true); view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, size, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, Math.round(sample * 32768), true));
  return new Blob([view], { type: "audio/wav" });
}
