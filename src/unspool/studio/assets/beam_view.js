// A beam search as a tree that grows while it runs.

import { BOX, placeColumn } from "./beam_layout.js";
import { findParting, greedyPath } from "./beam_paths.js";
import { drawProgress } from "./details.js";
import { el, svg, button, replace } from "./dom.js";
import { bestPath, endOfBest, pathTo, readTokens } from "./run.js";
import { number, percent, shorten, showToken } from "./wording.js";

const MARGIN = 16;
const TOP = 26; // for the numbers of the steps

export class BeamView {
  element = el("div", { class: "beam-view" });
  onbranch = () => {}; // (run, tokens, text)
  #run = null;
  #columns = [];
  #nodes = new Map(); // "step:place" → {group, edge, box}
  #drawn = 0;
  #pinned = null;
  #isSettled = false;
  #layer = svg("g");
  #svg = svg("svg", { class: "beam-tree", tabindex: "0", role: "img" }, this.#layer);
  #scroll = el("div", { class: "scroll beam-scroll" }, this.#svg);
  #verdict = el("p", { class: "verdict" });
  #detail = el("div", { class: "beam-detail", "aria-live": "polite" });
  #now = el("div", { class: "beam-now" });
  #slider = el("input", { type: "range", min: 1, value: 1, "aria-label": "Steps shown", oninput: () => this.#scrub() });
  #shown = el("output", {});

