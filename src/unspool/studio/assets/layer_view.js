// DoLa along the text: for each token how far each early layer is from the last one, and which was contrasted.

import { el, svg, replace, scroller } from "./dom.js";
import { number, shorten, showToken } from "./wording.js";

const CELL = 26;
const LEFT = 58;
const TOP = 74;
const MOST = 400; // tokens drawn

export class LayerView {
  element = el("div", { class: "layer-view" });
  onselect = () => {};
  #verdict = el("p", { class: "verdict" });
  #scroll = scroller("Layers along the text", { class: "scroll" });

  constructor() {
    const legend = el(
      "p",
      { class: "legend" },
      el("span", { class: "key heat" }, "darker: further from the last layer"),
      el("span", { class: "key chosen" }, "contrasted"),
    );
    this.element.append(this.#verdict, legend, this.#scroll);
  }

  draw(tokens) {
    const shown = tokens
      .map((token, place) => ({ token, place }))
      .filter(({ token }) => token.dola)
      .slice(-MOST);
    if (!shown.length) return;
    const layers = [...new Set(shown.flatMap(({ token }) => token.dola.divergences.map((one) => one.layer)))].sort(
      (a, b) => b - a,
    );
    const largest = Math.max(1e-9, ...shown.flatMap(({ token }) => token.dola.divergences.map((one) => one.value)));
    const height = TOP + layers.length * 22 + 8;
    const width = LEFT + shown.length * CELL + 60;
    const labels = layers.map((layer, row) =>
      svg("text", { class: "axis", x: LEFT - 8, y: TOP + row * 22 + 15 }, `layer ${layer}`),
    );
    const columns = shown.map(({ token, place }, at) => this.#column(token, place, LEFT + at * CELL, layers, largest));
    replace(
      this.#scroll,
      svg(
        "svg",
        {
          class: "layers",
          width,
          height,
          viewBox: `0 0 ${width} ${height}`,
          role: "img",
          "aria-label": this.#say(shown),
        },
        labels,
        columns,
      ),
    );
  }

  #column(token, place, x, layers, largest) {
    const { dola } = token;
    const cells = dola.divergences.map(({ layer, value }) => {
      const isChosen = layer === dola.layer;
      const guess = dola.guesses?.find((one) => one.layer === layer);
      return svg(
        "rect",
        {
          class: `cell${isChosen ? " chosen" : ""}`,
          x: x + 2,
          y: TOP + layers.indexOf(layer) * 22 + 2,
          width: CELL - 4,
          height: 18,
          rx: 3,
          vars: { "--share": (0.06 + 0.94 * (value / largest)).toFixed(3) },
        },
        svg("title", {}, `layer ${layer}: ${number(value, 4)}${guess ? `, it guesses ${showToken(guess.text)}` : ""}`),
      );
    });
    return svg(
      "g",
      { class: "layer-column", onclick: () => this.onselect(place) },
      svg(
        "text",
        { class: "head", transform: `translate(${x + CELL / 2 + 4} ${TOP - 6}) rotate(-50)` },
        shorten(showToken(token.text), 10),
      ),
      cells,
    );
  }

  #say(shown) {
    const counts = new Map();
    for (const { token } of shown) counts.set(token.dola.layer, (counts.get(token.dola.layer) ?? 0) + 1);
    const [layer, times] = [...counts].sort((a, b) => b[1] - a[1])[0];
    this.#verdict.textContent = `For each token the early layer that differs most from the last one is taken away from it. Most often that was layer ${layer}: ${times} of ${shown.length} times.`;
    return this.#verdict.textContent;
  }
}
