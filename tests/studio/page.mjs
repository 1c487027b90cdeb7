// The whole page without a browser: names, focus, keys, and what each tab shows.
// `ASSETS` and `HERE` are replaced by addresses, `PARAMETERS` by the server's table of settings.
import assert from "node:assert/strict";
import { test } from "node:test";
import { nameOf, openPage } from "HERE/small_page.mjs";

const parameters = PARAMETERS;
const asked = [];
const alternative = (id, text, raw, more = {}) => ({ id, text, raw, p: raw, cut_by: null, ...more });
const token = (index, text, more = {}) => ({
  type: "token", index, id: index, text, delta: text, logprob: -1, raw_logprob: -2, rank: 2, entropy: 1, raw_entropy: 2, ms: 3, draft: null,
  top: [alternative(index, text, 0.5), alternative(900, " other", 0.3), alternative(901, " third", 0.1, { cut_by: "top_p" })],
  steps: [{ processor: "top_p", setting: "top_p", removed: 1, left: 2, changed: 0, line: 0.2 }], ...more,
});
const TEXTS = [" A", " ", "\n", "\t", "", "\u00a0", "<0xF0>"];
let makeEvents = () => [
  { type: "start", id: "t", model: "m", strategy: "sample", settings: {}, seed: 1, prompt: [] },
  ...TEXTS.map((text, at) => token(at, text)),
  { type: "end", finish_reason: "length", text: TEXTS.join(""), sequences: [], stats: { tokens_per_second: 9 } },
];
const makeShort = (body) => {
  asked.push(body);
  const tokens = ["The ", "pier ", "was "].map((text, at) => ({ context: 0, text, loss: at ? at * 3 : null, is_kept: at !== 2 }));
  return { compressed_prompt: "The pier ", origin_tokens: 3, compressed_tokens: 2, rate: 0.6667, seconds: 0.2, tokens };
};
const page = openPage((path, body) => {
  if (path === "v1/models") return { data: [{ id: "m" }] };
  if (path === "v1/parameters") return parameters;
  if (path === "v1/compress") return makeShort(body);
  asked.push(body);
  return makeEvents(body);
});
await import("ASSETS/main.js");
const settle = () => new Promise((done) => setTimeout(done, 30));
await settle();

const find = (selector) => page.querySelector(selector);
const shown = (selector) => page.querySelectorAll(selector).filter((one) => one.isShown);
const press = (key, more = {}) => page.activeElement.send("keydown", { key, ...more });
const names = () => shown(".setting").map((one) => one.dataset.name);
const primary = () => shown(".primary").map((one) => one.getAttribute("id"));
const write = async () => {
  find("#tab-write").click();
  find("#write").click();
  await settle();
};
const choose = (select, value) => {
  select.value = value;
  select.send("change");
};

test("keys act at once, and letters that are typed into a field act nowhere", async () => {
  assert.equal(page.activeElement, page.body); // nothing that is typed lands in a field that was not chosen
  press("c");
  assert.equal(page.body.dataset.tab, "compare");
  press("w");
  assert.equal(page.body.dataset.tab, "write");
  const before = asked.length;
  for (const open of [() => press("/"), () => press("s"), () => find("#model").focus(), () => find("#set-stop_strings")?.focus()]) {
    open();
    assert.match(page.activeElement.tagName, /INPUT|TEXTAREA|SELECT/);
    for (const key of ["c", "w", "t", "s", "/", "?", "[", "]", "Enter", " "]) {
      const at = page.activeElement;
      assert.equal(press(key).defaultPrevented, false, key); // the field gets it
      assert.equal(page.activeElement, at);
      assert.equal(page.body.dataset.tab, "write");
    }
    press("Escape"); // leaves the field
    assert.equal(page.activeElement, page.body);
  }
  assert.equal(find("dialog"), null);
  find("#prompt").focus();
  press("Enter", { ctrlKey: true, isComposing: true }); // chooses a word in an input method
  assert.equal(asked.length, before);
  page.activeElement.isContentEditable = false;
  press("Escape");
  const edited = find("h1");
  edited.isContentEditable = true;
  edited.focus();
  press("c");
  assert.equal(page.body.dataset.tab, "write");
  edited.isContentEditable = false;
  edited.blur();
});

test("an open dialog has the keys, and single letters can be switched off", async () => {
  press("?");
  const before = asked.length;
  press("c");
  press("Enter", { ctrlKey: true });
  assert.equal(asked.length, before);
  assert.equal(page.body.dataset.tab, "write");
  const box = find("#keys-on");
  assert.match(nameOf(box), /Keys without Ctrl/);
  box.checked = false;
  box.send("change");
  find("dialog").close();
  press("c");
  assert.equal(page.body.dataset.tab, "write");
  page.querySelectorAll("button").find((one) => nameOf(one) === "Keyboard").click();
  find("#keys-on").checked = true;
  find("#keys-on").send("change");
  find("dialog").close();
  page.activeElement.blur();
  press("c");
  assert.equal(page.body.dataset.tab, "compare");
  press("w");
});

