// The book of runs: which there are, which is shown, what was branched from what; and carrying them out.

import { openTrace, ServerError } from "./api.js";
import { applyEvent, newRun, readTokens } from "./run.js";

const LEAST_MORE = 16; // tokens that a branch may write at least

export class Book {
  runs = new Map();
  shown = null; // id of the run that is shown
  selected = null; // index of the token that is looked at
  #listeners = new Set();
  #stops = new Map();
  #next = 1;

  /** Call `listener(kind, run)` when something changes: run (it grew), shown, selected, ended. */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #announce(kind, run = this.current) {
    for (const listener of this.#listeners) listener(kind, run);
  }

  get current() {
    return this.runs.get(this.shown) ?? null;
  }

  show(id) {
    if (id === this.shown || !this.runs.has(id)) return;
    this.shown = id;
    this.selected = null;
    this.#announce("shown");
  }

  select(index) {
    if (index === this.selected) return;
    this.selected = index;
    this.#announce("selected");
  }

  /** Put a run in that was read from somewhere. */
  put(run) {
    this.runs.set(run.id, run);
    this.#next = Math.max(this.#next, run.id + 1);
    this.#announce("run", run);
  }

  /** Begin a run; with `isQuiet` the one that is shown stays. Returns it, and a promise of its end. */
  begin(request, { parent = null, prefix = [], label = "", isQuiet = false } = {}) {
    const run = newRun(this.#next++, request, { parent, prefix, label });
    this.runs.set(run.id, run);
    if (!isQuiet) this.show(run.id);
    return { run, ended: this.#carryOut(run, request) };
  }

  /** Write on from `index` of a run with another token than the one there. */
  branch(run, index, chosen) {
    const before = readTokens(run).slice(0, index);
    const there = readTokens(run)[index];
    const forced = {
      ...there,
      id: chosen.id,
      text: chosen.text,
      delta: chosen.text,
      byHand: true,
      ms: null,
      draft: null,
    };
    forced.logprob = chosen.p ? Math.log(chosen.p) : null;
    forced.raw_logprob = chosen.raw ? Math.log(chosen.raw) : null;
    forced.rank = null;
    return this.#goOn(run, [...before, forced], { run: run.id, index, from: there.text, text: chosen.text });
  }

  /** Write on from tokens of a beam that was not returned. */
  branchFrom(run, tokens, text) {
    return this.#goOn(run, tokens, { run: run.id, index: Math.max(tokens.length - 1, 0), from: "", text });
  }

  /** Go on with a run whose stream was lost or stopped. */
  resume(run) {
    const tokens = readTokens(run);
    return this.#goOn(run, tokens, { run: run.id, index: tokens.length, from: "", text: "", isResumed: true });
  }

  #goOn(run, prefix, parent) {
    const request = { ...run.request, prefix_ids: prefix.map((token) => token.id) };
    // The length counts what was there already: a branch near the end still has room to go on.
    const least = prefix.length + (parent.isResumed ? 1 : LEAST_MORE);
    if (request.max_new_tokens < least) request.max_new_tokens = least;
    return this.begin(request, { parent, prefix, label: run.label });
  }

  stop(run) {
    this.#stops.get(run.id)?.abort();
  }

  get isBusy() {
    return this.#stops.size > 0;
  }

  async #carryOut(run, request) {
    const stop = new AbortController();
    this.#stops.set(run.id, stop);
    this.#announce("run", run);
    try {
      for await (const event of openTrace(request, stop.signal)) {
        applyEvent(run, event);
        this.#announce("run", run);
      }
      if (run.status === "running") this.#lose(run, "The stream ended before the text did.");
    } catch (error) {
      if (stop.signal.aborted) run.status = "stopped";
      else if (error instanceof ServerError)
        Object.assign(run, { status: "failed", error: error.message, param: error.param });
      else this.#lose(run, run.start ? "The connection was lost." : "The server can't be reached.");
    } finally {
      this.#stops.delete(run.id);
      this.#announce("run", run);
      this.#announce("ended", run);
    }
    return run;
  }

  #lose(run, message) {
    run.status = "lost";
    run.error = message;
  }
}
