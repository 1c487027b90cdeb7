// Values of settings: what a person typed, read against the server's table. Nothing here touches the page.

// Fields of a request beside the settings: texts, which the server turns into tokens.
export const FIELDS = [
  {
    name: "negative_prompt",
    type: "long text",
    default: null,
    group: "control",
    help: "What guidance_scale leads away from.",
  },
  {
    name: "force_words",
    type: "texts",
    default: null,
    group: "control",
    help: "Texts that must be written, one on each line; with num_beams.",
  },
  {
    name: "bad_words",
    type: "texts",
    default: null,
    group: "control",
    help: "Texts that may not be written, one on each line.",
  },
  { name: "ignore_eos", type: "flag", default: false, group: "length", help: "Go on after the model's end token." },
];

const KINDS = {
  flag: "flag",
  boolean: "flag",
  bool: "flag",
  integer: "integer",
  int: "integer",
  number: "number",
  float: "number",
  choice: "choice",
  enum: "choice",
  text: "text",
  string: "text",
  "long text": "text",
  texts: "texts",
  choices: "texts",
  ids: "json-or-number",
  layers: "layers",
}; // everything else is written as JSON

export function kindOf(parameter) {
  if (parameter.choices?.length) return "choice";
  return KINDS[parameter.type] ?? "json";
}

/** The value that a text stands for; undefined for an empty one. Throws an Error that says what is wrong. */
export function readValue(parameter, text) {
  const word = text.trim();
  const kind = kindOf(parameter);
  if (word === "") return undefined;
  if (kind === "flag") return readFlag(parameter, word);
  if (kind === "integer" || kind === "number") return readNumber(parameter, word, kind === "integer");
  if (kind === "choice") return readChoice(parameter, word);
  if (kind === "text") return text;
  if (kind === "layers" && !word.startsWith("[")) return word;
  if (kind === "texts" && !word.startsWith("[")) return text.split("\n").filter((line) => line !== "");
  try {
    return JSON.parse(word);
  } catch {
    throw new Error(`${parameter.name} is written as JSON, such as [1, 2] or {"a": 1}`);
  }
}

function readFlag(parameter, word) {
  if (word === "true" || word === "false") return word === "true";
  throw new Error(`${parameter.name} is true or false`);
}

function readNumber(parameter, word, isWhole) {
  const value = Number(word);
  if (!Number.isFinite(value) || (isWhole && !Number.isInteger(value))) {
    throw new Error(`${parameter.name} is a ${isWhole ? "whole " : ""}number`);
  }
  const { minimum, maximum } = parameter;
  if (typeof minimum === "number" && value < minimum) throw new Error(`${parameter.name} is at least ${minimum}`);
  if (typeof maximum === "number" && value > maximum) throw new Error(`${parameter.name} is at most ${maximum}`);
  return value;
}

function readChoice(parameter, word) {
  const found = parameter.choices.find((choice) => String(choice) === word);
  if (found === undefined) throw new Error(`${parameter.name} is one of ${parameter.choices.join(", ")}`);
  return found;
}

/** A value as it is typed. */
export function writeValue(value) {
  if (value === undefined || value === null) return "";
  if (Array.isArray(value) && value.length && value.every((one) => typeof one === "string" && !one.includes("\n"))) {
    return value.join("\n");
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** The range of a slider for settings that have a natural one. */
export function sliderRange(parameter) {
  const known = {
    temperature: [0, 2, 0.05],
    top_p: [0, 1, 0.01],
    min_p: [0, 1, 0.01],
    typical_p: [0, 1, 0.01],
    penalty_alpha: [0, 1, 0.05],
    repetition_penalty: [1, 2, 0.05],
    top_k: [0, 200, 1],
    num_beams: [1, 16, 1],
    max_new_tokens: [1, 512, 1],
    guidance_scale: [1, 5, 0.1],
  }[parameter.name];
  return known ?? null;
}

const SEARCHES = ["penalty_alpha", "dola_layers", "force_words", "force_words_ids"];

/** Whether tokens are drawn under these settings, as the server decides it. */
export function isDrawn(settings) {
  if (settings.temperature === 0 || settings.do_sample === false) return false;
  if (settings.do_sample || settings.temperature !== undefined) return true;
  return !(settings.num_beams > 1) && SEARCHES.every((name) => settings[name] === undefined);
}

/** Settings with a seed: what is drawn can then be resumed, shared and drawn again. */
export function withSeed(settings, seed = newSeed()) {
  return settings.seed === undefined && isDrawn(settings) ? { ...settings, seed } : settings;
}

export function newSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}
