// Third tab: plays, renames, exports and deletes voices, clones a recording, and designs voices from a description.

import { at, make, saveFile, show } from "./dom.js";
import { ask } from "./server.js";
import { recording, startRecorder } from "./record.js";

let refresh = async () => {};
let playing = null; // the current preview
let canClone = null; // whether a model speaks with stored voices; null until known

const NO_CLONES = "This server cannot speak with stored voices. Start one that can: talkray serve --model embedded-base, or a Base checkpoint.";

export function showVoices(voices, kinds, isDemo) {
  const canDesign = kinds.has("voice_design"), isFirst = canClone === null;
  canClone = kinds.has("base");
  const listed = voices.filter((voice) => voice.type !== "alias");
  at("voice-list").replaceChildren(...listed.map(entry));
  show("voices-state", listed.length ? "" : "There is no voice yet. Clone or design one below.");
  at("voices-about").textContent = [isDemo && "This is the demo voice, a small model: intelligible, but clearly synthetic.",
    !canClone && listed.some((voice) => voice.type === "stored") && NO_CLONES].filter(Boolean).join(" ");
  at("clone-about").textContent = `Record one person in a quiet room for 5 to 15 seconds.${canClone ? "" : ` ${NO_CLONES}`}`;
  at("design-fields").disabled = !canDesign;
  at("design-about").textContent = canDesign ? `Describe a voice. You get three candidates and keep one.${canClone ? "" : ` ${NO_CLONES}`}`
    : "This needs a VoiceDesign model: talkray serve --model 1.7B-VoiceDesign.";
  if (isFirst) for (const [part, can] of [["clone", canClone], ["design", canDesign]]) at(`${part}-part`).open = can;
}

function entry(voice) {
  const { id, name, type, language, gender, description } = voice;
  const told = [language, gender, description].filter(Boolean).join(" · ");
  const badge = type === "stored" ? [make("span", { className: "badge", textContent: "stored" })] : [];
  const item = make("li", {}, make("span", { className: "what" }, name, ...badge, make("small", { textContent: told })));
  const button = (text, act) => {
    const made = make("button", { type: "button", className: "small", textContent: text, "aria-label": `${text} ${name}` });
    made.addEventListener("click", () => act(made).catch((error) => show("voices-state", error.message, true)));
    item.append(made);
    return made;
  };
  const speaking = [button("Hear", async (by) => hear(by, id)), button("Use", async () => { at("voice").value = id; at("voice").dispatchEvent(new Event("change")); at("tab-speak").click(); })];
  if (type !== "stored") return item;
  if (!canClone) for (const each of speaking) Object.assign(each, { disabled: true, title: NO_CLONES });
  const path = `v1/audio/voices/${encodeURIComponent(id)}`;
  button("About", async (by) => {
    const open = item.querySelector("ul");
    by.setAttribute("aria-expanded", String(!open));
    if (open) { open.remove(); return; }
    item.append(findings(await (await ask(path)).json()));
  });
  button("Rename", async () => {
    const other = prompt(`New name for ${name}`, name);
    if (!other || other === name) return;
    await ask(path, { json: { name: other } });
    await refresh();
  });
  button("Export", async () => saveFile(await (await ask(`${path}/file`)).blob(), `${name}.voice`));
  button("Delete", async () => {
    if (!confirm(`Delete ${name} and its recordings? You cannot undo this.`)) return;
    await ask(path, { method: "DELETE" });
    await refresh();
    show("voices-state", `${name} is deleted.`);
  }).classList.add("danger");
  return item;
}

async function hear(by, voice) {
  playing?.pause();
  by.disabled = true;
  show("voices-state", "Waiting for audio …");
  try {
    const json = { model: "qwen3-tts", input: at("sample").value || "Hello.", voice, response_format: "mp3", stream: false };
    playing = new Audio(URL.createObjectURL(await (await ask("v1/audio/speech", { json })).blob()));
    await playing.play();
    show("voices-state", "");
  } finally {
    by.disabled = false;
  }
}

