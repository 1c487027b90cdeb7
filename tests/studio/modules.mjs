// Tests of the modules that need no page. `ASSETS` is replaced by the folder's address.
import assert from "node:assert/strict";
import { test } from "node:test";

const load = (name) => import(`ASSETS/${name}`);
const { applyEvent, bestPath, endOfBest, newRun, pathTo, plainText, readTokens, tokenIds, totalLogprob } = await load("run.js");
const { findParting, greedyPath } = await load("beam_paths.js");
const { placeColumn, spread, measure, ROW } = await load("beam_layout.js");
const { commonStart, findShared } = await load("align.js");
const { isDrawn, readValue, withSeed, writeValue } = await load("values.js");
const { fillPage, readFragment, readRuns, writeFragment, writeRuns } = await load("keep.js");
const { asCommand, asCurl, asPython, quoteShell, writePython } = await load("code.js");
const { explainSteps, nameCut } = await load("explaining.js");
const { parseBlock, readEvents } = await load("events.js");
const { percent, showToken, number } = await load("wording.js");
const { usualColouring, findColouring } = await load("colours.js");

const token = (id, text, more = {}) => ({ type: "token", id, text, delta: text, logprob: -1, raw_logprob: -2, top: [], steps: [], ...more });

test("events are folded into a run", () => {
  const run = newRun(1, { prompt: "x" });
  for (const event of [{ type: "start", strategy: "sample" }, token(1, " a"), token(2, " b"), { type: "later", x: 1 }, { type: "end", text: " a b", sequences: [] }]) applyEvent(run, event);
  assert.equal(run.status, "done");
  assert.deepEqual(tokenIds(run), [1, 2]);
  assert.deepEqual(totalLogprob(run), { total: -4, num: 2 });
  assert.equal(plainText(run), " a b");
});

const beam = (parent, id, text, sum, group = 0) => ({ parent, id, text, sum_logprob: sum, score: sum, group });
const search = () => {
  const run = newRun(1, { prompt: "x", num_beams: 2 });
  // greedy takes A then C, and falls out; the best beam is B then E.
  applyEvent(run, { type: "beams", live: [beam(null, 1, "A", -0.5), beam(null, 2, "B", -0.9)], ended: [] });
  applyEvent(run, { type: "beams", live: [beam(1, 5, "E", -1.0), beam(0, 3, "C", -1.5)], ended: [] });
  applyEvent(run, { type: "beams", live: [beam(0, 6, "F", -1.1), beam(0, 7, "G", -2)], ended: [{ parent: 0, id: 9, text: "!", score: -0.4, group: 0 }] });
  return run;
};

test("the best beam, greedy's path, and where they part", () => {
  const run = search();
  assert.deepEqual(bestPath(run), [1, 0, 0]);
  assert.deepEqual(readTokens(run).map((one) => one.text), ["B", "E", "F"]);
  assert.deepEqual(pathTo(run, 1, 1), [0, 1]);
  assert.deepEqual(greedyPath(run), { path: [0, 1], fellAt: 2 });
  const parting = findParting(run);
  assert.equal(parting.step, 0);
  assert.deepEqual([parting.greedy.text, parting.best.text, parting.fellAt], ["A", "B", 2]);
});

test("a returned text that ended before the last step", () => {
  const run = search();
  applyEvent(run, { type: "end", text: "BE!", sequences: [{ text: "BE!", ids: [2, 5, 9], score: -0.4, beams: [1, 0, null] }] });
  assert.deepEqual(endOfBest(run).node.text, "!");
  assert.deepEqual(tokenIds(run), [2, 5, 9]);
});

test("a search that never leaves greedy has no parting", () => {
  const run = newRun(1, {});
  applyEvent(run, { type: "beams", live: [beam(null, 1, "A", -0.5), beam(null, 2, "B", -0.9)], ended: [] });
  applyEvent(run, { type: "beams", live: [beam(0, 3, "C", -0.6), beam(1, 4, "D", -2)], ended: [] });
  assert.equal(findParting(run), null);
});

