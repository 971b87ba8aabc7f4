// First tab: speaks a text with a voice, and shows the details of the utterance.

import { at, figures, kept, make, ms, saveFile, seconds, show } from "./dom.js";
import { drawStrip, drawWave } from "./draw.js";
import { asWav, isSmooth } from "./player.js";
import { ask, countDown, key } from "./server.js";
import { Speech } from "./speech.js";

const OPTIONS = { language: "language", seed: "seed", temperature: "temperature", markup: "markup", normalization: "text_normalization", any: "any_language" };
const REMEDY = /"(any_language|markup)": "?(\w+)"?/; // option named in an error of the server
const MOST_KEPT = 12;
const EXAMPLES = [
  ["Your order 4711 ships on May 3rd at 5:30 p.m. The total is $1,249.50, including 19 % tax."],
  ["I have something to tell you, but please keep it between us.", "Slow and quiet"],
  ["The lighthouse stood at the end of the pier. Every evening the keeper climbed its 142 steps and lit the lamp. On clear "
    + "nights fishermen saw it from thirty miles away. On foggy nights they listened for the horn. One autumn the storm came "
    + "early, and the boats were still at sea. The keeper kept the lamp burning until morning. When the sun rose, he counted "
    + "the masts in the harbor. They were all there."],
];
const past = [];
let now = null; // the displayed Speech
let isBusy = false, isPlaying = false, shownS = 1;

// Returns the fields of the request from the form, without unchanged options.
export function fields() {
  const sent = { model: at("model").value || "qwen3-tts", input: at("text").value };
  if (at("voice").value && !at("voice-field").hidden) sent.voice = at("voice").value;
  if (at("instructions").value && !at("instructions-field").hidden) sent.instructions = at("instructions").value;
  for (const [id, name] of Object.entries(OPTIONS)) {
    const { value, type } = at(id);
    if (value !== "") sent[name] = type === "number" ? Number(value) : value === "true" || value;
  }
  if (Number(at("speed").value) !== 1) sent.speed = Number(at("speed").value);
  return sent;
}

