// What a person does on the page, one function a scenario: node scenarios.mjs NAME BROWSER URL [JSON of options].
// The last line that it prints is JSON of what was seen.

import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { join } from "node:path";
import { readFileSync } from "node:fs";
import { launch, open, set, stateIs, text, until } from "./browser.mjs";

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function press(page, name, ...held) {
  for (const each of held) await page.keyboard.down(each);
  await page.keyboard.press(name);
  for (const each of held.reverse()) await page.keyboard.up(each);
}

async function speakToTheEnd(page) {
  await page.focus("#text");
  await press(page, "Enter", "Control");
  await stateIs(page, "speak-state", "of audio");
}

// The sizes of files that the page saves, in place of the browser's downloads.
const watchFiles = (page) => page.evaluate(() => {
  window.files = [];
  const make = URL.createObjectURL;
  URL.createObjectURL = (blob) => { window.files.push([blob.size, blob.type]); return make(blob); };
  HTMLAnchorElement.prototype.click = function () {};
});

// Seconds of audio, in pieces of 80 ms, after which the player of the worklet in the file `source` begins.
function beginsAfter(source, bufferS) {
  let Player, hasBegun = false;
  const Base = class { port = { postMessage: (message) => { hasBegun ||= message.begun; } }; };
  new Function("AudioWorkletProcessor", "registerProcessor", "sampleRate", readFileSync(source, "utf8"))(Base, (_, kind) => { Player = kind; }, 24000);
  const player = new Player({ processorOptions: { bufferS } });
  for (let pieces = 1; pieces < 9; pieces++) {
    player.port.onmessage({ data: { pcm: new Float32Array(1920).fill(0.5) } });
    player.process([], [[new Float32Array(128)]]);
    if (hasBegun) return pieces * 0.08;
  }
  return null;
}

