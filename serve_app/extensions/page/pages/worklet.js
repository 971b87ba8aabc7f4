// Plays received audio on the audio thread. It buffers some audio before the start, and again after an underrun.

const AGAIN_S = 0.25, TOLD_EVERY = 8; // quanta of 128 samples
const AUDIBLE = 0.003; // of full scale, -50 dBFS

class Pieces extends AudioWorkletProcessor {
  constructor({ processorOptions: { bufferS } }) {
    super();
    this.bufferS = bufferS;
    this.clear();
    this.quanta = 0;
    this.port.onmessage = ({ data }) => {
      if (data.pcm) {
        this.pieces.push(data.pcm);
        this.buffered += data.pcm.length;
        this.isOver = false;
      } else if (data.over) this.isOver = true;
      else if (data.clear) this.clear();
      else if (data.close) this.isClosed = true;
    };
  }

  clear() {
    this.pieces = [];
    this.at = this.buffered = this.played = 0;
    this.isOver = this.isPlaying = this.isHeard = false;
    this.wait = this.bufferS;
  }

  process(_inputs, [[out]]) {
    if (this.isClosed) return false;
    if (!this.isPlaying && this.buffered && (this.isOver || this.buffered >= this.wait * sampleRate)) {
      this.isPlaying = true;
      this.port.postMessage({ begun: true, played: this.played });
    }
    if (!this.isPlaying) return true;
    let filled = 0, loudest = 0;
    while (filled < out.length && this.pieces.length) {
      const piece = this.pieces[0], many = Math.min(out.length - filled, piece.length - this.at);
      for (let index = 0; index < many; index++) {
        const value = out[filled + index] = piece[this.at + index];
        if (!this.isHeard) loudest = Math.max(loudest, Math.abs(value));
      }
      filled += many;
      this.at += many;
      if (this.at === piece.length) { this.pieces.shift(); this.at = 0; }
    }
    this.buffered -= filled;
    this.played += filled;
    const tell = {};
    if (loudest > AUDIBLE) { this.isHeard = true; tell.heard = true; }
    if (filled < out.length) {
      this.isPlaying = false;
      if (this.isOver) { tell.ended = true; this.isHeard = false; this.wait = this.bufferS; }
      else { tell.dry = true; this.wait = AGAIN_S; }
    }
    if (Object.keys(tell).length || this.quanta++ % TOLD_EVERY === 0) this.port.postMessage({ ...tell, played: this.played });
    return true;
  }
}

registerProcessor("pieces", Pieces);
