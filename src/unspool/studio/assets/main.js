// The studio: a page on which decoding is watched. This module puts its parts together.

import { fetchModels, fetchParameters, fetchSinglePage, ServerError, setKeyAsker } from "./api.js";
import { Book } from "./book.js";
import { asCommand, asCurl, asPython } from "./code.js";
import { CompareView } from "./compare.js";
import { Composer } from "./composer.js";
import { askForKey, areKeysOn, copyText, showCode, showKeys } from "./dialogs.js";
import { button, el, replace } from "./dom.js";
import { fillPage, readFragment, readRuns, saveFile, writeFragment, writeRuns } from "./keep.js";
import { FIRST_PRESET, PRESETS, findPreset, presetSettings } from "./presets.js";
import { plainText, readTokens } from "./run.js";
import { SettingsForm } from "./settings.js";
import { ShortView } from "./short_view.js";
import { makeThemeButton } from "./theme.js";
import { FIELDS, withSeed } from "./values.js";
import { count } from "./wording.js";
import { WriteView } from "./write_view.js";

const TABS = [
  ["write", "Write"],
  ["compare", "Compare"],
  ["shorten", "Shorten"],
];
const app = document.getElementById("app");
const live = el("p", { class: "sr", role: "status", "aria-live": "polite" });
const book = new Book();

function say(text) {
  live.textContent = text;
}

/** Whether everything stands in one column, as on a phone. */
function isNarrow() {
  return matchMedia("(max-width: 860px)").matches;
}

/** Whether letters that are typed belong to an element: to a field, not to a slider or a box to tick. */
function takesLetters(one) {
  if (one.isContentEditable || /^(TEXTAREA|SELECT)$/.test(one.tagName)) return true;
  return one.tagName === "INPUT" && !["checkbox", "range", "radio", "button"].includes(one.getAttribute("type"));
}

function makeHeader(...tools) {
  return el(
    "header",
    { class: "top" },
    el("h1", {}, el("span", { class: "brand" }, "unspool"), " studio"),
    ...tools,
    el("div", { class: "top-end" }, makeThemeButton()),
  );
}

// --- a kept page: runs without a server -----------------------------------------------------------------------------
function startKept(text) {
  for (const run of readRuns(text)) book.put(run);
  const view = new WriteView(book, { isKept: true });
  replace(
    app,
    makeHeader(el("p", { class: "muted" }, "Kept runs; nothing here asks a server.")),
    el("main", { class: "panes kept" }, view.element, view.inspector.element),
    live,
  );
  book.show([...book.runs.keys()].at(-1));
}

