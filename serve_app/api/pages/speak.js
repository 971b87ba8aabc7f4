// The first tab: a text, a voice, and everything that can be seen of one utterance.

import { at, figures, kept, make, ms, saveFile, seconds, show } from "./dom.js";
import { drawStrip, drawWave } from "./draw.js";
import { asWav, isSmooth } from "./player.js";
import { ask, countDown, key } from "./server.js";
import { Speech } from "./speech.js";

const OPTIONS = { language: "language", seed: "seed", temperature: "temperature", markup: "markup", normalization: "text_normalization" };
const MOST_KEPT = 12;
const past = [];
let now = null; // the Speech that is shown
let isBusy = false, isPlaying = false, shownS = 1;

// The fields of the request as the form has them, without what is left alone.
export function fields() {
  const sent = { model: at("model").value || "qwen3-tts", input: at("text").value };
  if (at("voice").value && !at("voice-field").hidden) sent.voice = at("voice").value;
  if (at("instructions").value && !at("instructions-field").hidden) sent.instructions = at("instructions").value;
  for (const [id, name] of Object.entries(OPTIONS)) {
    const { value, type } = at(id);
    if (value !== "") sent[name] = type === "number" ? Number(value) : value;
  }
  if (Number(at("speed").value) !== 1) sent.speed = Number(at("speed").value);
  return sent;
}

export async function speak(more = {}) {
  stop();
  const asked = { ...fields(), ...more };
  asked.seed ??= Math.floor(Math.random() * 2 ** 31); // so that another format can be made of the same speech
  const mine = now = new Speech(asked, performance.now());
  busy(true);
  noEffect([]);
  at("speak-note").textContent = "";
  show("speak-state", "Asking …");
  try {
    for (;;) {
      try {
        await mine.speak({ came: () => live(mine), heard: () => live(mine) });
        break;
      } catch (error) {
        if (error.retryMs == null || mine.parts.length || mine.leaving.signal.aborted) throw error;
        await countDown("speak-state", error, mine.leaving.signal);
        if (mine.leaving.signal.aborted) throw error;
        mine.pressedAt = performance.now();
        show("speak-state", "Asking …");
      }
    }
    if (now === mine) show("speak-state", summary(mine));
  } catch (error) {
    const stopped = mine.leaving.signal.aborted;
    mine.stop();
    if (now !== mine) return;
    const length = mine.parts.length ? ` ${seconds(mine.lengthS)} can be saved.` : "";
    if (stopped) show("speak-state", `Stopped.${length}`);
    else show("speak-state", `${error.message}${length}`, true);
    if (error.field) at("options").open ||= Object.values(OPTIONS).includes(error.field);
    if (error.field) noEffect([{ field: error.field, reason: error.message }]);
  } finally {
    if (now === mine) { busy(false); finished(mine); }
  }
}

export function stop() {
  if (!now || !(isBusy || isPlaying)) return;
  isPlaying = false;
  now.stop();
  at("replay").textContent = "Play again";
}

function busy(is) {
  isBusy = is;
  at("speak-now").disabled = is;
  at("stop").disabled = !is;
}

function live(speech) {
  if (now !== speech) return;
  if (at("heard").hidden || at("words").dataset.of !== speech.fields.input) reveal(speech);
  split(speech);
  show("speak-state", `${seconds(speech.lengthS)} so far`);
}

function reveal(speech) {
  at("heard").hidden = false;
  at("words").dataset.of = speech.fields.input;
  at("words").replaceChildren(...speech.fields.input.trim().split(/(\s+)/).map((part) => (
    /\S/.test(part) ? make("span", { textContent: part }) : part
  )));
  frame();
}

function split(speech) {
  const network = speech.serverMs === null ? null : Math.max(0, speech.firstMs - speech.serverMs);
  const playback = speech.soundMs === null ? null : speech.soundMs - speech.firstMs;
  figures("split", [
    ["First sound", ms(speech.soundMs), "ms", true],
    ["of it the server", ms(speech.serverMs), "ms"],
    ["the network", ms(network), "ms"],
    ["silence and playback", ms(playback), "ms"],
    ["Length", speech.lengthS.toFixed(1), "s"],
    ["Underruns", speech.dry.length, ""],
  ]);
}

