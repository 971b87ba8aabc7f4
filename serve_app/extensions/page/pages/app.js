// Tabs of the page, and the models and voices of the server.

import { startChat } from "./chat.js";
import { startConverse } from "./converse.js";
import { at, keepTyped, kept, make } from "./dom.js";
import { startLoad } from "./load.js";
import { wake } from "./player.js";
import { ask, askForKey, startKey } from "./server.js";
import { showSpeak, startSpeak } from "./speak.js";
import { showStatus, startStatus } from "./status.js";
import { showUse, startUse } from "./use.js";
import { showVoices, startVoices } from "./voices.js";

const TABS = ["speak", "converse", "voices", "use", "status"];
const SHOWN = { speak: showSpeak, use: showUse, status: showStatus };
const DEMO = { embedded: "Demo voice", "embedded-base": "Demo voice for clones" };
let looking = 0;

function open(name, focus = false) {
  for (const each of TABS) {
    const tab = at(`tab-${each}`), isOpen = each === name;
    tab.setAttribute("aria-selected", String(isOpen));
    tab.tabIndex = isOpen ? 0 : -1;
    at(each).hidden = !isOpen;
    if (isOpen && focus) tab.focus();
  }
  history.replaceState(null, "", name === "speak" ? location.pathname + location.search : `#${name}`);
  Promise.resolve(SHOWN[name]?.()).catch((error) => tell(error.message, true));
}

function startTabs() {
  for (const [index, name] of TABS.entries()) {
    at(`tab-${name}`).addEventListener("click", () => open(name));
    at(`tab-${name}`).addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: TABS.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(TABS[(to + TABS.length) % TABS.length], true);
    });
  }
  const named = location.hash.slice(1);
  open(TABS.includes(named) ? named : "speak");
}

function tell(text, bad = false) {
  at("about").textContent = text;
  at("about").classList.toggle("bad", bad);
}

// Polls until a model is ready, and then shows its features.
async function look() {
  const mine = ++looking;
  for (;;) {
    try {
      await describe();
      return;
    } catch (error) {
      if (mine !== looking) return;
      tell(error.status === 503 ? await howFar(error) : error.message, error.status !== 503);
      if (error.retryMs == null) { if (error.status === 401) askForKey(); return; }
    }
    await new Promise((done) => setTimeout(done, 1000));
    if (mine !== looking) return;
  }
}

async function howFar(error) {
  try {
    const { models } = await (await ask("status")).json();
    const told = Object.values(models).map(({ state, percent, stage }) => [state, percent === undefined ? "" : `${percent} %`, stage].filter(Boolean).join(", "));
    return `The model is ${told.join("; ")}`;
  } catch {
    return error.message.replace(/ ?Try again in \d+ s\./, "");
  }
}

async function describe() {
  const { data } = await (await ask("v1/models")).json();
  const { voices, languages } = await (await ask("v1/audio/voices")).json();
  const own = data.filter((model, index) => index === 0 || model.root !== data[0].root);
  const kinds = new Set(own.map((model) => model.kind));
  const states = own.filter((model) => model.state && model.state !== "ready").map((model) => `${model.id} is ${model.state}${model.percent === undefined ? "" : ` (${model.percent} %)`}`);
  const spoken = languages.slice(1).map((name) => name[0].toUpperCase() + name.slice(1)).join(", ");
  tell([own.map((model) => DEMO[model.root] ?? model.id).join(", ") + (spoken && ` (${spoken})`), ...states].join(" · "));
  fill("model", own.length > 1 ? [["", "chosen by the request"], ...own.map((model) => [model.id, model.id])] : []);
  at("model-field").hidden = own.length < 2;
  fill("language", [["", "auto"], ["detect", "detect"], ...languages.slice(1).map((name) => [name, name])]);
  showChoices(voices, kinds);
  showVoices(voices, kinds, own.some((model) => DEMO[model.root]));
}

function fill(id, options) {
  const before = at(id).value || kept.read(`speak.${id}`) || "";
  at(id).replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  if (options.some(([value]) => value === before)) at(id).value = before;
}
function showChoices(voices, kinds) {
  const shown = ({ type, name }) => type === "stored" ? name : name.replace(/(^|_)(.)/g, (_, gap, char) => (gap && " ") + char.toUpperCase());
  const names = Object.fromEntries(voices.map((voice) => [voice.id, shown(voice)]));
  const before = at("voice").value || kept.read("speak.voice");
  const designsOnly = kinds.has("voice_design") && kinds.size === 1;
  const groups = { stored: "Stored voices", builtin: "Voices", alias: "OpenAI names" };
  const none = kinds.has("custom_voice") || !voices.length ? [] : [new Option("none", "")];
  at("voice").replaceChildren(...none, ...Object.entries(groups).flatMap(([type, label]) => {
    const listed = voices.filter((voice) => voice.type === type && !(designsOnly && type === "stored"));
    const options = listed.map((voice) => new Option(voice.alias_of ? `${shown(voice)} (${names[voice.alias_of]})` : shown(voice), voice.id));
    return options.length ? [make("optgroup", { label }, ...options)] : [];
  }));
  if (before !== null && [...at("voice").options].some((option) => option.value === before)) at("voice").value = before;
  else if (none.length && at("voice").options.length > 1 && !kinds.has("voice_design")) at("voice").selectedIndex = 1;
  at("voice-field").hidden = !voices.length || designsOnly;
  const label = document.querySelector("label[for=instructions]");
  label.textContent = designsOnly ? "Voice description" : kinds.has("voice_design") ? "Instruction, or a voice description" : "Instruction";
  if (designsOnly && !at("instructions").value) at("instructions").value = "A calm, friendly voice";
  if (kinds.size === 1 && kinds.has("base") && !voices.some((voice) => voice.type === "stored")) {
    tell(`${at("about").textContent} · This model clones voices. Store a recording under Voices first.`);
  }
}

// Starts the audio context on the first click or key press, because the start takes a moment.
for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, () => wake(), { once: true, capture: true });
startKey(look);
startSpeak();
startConverse();
startChat();
startVoices(describe);
startUse();
startStatus();
startLoad();
keepTyped();
startTabs();
look();