export async function speak(more = {}) {
  stop();
  const asked = { ...fields(), ...more };
  asked.seed ??= Math.floor(Math.random() * 2 ** 31); // so `save` can request the same speech in another format
  const mine = now = new Speech(asked, performance.now());
  busy(true);
  noEffect([]);
  accept("Waiting for audio …");
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
        accept("Waiting for audio …");
      }
    }
    if (now === mine) accept(summary(mine));
  } catch (error) {
    const stopped = mine.leaving.signal.aborted;
    mine.stop();
    if (now !== mine) return;
    const length = mine.parts.length ? ` ${seconds(mine.lengthS)} can be saved.` : "";
    if (stopped) accept(`Stopped.${length}`);
    else refuse(error, length);
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

// Sets the state line, and clears the marks of the last error.
function accept(text) {
  show("speak-state", text);
  at("anyway").hidden = true;
  for (const each of document.querySelectorAll("#speak [aria-invalid]")) each.removeAttribute("aria-invalid");
}

// Shows an error, marks its field, and offers the option that the server suggests.
function refuse(error, more = "") {
  accept("");
  show("speak-state", `${error.message}${more}`, true);
  const field = error.field === "input" ? at("text") : document.querySelector(`[data-note="${error.field}"]`)?.parentElement.querySelector("input, select");
  field?.setAttribute("aria-invalid", "true");
  at("options").open ||= at("options").contains(field ?? null);
  const [, name, value] = REMEDY.exec(error.message) ?? [];
  at("anyway").hidden = !name;
  at("anyway").onclick = () => {
    at(Object.keys(OPTIONS).find((id) => OPTIONS[id] === name)).value = value;
    speak();
  };
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
  show("speak-state", `${seconds(speech.lengthS)} received`);
}

function reveal(speech) {
  at("heard").hidden = false;
  at("words").dataset.of = speech.fields.input;
  let place = 0;
  at("words").replaceChildren(...speech.fields.input.split(/(\s+)/).map((part) => {
    const from = place, letters = [...part];
    place += letters.length;
    return /\S/.test(part) ? make("span", {}, ...struck(letters, from, speech.unspoken ?? [])) : part;
  }));
  if (speech.cutsText && !speech.unspoken) strike(speech);
  frame();
}

// Strikes out the `letters` in `ranges`. The first letter is at position `from` of the text.
function struck(letters, from, ranges) {
  const parts = [];
  for (const [index, letter] of letters.entries()) {
    const tag = ranges.some(([start, end]) => start <= from + index && from + index < end) ? "s" : "span";
    if (parts.at(-1)?.localName !== tag) parts.push(document.createElement(tag));
    parts.at(-1).textContent += letter;
  }
  return parts.map((part) => (part.localName === "s" ? part : part.textContent));
}

async function strike(speech) {
  try {
    const { sent, unspoken } = await (await ask("v1/audio/text", { json: speech.fields })).json();
    speech.unspoken = sent === speech.fields.input ? unspoken : [];
    if (now === speech) reveal(speech);
  } catch { /* keep the text unmarked */ }
}

function split(speech) {
  const network = speech.serverMs === null ? null : Math.max(0, speech.firstMs - speech.serverMs);
  const playback = speech.soundMs === null ? null : speech.soundMs - speech.firstMs;
  figures("split", [
    ["First sound", ms(speech.soundMs), "ms", true],
    ["Server", ms(speech.serverMs), "ms"],
    ["Network", ms(network), "ms"],
    ["Playback delay", ms(playback), "ms"],
    ["Length", speech.lengthS.toFixed(1), "s"],
    ["Underruns", speech.dry.length, ""],
  ]);
}

function summary(speech) {
  const [firstAt] = speech.came[0] ?? [0], lastAt = speech.came.at(-1)?.[0] ?? 0;
  const pace = lastAt > firstAt ? ` Synthesized at ${(speech.lengthS / (lastAt - firstAt)).toFixed(1)}× real time.` : "";
  return `${seconds(speech.lengthS)} of audio, seed ${speech.fields.seed}.${pace}`;
}

function finished(speech) {
  at("replay").textContent = "Play again";
  if (!speech.parts.length) return;
  split(speech);
  noEffect(speech.ignored);
  remember(speech);
  frame();
}

// Shows the reason of an ignored option next to its field, and reasons of other fields below the form.
function noEffect(ignored) {
  const notes = new Map([...document.querySelectorAll("[data-note]")].map((note) => [note.dataset.note, note]));
  for (const note of notes.values()) { note.textContent = ""; note.classList.remove("no-effect"); }
  const others = [];
  for (const { field, reason } of ignored) {
    const note = notes.get(field);
    if (note && !note.closest("[hidden]")) {
      note.textContent = reason.startsWith(field) ? reason : `No effect: ${reason}`;
      note.classList.add("no-effect");
    } else if (field !== "model") others.push(field === "input" ? `Text: ${reason}` : `${field}: ${reason}`);
  }
  at("speak-note").textContent = others.join(" · ");
}

// Draws the current position, and repeats until playback ends.
function frame() {
  const speech = now;
  if (!speech || at("heard").hidden || at("speak").hidden) return;
  const playedS = position(speech);
  shownS = drawWave(at("wave").firstElementChild, speech.samples, speech.rate, { playedS, wholeS: speech.isWhole ? 0 : speech.lengthS * 1.25 });
  drawStrip(at("strip"), speech.came, speech.playedRows, speech.dry);
  at("strip-note").textContent = `Blue: audio received, one step per chunk. Green: audio played. ${
    speech.dry.length ? `Red: ${speech.dry.length} underrun${speech.dry.length === 1 ? "" : "s"}.` : "No underruns."}${
    isSmooth() ? "" : " A simpler player is in use because this page is not on https or localhost."}`;
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
    if (spans[found].className === "now") spans[found].title = speech.estimated ? "This time is an estimate." : "";
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
  show("speak-state", `Synthesizing again as ${format} with the same seed …`);
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

// Shows the options that would have no effect, before any speech. The server checks the request without speaking.
let asking = null;
async function tryOptions() {
  asking?.abort();
  const mine = asking = new AbortController();
  await new Promise((done) => setTimeout(done, 400));
  if (mine.signal.aborted || isBusy) return;
  try {
    const answer = await ask("v1/audio/text", { json: fields(), signal: mine.signal });
    if (at("speak-state").classList.contains("bad")) accept("");
    noEffect((await answer.json()).ignored);
  } catch (error) {
    if (error.name === "AbortError" || !error.field) return;
    noEffect([]);
    refuse(error);
  }
}

export function startSpeak() {
  for (const [index, button] of [...at("examples").children].entries()) {
    button.addEventListener("click", () => { [at("text").value, at("instructions").value = ""] = EXAMPLES[index]; });
  }
  at("speak-form").addEventListener("submit", (event) => { event.preventDefault(); speak(); });
  at("stop").addEventListener("click", stop);
  at("replay").addEventListener("click", () => { if (isPlaying) { stop(); frame(); } else replay(0); });
  at("save").addEventListener("click", save);
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); at("speak-form").requestSubmit(); }
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !at("speak").hidden) stop(); });
  for (const id of [...Object.keys(OPTIONS), "speed", "voice", "model", "instructions", "playback"]) {
    at(id).addEventListener("change", () => {
      kept.write("speak." + id, at(id).value);
      if (!at("with-key").hidden && !key()) return;
      tryOptions();
    });
  }
  for (const id of [...Object.keys(OPTIONS).filter((name) => name !== "language"), "speed", "playback"]) {
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
