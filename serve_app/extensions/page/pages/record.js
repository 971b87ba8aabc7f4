// Gets a recording to clone from a file or the microphone. Browsers allow the microphone only on secure pages.

import { at } from "./dom.js";

const MOST_S = 29;
let recorder = null, recorded = null, timer = null;

export const recording = () => recorded ?? at("clone-file").files[0] ?? null;

function offer(blob) {
  at("clone-audio").src = URL.createObjectURL(blob);
  at("clone-audio").hidden = false;
}

async function start() {
  const stream = await navigator.mediaDevices.getUserMedia({
    audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false },
  });
  const parts = [], began = performance.now();
  recorder = new MediaRecorder(stream);
  recorder.ondataavailable = ({ data }) => parts.push(data);
  recorder.onstop = () => {
    clearInterval(timer);
    for (const track of stream.getTracks()) track.stop();
    recorded = new Blob(parts, { type: recorder.mimeType });
    recorded.name = recorder.mimeType.includes("ogg") ? "microphone.ogg" : "microphone.webm";
    recorder = null;
    at("record").textContent = "Record again";
    at("record").classList.remove("recording");
    at("record-note").textContent = "Listen to it below, and type what it says, word for word.";
    at("clone-file").value = "";
    offer(recorded);
  };
  recorder.start();
  at("record").textContent = "Stop recording";
  at("record").classList.add("recording");
  timer = setInterval(() => {
    const spent = (performance.now() - began) / 1000;
    at("record-note").textContent = `${spent.toFixed(0)} of ${MOST_S} s`;
    if (spent >= MOST_S) recorder?.stop();
  }, 250);
}

export function startRecorder() {
  if (!navigator.mediaDevices || !window.MediaRecorder) {
    at("record").disabled = true;
    at("record-note").textContent = "Recording needs https or localhost.";
  }
  at("record").addEventListener("click", async () => {
    if (recorder) { recorder.stop(); return; }
    try {
      await start();
    } catch (error) {
      at("record-note").textContent = `Recording failed: ${error.message}`;
    }
  });
  at("clone-file").addEventListener("change", () => {
    recorded = null;
    if (at("clone-file").files[0]) offer(at("clone-file").files[0]);
  });
}
