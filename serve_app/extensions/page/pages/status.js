// Shows the response of `/status`, and updates it every two seconds while this tab is visible.

import { at, figures, make, ms, show } from "./dom.js";
import { drawTrend } from "./draw.js";
import { ask } from "./server.js";

const EVERY_MS = 2000;
let timer = null;

export function showStatus() {
  clearTimeout(timer);
  look();
}

async function look() {
  if (at("status").hidden) return;
  if (!document.hidden) {
    try {
      describe(await (await ask("status")).json());
    } catch (error) {
      const why = error.status === 401 ? "The status needs an API key. Enter it above." : error.message;
      show("status-state", error.status === 404 ? "This server has no /status." : why, true);
      if (error.status === 404) return;
    }
  }
  timer = setTimeout(look, EVERY_MS);
}

const refusals = (counts) => Object.values(counts.refused).reduce((sum, count) => sum + count, 0);

function describe(told) {
  const { streams, last_minute: now, last_quarter_hour: quarter, slices } = told;
  show("status-state", "");
  figures("figures", [
    ["First audio, last minute", ms(now.first_audio_ms.p50), "ms", true],
    ["p95, last minute", ms(now.first_audio_ms.p95), "ms"],
    ["Median, last 15 min", ms(quarter.first_audio_ms.p50), "ms"],
    ["Speaking now", streams.speaking, `of ${streams.most}`],
    ["Waiting for audio", streams.waiting, ""],
    ["Refused, last 15 min", refusals(quarter), ""],
    ["Late chunks, last 15 min", quarter.late_chunks, ""],
    ["Audio, last 15 min", Math.round(quarter.audio_s), "s"],
  ]);
  drawTrend(at("trend"), slices);
  const reasons = Object.entries(quarter.refused).map(([reason, count]) => `${reason} ${count}`).join(", ");
  at("trend-note").textContent = `Time to first audio, one bar for 15 seconds. Blue: median. Gray: p95.${
    reasons ? ` Red: refused (${reasons}).` : ""} Measured by ${told.ingresses_heard} ingress replica${told.ingresses_heard === 1 ? "" : "s"}.`;
  const models = Object.entries(told.models).map(([name, state]) => row(name === "model" ? "Model" : `Model: ${name}`, state.state, "", state));
  const pools = Object.entries(told.pools).map(([name, { wanted, running }]) => (
    row(`Pool: ${name}`, running >= wanted ? "ready" : "starting", `${running} of ${wanted}`, {})
  ));
  at("pools").replaceChildren(...models, ...pools);
}

function row(name, state, replicas, { percent, stage }) {
  const cell = make("td", {});
  if (percent !== undefined) cell.append(make("progress", { max: 100, value: percent, "aria-label": `${name} loads` }));
  cell.append([state, percent === undefined ? "" : `${percent} %`, stage ?? ""].filter(Boolean).join(" · "));
  return make("tr", {}, make("th", { scope: "row", textContent: name }), cell, make("td", { textContent: replicas }));
}

export function startStatus() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) showStatus(); });
}
