// Compare: the same prompt and seed under two to four settings, aligned where they part.

import { commonStart, findShared } from "./align.js";
import { findColouring } from "./colours.js";
import { el, button, replace, oncePerFrame } from "./dom.js";
import { findPreset, presetSettings, PRESETS } from "./presets.js";
import { readTokens, totalLogprob } from "./run.js";
import { flowText } from "./text.js";
import { isDrawn, newSeed, withSeed } from "./values.js";
import { count, number, shortValue } from "./wording.js";

const MINE = "the settings of Write";
const FIRST = ["Greedy", "Beam search", "Sampling, top-p 0.9"];

/** The settings of a column, with those of Write beside it. */
function settingsOf(column, mine, seed) {
  if (column.name === MINE) return withSeed({ ...mine }, seed);
  const { seed: _, ...made } = presetSettings(findPreset(column.name));
  if (mine.max_new_tokens !== undefined) made.max_new_tokens = mine.max_new_tokens;
  return withSeed(made, seed);
}

export class CompareView {
  element = el("div", { class: "compare" });
  onopen = () => {}; // (run)
  onchange = () => {}; // another choice of columns
  #columns = [];
  #book;
  #readPrompt;
  #readSettings;
  #grid = el("div", { class: "compare-grid" });
  #verdict = el("p", { class: "verdict", role: "status" });
  #add = button("Add a column", () => this.#addByHand(), { class: "quiet" });
  #draw = oncePerFrame(() => this.#update());

  constructor(book, readPrompt, readSettings) {
    this.#book = book;
    this.#readPrompt = readPrompt;
    this.#readSettings = readSettings;
    const colour = findColouring("probability");
    const tools = el(
      "div",
      { class: "compare-tools" },
      button(["Compare ", el("kbd", {}, "Ctrl ↵")], () => this.start(), { class: "primary", id: "compare-run" }),
      this.#add,
      el(
        "p",
        { class: "legend" },
        colour.legend.slice(1, 5).map(([kind, name]) => el("span", { class: `key t ${kind}` }, name)),
        el("span", { class: "key differs" }, "not in the first column"),
      ),
    );
    this.element.append(
      el(
        "p",
        { class: "muted" },
        "Prompt, length and seed are those on the left; each column decodes in its own way, and one can have all settings on the left. Muted text is the same as in the first column; ⋔ is where a column leaves it.",
      ),
      tools,
      this.#verdict,
      this.#grid,
    );
    book.listen((kind, run) => this.#columns.some((one) => one.run === run) && this.#draw());
    for (const name of FIRST) this.#addColumn(name);
  }

  get runs() {
    return this.#columns.map((one) => one.run).filter(Boolean);
  }

  /** The names of the settings on the left that change what the columns write; null if all do. */
  get settingNames() {
    if (this.#columns.some((one) => one.name === MINE)) return null;
    const draws = this.#columns.some((one) => isDrawn(findPreset(one.name).settings));
    return ["max_new_tokens", ...(draws ? ["seed"] : [])];
  }

  #addByHand() {
    this.#addColumn(MINE);
    if (this.#add.hidden) this.#columns.at(-1).select.focus();
  }

  #addColumn(name) {
    if (this.#columns.length >= 4) return;
    const column = {
      name,
      run: null,
      fault: "",
      text: el("div", { class: "compare-text", dir: "auto" }),
      stats: el("dl", { class: "compare-stats" }),
    };
    column.select = el(
      "select",
      {
        onchange: (event) => {
          column.name = event.target.value;
          this.#describe(column);
        },
      },
      [MINE, ...PRESETS.map((one) => one.name)].map((one) => el("option", { value: one, selected: one === name }, one)),
    );
    column.about = el("p", { class: "muted small" });
    column.remove = button("×", () => this.#removeColumn(column), { class: "reset" });
    column.open = button("Open in Write", () => column.run && this.onopen(column.run), {
      class: "quiet small",
      hidden: true,
    });
    column.element = el(
      "section",
      { class: "compare-column card" },
      el("header", { class: "card-head" }, column.select, column.remove),
      column.about,
      column.text,
      column.stats,
      column.open,
    );
    this.#columns.push(column);
    this.#place();
    this.#describe(column);
  }

  #removeColumn(column) {
    if (column.run) this.#book.stop(column.run);
    this.#columns = this.#columns.filter((one) => one !== column);
    this.#place();
    this.#draw();
    this.onchange();
    this.#add.focus();
  }

  #place() {
    replace(
      this.#grid,
      this.#columns.map((one) => one.element),
    );
    this.#add.hidden = this.#columns.length >= 4;
    for (const one of this.#columns) one.remove.hidden = this.#columns.length <= 2;
    this.#columns.forEach((one, place) => this.#name(one, place + 1));
  }

  /** Names that tell columns apart which have the same settings. */
  #name(column, num) {
    column.element.setAttribute("aria-label", `Column ${num}: ${column.name}`);
    column.select.setAttribute("aria-label", `Settings of column ${num}`);
    column.remove.setAttribute("aria-label", `Remove column ${num}`);
    replace(column.open, "Open", el("span", { class: "sr" }, ` column ${num}`), " in Write");
  }

  #describe(column) {
    this.#name(column, this.#columns.indexOf(column) + 1);
    const settings = column.name === MINE ? null : findPreset(column.name).settings;
    column.about.textContent =
      settings === null
        ? "as set on the left"
        : Object.entries(settings)
            .filter(([name]) => !["seed", "max_new_tokens"].includes(name))
            .map(([name, value]) => `${name} ${shortValue(value)}`)
            .join(" · ");
    this.onchange();
  }