  constructor() {
    const legend = el(
      "p",
      { class: "legend" },
      el("span", { class: "key line-best" }, "best beam"),
      el("span", { class: "key line-greedy" }, "greedy’s path"),
      el("span", { class: "key node-ended" }, "ended"),
    );
    this.element.append(
      this.#verdict,
      el("div", { class: "beam-tools" }, legend, el("label", { class: "scrub" }, "step ", this.#slider, this.#shown)),
      this.#scroll,
      this.#detail,
      this.#now,
    );
    this.#svg.addEventListener("keydown", (event) => this.#press(event));
  }

  show(run) {
    this.#run = run;
    this.#columns = [];
    this.#nodes.clear();
    this.#drawn = 0;
    this.#pinned = null;
    this.#isSettled = false;
    this.#layer.replaceChildren();
    this.#detail.replaceChildren();
    this.update();
  }

  update() {
    const run = this.#run;
    if (!run?.beams.length) return;
    const isAtEnd = this.#scroll.scrollLeft + this.#scroll.clientWidth >= this.#scroll.scrollWidth - 60;
    for (; this.#drawn < run.beams.length; this.#drawn += 1) this.#addStep(this.#drawn);
    this.#slider.max = this.#drawn;
    this.#slider.value = this.#drawn;
    this.#scrub();
    this.#fit();
    this.#markPaths();
    this.#say();
    this.#listNow();
    if (run.status === "running" && isAtEnd) this.#scroll.scrollLeft = this.#scroll.scrollWidth;
    else if (run.status !== "running" && !this.#isSettled) this.#settle();
  }

  // --- drawing ---------------------------------------------------------------------------------------------------
  /** When all has come, show the place where the best beam leaves greedy's path. */
  #settle() {
    this.#isSettled = true;
    const parting = findParting(this.#run);
    this.#scroll.scrollLeft = parting === null ? 0 : Math.max(0, this.#columns[parting.step].x - 260);
  }

  #addStep(step) {
    const { live, ended = [] } = this.#run.beams[step];
    const before = step ? this.#run.beams[step - 1].live : [];
    const nodes = [
      ...live.map((one, place) => ({ ...one, place, isLive: true })),
      ...ended.map((one, place) => ({ ...one, place: live.length + place, isLive: false })),
    ].map((node) => {
      const gained =
        node.sum_logprob === undefined
          ? null
          : Math.exp(node.sum_logprob - (step ? (before[node.parent]?.sum_logprob ?? 0) : 0));
      const share = node.isLive && gained !== null && gained <= 1.001 ? percent(Math.min(1, gained)) : "";
      const token = shorten(showToken(node.text), 16);
      return {
        ...node,
        step,
        token,
        share: node.isLive ? share : `■ ${number(node.score)}`,
        label: `${token}  ${node.isLive ? share : `■ ${number(node.score)}`}`,
      };
    });
    const last = this.#columns.at(-1) ?? null;
    const column = placeColumn(last, nodes, last?.next ?? MARGIN);
    this.#columns.push(column);
    this.#layer.append(svg("text", { class: "step-number", x: column.x, y: 0, data: { step } }, String(step + 1)));
    for (const box of column.boxes) this.#addNode(box);
  }

  #addNode(box) {
    const { node } = box;
    const kind = `${node.isLive ? "" : "ended"} group${(node.group ?? 0) % 8}`;
    const edge = box.from && svg("path", { class: `edge ${kind}`, d: edgePath(box), data: { step: node.step } });
    const group = svg(
      "g",
      {
        class: `node ${kind}`,
        data: { step: node.step },
        transform: `translate(${box.x} ${box.y})`,
        onclick: () => this.#pin(node),
        onpointerenter: () => this.#light(node),
        onpointerleave: () => this.#light(this.#pinned),
      },
      svg("rect", { y: -BOX / 2, width: box.width, height: BOX, rx: 6 }),
      svg("text", { x: 8, y: 4.5 }, node.token, svg("tspan", { class: "share", dx: 7 }, node.share)),
    );
    if (edge) this.#layer.prepend(edge);
    this.#layer.append(group);
    this.#nodes.set(`${node.step}:${node.place}`, { group, edge, box });
  }

  #fit() {
    const boxes = this.#columns.flatMap((column) => column.boxes);
    const top = Math.min(...boxes.map((box) => box.y)) - BOX / 2 - TOP;
    const bottom = Math.max(...boxes.map((box) => box.y)) + BOX / 2 + MARGIN;
    const width = this.#columns.at(-1).next;
    this.#svg.setAttribute("viewBox", `0 ${top} ${width} ${bottom - top}`);
    this.#svg.setAttribute("width", width);
    this.#svg.setAttribute("height", bottom - top);
    for (const text of this.#layer.querySelectorAll(".step-number")) text.setAttribute("y", top + 16);
  }

  #markPaths() {
    const run = this.#run;
    for (const { group, edge } of this.#nodes.values())
      for (const one of [group, edge]) one?.classList.remove("best", "greedy", "fell");
    const mark = (path, kind) =>
      path.forEach((place, step) => {
        const found = this.#nodes.get(`${step}:${place}`);
        found?.group.classList.add(kind);
        found?.edge?.classList.add(kind);
      });
    const greedy = greedyPath(run);
    mark(greedy.path, "greedy");
    mark(bestPath(run), "best");
    const ended = endOfBest(run);
    if (ended) mark([...Array(ended.step), run.beams[ended.step].live.length + ended.place], "best");
    const parting = findParting(run);
    for (const text of this.#layer.querySelectorAll(".step-number")) {
      const isParting = parting !== null && Number(text.dataset.step) === parting.step;
      text.classList.toggle("parts", isParting);
      text.textContent = isParting ? `${parting.step + 1} ▾ leaves greedy` : String(Number(text.dataset.step) + 1);
    }
    if (greedy.fellAt !== null)
      this.#nodes.get(`${greedy.fellAt - 1}:${greedy.path.at(-1)}`)?.group.classList.add("fell");
  }

  #say() {
    const run = this.#run;
    const parting = findParting(run);
    const wins = run.status === "running" ? "The best beam so far" : "Beam search";
    let text;
    if (parting === null) text = `${wins} is where greedy search would be.`;
    else {
      const chance = (node) => (node ? percent(Math.exp(node.sum_logprob - parting.before)) : "");
      const greedy = parting.greedy
        ? `greedy takes ${showToken(parting.greedy.text)} (${chance(parting.greedy)})`
        : "greedy’s path had fallen out";
      const best = parting.best
        ? `, the best beam ${showToken(parting.best.text)} (${parting.greedy ? chance(parting.best) : number(parting.best.sum_logprob)})`
        : "";
      const fell = parting.fellAt === null ? "" : ` Greedy’s path fell out of the beams at step ${parting.fellAt + 1}.`;
      text = `${wins} left greedy at step ${parting.step + 1}: ${greedy}${best}.${fell}`;
    }
    this.#verdict.textContent = text;
    this.#svg.setAttribute("aria-label", `Tree of the beams, ${run.beams.length} steps. ${text}`);
  }

  #listNow() {
    const run = this.#run;
    const last = run.beams.at(-1);
    const rows = run.end?.sequences?.length
      ? run.end.sequences.map((one) => ({
          text: one.text,
          score: one.score,
          group: last.live[one.beams?.at(-1)]?.group ?? 0,
          progress: null,
        }))
      : last.live.map((one, place) => ({
          text: pathTo(run, run.beams.length - 1, place)
            .map((at, step) => run.beams[step].live[at].text)
            .join(""),
          score: one.score,
          group: one.group,
          progress: one.progress,
        }));
    const constraints = run.end && last.live[bestPath(run).at(-1)]?.progress;
    replace(
      this.#now,
      el("h3", {}, run.end?.sequences?.length ? "Returned" : "Beams now"),
      el(
        "ol",
        { class: "beam-list" },
        rows
          .slice(0, 16)
          .map((row) =>
            el(
              "li",
              { class: `group${(row.group ?? 0) % 8}` },
              el("span", { class: "beam-score" }, number(row.score, 3)),
              el("span", { class: "beam-text", dir: "auto" }, row.text.trimStart()),
              row.progress?.length ? drawProgress(row.progress) : null,
            ),
          ),
      ),
      constraints?.length ? [el("h3", {}, "Forced words"), drawProgress(constraints)] : null,
    );
  }

