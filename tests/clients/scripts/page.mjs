// The page's own script, with a document that only remembers: speaks, is stopped behind the first chunk, speaks again.
import { readFileSync } from "node:fs";
import vm from "node:vm";

const [, , page] = process.argv;
const script = readFileSync(page, "utf8").match(/<script>(.*?)<\/script>/s)[1];
const thrown = [];
process.on("unhandledRejection", (error) => thrown.push(String(error)));

class Element {
  constructor() { this.hidden = this.disabled = false; this.value = this.textContent = this.className = this.href = ""; this.handlers = {}; this.children = []; this.parentElement = { hidden: false }; }
  addEventListener(kind, handler) { this.handlers[kind] = handler; }
  append(child) { this.children.push(child); }
  get childElementCount() { return this.children.length; }
  requestSubmit() { this.handlers.submit({ preventDefault() {} }); }
}
const elements = {};
const element = (id) => (elements[id] ??= Object.assign(new Element(), { hidden: id === "save" }));

class Player {
  currentTime = 0; state = "running"; destination = {};
  resume() { return Promise.resolve(); }
  close() {
    if (this.state === "closed") return Promise.reject(new Error("Cannot close a closed AudioContext."));
    this.state = "closed";
    return Promise.resolve();
  }
  createBuffer(channels, length, rate) { return { duration: length / rate, copyToChannel() {} }; }
  createBufferSource() { return { connect() {}, start() {} }; }
}

const pcm = new Uint8Array(48000); // a second
let release = () => {};
const voices = [{ id: "nora", name: "Nora", type: "builtin", alias_of: null }, { id: "alloy", name: "Alloy", type: "alias", alias_of: "nora" }];
async function fetch(path, { signal } = {}) {
  if (path === "v1/audio/voices") return Response.json({ voices });
  if (path === "v1/models") return Response.json({ data: [{ id: "embedded", languages: ["English"] }] });
  const body = new ReadableStream({
    start(controller) {
      controller.enqueue(pcm);
      signal.addEventListener("abort", () => controller.error(signal.reason));
      release = () => controller.close();
    },
  });
  return new Response(body, { headers: { "x-sample-rate": "24000" } });
}

let saved = null;
class Url extends URL { static createObjectURL(blob) { saved = blob; return "blob:saved"; } }
class Choice { constructor(text, value) { Object.assign(this, { text, value }); } }
const document = { getElementById: element, createElement: () => new Element() };
const world = { document, fetch, AudioContext: Player, AbortController, Blob, Response, URL: Url, Option: Choice, navigator: {}, location: { href: "http://talkray/" }, performance, console };
vm.runInNewContext(script, world);

const turn = () => new Promise((next) => setImmediate(next));
const until = async (is) => { for (let turns = 0; turns < 1000 && !is(); turns++) await turn(); };
await until(() => element("about").textContent);
element("form").requestSubmit();
await until(() => element("state").textContent.includes("so far"));
element("stop").handlers.click();
await until(() => element("stop").disabled && !element("save").hidden);
await turn(); // what was rejected is told
const stopped = { state: element("state").textContent, bytes: saved?.size, hidden: element("save").hidden, speak: element("speak").disabled };
element("form").requestSubmit();
await until(() => element("state").textContent.includes("so far"));
element("form").requestSubmit(); // while the one before speaks: nothing of it may show
await until(() => element("state").textContent.includes("so far"));
release();
await until(() => element("state").textContent.includes("in all"));
const options = element("voice").children.flatMap((group) => group.children.map((option) => option.text));
console.log(JSON.stringify({ thrown, stopped, again: element("state").textContent, options }));
