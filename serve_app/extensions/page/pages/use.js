// Shows code for the current request, and the settings of unmodified clients.

import { at, copier } from "./dom.js";
import { address, ask, needsKey } from "./server.js";
import { fields } from "./speak.js";

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
const OURS = ["model", "input", "voice", "instructions", "speed", "response_format"]; // fields of OpenAI's API

const PROGRAMS = {
  curl(sent) {
    const withKey = needsKey() ? ['-H "Authorization: Bearer $TALKRAY_API_KEY"'] : [];
    const body = JSON.stringify({ ...sent, response_format: "mp3" });
    return [`curl ${address()}/v1/audio/speech`, ...withKey, "-H 'Content-Type: application/json'", `-d ${quoted(body)}`, "-o hello.mp3"].join(" \\\n  ");
  },
  Python(sent) {
    const own = Object.entries(sent).filter(([name]) => OURS.includes(name)).map(([name, value]) => `    ${name}=${python(value)},\n`);
    const more = Object.fromEntries(Object.entries(sent).filter(([name]) => !OURS.includes(name)));
    const extra = Object.keys(more).length ? `    extra_body=${python(more)},\n` : "";
    return `# pip install openai\nimport os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${address()}/v1", api_key=${
      needsKey() ? 'os.environ["TALKRAY_API_KEY"]' : '"none"'})\nwith client.audio.speech.with_streaming_response.create(\n${
      own.join("")}${sent.voice ? "" : '    voice="default",\n'}    response_format="mp3",\n${extra}) as answer:\n    answer.stream_to_file("hello.mp3")`;
  },
  JavaScript(sent) {
    return `const answer = await fetch("${address()}/v1/audio/speech", {\n  method: "POST",\n  headers: { "Content-Type": "application/json"${
      needsKey() ? ", Authorization: `Bearer ${process.env.TALKRAY_API_KEY}`" : ""} },\n  body: JSON.stringify(${
      JSON.stringify({ ...sent, response_format: "mp3" }, null, 2).replaceAll("\n", "\n  ")}),\n});\nfor await (const audio of answer.body) {\n  // play the audio, or write it to a file\n}`;
  },
};

const python = (value) => JSON.stringify(value).replace(/^true$/, "True").replace(/^false$/, "False");

const lines = new Map(); // by client

export async function showUse() {
  describe(); // does not need the server
  if (!lines.size) {
    const known = await (await ask("page/clients.json")).json();
    if (lines.size) return; // the user opened this tab again meanwhile
    for (const { dialect, clients } of known) {
      for (const line of clients) {
        const [, name, rest] = /^([^:]+):\s+(.*)$/s.exec(line) ?? [null, dialect, line];
        lines.set(name, [...(lines.get(name) ?? []), [dialect, rest]]);
      }
    }
    const first = ["Open WebUI", "Home Assistant", "LiveKit", "Pipecat", "SillyTavern", "LibreChat"].filter((name) => lines.has(name));
    const others = [...lines.keys()].filter((name) => !first.includes(name)).sort((a, b) => a.localeCompare(b));
    at("client").replaceChildren(...[...first, ...others].map((name) => new Option(name)));
    describe();
  }
}

function describe() {
  at("program-code").textContent = PROGRAMS[at("program").value](fields());
  const words = { $url: address(), $sockets: address().replace("http", "ws"), $voice: at("voice").value || "default" };
  const filled = (text) => text.replace(/\$(url|sockets|voice)\b/g, (word) => words[word]);
  at("client-lines").textContent = (lines.get(at("client").value) ?? []).map(([dialect, rest]) => `Through the ${dialect} API:\n  ${filled(rest)}`).join("\n\n");
}

export function startUse() {
  at("program").replaceChildren(...Object.keys(PROGRAMS).map((name) => new Option(name)));
  at("program").addEventListener("change", describe);
  at("client").addEventListener("change", describe);
  copier("copy-program", () => at("program-code").textContent);
  copier("copy-client", () => at("client-lines").textContent);
}
