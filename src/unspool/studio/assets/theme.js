// Dark or light: what the system says, or what was chosen here.

import { button } from "./dom.js";

const KEY = "unspool-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

export function makeThemeButton() {
  let theme = read();
  const made = button("", () => set(NEXT[theme]), { class: "icon", id: "theme" });
  const set = (wanted) => {
    theme = wanted;
    document.documentElement.dataset.theme = theme;
    made.textContent = SIGNS[theme];
    made.setAttribute("aria-label", `Colours: ${theme}`);
    made.title = `Colours: ${theme}`;
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // a kept page may have no storage
    }
  };
  set(theme);
  return made;
}

function read() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept in NEXT ? kept : "auto";
  } catch {
    return "auto";
  }
}
