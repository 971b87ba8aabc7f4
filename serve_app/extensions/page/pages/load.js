// Load test from this browser. It speaks the same text several times in parallel, over one WebSocket each.

import { at, make, ms, show } from "./dom.js";
import { socket } from "./server.js";
import { fields } from "./speak.js";

const MOST = 16, PAUSE_MS = 250, BOUND_MS = 60000;
let sockets = [], isStopped = true;

// Measures an utterance for a player without a buffer. Returns {firstMs, pauseMs}, {refused} or {failed}.
async function speakOnce() {
  const opened = await socket("v1/audio/speech/ws"), began = performance.now();
  return new Promise((done) => {
    let rate = 24000, firstMs = null, due = 0, pauseMs = 0, isDone = false;
    const end = (result) => { if (!isDone) { isDone = true; clearTimeout(timer); done(result); opened.close(); } };
    const timer = setTimeout(() => end({ failed: "A stream did not end within a minute." }), BOUND_MS);
    sockets.push(opened);
    if (isStopped) opened.close();
    opened.onopen = () => opened.send(JSON.stringify({ type: "speak", ...fields(), seed: Math.floor(Math.random() * 2 ** 31) }));
    opened.onmessage = ({ data }) => {
      const now = performance.now();
      if (typeof data !== "string") {
        if (firstMs === null) { firstMs = now - began; due = now; }
        pauseMs = Math.max(pauseMs, now - due);
        due = Math.max(due, now) + (1000 * data.byteLength) / 2 / rate;
        return;
      }
      const message = JSON.parse(data);
      if (message.type === "started") rate = message.sample_rate;
      else if (message.type === "done") end({ firstMs, pauseMs });
      else if (message.type === "error") end(message.error.code === "rate_limit_exceeded" ? { refused: message.error.message } : { failed: message.error.message });
    };
    opened.onclose = ({ code, reason }) => end(code === 1013 ? { refused: reason } : { failed: isStopped ? "stopped" : `The socket was closed (${code}).` });
  });
}

async function load() {
  const most = Math.max(1, Math.min(MOST, Number(at("most").value) || 1));
  at("most").value = most;
  isStopped = false;
  at("load").disabled = true;
  at("load-stop").disabled = false;
  at("load-rows").replaceChildren();
  at("load-table").hidden = false;
  let carried = 0, why = "";
  for (let many = 1; !why; many = Math.min(most, many * 2)) {
    show("load-state", `${many} in parallel …`);
    sockets = [];
    const results = await Promise.all(Array.from({ length: many }, speakOnce));
    if (isStopped) { why = "Stopped."; break; }
    const failed = results.find((each) => each.failed);
    if (failed) { why = failed.failed; break; }
    const spoken = results.filter((each) => each.firstMs !== undefined), refused = results.filter((each) => each.refused);
    const firsts = spoken.map((each) => each.firstMs).sort((a, b) => a - b), pause = Math.max(0, ...spoken.map((each) => each.pauseMs));
    at("load-rows").append(make("tr", {}, ...[many, `${ms(firsts[firsts.length >> 1])} ms, max. ${ms(firsts.at(-1))} ms`, `${ms(pause)} ms`, refused.length]
      .map((text, index) => make(index ? "td" : "th", { textContent: text, ...(index ? {} : { scope: "row" }) }))));
    if (refused.length) why = `The server accepted ${spoken.length} of ${many} streams.`;
    else if (pause > PAUSE_MS) why = `${many > 1 ? `${many} streams` : "Even a single stream"} had a gap of ${ms(pause)} ms.`;
    else {
      carried = many;
      if (many === most) why = "This is the number that you set.";
    }
  }
  show("load-state", `${carried ? `${carried} in parallel without a gap of more than ${PAUSE_MS} ms. ` : ""}${why}`);
  isStopped = true;
  at("load").disabled = false;
  at("load-stop").disabled = true;
}

export function startLoad() {
  at("load").addEventListener("click", load);
  at("load-stop").addEventListener("click", () => { isStopped = true; for (const each of sockets) each.close(); });
}