test("the same text by beams has the same log-probability", () => {
  const greedy = newRun(1, { prompt: "x" });
  for (const one of [["A", -0.5], ["C", -1], ["!", -2]]) applyEvent(greedy, { ...token(1, one[0], { raw_logprob: one[1] }) });
  const beams = newRun(2, { prompt: "x", num_beams: 2 });
  const node = (parent, id, text, sum, raw) => ({ ...beam(parent, id, text, sum), raw_logprob: raw });
  applyEvent(beams, { type: "beams", live: [node(null, 1, "A", -0.4, -0.5), node(null, 2, "B", -0.9, -0.9)], ended: [] });
  applyEvent(beams, { type: "beams", live: [node(0, 3, "C", -1.2, -1), node(1, 3, "C", -2, -1)], ended: [] });
  applyEvent(beams, { type: "beams", live: [node(1, 4, "D", -2.5, -0.5)], ended: [node(0, 9, "!", -3, -2)] });
  applyEvent(beams, { type: "end", text: "AC!", sequences: [{ text: "AC!", ids: [1, 3, 9], score: -1, beams: [0, 0, null] }] });
  assert.deepEqual(totalLogprob(beams), { total: -3.5, num: 3 });
  assert.deepEqual(totalLogprob(beams), totalLogprob(greedy));
  const last = readTokens(beams).at(-1);
  assert.ok(Math.abs(last.logprob + 1.8) < 1e-9 && last.top[0].p > 0);
  assert.equal(findParting(beams), null); // greedy and the best end with the same token
});

test("greedy's text may end where the best goes on", () => {
  const run = newRun(1, {});
  applyEvent(run, { type: "beams", live: [beam(null, 1, "A", -0.5), beam(null, 2, "B", -0.9)], ended: [] });
  applyEvent(run, { type: "beams", live: [beam(0, 3, "C", -1.6)], ended: [beam(0, 9, "!", -0.6)] });
  assert.deepEqual(greedyPath(run), { path: [0], fellAt: null, end: beam(0, 9, "!", -0.6) });
  const { step, greedy, best } = findParting(run);
  assert.deepEqual([step, greedy.text, best.text], [1, "!", "C"]);
});

test("columns keep their order and a gap", () => {
  assert.deepEqual(spread([0, 0, 0], 10), [-10, 0, 10]);
  assert.deepEqual(spread([0, 100], 10), [0, 100]);
  const nodes = (list) => list.map((one, place) => ({ ...one, place, isLive: true, label: one.text }));
  const first = placeColumn(null, nodes([beam(null, 1, "A", -1), beam(null, 2, "B", -2)]), 0);
  const second = placeColumn(first, nodes([beam(1, 3, "C", -1), beam(0, 4, "D", -2), beam(0, 5, "E", -3)]), first.next);
  assert.deepEqual(second.boxes.map((box) => box.node.text), ["D", "E", "C"]); // by parents: no lines cross
  const ys = second.boxes.map((box) => box.y);
  for (let at = 1; at < ys.length; at += 1) assert.ok(ys[at] - ys[at - 1] >= ROW - 1e-9);
  const orphan = placeColumn(second, nodes([beam(null, 8, "X", -1)]), 0);
  assert.equal(orphan.boxes.length, 1);
  assert.equal(measure("a日"), 3);
});

test("texts are aligned", () => {
  assert.equal(commonStart([[1, 2, 3], [1, 2, 4], [1, 2]]), 2);
  assert.equal(commonStart([[5], [6]]), 0);
  assert.deepEqual(findShared([1, 2, 3, 4], [1, 9, 3, 4]), [true, false, true, true]);
  assert.deepEqual(findShared([], [1]), [false]);
});

