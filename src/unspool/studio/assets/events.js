// Server-sent events read from a fetch: EventSource can't post a body or send a key.

const LARGEST = 8 << 20; // characters of one event

/** The JSON objects of a stream, in order. */
export async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += value ?? "";
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parseBlock(block);
        if (event !== null) yield event;
      }
      if (done) return;
      if (rest.length > LARGEST) throw new Error("the server sent an event that is too large");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The object of one block of lines; null for comments and for the mark of the end. */
export function parseBlock(block) {
  const data = block
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(line.startsWith("data: ") ? 6 : 5))
    .join("\n");
  if (data === "" || data === "[DONE]") return null;
  const event = JSON.parse(data);
  return event !== null && typeof event === "object" ? event : null;
}