  /** Run all columns at once: the server decodes them together. */
  start() {
    let prompt, mine;
    try {
      [prompt, mine] = [this.#readPrompt(), this.#readSettings(this.settingNames)];
    } catch (error) {
      this.#verdict.textContent = error.message;
      return;
    }
    const seed = mine.seed ?? newSeed();
    for (const column of this.#columns) {
      if (column.run) this.#book.stop(column.run);
      const begun = this.#book.begin(
        { ...prompt, ...settingsOf(column, mine, seed) },
        { label: column.name === MINE ? "" : column.name, isQuiet: true },
      );
      column.run = begun.run;
    }
    this.#draw();
  }

  #update() {
    const columns = this.#columns.filter((one) => one.run);
    const lists = columns.map((one) => readTokens(one.run).map((token) => token.id));
    const isDone = columns.length > 0 && columns.every((one) => one.run.status !== "running");
    // Where each column leaves the first one.
    const partings = columns.map((_, place) =>
      place && lists[0].length && lists[place].length ? commonStart([lists[0], lists[place]]) : 0,
    );
    const colour = findColouring("probability");
    columns.forEach((column, place) => {
      const tokens = readTokens(column.run);
      const same = partings[place];
      const shared = place ? findShared(lists[0].slice(same), lists[place].slice(same)) : tokens.map(() => true);
      const spans = tokens.map((token, at) => {
        const kind = at < same ? "t common" : `t ${colour.of(token)}${shared[at - same] ? "" : " differs"}`;
        return [
          at === same && place > 0
            ? el("span", { class: "parting", title: "here they part", "aria-label": "here they part" }, "⋔")
            : null,
          el("span", { class: kind }, flowText(token)),
          token.text.includes("\n") ? el("br") : null,
        ];
      });
      replace(column.text, column.run.error ? el("p", { class: "fault" }, column.run.error) : null, spans);
      this.#drawStats(column);
      column.open.hidden = !tokens.length;
    });
    this.#verdict.textContent = this.#say(columns, lists, partings, isDone);
  }

  #say(columns, lists, partings, isDone) {
    if (!columns.length) return "";
    const isSame = (place) => lists[place].length === lists[0].length && partings[place] === lists[0].length;
    const leaves = columns
      .slice(1)
      .map((one, at) =>
        isSame(at + 1)
          ? `${one.name} wrote the same as ${columns[0].name}.`
          : `${one.name} leaves ${columns[0].name} at token ${partings[at + 1] + 1}.`,
      );
    if (!isDone) return "Writing…";
    const scored = columns.map((one) => ({ one, ...totalLogprob(one.run) })).filter(({ num }) => num);
    const best = scored.sort((a, b) => b.total / b.num - a.total / a.num)[0];
    return `${leaves.join(" ")}${best ? ` ${best.one.name} wrote the likeliest text per token.` : ""}`;
  }

  #drawStats(column) {
    const { run } = column;
    const { total, num } = totalLogprob(run);
    const speed = run.end?.stats?.tokens_per_second;
    const facts = [
      ["tokens", count(readTokens(run).length)],
      ["tokens/s", Number.isFinite(speed) ? number(speed, 1) : run.status === "running" ? "…" : "–"],
      ["log-probability", num ? number(total) : "–"],
      ["per token", num ? number(total / num, 3) : "–"],
      ["ended by", run.end?.finish_reason ?? (run.status === "running" ? "…" : run.status)],
    ];
    replace(
      column.stats,
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
  }
}