test("one button is the primary one", async () => {
  assert.deepEqual(primary(), ["write"]);
  find("#tab-compare").click();
  assert.deepEqual(primary(), ["compare-run"]);
  find("#compare-run").click();
  await settle();
  assert.deepEqual(primary(), ["compare-run"]);
  const whole = makeEvents;
  makeEvents = (body) => whole(body).slice(0, 3); // the stream is lost
  await write();
  assert.ok(find("#resume").isShown);
  assert.deepEqual(primary(), ["write"]);
  makeEvents = whole;
});

test("Compare shows the settings that its columns take, and sends no others", async () => {
  find("#tab-write").click();
  const all = names();
  assert.ok(all.length > 60 && find("#preset").isShown && find("#settings-search").isShown);
  choose(find("#preset"), "Watermark");
  find("#set-top_k").value = "7";
  find("#set-top_k").send("input");
  find("#set-min_p").value = "high"; // a fault where it can't be seen stops nothing
  find("#set-min_p").send("input");
  find("#tab-compare").click();
  assert.deepEqual(names(), ["max_new_tokens", "seed"]);
  assert.ok(!find("#preset").isShown && !find("#settings-search").isShown);
  assert.deepEqual(shown(".chip-name").map((one) => one.textContent).sort(), ["max_new_tokens", "seed"]);
  assert.deepEqual(shown(".settings details"), []);
  asked.length = 0;
  find("#compare-run").click();
  await settle();
  assert.equal(asked.length, 3);
  for (const one of asked) assert.ok(one.top_k === undefined && one.watermarking_config === undefined && one.max_new_tokens === 64);
  const selects = shown(".compare-column select");
  choose(selects[2], "Greedy"); // nothing is drawn: a seed has no effect
  assert.deepEqual(names(), ["max_new_tokens"]);
  choose(selects[2], "the settings of Write");
  assert.deepEqual(names(), all);
  assert.ok(find("#preset").isShown);
  asked.length = 0;
  find("#compare-run").click();
  assert.deepEqual(asked, []); // now the fault counts
  assert.match(find(".compare .verdict").textContent, /min_p is a number/);
  find("#set-min_p").value = "";
  find("#set-min_p").send("input");
  find("#compare-run").click();
  await settle();
  assert.equal(asked.filter((one) => one.top_k === 7 && one.watermarking_config).length, 1);
  choose(selects[2], "Sampling, top-p 0.9");
  find("#tab-write").click();
  assert.deepEqual(names(), all); // what was set is still there
  assert.equal(find("#set-top_k").value, "7");
});

test("everything has a name, and landmarks have different ones", async () => {
  const check = () => {
    for (const one of shown("button, input, select, textarea, [role=option], [role=img], [role=listbox], [role=tab], [role=group]")) {
      if (one.getAttribute("aria-hidden") === "true") continue;
      assert.notEqual(nameOf(one), "", `${one.tagName} ${one.getAttribute("class")} ${one.textContent}`);
    }
    const landmarks = shown("section, nav, aside, main, [role=region]").filter(
      (one) => one.tagName === "MAIN" || one.hasAttribute("aria-label") || one.hasAttribute("aria-labelledby"),
    );
    const told = landmarks.map((one) => `${one.tagName} ${one.hasAttribute("aria-label") || one.hasAttribute("aria-labelledby") ? nameOf(one) : ""}`);
    assert.deepEqual(told, [...new Set(told)]);
    const ids = shown("[id]").map((one) => one.getAttribute("id"));
    assert.deepEqual(ids, [...new Set(ids)]);
  };
  check();
  // Each strategy brings a view that has the strategy's name, as the text has.
  const more = {
    contrastive: { alpha: 0.6, candidates: [{ id: 1, text: " a", p: 0.5, penalty: 0.1, score: 0.4, chosen: true }, { id: 2, text: " b", p: 0.6, penalty: 0.9, score: 0.1 }] },
    dola: { layer: 2, divergences: [{ layer: 2, value: 0.1 }], guesses: [] },
    guidance: { with: [{ id: 1, text: " a", p: 0.5 }], without: [{ id: 2, text: " b", p: 0.5 }] },
    grammar: { allowed: 3, forced: false },
    watermark: { green: true, scored: 3, z: 1 },
  };
  const whole = makeEvents;
  for (const strategy of ["contrastive_search", "dola", "guidance", "grammar", "watermark", "sample"]) {
    makeEvents = (body) => whole(body).map((one) => (one.type === "token" ? { ...one, ...more } : one.type === "start" ? { ...one, strategy } : one));
    await write();
    assert.equal(shown("[role=option]").length, TEXTS.length);
    check();
  }
  makeEvents = whole;
  find("#tab-compare").click();
  for (const select of shown(".compare-column select")) choose(select, "Greedy");
  check(); // columns with the same settings
  page.querySelectorAll("button").find((one) => nameOf(one) === "Add a column").click();
  assert.equal(nameOf(page.activeElement), "Settings of column 4");
  check();
  find("#compare-run").click();
  await settle();
  check();
  page.querySelectorAll("button").find((one) => nameOf(one) === "Remove column 4").click();
  assert.equal(nameOf(page.activeElement), "Add a column");
});