test("values are read against the table, and refused with a reason", () => {
  const top_p = { name: "top_p", type: "number", minimum: 0, maximum: 1 };
  assert.equal(readValue(top_p, "0.9"), 0.9);
  assert.equal(readValue(top_p, " "), undefined);
  assert.throws(() => readValue(top_p, "1.5"), /at most 1/);
  assert.throws(() => readValue(top_p, "-1"), /at least 0/);
  assert.throws(() => readValue(top_p, "NaN"), /number/);
  assert.throws(() => readValue({ name: "top_k", type: "integer" }, "1.5"), /whole number/);
  assert.equal(readValue({ name: "x", type: "flag" }, "true"), true);
  assert.deepEqual(readValue({ name: "x", type: "texts" }, " a\n b"), [" a", " b"]);
  assert.deepEqual(readValue({ name: "x", type: "id lists" }, "[[1]]"), [[1]]);
  assert.throws(() => readValue({ name: "x", type: "object" }, "{a"), /JSON/);
  assert.equal(readValue({ name: "x", type: "layers" }, "high"), "high");
  assert.equal(readValue({ name: "x", type: "choice", choices: [true, false, "never"] }, "true"), true);
  for (const value of [1, true, "x", [" a", " b"], [[1, 2]], { a: 1 }]) {
    const type = Array.isArray(value) ? (typeof value[0] === "string" ? "texts" : "id lists") : typeof value === "object" ? "object" : { number: "number", boolean: "flag", string: "text" }[typeof value];
    assert.deepEqual(readValue({ name: "x", type }, writeValue(value)), value);
  }
});

test("what is drawn has a seed", () => {
  for (const settings of [{}, { do_sample: true }, { temperature: 0.7 }, { num_beams: 4, do_sample: true }, { top_p: 0.9 }]) {
    assert.ok(isDrawn(settings));
    assert.ok(Number.isSafeInteger(withSeed(settings).seed));
  }
  for (const settings of [{ do_sample: false }, { temperature: 0 }, { num_beams: 4 }, { penalty_alpha: 0.6, top_k: 4 }, { dola_layers: "high" }]) {
    assert.ok(!isDrawn(settings));
    assert.equal(withSeed(settings).seed, undefined);
  }
  assert.equal(withSeed({ seed: 3 }).seed, 3);
});

