// A browser with a page whose sound is watched on its way to the loudspeaker.

import { createRequire } from "node:module";
import { join } from "node:path";

const load = createRequire(join(process.env.PAGES_MODULES, "package.json"));
const puppeteer = load("puppeteer-core");

export async function launch(name, { recording, width = 1100, height = 900, dark = false } = {}) {
  const fake = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"];
  if (recording) fake.push(`--use-file-for-fake-audio-capture=${recording}`);
  const protocolTimeout = Number(process.env.PAGES_WAIT_MS); // of a browser that answers nothing, the scenario tells the state
  const browser = await puppeteer.launch(name === "firefox" ? {
    protocolTimeout, browser: "firefox", executablePath: process.env.PAGES_FIREFOX, headless: true,
    extraPrefsFirefox: { "media.navigator.streams.fake": true, "media.navigator.permission.disabled": true, "ui.systemUsesDarkTheme": dark ? 1 : 0 },
  } : {
    protocolTimeout, executablePath: process.env.PAGES_CHROMIUM, headless: true, args: ["--no-sandbox", "--disable-gpu", ...fake],
  });
  const page = await browser.newPage();
  await page.setViewport({ width, height });
  if (dark && name !== "firefox") await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error.message)));
  page.on("console", (line) => { if (line.type() === "error") faults.push(line.text()); });
  page.on("dialog", (dialog) => dialog.accept(dialog.type() === "prompt" ? "renamed" : undefined));
  await page.evaluateOnNewDocument(watchSink);
  return { browser, page, faults };
}

// The loudest sample that reached the destination, when the first loud one did, and when the last one did.
function watchSink() {
  const connect = AudioNode.prototype.connect;
  const sink = window.sink = { loudest: 0, firstAt: null, lastAt: null, keyAt: null };
  AudioNode.prototype.connect = function (to, ...rest) {
    const connected = connect.call(this, to, ...rest);
    if (to === this.context.destination) {
      const ear = this.context.createAnalyser(), samples = new Float32Array(ear.fftSize = 1024);
      connect.call(this, ear);
      const timer = setInterval(() => {
        if (this.context.state === "closed") { clearInterval(timer); return; }
        ear.getFloatTimeDomainData(samples);
        const loudest = samples.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
        if (loudest < 0.003) return;
        sink.loudest = Math.max(sink.loudest, loudest);
        sink.firstAt ??= performance.now();
        sink.lastAt = performance.now();
      }, 5);
    }
    return connected;
  };
  for (const kind of ["keydown", "click"]) addEventListener(kind, () => { sink.keyAt = performance.now(); sink.firstAt = null; }, true);
}

export const text = (page, selector) => page.$eval(selector, (element) => element.textContent);

export async function until(page, what, ...given) {
  await page.waitForFunction(what, { timeout: Number(process.env.PAGES_WAIT_MS), polling: 50 }, ...given);
}

export const stateIs = (page, id, part) => until(page, (name, wanted) => document.getElementById(name).textContent.includes(wanted), id, part);

export async function open(page, url, tab = "speak") {
  await page.goto(url, { waitUntil: "load" });
  await until(page, () => document.getElementById("voice").options.length > 0 || !document.getElementById("with-key").hidden || document.getElementById("voice-field").hidden);
  if (tab !== "speak") await page.click(`#tab-${tab}`);
}

export async function set(page, selector, value) {
  await page.$eval(selector, (element, given) => {
    element.value = given;
    element.dispatchEvent(new Event("input", { bubbles: true }));
    element.dispatchEvent(new Event("change", { bubbles: true }));
  }, value);
}
