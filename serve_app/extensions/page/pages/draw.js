// Draws the waveform, the timeline of received and played audio, and the time to first audio.

import { color, sheet } from "./dom.js";

// Draws the peaks of `samples`, with the played part in a darker color. `wholeS` is the expected length in seconds.
export function drawWave(canvas, samples, rate, { playedS = 0, wholeS = 0 } = {}) {
  const { paint, width, height } = sheet(canvas);
  const bars = Math.floor(width / 3), each = Math.max(1, Math.ceil(Math.max(samples.length, wholeS * rate) / bars));
  const said = color("accent"), still = color("wave"), stride = Math.max(1, each >> 6);
  for (let bar = 0; bar * each < samples.length; bar++) {
    let peak = 0;
    const end = Math.min(samples.length, (bar + 1) * each);
    for (let index = bar * each; index < end; index += stride) peak = Math.max(peak, Math.abs(samples[index]));
    const tall = Math.max(2, Math.min(1, peak * 1.6) * (height - 12));
    paint.fillStyle = (bar + 0.5) * each <= playedS * rate ? said : still;
    paint.fillRect(bar * 3, (height - tall) / 2, 2, tall);
  }
  return (bars * each) / rate; // duration of the full width in seconds
}

const LEFT = 46; // space for the labels of the y axis
const STEPS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600];
const stepFor = (most, many) => STEPS.find((size) => most / size <= many) ?? 10 ** Math.ceil(Math.log10(most / many));

function axis(paint, width, height, mostS, mark, every = stepFor(mostS, 8)) {
  paint.fillStyle = color("soft");
  paint.strokeStyle = color("line");
  paint.font = "11px system-ui, sans-serif";
  for (let at = 0; at <= mostS; at += every) {
    const x = LEFT + (at / mostS) * (width - LEFT);
    paint.beginPath(); paint.moveTo(x, 0); paint.lineTo(x, height - 16); paint.stroke();
    if (x < width - 36) paint.fillText(mark(at, every), x + 3, height - 4);
  }
}

// Draws labels and lines at `y(value)`, up to `most`.
function yAxis(paint, width, most, y, unit) {
  const every = stepFor(most, 4);
  for (let value = 0; value <= most; value += every) {
    paint.beginPath(); paint.moveTo(LEFT, y(value)); paint.lineTo(width, y(value)); paint.stroke();
    paint.fillText(`${Number(value.toFixed(2))} ${unit}`, 4, y(value) + 4);
  }
}

const AUDIO_ROW = 34;

// Draws the received audio as steps, the played audio below, and underruns in red. All times are in seconds since the
// key press: `came` lists [arrival, duration of the chunk], `played` lists [from, to], and `dry` lists underruns.
export function drawStrip(canvas, came, played, dry) {
  const { paint, width, height } = sheet(canvas);
  const total = came.reduce((sum, [, audio]) => sum + audio, 0);
  const ends = played.map(([, to]) => to);
  const most = Math.max(0.2, total, ...came.map(([at]) => at), ...ends) * 1.03;
  const x = (at) => LEFT + (at / most) * (width - LEFT);
  axis(paint, width, height, most, (at, step) => `${at.toFixed(step < 1 ? 2 : 0)} s`);
  let sum = 0;
  const top = 8, base = height - 24 - AUDIO_ROW / 2 - 4;
  const y = (audio) => base - (audio / Math.max(0.1, total)) * (base - top);
  yAxis(paint, width, total, y, "s");
  paint.fillStyle = color("tint"); // received audio, one step per chunk
  paint.beginPath();
  paint.moveTo(x(came[0]?.[0] ?? 0), base);
  for (const [at, audio] of came) { paint.lineTo(x(at), y(sum)); sum += audio; paint.lineTo(x(at), y(sum)); }
  paint.lineTo(x(most), y(sum)); paint.lineTo(x(most), base); paint.fill();
  sum = 0;
  paint.fillStyle = color("accent");
  for (const [at, audio] of came) { sum += audio; paint.fillRect(x(at) - 1, y(sum), 2.5, Math.max(3, y(sum - audio) - y(sum))); }
  paint.strokeStyle = color("good"); // played audio
  paint.lineWidth = 2;
  let heard = 0;
  paint.beginPath();
  for (const [from, to] of played) { paint.moveTo(x(from), y(heard)); heard += to - from; paint.lineTo(x(to), y(heard)); }
  paint.stroke();
  paint.fillStyle = color("good");
  for (const [from, to] of played) paint.fillRect(x(from), base + 6, Math.max(2, x(to) - x(from)), 8);
  paint.fillStyle = color("bad");
  for (const at of dry) paint.fillRect(x(at) - 1, top, 3, base + 6);
}

// Draws the median and the p95 of each 15 seconds.
export function drawTrend(canvas, slices) {
  const { paint, width, height } = sheet(canvas);
  const most = 1.15 * Math.max(10, ...slices.map((slice) => slice.first_audio_ms.p95 ?? 0));
  axis(paint, width, height, 15, (at) => (at && at < 15 ? `${15 - at} min ago` : ""), width < 500 ? 5 : 3);
  const each = (width - LEFT) / slices.length, base = height - 18, x = (index) => LEFT + index * each + 1;
  yAxis(paint, width, most, (value) => base - (value / most) * (base - 6), "ms");
  slices.forEach((slice, index) => {
    const { p50, p95, count } = slice.first_audio_ms;
    if (count) {
      paint.fillStyle = color("wave");
      paint.fillRect(x(index), base - (p95 / most) * (base - 6), Math.max(2, each - 2), (p95 / most) * (base - 6));
      paint.fillStyle = color("accent");
      paint.fillRect(x(index), base - (p50 / most) * (base - 6), Math.max(2, each - 2), (p50 / most) * (base - 6));
    }
    if (Object.keys(slice.refused).length) {
      paint.fillStyle = color("bad");
      paint.fillRect(x(index), 0, Math.max(2, each - 2), 5);
    }
  });
}
