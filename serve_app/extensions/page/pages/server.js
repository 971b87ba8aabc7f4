// Sends requests with the API key to this server. Refused requests say when to retry.

import { at, kept, show } from "./dom.js";

const url = (path) => new URL(path, document.baseURI); // supports a path prefix

export const address = () => url("./").href.replace(/\/$/, "");

export class Refused extends Error {
  constructor(message, { status = 0, retryMs = null, field = null } = {}) {
    super(message);
    Object.assign(this, { status, retryMs, field });
  }
}

export const key = () => at("key").value.trim();

export const needsKey = () => !at("with-key").hidden;

export function askForKey() {
  at("with-key").hidden = false;
  at("with-key").open = true;
  at("key").focus();
}

export function startKey(changed) {
  at("with-key").hidden = true;
  const known = kept.read("key");
  if (known) {
    at("key").value = known;
    at("keep-key").checked = true;
    at("with-key").hidden = false;
  }
  const keep = () => kept.write("key", at("keep-key").checked ? key() : null);
  at("keep-key").addEventListener("change", keep);
  at("key").addEventListener("change", () => { keep(); at("with-key").open = !key(); changed(); });
}

// Returns a successful response, or throws Refused. `json` is the body of the request.
export async function ask(path, { json, headers = {}, ...options } = {}) {
  const sent = { ...headers };
  if (key()) sent.Authorization = "Bearer " + key();
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    options = { method: "POST", body: JSON.stringify(json), ...options };
  }
  let answer;
  try {
    answer = await fetch(url(path), { ...options, headers: sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.", { retryMs: 2000 });
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  if (answer.status === 401) askForKey();
  const after = answer.headers.get("retry-after-ms") ?? 1000 * answer.headers.get("retry-after");
  const details = { status: answer.status, retryMs: [429, 503].includes(answer.status) ? Number(after) || 1000 : null };
  try {
    const { error } = await answer.json();
    return new Refused(error.message, { ...details, field: error.param });
  } catch {
    return new Refused(`The server answered with status ${answer.status}.`, details);
  }
}

let token = {};

// Returns the credential for a socket: a token that is valid for some minutes, or the key if the server issues no tokens.
async function credential() {
  if (token.of === key() && Date.now() < token.untilMs) return token.value;
  const read = async () => (await ask("v1/tokens", { json: { purpose: "socket" } })).json();
  const { token: value, expires_in: lifetimeS } = await read().catch(() => ({ token: key(), expires_in: 0 }));
  token = { value, of: key(), untilMs: Date.now() + 900 * lifetimeS };
  return value;
}

export async function socket(path) {
  const to = url(path);
  to.protocol = to.protocol.replace("http", "ws");
  const opened = new WebSocket(to, key() ? ["talkray", "openai-insecure-api-key." + (await credential())] : []);
  opened.binaryType = "arraybuffer";
  opened.addEventListener("error", () => { token = {}; });
  return opened;
}

// Counts down in the state line `id` until the next retry. Returns early, without an error, if `signal` aborts.
export async function countDown(id, error, signal) {
  for (let left = Math.ceil(error.retryMs / 1000); left > 0 && !signal.aborted; left--) {
    const told = error.message.replace(/ ?Try again in \d+ s\./, "");
    show(id, `${told} Trying again in ${left} s.`, true);
    await new Promise((done) => {
      const timer = setTimeout(done, Math.min(1000, error.retryMs));
      signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
    });
  }
}
