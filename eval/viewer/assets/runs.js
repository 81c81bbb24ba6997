// The table of runs and results.

import { ask } from "./api.js";
import { el, number } from "./dom.js";
import { get, link, set } from "./state.js";

export const names = { run: "training run", evaluation: "evaluation" };

// Seconds as a reader says them: 45 s, 12 min, 3.4 h, 2 d.
export function spell(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= 2 * size) ?? [1, "s"];
  return `${Number((seconds / size).toFixed(unit === "d" || unit === "h" ? 1 : 0))} ${unit}`;
}

const STATES = { ended: "finished" };
const kindOf = (status) => (status === "ended" ? "good" : status?.startsWith("running") ? "going" : "bad");

function state(one) {
  if (!one.status) return el("td", {}, "–");
  const said = STATES[one.status] ?? one.status;
  const short = said.split(":")[0].slice(0, 24);
  return el("td", { title: said }, el("span", { class: `state ${kindOf(one.status)}` }, short));
}

// A run opens at the group of its newest step whose rewards differ most, coloured; where it learns from samples, at one of these.
export const newest = (one) =>
  one.kind === "run"
    ? { view: "rollouts", run: one.name, step: "~1e15", kind: one.kinds.includes("train") ? "train" : "", order: "spread", colour: "entropy" }
    : { view: "rollouts", run: one.name };

const measured = (one) => (one.kind === "run" ? one.held_out : one.metrics) ?? {};

function cell(one, name) {
  const value = measured(one)[name];
  const spread = one.ci95?.[name];
  return el(
    "td",
    { class: "value" },
    number(value),
    spread ? el("span", { class: "dim" }, ` ±${number(spread)}`) : null,
  );
}

function row(one, columns) {
  const short = columns.slice(0, 4);
  return el(
    "tr",
    {},
    el(
      "th",
      { scope: "row" },
      el("a", { href: link(newest(one), {}), title: one.path }, one.name),
      one.notices.map((notice) => el("div", { class: "notice" }, notice)),
    ),
    el(
      "td",
      { class: "value" },
      one.rollouts ? number(one.rollouts) : "–",
      one.progress < 1 ? el("progress", { value: one.progress, title: "indexed so far" }) : null,
    ),
    one.kind === "run"
      ? [
          state(one),
          el("td", { class: "value" }, one.seen ? spell(Date.now() / 1000 - one.seen) : "–"),
          el("td", { class: "value" }, spell(one.duration)),
          el("td", { class: "value" }, number(one.steps)),
          el("td", { class: "value" }, number(one.reward)),
          el("td", { class: "value" }, number(one.length)),
        ]
      : [
          el("td", { title: one.model }, (one.model ?? "–").split("/").slice(-2).join("/")),
          el("td", { class: "value" }, one.throughput ? `${number(one.throughput, 0)}` : "–"),
        ],
    short.map((name) => cell(one, name)),
    el(
      "td",
      { class: "dim mono", title: one.commit },
      one.commit ? one.commit.slice(0, 8) + (one.commit.includes("+") ? "+" : "") : "–",
    ),
    el(
      "td",
      {},
      one.kind === "run"
        ? el("a", { href: link({ view: "curves", runs: one.name }, {}) }, "curves")
        : el("a", { href: link({ view: "compare", run_a: one.name }, {}) }, "compare"),
    ),
  );
}

function table(kind, runs) {
  const mine = runs.filter((one) => one.kind === kind);
  if (!mine.length) return null;
  const counts = new Map();
  for (const one of mine) for (const name of Object.keys(measured(one))) counts.set(name, (counts.get(name) ?? 0) + 1);
  const beside = (name) => /(_truncated|_length|_distinct|\/prompts)$/.test(name) || name.split("/").length > 3;
  const results = [...counts.keys()].filter((name) => !beside(name));
  const columns = (results.length ? results : [...counts.keys()]).sort((a, b) => counts.get(b) - counts.get(a)).slice(0, 4);
  const fixed = kind === "run" ? ["status", "age", "duration", "steps", "reward", "length"] : ["model", "tokens/s"];
  const heads = ["name", "rollouts", ...fixed, ...columns.map((name) => name.replace(/^eval\//, "")), "commit", ""];
  return [
    el("h2", {}, `${names[kind]}s `, el("span", { class: "dim" }, mine.length)),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "runs" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            heads.map((head) => el("th", { scope: "col" }, head)),
          ),
        ),
        el(
          "tbody",
          {},
          mine.map((one) => row(one, columns)),
        ),
      ),
    ),
  ];
}

export async function draw(main) {
  const runs = await ask("runs");
  const text = get("text").toLowerCase();
  const shown = runs.filter((one) => !text || `${one.name} ${one.model ?? ""}`.toLowerCase().includes(text));
  const search = el("input", {
    type: "search",
    placeholder: "filter by name",
    value: get("text"),
    "data-search": true,
    oninput: (event) => set({ text: event.target.value }, { replace: true }),
  });
  const focused = document.activeElement?.matches("[data-search]");
  main.replaceChildren(
    el(
      "section",
      { class: "page" },
      el("div", { class: "bar-line" }, search),
      table("run", shown),
      table("evaluation", shown),
      shown.length ? null : el("p", {}, "no run has such a name"),
    ),
  );
  if (focused) main.querySelector("[data-search]").focus();
}
