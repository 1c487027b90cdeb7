// As much of a browser's page as the studio needs, so that its own modules can be tested where there is no browser.
// Nothing is laid out; what is tested are elements, names, values, focus and keys.

class FakeEvent {
  defaultPrevented = false;
  isStopped = false;
  constructor(type, more = {}) {
    Object.assign(this, { type, key: "", ctrlKey: false, metaKey: false, altKey: false, isComposing: false }, more);
  }
  preventDefault() {
    this.defaultPrevented = true;
  }
  stopPropagation() {
    this.isStopped = true;
  }
}

class FakeTarget {
  #listeners = [];
  addEventListener(type, listener) {
    this.#listeners.push([type, listener]);
  }
  hear(event) {
    for (const [type, listener] of this.#listeners) if (type === event.type) listener(event);
  }
}

class FakeText {
  parentElement = null;
  constructor(text) {
    this.textContent = String(text);
  }
}

export class FakeElement extends FakeTarget {
  parentElement = null;
  childNodes = [];
  isContentEditable = false;
  #attributes = new Map();
  #value = null;
  style = { setProperty: () => {} };
  scrollLeft = 0;
  scrollWidth = 0;
  clientWidth = 0;
  offsetWidth = 0;
  offsetHeight = 0;
  classList = {
    add: (...names) => this.#setClasses([...this.#classes, ...names]),
    remove: (...names) => this.#setClasses(this.#classes.filter((one) => !names.includes(one))),
    toggle: (name, isOn) => (isOn ? this.classList.add(name) : this.classList.remove(name)),
    contains: (name) => this.#classes.includes(name),
  };
  dataset = new Proxy(
    {},
    {
      get: (_, name) => this.getAttribute(`data-${String(name)}`) ?? undefined,
      set: (_, name, value) => (this.setAttribute(`data-${String(name)}`, value), true),
    },
  );

  constructor(tag, document) {
    super();
    this.tagName = tag.toUpperCase();
    this.ownerDocument = document;
  }