function summary(speech) {
  const [firstAt] = speech.came[0] ?? [0], lastAt = speech.came.at(-1)?.[0] ?? 0;
  const pace = lastAt > firstAt ? ` The server made ${(speech.lengthS / (lastAt - firstAt)).toFixed(1)} s of audio a second.` : "";
  return `${seconds(speech.lengthS)} in all, with seed ${speech.fields.seed}.${pace}`;
}

function finished(speech) {
  at("replay").textContent = "Play again";
  if (!speech.parts.length) return;
  split(speech);
  noEffect(speech.ignored);
  remember(speech);
  frame();
}

// Beside its field what had no effect; of other fields below the form.
function noEffect(ignored) {
  const notes = new Map([...document.querySelectorAll("[data-note]")].map((note) => [note.dataset.note, note]));
  for (const note of notes.values()) { note.textContent = ""; note.classList.remove("no-effect"); }
  const others = [];
  for (const { field, reason } of ignored) {
    const note = notes.get(field);
    if (note && !note.closest("[hidden]")) {
      note.textContent = reason.startsWith(field) ? reason : `No effect: ${reason}`;
      note.classList.add("no-effect");
    } else if (field !== "model") others.push(`${field}: ${reason}`);
  }
  at("speak-note").textContent = others.join(" · ");
}

// What the drawings and the words show of this moment, again until nothing is played.
function frame() {
  const speech = now;
  if (!speech || at("heard").hidden || at("speak").hidden) return;
  const playedS = position(speech);
  shownS = drawWave(at("wave").firstElementChild, speech.samples, speech.rate, { playedS, wholeS: speech.isWhole ? 0 : speech.lengthS * 1.25 });
  drawStrip(at("strip"), speech.came, speech.playedRows, speech.dry);
  at("strip-note").textContent = `Each step is a chunk that came; the line below it is what was played by then. ${
    speech.dry.length ? `Red: the player ran dry: ${speech.dry.length}.` : "The player never ran dry."}${
    isSmooth() ? "" : " This page is not secure (https or localhost), so a simpler player plays."}`;
  at("clock").textContent = `${playedS.toFixed(1)} / ${seconds(speech.lengthS)}`;
  const slider = at("wave");
  slider.setAttribute("aria-valuemax", speech.lengthS.toFixed(1));
  slider.setAttribute("aria-valuenow", playedS.toFixed(1));
  slider.setAttribute("aria-valuetext", `${playedS.toFixed(1)} of ${speech.lengthS.toFixed(1)} seconds`);
  lightWords(speech, playedS);
  if (isBusy || isPlaying) requestAnimationFrame(() => { if (now === speech) frame(); });
}

function position(speech) {
  const fromS = speech.replayFromS ?? 0;
  return Math.min(speech.lengthS, fromS + (speech.player?.isClosed && !isPlaying && !speech.isWhole ? 0 : speech.player?.playedS ?? 0));
}

function lightWords(speech, playedS) {
  const spans = [...at("words").querySelectorAll("span")];
  let place = 0;
  const isActive = isBusy || isPlaying;
  for (const { word, start, end } of speech.words) {
    const found = spans.findIndex((span, index) => index >= place && span.textContent.includes(word));
    if (found < 0) continue;
    for (let index = place; index < found; index++) spans[index].className = isActive && start <= playedS ? "said" : "";
    place = found + 1;
    spans[found].className = !isActive ? "" : start <= playedS && playedS < end ? "now" : end <= playedS ? "said" : "";
    if (spans[found].className === "now") spans[found].title = speech.estimated ? "its time is an estimate" : "";
  }
}

