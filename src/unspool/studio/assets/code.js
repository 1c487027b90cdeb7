// A request as code: Python, curl, the command line.

const CALLED = ["prompt", "messages", "model", "prefix_ids"];

function settingsOf(request) {
  return Object.entries(request).filter(([name]) => !CALLED.includes(name));
}

/** A value in Python's form. */
export function writePython(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(writePython).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value)
      .map(([key, one]) => `${writePython(key)}: ${writePython(one)}`)
      .join(", ")}}`;
  if (typeof value === "string") {
    return `"${value.replace(/[\\"\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, (one) => ({ "\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t" })[one] ?? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`)}"`;
  }
  return String(value);
}

/** A word of a shell, quoted. */
export function quoteShell(word) {
  return /^[\w.,:/=@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

// Texts that the server turns into tokens; the library and the program take ids.
const TEXTS = { force_words: "force_words_ids", bad_words: "bad_words_ids" };

export function asPython(request, model) {
  const settings = settingsOf(request);
  const names = new Map(settings);
  if (names.get("do_sample") && !names.has("top_k")) settings.push(["top_k", 0]); // the server's default
  const lines = settings.map(([name, value]) => `    ${writeArgument(name, value)}`);
  const prompt = writePython(request.messages ?? request.prompt);
  return `import unspool\n\nlm = unspool.load(${writePython(model)})\nresult = lm.generate(\n    ${prompt},\n${lines.join("\n")}\n)\nprint(result.text)\n`;
}

function writeArgument(name, value) {
  if (Object.hasOwn(TEXTS, name))
    return `${TEXTS[name]}=[lm.tokenizer.encode(word, add_special_tokens=False) for word in ${writePython(value)}],`;
  if (name === "ignore_eos") return `eos_token_id=${value ? "-1" : "None"},`;
  if (name === "watermarking_config") return `watermarking_config=unspool.WatermarkingConfig(**${writePython(value)}),`;
  return `${name}=${writePython(value)},`;
}

export function asCurl(request, address) {
  const body = JSON.stringify({ ...request, stream: true }, null, 2);
  const { max_new_tokens: length, prefix_ids: _, ...rest } = JSON.parse(body);
  const route = request.messages ? "v1/chat/completions" : "v1/completions";
  const sent = JSON.stringify(length === undefined ? rest : { ...rest, max_tokens: length }, null, 2);
  return `curl -N ${quoteShell(new URL(route, address).href)} \\\n  -H 'content-type: application/json' \\\n  -d ${quoteShell(sent)}\n`;
}

/** A command; `settled` are the settings as the server read them, with ids for texts. */
export function asCommand(request, model, settled = {}) {
  const parts = [`unspool run${request.messages ? " --chat" : ""} --model ${quoteShell(model)}`];
  const messages = request.messages ?? [];
  const system = messages.find((one) => one.role === "system")?.content;
  if (system !== undefined) parts.push(`--system ${quoteShell(system)}`);
  const missing = [];
  for (const [name, value] of settingsOf(request)) {
    const flag = asFlag(name, value, settled);
    if (flag === null) missing.push(name);
    else parts.push(flag);
  }
  if (request.do_sample && request.top_k === undefined) parts.push("--top-k 0");
  const prompt = request.messages ? (messages.findLast((one) => one.role === "user")?.content ?? "") : request.prompt;
  parts.push(quoteShell(typeof prompt === "string" ? prompt : JSON.stringify(prompt)));
  const note = missing.length ? `# without ${missing.join(", ")}, for which there is no such option\n` : "";
  return `${note}${parts.join(" \\\n  ")}\n`;
}

function asFlag(name, value, settled) {
  if (name === "watermarking_config" || name === "ignore_eos") return null;
  if (Object.hasOwn(TEXTS, name))
    return settled[TEXTS[name]]
      ? `--${TEXTS[name].replaceAll("_", "-")} ${quoteShell(JSON.stringify(settled[TEXTS[name]]))}`
      : null;
  const flag = name.replaceAll("_", "-");
  if (typeof value === "boolean") return value ? `--${flag}` : `--no-${flag}`;
  return `--${flag} ${quoteShell(typeof value === "string" ? value : JSON.stringify(value))}`;
}