test("the name of a bar holds what the bar shows", async () => {
  await write();
  shown("[role=option]")[0].click();
  const bars = shown(".bar");
  assert.equal(bars.length, 3);
  const seen = (one) => one.classList.contains("sr") || one.getAttribute("aria-hidden") === "true" ? "" : one.children.length ? one.childNodes.map((part) => (part.walk ? seen(part) : part.textContent)).join("") : one.textContent;
  for (const bar of bars)
    for (const part of bar.children) assert.ok(nameOf(bar).includes(seen(part).trim()), `${nameOf(bar)} | ${seen(part)}`);
  assert.match(nameOf(bars[0]), /␣A, 50 % in the model, 50 % after the settings.*, written$/);
  assert.match(nameOf(bars[2]), /cut by top_p.*, write on from it$/);
});

test("the focus is not lost when what had it goes away", async () => {
  await write();
  find("#preset").focus();
  choose(find("#preset"), "Watermark");
  const chips = () => shown(".chip button");
  const num = chips().length;
  chips()[0].click();
  assert.equal(chips().length, num - 1);
  assert.equal(page.activeElement, chips()[0]);
  while (chips().length) chips().at(-1).click();
  assert.equal(page.activeElement.getAttribute("id"), "settings-search");
  await write();
  const first = shown(".tried-run")[0];
  first.click();
  assert.equal(page.activeElement.dataset.run, "1");
  assert.ok(page.activeElement.isShown);
  find(".sheet-close").click();
  assert.equal(page.activeElement.getAttribute("role"), "listbox");
});

test("tabs are one stop of the tab key, and arrows go between them", () => {
  find("#tab-write").click();
  assert.deepEqual(shown("[role=tab]").map((one) => one.tabIndex), [0, -1, -1]);
  press("ArrowRight");
  assert.equal(page.activeElement.getAttribute("id"), "tab-compare");
  assert.equal(page.body.dataset.tab, "compare");
  assert.deepEqual(shown("[role=tab]").map((one) => one.tabIndex), [-1, 0, -1]);
  press("ArrowRight");
  assert.equal(page.body.dataset.tab, "shorten");
  press("ArrowLeft");
  assert.equal(page.body.dataset.tab, "compare");
  press("Home");
  assert.equal(page.activeElement.getAttribute("id"), "tab-write");
});

test("a screen reader hears when a text begins and ends, and not each token", async () => {
  const live = page.querySelectorAll("[role=status]").find((one) => one.classList.contains("sr"));
  const heard = [];
  const replace = live.replaceChildren.bind(live);
  live.replaceChildren = (...nodes) => (heard.push(nodes.join("")), replace(...nodes));
  await write();
  assert.deepEqual([heard.length, heard[0]], [2, "Writing"]);
  assert.match(heard[1], /^Done, 7 tokens\./);
  for (const one of page.querySelectorAll("[role=listbox]")) assert.equal(one.getAttribute("aria-live"), null);
});

test("a text is shown with each token's loss and what goes", async () => {
  find("#tab-shorten").click();
  assert.deepEqual(primary(), ["short-run"]);
  find("#short-question").value = "When?";
  find("#short-run").click();
  await settle();
  const { context, question, rate } = asked.at(-1);
  assert.ok(context[0].length > 0);
  assert.deepEqual([question, rate], ["When?", 0.5]);
  assert.match(find(".shorten .verdict").textContent, /^3 tokens, 2 left/);
  assert.deepEqual(shown(".short-text ins").map((one) => one.textContent), ["The ", "pier "]);
  assert.deepEqual(shown(".short-text del").map((one) => one.textContent), ["was "]);
  assert.match(find(".short-text del").getAttribute("title"), /loss 6.00, goes/);
  assert.equal(find(".short-left").textContent, "The pier ");
  find("#tab-write").click();
});
