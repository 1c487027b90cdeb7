"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const picture = document.querySelector(".picture");
  const find = (id) => document.getElementById(id);
  const groups = [...picture.querySelectorAll("g.node")];
  const edges = new Map([...picture.querySelectorAll("path.edge[data-node]")].map((edge) => [Number(edge.dataset.node), edge]));
  const nodes = new Map(groups.map((group) => [Number(group.dataset.node), group]));
  const rows = [...document.querySelectorAll("tbody tr")];
  let pinned = null;

  const pathOf = (number) => {
    const path = [];
    for (let place = number; place !== null; place = data[place].parent) path.unshift(place);
    return path;
  };
  const show = (number) => {
    const path = number === null ? [] : pathOf(number);
    picture.classList.toggle("lit", number !== null);
    for (const [place, group] of nodes) group.classList.toggle("on", path.includes(place));
    for (const [place, edge] of edges) edge.classList.toggle("on", path.includes(place));
    for (const [place, group] of nodes) if (group.hasAttribute("role")) group.setAttribute("aria-pressed", String(place === pinned));
    for (const row of rows) row.classList.toggle("on", number !== null && Number(row.dataset.node) === number);
    find("details").hidden = number === null;
    find("hint").hidden = number !== null;
    if (number === null) return;
    const node = data[number];
    for (const name of ["token", "step", "probability", "logprob", "total", "fate"]) find(name).textContent = node[name];
    find("sofar").textContent = path.map((place) => data[place].text).join("").trimStart();
  };
  const pin = (number) => { pinned = pinned === number ? null : number; show(pinned); };

  for (const [number, group] of nodes) {
    group.addEventListener("pointerenter", () => show(number));
    group.addEventListener("pointerleave", () => show(pinned));
    group.addEventListener("focus", () => show(number));
    group.addEventListener("blur", () => show(pinned));
    group.addEventListener("click", (event) => { event.stopPropagation(); pin(number); });
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      pin(number);
    });
  }
  for (const row of rows) {
    const number = Number(row.dataset.node);
    row.addEventListener("pointerenter", () => show(number));
    row.addEventListener("pointerleave", () => show(pinned));
    row.addEventListener("click", () => pin(number)); // the button in it, too
  }
  picture.addEventListener("click", () => { pinned = null; show(null); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") { pinned = null; show(null); } });

  const slider = find("steps");
  const turn = () => {
    const last = Number(slider.value);
    find("shown").textContent = `${last} of ${slider.max}`;
    for (const part of picture.querySelectorAll("[data-step]")) part.classList.toggle("later", Number(part.dataset.step) > last);
  };
  slider.addEventListener("input", turn);
  slider.value = slider.max; // a browser may have kept an old place
  turn();
  show(null);
})();