// --- the live page ---------------------------------------------------------------------------------------------------
class Studio {
  composer = new Composer();
  form;
  view = new WriteView(book);
  compare;
  short;
  #models = el("select", { id: "model", "aria-label": "Model" });
  #preset = el(
    "select",
    { id: "preset" },
    el("option", { value: "" }, "Choose…"),
    PRESETS.map((one) => el("option", { value: one.name }, one.name)),
  );
  #about = el("p", { class: "muted small", id: "preset-about" });
  #presetField = el("div", { class: "field" }, el("label", { for: "preset" }, "Preset"), this.#preset);
  #reset = button("Reset all", () => this.form.write({}), { class: "quiet small" });
  #write = button(["Write ", el("kbd", {}, "Ctrl ↵")], () => this.write(), { class: "primary", id: "write" });
  #stop = button("Stop", () => this.stop(), { id: "stop", hidden: true });
  #fault = el("p", { class: "fault", role: "alert", hidden: true });
  #tabs = TABS.map(([name, label]) =>
    button(label, () => this.showTab(name), {
      role: "tab",
      id: `tab-${name}`,
      "aria-controls": `pane-${name}`,
      onkeydown: (event) => this.#turnTab(event),
    }),
  );

  constructor(models, parameters) {
    const names = new Set(parameters.map((one) => one.name));
    this.form = new SettingsForm([...parameters, ...FIELDS.filter((one) => !names.has(one.name))]);
    this.compare = new CompareView(
      book,
      () => ({ ...this.#model(), ...this.composer.read() }),
      (names) => this.form.read(names),
    );
    this.short = new ShortView(() => ({ ...this.#model(), context: this.#readTexts() }));
    this.compare.onchange = () => this.#offer();
    this.compare.onopen = (run) => {
      book.show(run.id);
      this.showTab("write");
    };
    replace(
      this.#models,
      models.map((one) => el("option", { value: one.id }, one.id)),
    );
    this.#preset.addEventListener("change", () => this.usePreset(this.#preset.value));
    this.form.onchange = this.composer.onchange = () => this.#note();
    book.listen((kind, run) => this.#hear(kind, run));
    this.#build();
    this.#start();
  }

  #build() {
    const side = el(
      "section",
      { class: "side", "aria-label": "Prompt and settings" },
      el(
        "div",
        { class: "card" },
        this.#presetField,
        this.#about,
        this.composer.element,
        this.#fault,
        el("div", { class: "go" }, this.#write, this.#stop),
      ),
      el(
        "details",
        { class: "card settings-card", open: !isNarrow() },
        el("summary", {}, el("h2", {}, "Settings")),
        this.form.element,
        this.#reset,
      ),
    );
    const keep = el(
      "div",
      { class: "keep", role: "group", "aria-label": "Keep" },
      button("Share link", () => this.share(), { id: "share" }),
      button("As code", () => this.showCode(), { id: "code" }),
      button("Save JSON", () => this.saveJson(), { id: "save-json" }),
      button("Save page", () => this.savePage(), { id: "save-page" }),
    );
    const panes = {
      write: el(
        "div",
        { id: "pane-write", role: "tabpanel", "aria-labelledby": "tab-write", class: "pane-write" },
        this.view.element,
        this.view.inspector.element,
      ),
      compare: el(
        "div",
        { id: "pane-compare", role: "tabpanel", "aria-labelledby": "tab-compare", class: "pane-compare" },
        this.compare.element,
      ),
      shorten: el(
        "div",
        { id: "pane-shorten", role: "tabpanel", "aria-labelledby": "tab-shorten", class: "pane-shorten" },
        this.short.element,
      ),
    };
    this.panes = panes;
    const header = makeHeader(
      this.#models,
      el("div", { role: "tablist", class: "tabs", "aria-label": "Views" }, this.#tabs),
      keep,
    );
    header.querySelector(".top-end").append(button("?", showKeys, { class: "icon", "aria-label": "Keyboard" }));
    replace(app, header, el("main", { class: "panes" }, side, panes.write, panes.compare, panes.shorten), live);
    this.showTab("write");
    document.addEventListener("keydown", (event) => this.#press(event));
    addEventListener("hashchange", () => this.#readLink());
  }

  #start() {
    if (!this.#readLink()) this.usePreset(FIRST_PRESET);
  }

  #readLink() {
    const state = readFragment(location.hash);
    if (state === null) return false;
    this.composer.write(state);
    const unknown = this.form.write(state.settings ?? {});
    if ([...this.#models.options].some((one) => one.value === state.model)) this.#models.value = state.model;
    this.#preset.value = "";
    this.#about.textContent = unknown.length ? `This server has no setting ${unknown.join(", ")}.` : "";
    return true;
  }

  #model() {
    return this.#models.value ? { model: this.#models.value } : {};
  }

  usePreset(name) {
    const preset = findPreset(name);
    if (preset === null) return;
    this.#preset.value = name;
    this.composer.write({ prompt: preset.prompt });
    const unknown = this.form.write(presetSettings(preset));
    this.#preset.value = name;
    this.#about.textContent = preset.about + (unknown.length ? ` (not offered here: ${unknown.join(", ")})` : "");
  }

  showTab(name) {
    for (const tab of this.#tabs) {
      const isShown = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1; // arrow keys lead to the other
      this.panes[tab.id.slice(4)].hidden = !isShown;
    }
    document.body.dataset.tab = name;
    this.#write.hidden = name !== "write"; // one button is the primary one
    this.#complain("");
    this.#offer();
  }

  #turnTab(event) {
    const names = TABS.map(([name]) => name);
    const at = names.indexOf(document.body.dataset.tab);
    const [next, last] = [(at + 1) % names.length, names.length - 1];
    const to = { ArrowRight: next, ArrowLeft: (at + last) % names.length, Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.showTab(names[to]);
    this.#tabs[to].focus();
  }

  /** Show the settings, and the preset, where they have an effect on what is run from this tab. */
  #offer() {
    const names = { compare: this.compare.settingNames, shorten: [] }[document.body.dataset.tab] ?? null;
    this.form.offer(names);
    this.#presetField.hidden = this.#about.hidden = this.#reset.hidden = names !== null;
  }

  /** What Shorten reads: the prompt, or each message that is not the model's. */
  #readTexts() {
    const { prompt, messages } = this.composer.read();
    return messages ? messages.filter((one) => one.role !== "assistant").map((one) => one.content) : [prompt];
  }

  // --- writing -------------------------------------------------------------------------------------------------------
  #request() {
    return { ...this.#model(), ...this.composer.read(), ...withSeed(this.form.read()) };
  }

  #complain(message) {
    this.#fault.textContent = message;
    this.#fault.hidden = message === "";
  }

  async write() {
    let request;
    try {
      request = this.#request();
    } catch (error) {
      return this.#complain(error.message);
    }
    this.#complain("");
    this.showTab("write");
    if (isNarrow()) this.view.element.scrollIntoView();
    say("Writing");
    const { run, ended } = book.begin(request, { label: this.#preset.value });
    await ended;
    if (run.status === "failed" && run.param) this.form.showFault(run.param, run.error);
    if (run.status === "done" && this.composer.isChat && book.current === run)
      this.composer.addAnswer(request.messages, plainText(run).trim());
    return undefined;
  }

  stop() {
    for (const run of book.runs.values()) if (run.status === "running") book.stop(run);
  }

  #hear(kind, run) {
    if (document.activeElement === this.#stop && !book.isBusy)
      (this.#write.hidden ? document.querySelector(".primary:not([hidden])") : this.#write).focus();
    this.#stop.hidden = !book.isBusy;
    if (kind !== "ended") return;
    const num = count(readTokens(run).length, "token");
    const words = {
      done: `Done, ${num}. ${plainText(run).slice(0, 300)}`,
      stopped: `Stopped after ${num}`,
      lost: `${run.error} ${num} came; you can resume.`,
      failed: run.error,
    };
    say(words[run.status] ?? "");
  }

  #note() {
    this.#preset.value = this.#preset.value === "" ? "" : this.#stillPreset();
  }

  #stillPreset() {
    const preset = findPreset(this.#preset.value);
    const wanted = JSON.stringify(Object.entries(presetSettings(preset)).sort());
    return JSON.stringify(Object.entries(this.form.values).sort()) === wanted ? preset.name : "";
  }

  // --- keeping -------------------------------------------------------------------------------------------------------
  #state() {
    const request = book.current && document.body.dataset.tab === "write" ? book.current.request : this.#request();
    const { prompt, messages, model, prefix_ids: _, ...settings } = request;
    return { ...(messages ? { messages } : { prompt }), model, settings };
  }

  async share() {
    try {
      const address = new URL(writeFragment(this.#state()), location.href).href;
      history.replaceState(null, "", address);
      await copyText(address);
      say("The link is copied");
      this.#flash("share", "Copied");
    } catch (error) {
      this.#complain(error.message);
    }
  }

  #flash(id, text) {
    const made = document.getElementById(id);
    const before = made.textContent;
    made.textContent = text;
    setTimeout(() => (made.textContent = before), 1500);
  }

  showCode() {
    try {
      const request = book.current?.request ?? this.#request();
      const model = request.model ?? this.#models.value;
      showCode(
        [
          ["Python", asPython(request, model)],
          ["curl", asCurl(request, document.baseURI)],
          ["Command line", asCommand(request, model, book.current?.start?.settings)],
        ],
        say,
      );
    } catch (error) {
      this.#complain(error.message);
    }
  }

  saveJson() {
    saveFile("unspool-runs.json", writeRuns(book.runs.values()), "application/json");
  }

  async savePage() {
    try {
      saveFile("unspool-runs.html", fillPage(await fetchSinglePage(), book.runs.values()), "text/html");
    } catch (error) {
      this.#complain(error instanceof ServerError ? error.message : "The server can't be reached.");
    }
  }

  // --- keys ----------------------------------------------------------------------------------------------------------
  #press(event) {
    // An input method has the keys until a word is chosen, and an open dialog until it is closed.
    if (event.isComposing || event.keyCode === 229 || document.querySelector("dialog[open]")) return undefined;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      const start = { compare: () => this.compare.start(), shorten: () => this.short.start() };
      return (start[document.body.dataset.tab] ?? (() => this.write()))();
    }
    if (event.key === "Escape" && book.isBusy) return this.stop();
    if (event.key === "Escape" && this.view.inspector.element.contains(event.target))
      return this.view.text.element.focus();
    const isTyping = takesLetters(event.target);
    if (event.key === "Escape" && isTyping && !(event.target.type === "search" && event.target.value))
      return event.target.blur(); // so that keys act again
    if (isTyping || !areKeysOn() || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    const act = {
      "/": () => this.composer.focus(),
      s: () => this.#findSetting(),
      t: () => {
        this.showTab("write");
        this.view.text.element.focus();
      },
      w: () => this.showTab("write"),
      c: () => this.showTab("compare"),
      "?": showKeys,
      "[": () => this.#turn(-1),
      "]": () => this.#turn(1),
    }[event.key];
    if (!act) return undefined;
    event.preventDefault();
    return act();
  }

  #findSetting() {
    document.querySelector(".settings-card").open = true;
    const search = document.getElementById("settings-search");
    (search.hidden ? document.getElementById("set-max_new_tokens") : search).focus();
  }

  #turn(way) {
    this.showTab("write");
    const ids = [...book.runs.keys()];
    const next = ids[ids.indexOf(book.shown) + way];
    if (next !== undefined) book.show(next);
  }
}

async function startLive() {
  setKeyAsker(askForKey);
  replace(app, makeHeader(), el("p", { class: "loading muted", role: "status" }, "Asking the server for its models…"));
  try {
    const [models, parameters] = [await fetchModels(), await fetchParameters()];
    globalThis.studio = new Studio(models, parameters);
  } catch (error) {
    replace(
      app,
      makeHeader(),
      el(
        "main",
        { class: "loading" },
        el("p", { class: "fault", role: "alert" }, error.message),
        button("Try again", startLive, { class: "primary" }),
      ),
    );
  }
}

const kept = document.getElementById("kept");
if (kept) startKept(kept.textContent);
else startLive();