test("links hold the state, and nothing else gets in", () => {
  const state = { prompt: "Grüße, 世界 \u202e</script>", settings: { top_p: 0.9 }, model: "m" };
  assert.deepEqual(readFragment(writeFragment(state)), state);
  assert.match(writeFragment(state), /^#1\.[\w-]+$/);
  for (const bad of ["", "#", "#1.", "#1.%%%", "#2.abc", writeFragment([1]), writeFragment(null), `#1.${"a".repeat(70_000)}`]) assert.equal(readFragment(bad), null);
  assert.deepEqual(readFragment(writeFragment({ prompt: 1, messages: [{ role: 1 }, { role: "user", content: "x", evil: 1 }], settings: [], other: 1 })), { messages: [{ role: "user", content: "x" }] });
});

test("runs are kept and read again", () => {
  const run = newRun(3, { prompt: "x" });
  run.tokens.push(token(1, "</script><script>alert(1)</script>\u2028&amp;"));
  const page = fillPage("<script>{{runs}}</script>", [run]);
  assert.equal(page.match(/<script>/g).length, 1);
  assert.deepEqual(readRuns(page.slice(8, -9))[0].tokens, run.tokens);
  assert.equal(readRuns(writeRuns([run]))[0].status, "lost"); // it had not ended
  assert.throws(() => readRuns("{}"), /no runs/);
});

test("requests as code", () => {
  const request = { model: "m", prompt: `it's "x"\n`, do_sample: true, top_p: 0.9, prefix_ids: [1] };
  const python = asPython(request, "m");
  assert.match(python, /lm = unspool\.load\("m"\)/);
  assert.match(python, /"it's \\"x\\"\\n",/);
  assert.match(python, /do_sample=True,\n {4}top_p=0\.9,\n {4}top_k=0,/);
  assert.doesNotMatch(python, /prefix_ids/);
  const curl = asCurl({ ...request, max_new_tokens: 5 }, "http://localhost:1/");
  assert.match(curl, /http:\/\/localhost:1\/v1\/completions/);
  assert.match(curl, /"max_tokens": 5/);
  assert.match(curl, /it'\\''s/);
  assert.match(asCommand(request, "m"), /--do-sample/);
  assert.match(asCommand({ prompt: "x", do_sample: false }, "m"), /--no-do-sample/);
  assert.match(asCommand({ prompt: "x", force_words: ["a"] }, "m", { force_words_ids: [[5]] }), /--force-words-ids '\[\[5\]\]'/);
  assert.match(asCommand({ prompt: "x", watermarking_config: {} }, "m"), /^# without watermarking_config/);
  assert.match(asPython({ prompt: "x", force_words: [" a"] }, "m"), /force_words_ids=\[lm\.tokenizer\.encode\(word, add_special_tokens=False\) for word in \[" a"\]\],/);
  assert.equal(quoteShell("$(rm -rf /); 'x'"), `'$(rm -rf /); '\\''x'\\'''`);
  assert.equal(writePython({ a: [null, true, "\u2028"] }), '{"a": [None, True, "\\u2028"]}');
});

test("why a token was cut", () => {
  const step = { processor: "TopPLogitsWarper", setting: "top_p", removed: 49000, left: 3, changed: 0, line: 0.05 };
  const cut = { id: 5, text: " red", raw: 0.03, p: 0, cut_by: "TopPLogitsWarper" };
  const one = token(1, " a", { steps: [step], top: [{ id: 1, text: " a", raw: 0.6, p: 0.7, cut_by: null }, cut] });
  const [told] = explainSteps(one, { top_p: 0.9 });
  assert.equal(told.why, "top_p 0.9 keeps the likeliest tokens until together they hold 90 %: 3 tokens. ␣red (3.0 %) is past the line and was cut.");
  assert.equal(told.text, "cut 49,000, left 3 tokens · line at 5.0 %");
  assert.equal(nameCut(cut, one, { top_p: 0.9 }), "top_p 0.9");
});

test("events of a stream, however it is cut", async () => {
  const text = 'data: {"type":"token","text":"é世"}\n\n: ping\n\ndata: {"type":"end"}\r\n\r\ndata: [DONE]\n\n';
  const bytes = new TextEncoder().encode(text);
  for (const size of [1, 2, 3, 7, 1000]) {
    const stream = new ReadableStream({
      start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      },
    });
    const found = [];
    for await (const event of readEvents(stream)) found.push(event);
    assert.deepEqual(found, [{ type: "token", text: "é世" }, { type: "end" }]);
  }
  assert.equal(parseBlock(": ping"), null);
});

test("tokens and numbers in words", () => {
  assert.equal(showToken(" a b "), "␣a b␣");
  assert.equal(showToken("\n\t"), "↵⇥");
  assert.equal(showToken("a\u202eb\u0000"), "a⟨202E⟩b⟨0000⟩");
  assert.equal(showToken(""), "∅");
  assert.deepEqual([1, 0.5, 0.0123, 0.00005, 0, null].map(percent), ["100 %", "50 %", "1.2 %", "< 0.01 %", "0 %", "–"]);
  assert.equal(number(-1.005), "−1.00");
});

test("colours say what a run is about", () => {
  assert.equal(usualColouring([token(1, "a")]), "probability");
  assert.equal(usualColouring([token(1, "a", { draft: "accepted" })]), "drafts");
  assert.equal(findColouring("probability").of(token(1, "a", { raw_logprob: Math.log(0.0001) })), "warm5");
  assert.equal(findColouring("watermark").of(token(1, "a", { watermark: { green: null } })), "mark-none");
});
