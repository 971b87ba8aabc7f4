// Speaks text while it is written, in turns over the WebSocket `/v2/speak`.

import { openPlayer, Samples, wake } from "./player.js";
import { socket } from "./server.js";

const RATE = 24000;

export class LiveSpeech {
  // Optional callbacks in `on`: sound(delayMs), interrupted({spoken, remaining}), ended(), failed(message), noted(message).
  constructor(voice, on) {
    Object.assign(this, { on, baseS: 0, isDropping: false, isActive: false, lastKeyAt: 0, waiting: [] });
    wake(RATE);
    const query = new URLSearchParams({ encoding: "linear16", sample_rate: RATE, ...(voice ? { model: voice } : {}) });
    this.samples = new Samples();
    this.ready = this.renew();
    socket(`v2/speak?${query}`).then((opened) => this.listen(opened));
  }

  listen(opened) {
    this.socket = opened;
    if (this.isClosed) opened.close();
    opened.onopen = () => { this.isOpen = true; for (const each of this.waiting.splice(0)) this.send(each); };
    opened.onmessage = ({ data }) => this.take(data);
    opened.onclose = ({ code, reason }) => {
      if (this.isClosed) return;
      const refused = "The server refused the connection. Check the API key, and choose a stored voice if the model clones voices.";
      this.fail(this.isOpen ? reason || `The server closed the connection (code ${code}).` : refused);
    };
  }

  async renew() {
    this.player = await openPlayer(RATE, {
      heard: () => this.on.sound?.(performance.now() - this.lastKeyAt),
      ended: () => { if (this.isTurnOver) { this.isActive = false; this.on.ended?.(); } },
    });
  }

  send(message) {
    if (this.isOpen) this.socket.send(JSON.stringify(message));
    else this.waiting.push(message);
  }

  write(text) {
    this.lastKeyAt = performance.now();
    this.isActive = true;
    this.isTurnOver = false;
    this.send({ type: "Speak", text });
  }

  flush() { if (this.isActive) this.send({ type: "Flush" }); }

  // Stops the sound immediately. The heard text follows in interrupted().
  interrupt() {
    if (!this.isActive || this.isDropping) return;
    const playedS = this.player?.playedS ?? 0;
    this.player?.stop();
    this.player = null;
    this.baseS += playedS;
    this.isDropping = true;
    this.isActive = false;
    this.ready = this.renew();
    this.send({ type: "Interrupt", ...(this.baseS ? { playback_offset: { value: Math.round(1000 * this.baseS) } } : {}) });
  }

  async take(data) {
    if (typeof data !== "string") {
      if (this.isDropping) return;
      const pcm = this.samples.take(new Uint8Array(data));
      if (this.player) this.player.push(pcm);
      else { await this.ready; this.player.push(pcm); }
      return;
    }
    const message = JSON.parse(data);
    switch (message.type) {
      case "SpeechMetadata":
        await this.ready;
        this.isTurnOver = true;
        this.player.end();
        break;
      case "SpeechInterrupted":
        this.isDropping = false;
        this.samples = new Samples();
        this.on.interrupted?.({ spoken: message.text_spoken, remaining: message.text_remaining });
        break;
      case "Warning":
        this.isDropping = false;
        this.on.noted?.(message.description);
        break;
      case "Error":
        this.fail(message.description);
        break;
    }
  }

  fail(message) {
    this.close();
    this.on.failed?.(message);
  }

  close() {
    this.isClosed = true;
    this.isActive = false;
    this.socket?.close();
    this.player?.stop();
  }
}
