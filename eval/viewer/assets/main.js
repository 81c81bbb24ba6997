// The page: views, keys and help.

import * as compare from "./compare.js";
import * as curves from "./curves.js";
import { el } from "./dom.js";
import * as rollouts from "./rollouts.js";
import * as runs from "./runs.js";
import { get, link, listen, set } from "./state.js";

const VIEWS = { runs, curves, rollouts, compare };
const KEYS = [
  ["1 – 4", "runs, curves, rollouts, compare"],
  ["j  k", "next, previous group or prompt"],
  ["]  [", "next, previous step"],
  ["c", "next colour of tokens"],
  ["t", "fold or unfold thoughts"],
  ["/", "search"],
  ["Esc", "leave a field"],
  ["?", "this list"],
];

const main = document.getElementById("main");
const busy = document.getElementById("busy");
const help = document.getElementById("help");
let drawn = 0;

const view = () => (VIEWS[get("view")] ? get("view") : "runs");

async function draw() {
  const number = ++drawn;
  const fresh = () => number === drawn;
  const waiting = setTimeout(() => fresh() && (busy.textContent = "loading"), 150);
  document.getElementById("views").replaceChildren(
    ...Object.keys(VIEWS).map((name, i) => {
      const kept = name === "rollouts" && get("run") ? { newest: get("run") } : {};
      return el(
        "a",
        { href: link({ view: name, ...kept }, {}), "aria-current": name === view() && "page", title: `key ${i + 1}` },
        name,
      );
    }),
  );
  document.title = `${view()} ${get("run")} · jaxrl_llm`;
  try {
    await VIEWS[view()].draw(main, fresh);
  } finally {
    clearTimeout(waiting);
    if (fresh()) {
      busy.textContent = "";
      requestAnimationFrame(() => (document.body.dataset.drawn = number)); // seen by the browser's test
    }
  }
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const active = VIEWS[view()];
  const actions = {
    j: () => active.group?.(1),
    k: () => active.group?.(-1),
    "]": () => active.step?.(1),
    "[": () => active.step?.(-1),
    c: () => (view() === "rollouts" || view() === "compare") && rollouts.colour(),
    t: () => rollouts.fold(),
    "/": () => main.querySelector("[data-search]")?.focus(),
    "?": () => help.showModal(),
  };
  Object.keys(VIEWS).forEach((name, i) => (actions[i + 1] = () => set({ view: name, text: "" })));
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

help.append(
  el("h2", {}, "Keys"),
  el(
    "table",
    {},
    KEYS.map(([key, what]) => el("tr", {}, el("th", {}, el("kbd", {}, key)), el("td", {}, what))),
  ),
  el("form", { method: "dialog" }, el("button", {}, "Close")),
);
document.getElementById("help-button").addEventListener("click", () => help.showModal());
addEventListener("keydown", press);
listen(draw);
draw();
