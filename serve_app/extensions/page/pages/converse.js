// Second tab: speaks text while the user, or a demo, types.

import { at, figures, make, ms, show } from "./dom.js";
import { interruptChat } from "./chat.js";
import { LiveSpeech } from "./livespeech.js";

const SCRIPT = "This text is written one word at a time, as a language model would write it. The voice does not wait for "
  + "the end: it begins with the first words and keeps up with the writer. Press Escape, and it stops at once.";
let live = null, sent = 0, writing = null, voiceOf = null;
let wordsAt = 0, firstMs = null;

function conversation() {
  const voice = at("voice").value;
  if (live && !live.isClosed && voiceOf === voice) return live;
  live?.close();
  voiceOf = voice;
  return live = new LiveSpeech(voice, {
    sound(delayMs) {
      if (firstMs === null) firstMs = performance.now() - wordsAt;
      figures("live-split", [["Last key to sound", ms(delayMs), "ms", true], ["First word to sound", ms(firstMs), "ms"]]);
      show("live-state", "Speaking.");
    },
    interrupted({ spoken, remaining }) {
      show("live-state", "Interrupted.");
      if (spoken === undefined) return;
      const part = (className, text) => make("span", { className, textContent: `“${text.trim()}”` });
      at("live-state").replaceChildren("Heard: ", part("good", spoken), " Not heard: ", part("bad", remaining ?? ""));
    },
    ended() { show("live-state", "Finished."); over(); },
    failed(message) { show("live-state", message, true); over(); },
    noted(message) { show("live-state", message); },
  });
}

function write(text) {
  const to = conversation();
  if (!to.isActive) { wordsAt = performance.now(); firstMs = null; show("live-state", "The server has the first words."); }
  to.write(text);
  at("interrupt").disabled = false;
}

function over() {
  at("interrupt").disabled = true;
}

function endTurn() {
  const rest = at("live").value.slice(sent);
  if (rest.trim()) write(rest);
  live?.flush();
  at("live").value = "";
  sent = 0;
}

// Returns the complete words: the text up to the last space.
function typed() {
  const text = at("live").value;
  sent = Math.min(sent, text.length);
  const end = text.search(/\S*$/);
  if (end > sent && text.slice(sent, end).trim()) { write(text.slice(sent, end)); sent = end; }
}

function script() {
  if (writing) { stopWriting(); return; }
  const words = SCRIPT.match(/\S+\s*/g);
  at("live").value = "";
  sent = 0;
  at("write").textContent = "Stop the demo";
  const next = () => {
    if (!words.length) { stopWriting(); endTurn(); return; }
    at("live").value += words.shift();
    typed();
    writing = setTimeout(next, 1000 / Number(at("pace").value));
  };
  next();
}

function stopWriting() {
  clearTimeout(writing);
  writing = null;
  at("write").textContent = "Play a typing demo";
}

export function interrupt() {
  stopWriting();
  if (live?.isActive) { live.interrupt(); at("live").value = ""; sent = 0; over(); }
  interruptChat();
}

export function startConverse() {
  at("live").addEventListener("input", typed);
  at("live").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); stopWriting(); endTurn(); }
  });
  at("write").addEventListener("click", script);
  at("interrupt").addEventListener("click", interrupt);
  at("pace").addEventListener("input", () => { at("pace-is").textContent = `${at("pace").value} words/s`; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !at("converse").hidden) interrupt(); });
}