// Shows the flaws that the check found, and the changes made by the preparation.
function findings(voice) {
  const lines = voice.takes.flatMap(({ style, seconds, cloned_by: by, changes, flaws }) => [
    `${style}: ${seconds.toFixed(1)} s, cloned ${by === "vector" ? "without a transcript" : "with its transcript"}`,
    ...(flaws.length ? flaws.map((flaw) => `Recording (${flaw.severity}): ${flaw.found} ${flaw.advice}`) : ["Recording: no problems found."]),
    ...(changes.length ? changes.map((change) => `Prepared: ${change}`) : ["Prepared: unchanged."]),
  ]);
  const rest = [voice.consent ? `Consent: ${voice.consent}` : "Consent: not stated.", ...(voice.provenance ? [`Stored through: ${
    typeof voice.provenance === "string" ? voice.provenance : JSON.stringify(voice.provenance)}`] : [])];
  return make("ul", {}, ...[...lines, ...rest].map((textContent) => make("li", { textContent })));
}

async function clone() {
  const audio = recording();
  if (!audio) { show("clone-state", "Choose a file or record one.", true); return; }
  const form = new FormData();
  form.append("audio_sample", audio, audio.name ?? "microphone.webm");
  for (const [id, name] of [["clone-name", "name"], ["clone-text", "ref_text"], ["clone-language", "language"], ["clone-consent", "consent"]]) {
    if (at(id).value.trim()) form.append(name, at(id).value.trim());
  }
  await working("clone", async () => {
    const voice = await (await ask("v1/audio/voices", { method: "POST", body: form })).json();
    const item = entry({ ...voice, type: "stored" });
    item.append(findings(voice));
    at("findings").replaceChildren(make("ul", { className: "list" }, item));
    await refresh();
    show("clone-state", `${voice.name} is stored. ${canClone ? "Press Hear, and compare it with the recording above." : NO_CLONES}`);
  });
}

async function design() {
  const json = { instructions: at("design-words").value };
  if (at("design-text").value) json.text = at("design-text").value;
  if (at("design-language").value) json.language = at("design-language").value;
  await working("design", async () => {
    const { candidates, left_out: leftOut } = await (await ask("v1/audio/voices/design", { json })).json();
    at("candidates").replaceChildren(...candidates.map(candidate));
    show("design-state", leftOut.length ? `${leftOut.length} not usable: ${leftOut.map((each) => each.reason).join("; ")}.` : "Keep the one you like.");
  });
}

function candidate({ id, audio, media_type: type, seconds }, index) {
  const bytes = Uint8Array.from(atob(audio), (letter) => letter.charCodeAt(0));
  const named = `Candidate ${index + 1}`;
  const player = make("audio", { controls: true, src: URL.createObjectURL(new Blob([bytes], { type })), "aria-label": named });
  const name = make("input", { placeholder: "name", maxLength: 100, "aria-label": `Name of candidate ${index + 1}` });
  name.style.flex = "1 1 8rem";
  const lock = make("button", { type: "button", className: "small", textContent: "Keep", "aria-label": `Keep candidate ${index + 1}` });
  lock.addEventListener("click", () => working("design", async () => {
    if (!name.value.trim()) { name.focus(); throw new Error("Enter a name for the voice."); }
    const form = new FormData();
    form.append("design", id);
    form.append("name", name.value.trim());
    const voice = await (await ask("v1/audio/voices", { method: "POST", body: form })).json();
    at("candidates").replaceChildren();
    await refresh();
    show("design-state", `${voice.name} is stored.`);
  }));
  return make("li", {}, make("span", { textContent: `${index + 1} · ${seconds.toFixed(1)} s` }), player, name, lock);
}

async function working(part, act) {
  const button = at(`${part}-now`);
  button.disabled = true;
  show(`${part}-state`, "Working …");
  try {
    await act();
  } catch (error) {
    show(`${part}-state`, error.message, true);
  } finally {
    button.disabled = false;
  }
}

export function startVoices(again) {
  refresh = again;
  at("clone-form").addEventListener("submit", (event) => { event.preventDefault(); clone(); });
  at("design-form").addEventListener("submit", (event) => { event.preventDefault(); design(); });
  startRecorder();
}