  // --- looking ---------------------------------------------------------------------------------------------------
  #scrub() {
    const last = Number(this.#slider.value);
    this.#shown.textContent = ` ${last} of ${this.#slider.max}`;
    for (const part of this.#layer.children) part.classList.toggle("later", Number(part.dataset.step) >= last);
  }

  #light(node) {
    this.#svg.classList.toggle("lit", node !== null);
    for (const { group, edge } of this.#nodes.values()) for (const one of [group, edge]) one?.classList.remove("on");
    for (let box = node && this.#nodes.get(`${node.step}:${node.place}`).box; box; box = box.from) {
      const { group, edge } = this.#nodes.get(`${box.node.step}:${box.node.place}`);
      group.classList.add("on");
      edge?.classList.add("on");
    }
  }

  #pin(node) {
    this.#pinned = node;
    this.#light(node);
    if (node === null) return void replace(this.#detail);
    const tokens = this.#tokensTo(node);
    const text = tokens.map((one) => one.text).join("");
    replace(
      this.#detail,
      el(
        "p",
        {},
        el("b", {}, showToken(node.text)),
        ` step ${node.step + 1}${node.group ? `, group ${node.group + 1}` : ""} · score ${number(node.score, 3)}`,
      ),
      el("p", { class: "beam-text", dir: "auto" }, text.trimStart()),
      node.isLive
        ? button(
            "Write on from here",
            () => this.onbranch(this.#run, [...readTokens(this.#run).slice(0, this.#run.base), ...tokens], node.text),
            { class: "quiet" },
          )
        : null,
    );
  }

  #tokensTo(node) {
    const path = node.isLive ? pathTo(this.#run, node.step, node.place) : pathTo(this.#run, node.step - 1, node.parent);
    const tokens = path.map((place, step) => this.#run.beams[step].live[place]);
    return (node.isLive ? tokens : [...tokens, node]).map((one) => ({
      id: one.id,
      text: one.text,
      delta: one.text,
      byHand: false,
      top: [],
      steps: [],
    }));
  }

  #press(event) {
    const column = (step) => this.#columns[step]?.boxes ?? [];
    const at = this.#pinned ?? null;
    const now = at && this.#nodes.get(`${at.step}:${at.place}`).box;
    const boxes = now ? column(at.step) : [];
    const next = {
      ArrowRight: () => (now ? column(at.step + 1).find((box) => box.from === now) : column(0)[0]),
      ArrowLeft: () => now?.from,
      ArrowDown: () => boxes[boxes.indexOf(now) + 1],
      ArrowUp: () => boxes[boxes.indexOf(now) - 1],
    }[event.key]?.();
    if (event.key === "Escape") this.#pin(null);
    if (!next) return;
    event.preventDefault();
    this.#pin(next.node);
    this.#nodes
      .get(`${next.node.step}:${next.node.place}`)
      .group.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function edgePath({ from, x, y }) {
  const start = from.x + from.width;
  const bend = (x - start) / 2;
  return `M${start} ${from.y}C${start + bend} ${from.y} ${x - bend} ${y} ${x} ${y}`;
}