const scenarios = {
  async speak(page, { url }) {
    await open(page, url);
    await watchFiles(page);
    await page.focus("#text");
    await press(page, "Enter", "Control");
    await until(page, () => document.querySelector(".words .said"));
    const lit = await page.$$eval(".words .now, .words .said", (words) => words.length);
    await stateIs(page, "speak-state", "of audio");
    const { loudest, firstAt, keyAt } = await page.evaluate(() => window.sink);
    const figures = await page.$$eval("#split dd", (cells) => cells.map((cell) => parseFloat(cell.textContent)));
    const state = await text(page, "#speak-state");
    await page.click("#save");
    await set(page, "#save-as", "mp3");
    await page.click("#save");
    await stateIs(page, "speak-state", "Saved as");
    const files = await page.evaluate(() => window.files);
    await page.focus("#wave");
    await page.keyboard.press("Home");
    await until(page, () => document.getElementById("replay").textContent === "Stop");
    await until(page, () => document.getElementById("replay").textContent === "Play again");
    await speakToTheEnd(page); // its sound comes from a player that is awake
    const again = await page.evaluate(() => window.sink.firstAt - window.sink.keyAt);
    return { loudest, soundMs: [firstAt - keyAt, again], figures, lit, state, files, history: await page.$$eval("#history li", (items) => items.length) };
  },

  async stop(page, { url, text: words }) {
    await open(page, url);
    await watchFiles(page);
    if (words) await set(page, "#text", words);
    await page.click("#speak-now");
    await until(page, () => window.sink.firstAt !== null);
    await pause(300);
    await page.keyboard.press("Escape");
    await pause(500);
    const { keyAt, lastAt } = await page.evaluate(() => window.sink);
    await stateIs(page, "speak-state", "Stopped.");
    await page.click("#save");
    return { silentAfterMs: lastAt - keyAt, state: await text(page, "#speak-state"), files: await page.evaluate(() => window.files), disabled: await page.$eval("#speak-now", (button) => button.disabled) };
  },

  async converse(page, { url }) {
    await open(page, url, "converse");
    await set(page, "#pace", "12");
    await page.click("#write");
    await until(page, () => window.sink.firstAt !== null);
    await pause(1500);
    await page.keyboard.press("Escape");
    await pause(300);
    const { keyAt, lastAt } = await page.evaluate(() => window.sink);
    await stateIs(page, "live-state", "Heard:");
    const heard = await text(page, "#live-state"), colors = await page.$$eval("#live-state span", (all) => all.map((each) => getComputedStyle(each).color));
    await page.type("#live", "And now to something else.");
    await page.keyboard.press("Enter");
    await stateIs(page, "live-state", "Finished.");
    const figures = await page.$$eval("#live-split dd", (cells) => cells.map((cell) => parseFloat(cell.textContent)));
    return { heard, colors, silentAfterMs: lastAt - keyAt, figures };
  },

  async chat(page, { url }) {
    const asked = [];
    const endpoint = createServer((request, response) => {
      const allowed = { "access-control-allow-origin": "*", "access-control-allow-headers": "*" };
      if (request.method === "OPTIONS") { response.writeHead(204, allowed).end(); return; }
      let body = "";
      request.on("data", (part) => { body += part; });
      request.on("end", async () => {
        asked.push({ key: request.headers.authorization, ...JSON.parse(body) });
        response.writeHead(200, { ...allowed, "content-type": "text/event-stream" });
        for (const word of "It is a fine day, and there is a lot to tell you about it. ".match(/\S+\s*/g)) {
          response.write(`data: ${JSON.stringify({ choices: [{ delta: { content: word } }] })}\n\n`);
          await pause(20);
        }
        response.end("data: [DONE]\n\n");
      });
    });
    await new Promise((done) => endpoint.listen(0, "127.0.0.1", done));
    try {
      await open(page, url, "converse");
      await set(page, "#chat-url", `http://127.0.0.1:${endpoint.address().port}/v1/`);
      await set(page, "#chat-model", "any");
      await set(page, "#chat-key", "of-the-chat");
      await Promise.all([page.waitForNavigation(), page.click("#chat-save")]);
      await until(page, () => document.getElementById("voice").options.length > 0);
      await page.type("#chat-text", "How are you?");
      await page.click("#chat-send");
      await until(page, () => window.sink.firstAt !== null);
      await pause(1200);
      await page.keyboard.press("Escape");
      await until(page, () => document.querySelector("#chat-log s"));
      return { asked, log: await page.$$eval("#chat-log li", (lines) => lines.map((line) => line.textContent)), cut: await text(page, "#chat-log s"), colors: await page.$$eval("#chat-log li:last-child > *", (all) => all.map((each) => getComputedStyle(each).color)) };
    } finally {
      endpoint.close();
    }
  },

  // Fields by what a person typed into them, after a reload and after *Use this endpoint*, which loads the page anew.
  async typed(page, { url, fields, unkept }) {
    await open(page, url);
    await page.$$eval("main details", (all) => { for (const each of all) each.open = true; });
    const values = () => page.evaluate((names) => names.map((name) => document.getElementById(name).value), [...Object.keys(fields), ...Object.keys(unkept)]);
    const label = () => text(page, "#speed-is"), canSend = () => page.$eval("#chat-send", (button) => !button.disabled);
    for (const [id, value] of Object.entries({ ...fields, ...unkept })) await page.$eval(`#${id}`, (field, typed) => { field.value = typed; }, value);
    const reloads = async (act) => {
      await Promise.all([page.waitForNavigation(), act()]);
      await until(page, () => document.getElementById("voice").options.length > 0);
      return [await values(), await label(), await canSend()];
    };
    const before = await canSend(), reloaded = await reloads(() => page.reload());
    await page.$$eval("main details", (all) => { for (const each of all) each.open = true; });
    await page.click("#tab-converse");
    return { before, reloaded, used: await reloads(() => page.click("#chat-save")) };
  },

  // Each case sets fields, speaks, and sees how often the error is told, which field it marks, and what "Try anyway" sends.
  async errors(page, { url, cases }) {
    await open(page, url);
    await page.$eval("#options", (details) => { details.open = true; });
    const seen = [];
    page.on("request", (request) => { if (request.url().endsWith("/v1/audio/speech")) seen.at(-1).sent.push(JSON.parse(request.postData())); });
    for (const fields of cases) {
      seen.push({ sent: [] });
      for (const [id, value] of Object.entries(fields)) await page.$eval(`#${id}`, (field, typed) => { field.value = typed; }, value);
      await page.$eval("#speak-form", (form) => { form.noValidate = true; form.requestSubmit(); });
      await until(page, () => document.getElementById("speak-state").classList.contains("bad"));
      const told = await page.evaluate(() => {
        const message = document.getElementById("speak-state").textContent;
        return { times: document.getElementById("speak").innerText.split(message).length - 1, notes: [...document.querySelectorAll(".note, [data-note]")].map((each) => each.textContent).join(""),
          marked: [...document.querySelectorAll("[aria-invalid]")].map((each) => each.id), offers: !document.getElementById("anyway").hidden };
      });
      if (told.offers) {
        await page.click("#anyway");
        await stateIs(page, "speak-state", "of audio");
        told.left = await page.$$eval("[aria-invalid], #anyway:not([hidden])", (all) => all.length);
      }
      Object.assign(seen.at(-1), told);
      for (const id of Object.keys(fields)) await page.$eval(`#${id}`, (field) => { field.value = ""; });
      await page.$eval("#any", (field) => { field.value = ""; });
      await page.$eval("#markup", (field) => { field.value = ""; });
    }
    return { seen };
  },

  // What of a text is struck out.
  async struck(page, { url, texts }) {
    await open(page, url);
    const struck = [];
    for (const each of texts) {
      await set(page, "#text", each);
      await speakToTheEnd(page);
      await page.waitForNetworkIdle();
      struck.push(await page.$$eval("#words s", (all) => all.map((one) => one.textContent)));
    }
    return { struck, shown: await text(page, "#words") };
  },

  // Sizes, labels and drawings of each tab.
  async layout(page, { url, worklet }) {
    await page.evaluateOnNewDocument(() => {
      window.drawn = {}, window.buffers = [];
      const fill = CanvasRenderingContext2D.prototype.fillText, Node = window.AudioWorkletNode;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) { (window.drawn[this.canvas.id] ??= []).push(`${text} at ${x}`); return fill.call(this, text, x, y); };
      window.AudioWorkletNode = class extends Node { constructor(context, name, options) { super(context, name, options); window.buffers.push(options.processorOptions.bufferS); } };
    });
    await open(page, url);
    await page.$$eval("main details", (all) => { for (const each of all) each.open = true; });
    const examples = await page.$$eval("#examples button", (all) => all.map((each) => { each.click(); return ["text", "instructions"].map((id) => document.getElementById(id).value); }));
    await speakToTheEnd(page);
    await set(page, "#playback", "immediate");
    await speakToTheEnd(page);
    const tabs = {};
    for (const tab of ["speak", "converse", "voices", "use", "status"]) {
      await page.click(`#tab-${tab}`);
      await page.waitForNetworkIdle();
      if (tab === "status") await until(page, () => document.querySelectorAll("#pools tr").length > 0);
      tabs[tab] = await page.evaluate((name) => {
        const all = (selector, within = document.getElementById(name)) => [...within.querySelectorAll(selector)].filter((each) => each.checkVisibility());
        const heights = (row) => new Set(all("select, button, input:not([type=range], [type=file])", row).map((each) => each.getBoundingClientRect().height));
        return { uneven: all(".row, .grid").filter((row) => heights(row).size > 1).map((row) => row.outerHTML.slice(0, 99)),
          tiles: all(".split dt").map((each) => each.textContent), primary: all("button.go").map((each) => each.id),
          narrow: all(".row > button, .pair").filter((each) => innerWidth < 500 && each.parentElement.children.length > 1 && each.getBoundingClientRect().width < 80).map((each) => each.id) };
      }, tab);
    }
    await page.click("#tab-speak");
    const rest = await page.evaluate(() => {
      const box = (id) => document.getElementById(id).getBoundingClientRect(), { drawn, buffers } = window;
      const fields = [...document.querySelectorAll("#options .field")].map((field) => field.getBoundingClientRect().left);
      return { drawn, buffers, columns: new Set(fields).size, options: fields.length, footer: document.querySelector("footer").innerText, icon: document.querySelector("link[rel=icon]").href.slice(0, 19),
        together: box("save-as").top === box("save").top, filled: (box("stop").right - box("speak-now").left) / document.getElementById("text").offsetWidth };
    });
    return { tabs, examples, ...rest, begins: [...new Set(rest.buffers)].map((bufferS) => beginsAfter(worklet, bufferS)), pools: await page.$$eval("#pools tr", (rows) => rows.map((row) => row.children[1].textContent)) };
  },

  // A voice that is stored where none can speak.
  async stored(page, { url, recording }) {
    await open(page, url, "voices");
    const open_ = await page.$$eval("#clone-part, #design-part", (parts) => parts.map((part) => part.open));
    await page.click("#clone-part summary");
    await page.type("#clone-name", "ada");
    await (await page.$("#clone-file")).uploadFile(recording);
    await page.click("#clone-now");
    await stateIs(page, "clone-state", "ada is stored");
    await until(page, () => document.querySelector('#voice-list [aria-label="Delete ada"]'));
    return { open: open_, ...await page.evaluate(() => {
      const buttons = (name) => [...document.querySelectorAll(`[aria-label="${name} ada"]`)], box = (name) => buttons(name)[0].getBoundingClientRect();
      return { state: document.getElementById("clone-state").textContent, about: document.getElementById("voices-about").textContent, list: document.getElementById("voice-list").innerText,
        off: ["Hear", "Use"].flatMap(buttons).map((button) => button.disabled), stillOpen: document.getElementById("clone-part").open,
        gaps: [box("Export").left - box("Rename").right, box("Delete").left - box("Export").right] };
    }) };
  },

  async docs(page, { url }) {
    await page.goto(`${url}docs`, { waitUntil: "load" });
    await until(page, () => document.querySelectorAll(".opblock-tag-section.is-open").length > 3);
    return { tags: await page.$$eval(".opblock-tag-section", (all) => all.map((each) => [each.querySelector("[data-tag]").dataset.tag, each.classList.contains("is-open")])), about: await text(page, ".info") };
  },

  async report(page, { url }) {
    await page.goto(url);
    const columns = () => page.$$eval("table", (all) => all.map((table) => [...table.querySelectorAll("th")].filter((each) => each.checkVisibility()).length));
    const before = await columns(), wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    await page.$$eval(".columns", (all) => { for (const each of all) each.click(); });
    return { before, wide, after: await columns() };
  },

  async clone(page, { url }) {
    await open(page, url, "voices");
    await page.type("#clone-name", "ada");
    await page.click("#record");
    await pause(4500);
    await page.click("#record");
    await until(page, () => document.getElementById("record").textContent === "Record again");
    await page.type("#clone-text", "What the recording says.");
    await page.type("#clone-consent", "agreed in writing");
    await page.click("#clone-now");
    await stateIs(page, "clone-state", "ada is stored");
    const findings = await page.$$eval("#findings ul ul li", (lines) => lines.map((line) => line.textContent));
    await page.click('#voice-list [aria-label="Rename ada"]');
    await until(page, () => document.querySelector('#voice-list [aria-label="Hear renamed"]'));
    await page.click('#voice-list [aria-label="Hear renamed"]');
    await until(page, () => ["Waiting for audio …", ""].includes(document.getElementById("voices-state").textContent) && !document.querySelector('#voice-list [aria-label="Hear renamed"]').disabled);
    const said = await text(page, "#voices-state");
    await page.click('#voice-list [aria-label="Delete renamed"]');
    await stateIs(page, "voices-state", "renamed is deleted");
    return { findings, said };
  },

  async design(page, { url }) {
    await page.evaluateOnNewDocument(() => { // a voice of random weights never ends by itself
      const ask = window.fetch;
      window.fetch = (to, options) => ask(to, String(to).endsWith("/design")
        ? { ...options, body: JSON.stringify({ ...JSON.parse(options.body), max_new_tokens: 12, ignore_eos: true }) } : options);
    });
    await open(page, url, "voices");
    await page.type("#design-words", "A calm old man");
    await page.click("#design-now");
    await until(page, () => document.querySelector("#candidates li") || document.getElementById("design-state").classList.contains("bad"));
    const state = await text(page, "#design-state"), candidates = await page.$$eval("#candidates audio", (all) => all.length);
    await page.type('[aria-label="Name of candidate 2"]', "grandpa");
    await page.click('[aria-label="Keep candidate 2"]');
    await stateIs(page, "design-state", "grandpa is stored");
    return { state, candidates, listed: await page.$$eval("#voice-list .what", (all) => all.map((each) => each.textContent).filter((each) => each.startsWith("grandpa")).length) };
  },

  async refusal(page, { url, wait }) {
    await open(page, url);
    for (let count = 0; count < 2; count++) await speakToTheEnd(page);
    await page.click("#speak-now");
    await stateIs(page, "speak-state", "Trying again in");
    const refused = await text(page, "#speak-state");
    if (wait) await stateIs(page, "speak-state", "of audio");
    else {
      await page.keyboard.press("Escape");
      await stateIs(page, "speak-state", "Stopped.");
    }
    return { refused };
  },

  // Prints "gone", and goes on when a line comes: the server is gone by then, and back soon after.
  async gone(page, { url }) {
    await open(page, url);
    await speakToTheEnd(page);
    console.log("gone");
    await new Promise((done) => createInterface({ input: process.stdin }).once("line", done));
    await page.click("#speak-now");
    await stateIs(page, "speak-state", "cannot be reached");
    const refused = await text(page, "#speak-state");
    console.log("back");
    await stateIs(page, "speak-state", "of audio");
    return { refused };
  },

  async keys(page, { url, key }) {
    await page.evaluateOnNewDocument(() => {
      window.offered = [];
      window.WebSocket = class extends WebSocket {
        constructor(to, protocols) { super(to, protocols); window.offered.push(...protocols); }
      };
    });
    await open(page, url);
    await stateIs(page, "about", "API key");
    const before = await text(page, "#about");
    await set(page, "#key", key);
    await until(page, () => document.getElementById("about").textContent.includes("English"));
    await page.$eval("#with-key", (details) => { details.open = false; });
    await speakToTheEnd(page);
    await page.click("#tab-converse");
    await page.type("#live", "Hello there.");
    await page.keyboard.press("Enter");
    await stateIs(page, "live-state", "Finished.");
    const held = []; // the program stands there before this answer comes, and opening the tab twice adds no line twice
    await page.setRequestInterception(true);
    page.on("request", (request) => (request.url().endsWith("/clients.json") ? held.push(request) : request.continue()));
    await page.click("#tab-use");
    const program = await text(page, "#program-code");
    await page.click("#tab-speak");
    await page.click("#tab-use");
    for (const request of held) await request.continue();
    await page.waitForNetworkIdle();
    const lines = (await text(page, "#client-lines")).split("\n\n");
    return { before, program, held: held.length, lines, offered: await page.evaluate(() => window.offered), stored: await page.evaluate(() => localStorage.getItem("talkray.key")) };
  },

  async status(page, { url }) {
    await open(page, url, "status");
    await until(page, () => document.querySelectorAll("#pools tr").length >= 4);
    await set(page, "#most", "2");
    await page.click("#load");
    await stateIs(page, "load-state", "in parallel");
    await until(page, () => !document.getElementById("load").disabled);
    return { state: await text(page, "#load-state"), rows: await page.$$eval("#load-rows tr", (rows) => rows.length), pools: await page.$$eval("#pools th", (cells) => cells.map((cell) => cell.textContent)) };
  },

  // What axe finds on each tab, whether the page is wider than the window, and what the Tab key reaches.
  async access(page, { url }) {
    const axe = readFileSync(join(process.env.PAGES_MODULES, "node_modules/axe-core/axe.min.js"), "utf8");
    await open(page, url);
    await page.evaluate(axe);
    await page.$$eval("main details", (all) => { for (const each of all) each.open = true; });
    await set(page, "#text", "Hello there all of you");
    await speakToTheEnd(page);
    const found = [], wide = [];
    let controls = 0;
    for (const tab of ["speak", "converse", "voices", "use", "status"]) {
      await page.click(`#tab-${tab}`);
      await pause(300);
      const { violations } = await page.evaluate(() => window.axe.run());
      found.push(...violations.map(({ id, nodes }) => `${tab}: ${id}: ${nodes.map((node) => node.html).join(" ").slice(0, 300)}`));
      if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) wide.push(tab);
      const missed = await page.evaluate(async (name) => {
        const all = [...document.getElementById(name).querySelectorAll("button, input, select, textarea, summary, a, [role=slider]")];
        const shown = all.filter((each) => each.checkVisibility() && !each.matches(":disabled"));
        return [shown.length, shown.filter((each) => each.tabIndex < 0).map((each) => each.outerHTML)];
      }, tab);
      controls += missed[0];
      found.push(...missed[1].map((html) => `${tab}: not reached by keys: ${html}`));
    }
    await page.focus("#tab-status");
    await page.keyboard.press("Home");
    const back = await page.evaluate(() => document.activeElement.id);
    return { found, wide, controls, back };
  },

  // Prints what is told of a model that loads, and waits until it has loaded.
  async loading(page, { url }) {
    await page.goto(url, { waitUntil: "load" });
    await stateIs(page, "about", "%");
    const about = await text(page, "#about");
    console.log("loading");
    await until(page, () => document.getElementById("voice").options.length > 0);
    return { about, then: await text(page, "#about") };
  },

  async kinds(page, { url }) {
    await open(page, url);
    await until(page, () => !document.getElementById("about").textContent.startsWith("Looking"));
    const hidden = await page.$eval("#voice-field", (field) => field.hidden);
    const label = await text(page, "label[for=instructions]"), about = await text(page, "#about");
    await page.click("#speak-now");
    await until(page, () => document.getElementById("speak-state").classList.contains("bad") || document.getElementById("speak-state").textContent.includes("of audio"));
    return { hidden, label, about, state: await text(page, "#speak-state") };
  },

  // A function `speak` of the documents, after a click: the seconds that it plays, and the types of the messages.
  async program(page, { url, code }) {
    await open(page, url);
    await page.click("#text");
    await page.evaluate(() => {
      window.seen = { types: [], pieces: [] };
      console.log = (line) => window.seen.types.push(JSON.parse(line).type);
      const start = AudioBufferSourceNode.prototype.start;
      AudioBufferSourceNode.prototype.start = function (at) { window.seen.pieces.push([at, this.buffer.duration]); start.call(this, at); };
    });
    await page.evaluate(`${code}; speak("Hello from a browser.");`);
    await until(page, () => window.sink.firstAt !== null && window.seen.types.includes("done"));
    return page.evaluate(() => ({ ...window.seen, loudest: window.sink.loudest }));
  },
};

const [name, browserName, url, options = "{}"] = process.argv.slice(2);
const given = { url, ...JSON.parse(options) };
const { browser, page, faults } = await launch(browserName, given);
let told;
try {
  told = await scenarios[name](page, given);
} catch (error) {
  told = { error: String(error.stack), states: await page.$$eval(".state, #about", (all) => all.map((each) => `${each.id}: ${each.textContent}`).join("\n")).catch(String) };
} finally {
  await browser.close();
}
console.log(JSON.stringify({ ...told, faults }));
process.exit(told.error ? 1 : 0);