  get #classes() {
    return (this.getAttribute("class") ?? "").split(" ").filter(Boolean);
  }
  #setClasses(names) {
    this.setAttribute("class", [...new Set(names)].join(" "));
  }

  // --- attributes and properties
  setAttribute(name, value) {
    this.#attributes.set(name, String(value));
  }
  getAttribute(name) {
    return this.#attributes.get(name) ?? null;
  }
  removeAttribute(name) {
    this.#attributes.delete(name);
  }
  hasAttribute(name) {
    return this.#attributes.has(name);
  }
  get id() {
    return this.getAttribute("id") ?? "";
  }
  set id(text) {
    this.setAttribute("id", text);
  }
  get className() {
    return this.getAttribute("class") ?? "";
  }
  set className(text) {
    this.setAttribute("class", text);
  }
  get value() {
    if (this.tagName === "OPTION") return this.getAttribute("value") ?? this.textContent;
    if (this.tagName !== "SELECT") return this.#value ?? this.getAttribute("value") ?? "";
    const chosen = this.#value ?? this.options.find((one) => one.selected)?.value;
    return this.options.some((one) => one.value === chosen) ? chosen : (this.options[0]?.value ?? "");
  }
  set value(text) {
    if (this.tagName === "OPTION") this.setAttribute("value", text);
    else this.#value = String(text);
  }
  get options() {
    return this.querySelectorAll("option");
  }

  // --- the tree
  get children() {
    return this.childNodes.filter((one) => one instanceof FakeElement);
  }
  get childElementCount() {
    return this.children.length;
  }
  get firstElementChild() {
    return this.children[0] ?? null;
  }
  get lastElementChild() {
    return this.children.at(-1) ?? null;
  }
  get textContent() {
    return this.childNodes.map((one) => one.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren(text);
  }
  append(...nodes) {
    for (const given of nodes) {
      const node = given instanceof FakeElement || given instanceof FakeText ? given : new FakeText(given);
      node.parentElement?.drop(node);
      node.parentElement = this;
      this.childNodes.push(node);
    }
  }
  prepend(node) {
    this.append(node);
    this.childNodes.unshift(this.childNodes.pop());
  }
  drop(node) {
    this.childNodes = this.childNodes.filter((one) => one !== node);
    node.parentElement = null;
    const { ownerDocument: page } = this;
    if (node instanceof FakeElement && node.contains(page.activeElement)) page.activeElement = page.body;
  }
  remove() {
    this.parentElement?.drop(this);
  }
  replaceChildren(...nodes) {
    for (const one of [...this.childNodes]) this.drop(one);
    this.append(...nodes);
  }
  contains(node) {
    for (let up = node; up; up = up.parentElement) if (up === this) return true;
    return false;
  }
  closest(selector) {
    for (let up = this; up; up = up.parentElement) if (up.matches(selector)) return up;
    return null;
  }
  *walk() {
    for (const child of this.children) {
      yield child;
      yield* child.walk();
    }
  }
  matches(selector) {
    return selector.split(",").some((one) => this.#matchesPath(one.trim().split(/\s+/)));
  }
  #matchesPath(path) {
    if (!this.#matchesOne(path.at(-1))) return false;
    if (path.length === 1) return true;
    for (let up = this.parentElement; up; up = up.parentElement) if (up.#matchesPath(path.slice(0, -1))) return true;
    return false;
  }
  #matchesOne(selector) {
    const parts = selector.match(/^[\w-]+|#[\w-]+|\.[\w-]+|\[[^\]]+\]/g);
    if (parts?.join("") !== selector) throw new Error(`no selector of this page: ${selector}`);
    return parts.every((part) => {
      if (part[0] === "#") return this.id === part.slice(1);
      if (part[0] === ".") return this.classList.contains(part.slice(1));
      if (part[0] !== "[") return this.tagName === part.toUpperCase();
      const [name, value] = part.slice(1, -1).split("=");
      const known = this.hasAttribute(name) || Boolean(this[name]);
      return value === undefined ? known : this.getAttribute(name) === value.replaceAll('"', "");
    });
  }
  querySelectorAll(selector) {
    return [...this.walk()].filter((one) => one.matches(selector));
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }

  // --- what a person does
  get isShown() {
    for (let up = this; up; up = up.parentElement) if (up.hidden) return false;
    return this.ownerDocument.body.contains(this);
  }
  focus() {
    if (this.isShown) this.ownerDocument.activeElement = this;
  }
  blur() {
    this.ownerDocument.activeElement = this.ownerDocument.body;
  }
  send(type, more = {}) {
    const event = new FakeEvent(type, { target: this, ...more });
    for (let up = this; up && !event.isStopped; up = up.parentElement) up.hear(event);
    if (!event.isStopped) this.ownerDocument.hear(event);
    return event;
  }
  click() {
    if (this.isShown) {
      if (/^(BUTTON|INPUT|SELECT|TEXTAREA)$/.test(this.tagName)) this.focus();
      this.send("click");
    }
  }
  showModal() {
    this.open = true;
  }
  close() {
    this.open = false;
    this.hear(new FakeEvent("close"));
  }
  scrollIntoView() {}
  getBoundingClientRect() {
    return { left: 0, top: 0, width: 1, height: 1 };
  }
  getClientRects() {
    return [this.getBoundingClientRect()];
  }
}

class FakeDocument extends FakeTarget {
  baseURI = "http://127.0.0.1/";
  body = new FakeElement("body", this);
  documentElement = new FakeElement("html", this);
  activeElement = this.body;
  createElement(tag) {
    return new FakeElement(tag, this);
  }
  createElementNS(_, tag) {
    return new FakeElement(tag, this);
  }
  getElementById(id) {
    return this.body.querySelector(`#${id}`);
  }
  querySelector(selector) {
    return this.body.querySelector(selector);
  }
  querySelectorAll(selector) {
    return this.body.querySelectorAll(selector);
  }
}

/** Put a page in place of a browser's, and return its document. `answers` has what the server says to each path. */
export function openPage(answers) {
  const page = new FakeDocument();
  const app = page.createElement("div");
  app.setAttribute("id", "app");
  page.body.append(app);
  const kept = new Map();
  const storage = {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, value) => kept.set(name, String(value)),
  };
  const answer = (path, asked) => {
    const given = answers(path, asked.body === undefined ? undefined : JSON.parse(asked.body));
    return Array.isArray(given) && path === "v1/trace"
      ? new Response(given.map((one) => `data: ${JSON.stringify(one)}\n\n`).join(""))
      : new Response(JSON.stringify(given));
  };
  Object.assign(globalThis, {
    document: page,
    localStorage: storage,
    sessionStorage: storage,
    location: { hash: "", href: page.baseURI },
    history: { replaceState: () => {} },
    addEventListener: () => {},
    matchMedia: () => ({ matches: false }),
    requestAnimationFrame: (work) => setTimeout(work, 0),
    getComputedStyle: () => ({ direction: "ltr" }),
    innerWidth: 1400,
    fetch: async (address, asked = {}) => answer(new URL(address).pathname.slice(1), asked),
  });
  return page;
}

/** The name that a screen reader says for an element, by the parts of the rule that this page uses. */
export function nameOf(one) {
  const label = one.getAttribute("aria-label");
  if (label !== null) return label.trim();
  const by = one.getAttribute("aria-labelledby");
  if (by !== null) return by.split(" ").map((id) => document.getElementById(id).textContent).join(" ").trim();
  const id = one.getAttribute("id");
  const around = one.closest("label");
  const of = id === null ? null : document.querySelectorAll("label").find((found) => found.getAttribute("for") === id);
  if (of ?? around) return (of ?? around).textContent.trim();
  return heardText(one).trim();
}

function heardText(one) {
  if (one instanceof FakeText) return one.textContent;
  if (one.hidden || one.getAttribute("aria-hidden") === "true") return "";
  return one.getAttribute("aria-label") ?? one.childNodes.map(heardText).join("");
}
