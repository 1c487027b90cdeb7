// Elements made by code. Text goes in as text nodes, never as markup: nothing here, or anywhere else, parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "indeterminate"]);

export function el(tag, given = {}, ...children) {
  return fill(document.createElement(tag), given, children);
}

export function svg(tag, given = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), given, children);
}

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || (value === false && !PROPERTIES.has(name))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

export function button(label, onclick, more = {}) {
  return el("button", { type: "button", onclick, ...more }, label);
}

/** A box that may be wider or higher than its place; keys scroll it while it has the focus. */
export function scroller(label, more, ...children) {
  return el("div", { tabindex: "0", role: "group", "aria-label": label, ...more }, ...children);
}

/** A card: a section with a heading, something beside the heading, and a body. */
export function card(title, { id, aside = [], kind = "" } = {}, ...children) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el(
    "section",
    { class: `card ${kind}`, id, "aria-labelledby": `${id}-title` },
    el("header", { class: "card-head" }, heading, el("div", { class: "card-aside" }, aside)),
    ...children,
  );
}

/** Call `work` once before the next frame, however often it is asked for. */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}