async function replay(fromS) {
  if (isBusy || !now?.parts.length) return;
  if (isPlaying) {
    stop();
    now.replayFromS = Math.min(fromS, now.lengthS);
    frame();
    if (fromS === 0) return;
  }
  const speech = now;
  speech.replayFromS = Math.min(fromS, speech.lengthS);
  isPlaying = true;
  at("stop").disabled = false;
  at("replay").textContent = "Stop";
  await speech.replay(speech.replayFromS, () => {
    if (now !== speech) return;
    isPlaying = false;
    at("stop").disabled = true;
    at("replay").textContent = "Play again";
    frame();
  });
  frame();
}

async function save() {
  const speech = now, format = at("save-as").value;
  if (!speech?.parts.length) return;
  if (format === "wav") { saveFile(asWav(speech.samples, speech.rate), "talkray.wav"); return; }
  show("speak-state", `Making it again as ${format}, with the same seed …`);
  try {
    const answer = await ask("v1/audio/speech", { json: { ...speech.fields, response_format: format, stream: false } });
    saveFile(await answer.blob(), `talkray.${format}`);
    show("speak-state", `Saved as talkray.${format}.`);
  } catch (error) {
    show("speak-state", error.message, true);
  }
}

function remember(speech) {
  if (!past.includes(speech)) past.unshift(speech);
  past.splice(MOST_KEPT);
  at("past").hidden = past.length < 2;
  at("history").replaceChildren(...past.map((each) => {
    const { input, voice, seed } = each.fields, text = input.length > 70 ? input.slice(0, 70) + "…" : input;
    const told = `${voice ?? "no voice"} · ${seconds(each.lengthS)} · first sound ${ms(each.soundMs)} ms · seed ${seed}`;
    const again = make("button", { type: "button", className: "small", textContent: "Show and play", "aria-label": `Show and play: ${text}` });
    again.addEventListener("click", () => { stop(); now = each; reveal(each); split(each); noEffect(each.ignored); replay(0); });
    return make("li", {}, make("span", { className: "what" }, text, make("small", { textContent: told })), again);
  }));
}

// Before any speech: what of the options would have no effect. The server reads the request and speaks nothing.
let asking = null;
async function tryOptions() {
  asking?.abort();
  const mine = asking = new AbortController();
  await new Promise((done) => setTimeout(done, 400));
  if (mine.signal.aborted || isBusy) return;
  try {
    const answer = await ask("v1/audio/text", { json: fields(), signal: mine.signal });
    noEffect((await answer.json()).ignored);
  } catch (error) {
    if (error.name !== "AbortError" && error.field) noEffect([{ field: error.field, reason: error.message }]);
  }
}

export function startSpeak() {
  at("speak-form").addEventListener("submit", (event) => { event.preventDefault(); speak(); });
  at("stop").addEventListener("click", stop);
  at("replay").addEventListener("click", () => { if (isPlaying) { stop(); frame(); } else replay(0); });
  at("save").addEventListener("click", save);
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("speak-form").requestSubmit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !at("speak").hidden) stop(); });
  for (const id of [...Object.keys(OPTIONS), "speed", "voice", "model", "instructions"]) {
    at(id).addEventListener("change", () => {
      kept.write("speak." + id, at(id).value);
      if (!at("with-key").hidden && !key()) return;
      tryOptions();
    });
  }
  for (const id of [...Object.keys(OPTIONS).filter((name) => name !== "language"), "speed"]) {
    const value = kept.read("speak." + id);
    if (value !== null) at(id).value = value;
  }
  const told = () => { at("speed-is").textContent = `${Number(at("speed").value)}×`; };
  at("speed").addEventListener("input", told);
  told();
  at("wave").addEventListener("pointerdown", (event) => {
    const { left, width } = at("wave").getBoundingClientRect();
    replay(Math.max(0.001, ((event.clientX - left) / width) * shownS));
  });
  at("wave").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !now) return;
    event.preventDefault();
    replay(Math.max(0.001, Math.min(now.lengthS - 0.1, position(now) + by)));
  });
  new ResizeObserver(frame).observe(at("wave"));
}

export const showSpeak = frame;
