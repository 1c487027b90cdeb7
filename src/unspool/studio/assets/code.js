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
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${writePython(key)}: ${writePython(one)}`).join(", ")}}`;
  if (typeof value === "string") {
    return `"${value.replace(/[\\"\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, (one) => ({ "\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t" })[one] ?? `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`)}"`;
  }
  return String(value);
}

/** A word of a shell, quoted. */
export function quoteShell(word) {
  return /^[\w.,:/=@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

export function asPython(request, model) {
  const given = settingsOf(request);
  const settings = given.filter(([name]) => name !== "force_words");
  const names = new Map(settings);
  if (names.get("do_sample") && !names.has("top_k")) settings.push(["top_k", 0]); // the server's default
  const words = given.find(([name]) => name === "force_words")?.[1];
  const lines = settings.map(([name, value]) => `    ${name}=${writePython(value)},`);
  if (words) lines.push(`    force_words_ids=[lm.tokenizer.encode(word, add_special_tokens=False) for word in ${writePython(words)}],`);
  const prompt = writePython(request.messages ?? request.prompt);
  return `import unspool\n\nlm = unspool.load(${writePython(model)})\nresult = lm.generate(\n    ${prompt},\n${lines.join("\n")}\n)\nprint(result.text)\n`;
}

export function asCurl(request, address) {
  const body = JSON.stringify({ ...request, stream: true }, null, 2);
  const { max_new_tokens: length, prefix_ids: _, ...rest } = JSON.parse(body);
  const route = request.messages ? "v1/chat/completions" : "v1/completions";
  const sent = JSON.stringify(length === undefined ? rest : { ...rest, max_tokens: length }, null, 2);
  return `curl -N ${quoteShell(new URL(route, address).href)} \\\n  -H 'content-type: application/json' \\\n  -d ${quoteShell(sent)}\n`;
}

export function asCommand(request, model) {
  const words = ["unspool", "run", ...(request.messages ? ["--chat"] : []), "--model", quoteShell(model)];
  const messages = request.messages ?? [];
  const system = messages.find((one) => one.role === "system")?.content;
  if (system !== undefined) words.push("--system", quoteShell(system));
  for (const [name, value] of settingsOf(request)) words.push(...asFlag(name, value));
  if (request.do_sample && request.top_k === undefined) words.push("--top-k 0");
  const prompt = request.messages ? messages.findLast((one) => one.role === "user")?.content ?? "" : request.prompt;
  words.push(quoteShell(typeof prompt === "string" ? prompt : JSON.stringify(prompt)));
  return `${words.join(" ").replaceAll(" --", " \\\n  --")}\n`;
}

function asFlag(name, value) {
  const flag = `--${name.replaceAll("_", "-")}`;
  if (name === "force_words" && Array.isArray(value)) return value.map((word) => `--force-words ${quoteShell(word)}`);
  if (value === true) return [flag];
  if (value === false) return [`--no-${name.replaceAll("_", "-")}`];
  return [`${flag} ${quoteShell(typeof value === "string" ? value : JSON.stringify(value))}`];
}
