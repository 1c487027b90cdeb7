// Keeping: a link that has prompt and settings in its fragment, a file of the runs, a page of its own.

const LONGEST_LINK = 60_000;
const FORMAT = "unspool-studio";

/** The fragment of a state: JSON in base64url. It never leaves the browser: servers are not sent fragments. */
export function writeFragment(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return `#1.${btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** The state of a fragment: `{prompt | messages, settings, model}`, or null. Anything of another form is left out. */
export function readFragment(fragment) {
  if (!fragment.startsWith("#1.") || fragment.length > LONGEST_LINK) return null;
  try {
    const text = atob(fragment.slice(3).replaceAll("-", "+").replaceAll("_", "/"));
    const given = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (letter) => letter.charCodeAt(0))));
    return cleanState(given);
  } catch {
    return null;
  }
}

function cleanState(given) {
  if (given === null || typeof given !== "object" || Array.isArray(given)) return null;
  const state = {};
  if (typeof given.prompt === "string") state.prompt = given.prompt;
  if (Array.isArray(given.messages)) {
    state.messages = given.messages
      .filter((one) => one && typeof one.role === "string" && typeof one.content === "string")
      .map(({ role, content }) => ({ role, content }));
  }
  if (given.settings && typeof given.settings === "object" && !Array.isArray(given.settings))
    state.settings = { ...given.settings };
  if (typeof given.model === "string") state.model = given.model;
  return state;
}

/** Runs as a file: everything that was sent and everything that came. */
export function writeRuns(runs) {
  return JSON.stringify({ format: FORMAT, version: 1, runs: [...runs] });
}

/** The runs of a file or of a kept page; throws an Error if it is none. */
export function readRuns(text) {
  const given = JSON.parse(text);
  if (given?.format !== FORMAT || !Array.isArray(given.runs)) throw new Error("This file holds no runs of the studio.");
  const isRun = (run) =>
    run &&
    Number.isInteger(run.id) &&
    Array.isArray(run.tokens) &&
    Array.isArray(run.beams) &&
    Array.isArray(run.rounds) &&
    run.request;
  return given.runs.filter(isRun).map((run) => ({ ...run, status: run.status === "running" ? "lost" : run.status }));
}

/** The page for keeping, with the runs put in. `<` is written as an escape, so that no text can end the element. */
export function fillPage(page, runs) {
  const data = writeRuns(runs)
    .replaceAll("<", "\\u003c")
    .replaceAll(">", "\\u003e")
    .replaceAll("&", "\\u0026")
    .replaceAll("\u2028", "\\u2028")
    .replaceAll("\u2029", "\\u2029");
  return page.split(`{${"{runs}"}}`).join(data);
}

/** Let the browser save a text. */
export function saveFile(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
