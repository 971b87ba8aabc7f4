// Pictures of the page for the documents: node screenshots.mjs URL FOLDER, against a server with the embedded voice.

import { launch, open, set, stateIs, until } from "./browser.mjs";

const [url, folder, only] = process.argv.slice(2);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

async function speak(page) {
  await page.focus("#text");
  await page.keyboard.down("Control");
  await page.keyboard.press("Enter");
  await page.keyboard.up("Control");
}

const middle = async (page) => { await until(page, () => window.sink.firstAt !== null); await pause(2600); };

async function converse(page) {
  await page.click("#tab-converse");
  await page.click("#write");
  await until(page, () => window.sink.firstAt !== null);
  await pause(3500);
  await page.keyboard.press("Escape");
  await stateIs(page, "live-state", "Heard:");
  await page.$eval("#chat-settings", (details) => { details.open = true; });
}

const PICTURES = [
  ["speak", {}, async (page) => {
    for (const _ of [1, 2]) { await speak(page); await stateIs(page, "speak-state", "of audio"); } // the first one wakes the player
    await page.click("#replay"); await pause(1700);
  }],
  ["speak-dark", { dark: true }, async (page) => { await speak(page); await middle(page); }],
  ["speak-phone", { width: 390 }, async (page) => { await speak(page); await middle(page); }],
  ["options", {}, async (page) => {
    await page.click("#options summary");
    await set(page, "#language", "detect");
    await set(page, "#instructions", "Slow and quiet");
    await pause(2000);
  }],
  ["converse", {}, converse],
  ["voices", {}, async (page) => { await page.click("#tab-voices"); await pause(500); }],
  ["voices-phone", { width: 390, dark: true }, async (page) => { await page.click("#tab-voices"); await pause(500); }],
  ["use", {}, async (page) => { await page.click("#tab-use"); await pause(800); }],
  ["status", {}, async (page) => { await page.click("#tab-status"); await page.click("#load"); await until(page, () => !document.getElementById("load").disabled); await pause(2500); }],
  ["status-phone", { width: 390, dark: true }, async (page) => { await page.click("#tab-status"); await pause(2500); }],
];

for (const [name, options, act] of PICTURES.filter(([name]) => !only || name === only)) {
  const { browser, page } = await launch("chromium", options);
  try {
    await open(page, url);
    await act(page);
    await page.screenshot({ path: `${folder}/${name}.webp`, type: "webp", quality: 82, fullPage: true });
  } catch (error) {
    console.error(`${name}: ${error.message}`);
    process.exitCode = 1;
  } finally {
    await browser.close();
  }
}
