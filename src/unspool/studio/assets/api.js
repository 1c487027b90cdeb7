// Asking the server: its models, its table of settings, and traces. The key stays in this tab.

import { readEvents } from "./events.js";

const KEY = "unspool-key";
let askForKey = async () => null;

/** How a person is asked for a key: an async function that returns it, or null. */
export function setKeyAsker(asker) {
  askForKey = asker;
}

export class ServerError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function send(path, { body, signal } = {}) {
  for (let again = false; ; again = true) {
    const headers = { accept: "application/json, text/event-stream" };
    const key = sessionStorage.getItem(KEY);
    if (key !== null) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const answer = await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
    });
    if (answer.status === 401) {
      const given = await askForKey(again || key !== null);
      if (given === null) throw new ServerError("The server wants an API key.", 401);
      sessionStorage.setItem(KEY, given);
      continue;
    }
    if (!answer.ok) throw await readRefusal(answer);
    return answer;
  }
}

async function readRefusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // no JSON: something between here and the server answered
  }
  const message = typeof error.message === "string" ? error.message : `The server answered ${answer.status}.`;
  return new ServerError(message, answer.status, typeof error.param === "string" ? error.param : null);
}

export async function fetchModels() {
  return (await (await send("v1/models")).json()).data;
}

export async function fetchParameters() {
  const given = await (await send("v1/parameters")).json();
  return Array.isArray(given) ? given : given.data;
}

export async function fetchSinglePage() {
  return (await send("studio/kept.html")).text();
}

/** A text without what the model could have guessed, with every token's loss. */
export async function postShort(body) {
  return (await send("v1/compress", { body })).json();
}

/** The events of a trace, as they come. */
export async function* openTrace(body, signal) {
  const answer = await send("v1/trace", { body, signal });
  yield* readEvents(answer.body);
}
