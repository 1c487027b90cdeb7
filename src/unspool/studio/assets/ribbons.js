// Ribbons: what goes up and down along the text. One value for each token, or the extremes where there is no room.

import { el, svg, replace } from "./dom.js";
import { count, number, percent } from "./wording.js";

const HEIGHT = 44;
const MOST_POINTS = 900;

const RIBBONS = [
  {
    name: "probability",
    colour: "kept",
    top: () => 1,
    show: percent,
    value: (token) => exp(token.raw_logprob ?? token.logprob),
  },
  {
    name: "entropy",
    colour: "cold",
    top: (values) => Math.max(1, ...values),
    show: (value) => `${number(value)} nats`,
    value: (token) => token.raw_entropy ?? token.entropy,
    second: (token) => (token.raw_entropy === undefined ? null : token.entropy),
  },
  {
    name: "time",
    colour: "soft",
    top: (values) => quantile(values, 0.98) || 1,
    show: (value) => `${number(value, 1)} ms`,
    value: (token) => token.ms,
  },
  {
    name: "watermark z",
    colour: "green",
    top: (values) => Math.max(4, ...values),
    show: (value) => number(value),
    value: (token) => token.watermark?.z,
    line: 4,
  },
  {
    name: "tokens allowed",
    colour: "cold",
    top: (values) => Math.max(1, ...values),
    show: (value) => count(Math.round(10 ** value)),
    value: (token) => (token.grammar ? Math.log10(Math.max(1, token.grammar.allowed)) : null),
  },
  {
    name: "layer",
    colour: "warm",
    top: (values) => Math.max(1, ...values),
    show: (value) => `layer ${value}`,
    value: (token) => token.dola?.layer,
  },
];

function exp(value) {
  return Number.isFinite(value) ? Math.exp(value) : null;
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))];
}

export class Ribbons {
  element = el("div", { class: "ribbons" });
  onselect = () => {};
  #tokens = [];
  #rows = [];

  draw(tokens) {
    this.#tokens = tokens;
    this.#rows = [];
    const wanted = RIBBONS.filter((one) => tokens.some((token) => Number.isFinite(one.value(token))));
    replace(
      this.element,
      wanted.map((one) => this.#drawOne(one)),
    );
  }

  mark(index) {
    const num = this.#tokens.length;
    const place = index ?? num - 1;
    for (const { ribbon, cursor, shown } of this.#rows) {
      const value = this.#tokens[place] ? ribbon.value(this.#tokens[place]) : null;
      shown.textContent = Number.isFinite(value) ? ribbon.show(value) : "";
      cursor.setAttribute("x1", place + 0.5);
      cursor.setAttribute("x2", place + 0.5);
      cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
    }
  }

  #drawOne(ribbon) {
    const tokens = this.#tokens;
    const num = tokens.length;
    const values = tokens.map((token) => ribbon.value(token));
    const top = ribbon.top(values.filter(Number.isFinite));
    const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const level = (value) => HEIGHT - Math.min(1, Math.max(0, value / top)) * (HEIGHT - 2);
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${num} ${HEIGHT}`,
        preserveAspectRatio: "none",
        class: `ribbon ${ribbon.colour}`,
        role: "img",
        "aria-label": this.#describe(ribbon, values),
      },
      ribbon.line === undefined
        ? null
        : svg("line", { class: "mark", x1: 0, x2: num, y1: level(ribbon.line), y2: level(ribbon.line) }),
      svg("path", { class: "area", d: areaPath(values, level) }),
      ribbon.second ? svg("path", { class: "second", d: linePath(tokens.map(ribbon.second), level) }) : null,
      cursor,
    );
    const point = (event) => {
      const box = picture.getBoundingClientRect();
      return Math.max(0, Math.min(num - 1, Math.floor(((event.clientX - box.left) / box.width) * num)));
    };
    picture.addEventListener("pointermove", (event) => this.mark(point(event)));
    picture.addEventListener("pointerleave", () => this.mark(null));
    picture.addEventListener("click", (event) => this.onselect(point(event)));
    const shown = el("span", { class: "ribbon-value" });
    this.#rows.push({ ribbon, cursor, shown });
    return el(
      "div",
      { class: "ribbon-row" },
      el("div", { class: "ribbon-label" }, el("span", {}, ribbon.name), shown),
      picture,
    );
  }

  #describe(ribbon, values) {
    const known = values.filter(Number.isFinite);
    const [least, most] = [Math.min(...known), Math.max(...known)];
    return `${ribbon.name} along the text: from ${ribbon.show(least)} to ${ribbon.show(most)}`;
  }
}

/** Values as [place, value], thinned to the extremes of each stretch where there are too many. */
export function thin(values, most = MOST_POINTS) {
  const points = [];
  const size = Math.max(1, Math.ceil((values.length * 2) / most));
  for (let from = 0; from < values.length; from += size) {
    let low = null;
    let high = null;
    for (let place = from; place < Math.min(values.length, from + size); place += 1) {
      if (!Number.isFinite(values[place])) continue;
      if (low === null || values[place] < values[low]) low = place;
      if (high === null || values[place] > values[high]) high = place;
    }
    if (low === null) continue;
    for (const place of low === high ? [low] : [low, high].sort((a, b) => a - b)) points.push([place, values[place]]);
  }
  return points;
}

function areaPath(values, level) {
  const points = thin(values);
  if (!points.length) return "";
  const steps = points.map(
    ([place, value], at) => `L${place} ${level(value).toFixed(1)}H${points[at + 1]?.[0] ?? place + 1}`,
  );
  return `M${points[0][0]} ${HEIGHT}${steps.join("")}V${HEIGHT}Z`;
}

function linePath(values, level) {
  const points = thin(values);
  return points
    .map(
      ([place, value], at) =>
        `${at ? "L" : "M"}${place} ${level(value).toFixed(1)}H${points[at + 1]?.[0] ?? place + 1}`,
    )
    .join("");
}
