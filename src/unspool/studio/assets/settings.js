// The form of settings, made from the server's table: names, help, bounds, choices.

import { el, button, replace } from "./dom.js";
import { kindOf, readValue, sliderRange, writeValue } from "./values.js";
import { shortValue } from "./wording.js";

const COMMON = [
  "max_new_tokens",
  "do_sample",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "num_beams",
  "seed",
];
const TITLES = {
  length: "Length and stops",
  strategy: "Strategy",
  sampling: "Sampling",
  control: "Control",
  assistance: "Speculation",
  output: "Output",
  "special tokens": "Special tokens",
  cache: "Cache",
  performance: "Performance",
};

export class SettingsForm {
  element = el("div", { class: "settings" });
  onchange = () => {};
  #values = {}; // what is set; everything else is the server's default
  #faults = new Map();
  #rows = new Map();
  #offered = null; // names of the settings that are shown; null for all
  #chips = el("ul", { class: "chips", "aria-label": "Settings that are set" });
  #search = el("input", {
    type: "search",
    id: "settings-search",
    class: "search",
    placeholder: "Find a setting",
    autocomplete: "off",
    "aria-label": "Find a setting",
    oninput: () => this.#filter(),
  });

  constructor(parameters) {
    const known = new Map(parameters.map((one) => [one.name, one]));
    const common = COMMON.map((name) => known.get(name)).filter(Boolean);
    const groups = Map.groupBy ? Map.groupBy(parameters, (one) => one.group) : groupBy(parameters);
    replace(
      this.element,
      this.#chips,
      el(
        "div",
        { class: "setting-list common" },
        common.map((one) => this.#makeRow(one)),
      ),
      this.#search,
      [...groups].map(([group, list]) =>
        this.#makeGroup(
          group,
          list.filter((one) => !COMMON.includes(one.name)),
        ),
      ),
    );
    this.#showChips();
  }

  /** The settings to send, or those of some names; throws an Error for one that can't be read. */
  read(names = null) {
    const isWanted = (name) => names === null || names.includes(name);
    for (const [name, message] of this.#faults) if (isWanted(name)) throw new Error(message);
    return Object.fromEntries(Object.entries(this.#values).filter(([name]) => isWanted(name)));
  }

  /** Show the settings of these names alone, or all of them for null; what is set stays set. */
  offer(names) {
    if (JSON.stringify(names) === JSON.stringify(this.#offered)) return;
    this.#offered = names;
    this.#search.hidden = names !== null;
    if (names !== null) this.#search.value = "";
    this.#filter();
    this.#showChips();
  }

  #isOffered(name) {
    return this.#offered === null || this.#offered.includes(name);
  }

  get values() {
    return { ...this.#values };
  }

  /** Replace all settings; names that the server does not know are left out, and returned. */
  write(values) {
    const unknown = Object.keys(values).filter((name) => !this.#rows.has(name));
    this.#values = Object.fromEntries(Object.entries(values).filter(([name]) => this.#rows.has(name)));
    this.#faults.clear();
    for (const [name, row] of this.#rows) row.show(this.#values[name]);
    this.#showChips();
    this.onchange();
    return unknown;
  }

  /** Show what the server said about a setting. */
  showFault(name, message) {
    const row = this.#rows.get(name);
    if (row === undefined) return false;
    row.fault(message);
    for (let up = row.element.parentElement; up !== null; up = up.parentElement)
      if (up.tagName === "DETAILS") up.open = true;
    row.element.scrollIntoView({ block: "nearest" });
    return true;
  }

  #makeGroup(group, list) {
    if (!list.length) return null;
    const title = TITLES[group] ?? group;
    return el(
      "details",
      { class: "setting-group" },
      el("summary", {}, title, el("span", { class: "muted" }, ` ${list.length}`)),
      el(
        "div",
        { class: "setting-list" },
        list.map((one) => this.#makeRow(one)),
      ),
    );
  }

  #makeRow(parameter) {
    const { name } = parameter;
    const help = el("p", { class: "help", id: `help-${name}` }, describe(parameter));
    const fault = el("p", { class: "fault", id: `fault-${name}`, role: "alert", hidden: true });
    const control = makeControl(parameter, (text) => this.#take(parameter, text));
    const clear = () => {
      this.#set(name, undefined);
      element.querySelector(`#set-${name}`).focus();
    };
    const reset = button("×", clear, {
      class: "reset",
      "aria-label": `Reset ${name}`,
      hidden: true,
      tabindex: "-1",
    });
    const element = el(
      "div",
      { class: "setting", data: { name } },
      el("div", { class: "setting-line" }, el("label", { for: `set-${name}` }, name), control.element, reset),
      fault,
      help,
    );
    this.#rows.set(name, {
      element,
      parameter,
      show: (value) => {
        control.show(value);
        reset.hidden = value === undefined;
        element.classList.toggle("is-set", value !== undefined);
        fault.hidden = true;
      },
      fault: (message) => {
        fault.textContent = message;
        fault.hidden = message === "";
      },
    });
    return element;
  }

  #take(parameter, text) {
    const row = this.#rows.get(parameter.name);
    try {
      const value = readValue(parameter, text);
      this.#faults.delete(parameter.name);
      row.fault("");
      this.#set(parameter.name, value, false);
    } catch (error) {
      this.#faults.set(parameter.name, error.message);
      row.fault(error.message);
    }
  }

  #set(name, value, shows = true) {
    if (value === undefined) delete this.#values[name];
    else this.#values[name] = value;
    const row = this.#rows.get(name);
    if (shows) {
      this.#faults.delete(name);
      row.show(value);
    } else {
      row.element.classList.toggle("is-set", value !== undefined);
      row.element.querySelector(".reset").hidden = value === undefined;
    }
    this.#showChips();
    this.onchange();
  }

  #showChips() {
    const place = [...this.#chips.children].findIndex((one) => one.contains(document.activeElement));
    replace(
      this.#chips,
      Object.entries(this.#values)
        .filter(([name]) => this.#isOffered(name))
        .map(([name, value]) =>
          el(
            "li",
            { class: "chip" },
            el("span", { class: "chip-name" }, name),
            el("span", { class: "chip-value" }, shortValue(value)),
            button("×", () => this.#set(name, undefined), { "aria-label": `Reset ${name}` }),
          ),
        ),
    );
    // The button that was pressed is gone: the focus goes to the next one.
    if (place >= 0)
      ((this.#chips.children[place] ?? this.#chips.lastElementChild)?.querySelector("button") ?? this.#search).focus();
  }

  #filter() {
    const wanted = this.#search.value.trim().toLowerCase().replaceAll("-", "_").replaceAll(" ", "_");
    for (const [name, row] of this.#rows) {
      const fits = name.includes(wanted) || row.parameter.help.toLowerCase().replaceAll(" ", "_").includes(wanted);
      row.element.hidden = !this.#isOffered(name) || (wanted !== "" && !fits);
    }
    for (const group of this.element.querySelectorAll("details")) {
      const some = [...group.querySelectorAll(".setting")].some((one) => !one.hidden);
      group.hidden = !some;
      if (wanted !== "") group.open = some;
    }
  }
}

function groupBy(parameters) {
  const groups = new Map();
  for (const one of parameters) groups.set(one.group, [...(groups.get(one.group) ?? []), one]);
  return groups;
}

function describe({ help, minimum, maximum, default: usual, type, needs }) {
  const bounds = [];
  const isLarge = (value) => Math.abs(value) >= 2 ** 31 - 1;
  if (typeof minimum === "number" && !isLarge(minimum)) bounds.push(`from ${minimum}`);
  if (typeof maximum === "number" && !isLarge(maximum)) bounds.push(`to ${maximum}`);
  const shown = usual === null || usual === undefined ? "off" : shortValue(usual);
  const facts = [type, bounds.join(" "), `default ${shown}`].filter((one) => one);
  if (needs?.length) facts.push(`read with ${needs.join(" or ")}`);
  return `${help} (${facts.join(", ")})`;
}

/** An input for a setting: `element`, and `show(value)`. */
function makeControl(parameter, take) {
  const kind = kindOf(parameter);
  const common = { id: `set-${parameter.name}`, "aria-describedby": `help-${parameter.name} fault-${parameter.name}` };
  if (kind === "flag") return makeSelect(common, ["true", "false"], take);
  if (kind === "choice") return makeSelect(common, parameter.choices.map(String), take);
  if (kind === "integer" || kind === "number") return makeNumber(parameter, common, take);
  const element = el("textarea", {
    ...common,
    rows: 1,
    spellcheck: "false",
    oninput: (event) => take(event.target.value),
  });
  return { element, show: (value) => (element.value = writeValue(value)) };
}

function makeSelect(common, choices, take) {
  const element = el(
    "select",
    { ...common, onchange: (event) => take(event.target.value) },
    el("option", { value: "" }, "default"),
    choices.map((choice) => el("option", { value: choice }, choice)),
  );
  return { element, show: (value) => (element.value = value === undefined ? "" : String(value)) };
}

function makeNumber(parameter, common, take) {
  const range = sliderRange(parameter);
  const box = el("input", {
    ...common,
    type: "text",
    inputmode: "decimal",
    class: "number",
    autocomplete: "off",
    placeholder: parameter.default === null || parameter.default === undefined ? "off" : String(parameter.default),
    oninput: () => {
      if (slider !== null && box.value !== "") slider.value = box.value;
      take(box.value);
    },
  });
  const slider =
    range &&
    el("input", {
      type: "range",
      min: range[0],
      max: range[1],
      step: range[2],
      tabindex: "-1",
      "aria-hidden": "true",
      oninput: () => {
        box.value = slider.value;
        take(slider.value);
      },
    });
  const show = (value) => {
    box.value = value === undefined ? "" : String(value);
    if (slider !== null) slider.value = value ?? parameter.default ?? range[0];
  };
  show(undefined);
  return { element: el("span", { class: "number-line" }, slider, box), show };
}
