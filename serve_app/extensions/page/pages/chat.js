// Spoken chat with the user's own OpenAI-compatible endpoint. The page sends the endpoint's key only to the endpoint.

import { at, kept, make, show } from "./dom.js";
import { LiveSpeech } from "./livespeech.js";

const FIELDS = ["chat-url", "chat-model", "chat-key"];
const messages = [{ role: "system", content: "Your answers are spoken aloud: plain sentences, no lists, no markup." }];
let live = null, asking = null, answer = null;

function say(who, text) {
  const line = make("li", { className: who, textContent: text });
  at("chat-log").append(line);
  line.scrollIntoView({ block: "nearest" });
  return line;
}

const trouble = (text) => say("bad", text).classList.add("bad");

// The content security policy allows requests to this server, and to one origin in the query of the page's URL.
function isAllowed(origin) {
  return origin === location.origin || new URLSearchParams(location.search).get("chat") === origin;
}

function useEndpoint() {
  let origin;
  try {
    ({ origin } = new URL(at("chat-url").value));
  } catch {
    trouble("Enter the URL of the chat endpoint, such as http://localhost:11434/v1.");
    return;
  }
  for (const id of FIELDS) kept.write(id, at(id).value.trim());
  if (isAllowed(origin)) { at("chat-settings").open = at("chat-send").disabled = false; return; }
  const to = new URL(location.href);
  to.searchParams.set("chat", origin);
  to.hash = "converse";
  location.assign(to); // the policy of the new page allows this origin
}

async function send() {
  const text = at("chat-text").value.trim(), base = at("chat-url").value.trim().replace(/\/+$/, "");
  if (!text) return;
  if (!isAllowed(new URL(base).origin)) { useEndpoint(); return; }
  interruptChat();
  at("chat-text").value = "";
  say("you", text);
  messages.push({ role: "user", content: text });
  const mine = answer = { role: "assistant", content: "", line: say("it", "…") };
  messages.push(mine);
  const voice = at("voice").value;
  if (!live || live.isClosed) {
    live = new LiveSpeech(voice, {
      sound: (delayMs) => { if (answer && !answer.soundMs) { answer.soundMs = performance.now() - answer.askedAt; answer.delayMs = delayMs; tell(answer); } },
      interrupted: ({ spoken }) => heard(spoken),
      failed: trouble,
      noted: () => {},
    });
  }
  asking = new AbortController();
  mine.askedAt = performance.now();
  try {
    const key = at("chat-key").value.trim(), signal = asking.signal;
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const sent = { model: at("chat-model").value.trim(), stream: true, messages: messages.slice(0, -1).map(({ role, content }) => ({ role, content })) };
    const reply = await fetch(`${base}/chat/completions`, { method: "POST", headers, body: JSON.stringify(sent), signal });
    if (!reply.ok) throw new Error(`The chat endpoint answered with status ${reply.status}: ${(await reply.text()).slice(0, 200)}`);
    for await (const piece of pieces(reply.body)) {
      mine.content += piece;
      mine.line.textContent = mine.content;
      live.write(piece);
    }
    live.flush();
  } catch (error) {
    if (error.name === "AbortError") return;
    mine.line.remove();
    messages.splice(-2);
    trouble(error instanceof TypeError ? "This page cannot reach the chat endpoint. Check that it is running and that it allows this origin (CORS)." : error.message);
  }
}

function tell({ line, soundMs }) {
  line.title = `first sound ${Math.round(soundMs)} ms after your message`;
  show("live-state", `First sound ${Math.round(soundMs)} ms after your message.`);
}

// Keeps only the heard part of an interrupted answer in the conversation.
function heard(spoken) {
  const cut = interrupted;
  interrupted = null;
  if (!cut || spoken === undefined) return;
  const rest = cut.content.slice(spoken.length);
  cut.content = spoken;
  cut.line.replaceChildren(make("span", { className: "good", textContent: spoken }), make("s", { textContent: rest }));
}

let interrupted = null;

export function interruptChat() {
  asking?.abort();
  asking = null;
  if (live?.isActive) { interrupted = answer; live.interrupt(); }
}

async function* pieces(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const piece = JSON.parse(line.slice(6)).choices?.[0]?.delta?.content;
      if (piece) yield piece;
    }
  }
}

export function startChat() {
  for (const id of FIELDS) at(id).value = kept.read(id) ?? "";
  at("chat-settings").open = at("chat-send").disabled = !at("chat-url").value;
  at("chat-save").addEventListener("click", useEndpoint);
  at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
}
