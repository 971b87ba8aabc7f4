// Elements, and helper functions for all parts of the page.

export const at = (id) => document.getElementById(id);

// Creates an element with properties, including `on...` listeners, and children.
export function make(tag, properties = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...inside);
  return element;
}

// Sets the text of a state line. `bad` styles the text as an error.
export function show(id, text, bad = false) {
  at(id).textContent = text;
  at(id).classList.toggle("bad", bad);
}

// Shows figures, given as rows of [name, value, unit, is the main figure].
export function figures(id, rows) {
  at(id).replaceChildren(...rows.map(([name, value, unit, main]) => make(
    "div", { className: main ? "main" : "" },
    make("dt", { textContent: name }), make("dd", {}, String(value), make("small", { textContent: unit ?? "" })),
  )));
}

export const ms = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : Math.round(value));

export const seconds = (value) => value.toFixed(1) + " s";

const store = (place) => ({
  read(name) {
    try { return JSON.parse(place().getItem("talkray." + name)); } catch { return null; }
  },
  write(name, value) {
    try {
      if (value === null) place().removeItem("talkray." + name);
      else place().setItem("talkray." + name, JSON.stringify(value));
    } catch { /* private windows may not have storage */ }
  },
});

export const kept = store(() => localStorage); // kept for the next visit
const typed = store(() => sessionStorage); // kept for this tab

// Keeps text, numbers and sliders across reloads.
export function keepTyped() {
  const all = document.querySelectorAll("textarea, input:not([type=password], [type=file], [type=checkbox])");
  for (const each of all) {
    each.value = typed.read(each.id) ?? each.value;
    if (each.type === "range") each.dispatchEvent(new Event("input")); // updates the label
  }
  addEventListener("pagehide", () => { for (const each of all) typed.write(each.id, each.value); });
}

export function copier(button, text) {
  at(button).hidden = !navigator.clipboard;
  at(button).addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    at(button).textContent = "Copied";
    setTimeout(() => { at(button).textContent = "Copy"; }, 1500);
  });
}

export function saveFile(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// Scales a canvas to the resolution of the screen. Returns its context, and width and height in CSS pixels.
export function sheet(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  return { paint, width, height };
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
