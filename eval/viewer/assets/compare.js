// Two runs, checkpoints or results on the prompts that both answered.

import { ask } from "./api.js";
import { cards, question } from "./cards.js";
import { el, number, select } from "./dom.js";
import { get, link, set } from "./state.js";
import { toolbar } from "./rollouts.js";

const LETTERS = ["a", "b"];
let list = { key: null, prompts: [], next: null };

const sideOf = (letter) =>
  Object.fromEntries(["run", "step", "kind", "role"].map((name) => [name, get(`${name}_${letter}`)]));
const asked = () =>
  Object.fromEntries(
    LETTERS.flatMap((letter) => Object.entries(sideOf(letter)).map(([name, value]) => [`${name}_${letter}`, value])),
  );

async function chooser(letter, runs) {
  const change = (name) => (value) =>
    set({
      [`${name}_${letter}`]: value,
      ...(name === "run" ? { [`step_${letter}`]: "", [`role_${letter}`]: "", [`kind_${letter}`]: "" } : {}),
      prompt: "",
    });
  const mine = sideOf(letter);
  const about = await ask("run", { run: mine.run, kind: mine.kind });
  const any = (values) => [["", "any"], ...values];
  return el(
    "fieldset",
    { class: `side ${letter}` },
    el("legend", {}, letter.toUpperCase()),
    select(
      "",
      mine.run,
      runs.map((one) => one.name),
      change("run"),
    ),
    about.names.kind.length > 1 && select("of", mine.kind, any(about.names.kind), change("kind")),
    about.steps.length > 1 &&
      select(
        "step",
        mine.step,
        [["", "all"], ...about.steps.map((one) => [one.step, number(one.step)])],
        change("step"),
      ),
    about.names.role.length > 1 && select("role", mine.role, any(about.names.role), change("role")),
  );
}

const within = (estimate) => `${number(estimate.mean)}${estimate.ci95 === null ? "" : ` ± ${number(estimate.ci95)}`}`;

function summary(found) {
  const { a, b, difference } = found.summary;
  const clear = difference.ci95 !== null && Math.abs(difference.mean) > difference.ci95;
  return el(
    "section",
    { class: "summary" },
    el(
      "table",
      {},
      el("tr", {}, el("th", {}, "mean reward, A"), el("td", { class: "value" }, within(a))),
      el("tr", {}, el("th", {}, "mean reward, B"), el("td", { class: "value" }, within(b))),
      el(
        "tr",
        { title: "paired on the prompts; ± is half of the 95% interval" },
        el("th", {}, "B − A, paired"),
        el("td", { class: `value ${clear ? (difference.mean > 0 ? "up" : "down") : ""}` }, within(difference)),
      ),
    ),
    el(
      "p",
      { class: "dim" },
      `${number(found.shared)} prompts in both, ${number(found.only_a)} in A alone, ${number(found.only_b)} in B alone`,
    ),
  );
}

function metrics(runs) {
  const [a, b] = LETTERS.map((letter) => runs.find((one) => one.name === get(`run_${letter}`))?.metrics ?? {});
  const [x, y] = LETTERS.map((letter) => runs.find((one) => one.name === get(`run_${letter}`))?.ci95 ?? {});
  const shared = Object.keys(a).filter((name) => name in b);
  if (!shared.length) return null;
  const cell = (value, spread) =>
    el("td", { class: "value" }, number(value), spread ? el("span", { class: "dim" }, ` ±${number(spread)}`) : null);
  return el(
    "details",
    { class: "summary" },
    el("summary", {}, `${shared.length} metrics of both summaries`),
    el(
      "table",
      {},
      shared.map((name) => el("tr", {}, el("th", {}, name), cell(a[name], x[name]), cell(b[name], y[name]))),
    ),
  );
}

function item(one) {
  const change = one.a === null || one.b === null ? null : one.b - one.a;
  const here = one.prompt === get("prompt");
  return el(
    "li",
    {},
    el(
      "a",
      { class: "group", href: link({ prompt: one.prompt }), "aria-current": here && "true" },
      el(
        "span",
        { class: "line" },
        el("code", {}, one.prompt),
        el(
          "span",
          { class: `change ${change > 0 ? "up" : change < 0 ? "down" : ""}` },
          `${number(one.a, 2)} → ${number(one.b, 2)}`,
        ),
      ),
    ),
  );
}

async function pair() {
  const sides = await Promise.all(LETTERS.map((letter) => ask("group", { ...sideOf(letter), prompt: get("prompt") })));
  const [a, b] = sides.map((one) => one.rows);
  if (!a.length || !b.length) return el("p", { class: "page" }, "One side has no answer to this prompt.");
  const [options, tools] = toolbar([...a, ...b]);
  const differ =
    a[0].question !== b[0].question &&
    el("p", { class: "notice" }, "The two sides asked different questions under this name.");
  return [
    question(a[0]),
    differ,
    tools,
    el(
      "div",
      { class: "sides" },
      LETTERS.map((letter, i) =>
        el(
          "section",
          { class: `side ${letter}` },
          el(
            "h3",
            {},
            `${letter.toUpperCase()}  ${get(`run_${letter}`)} ${get(`step_${letter}`) && `step ${get(`step_${letter}`)}`}`,
          ),
          sides[i].total > 32 && el("p", { class: "dim" }, `the first 32 of ${sides[i].total}`),
          cards(sides[i].rows, options, [...a, ...b]),
        ),
      ),
    ),
  ];
}

// Two results of the same kind; for a run alone, the first and the last step of its evaluation.
async function sensible(runs) {
  const held = (one) => one.kinds.find((kind) => kind.startsWith("eval/")) ?? "";
  const first =
    runs.find((one) => one.name === get("run_a")) ??
    runs.find((one) => one.kind === "evaluation") ??
    runs.find(held) ??
    runs[0];
  const second =
    runs.find((one) => one.name === get("run_b")) ??
    runs.find((one) => one !== first && one.kind === first.kind && one.kind === "evaluation") ??
    first;
  const chosen = { run_a: first.name, run_b: second.name, kind_a: held(first), kind_b: held(second) };
  if (first !== second || !held(first)) return chosen;
  const { steps } = await ask("run", { run: first.name, kind: held(first) });
  return { ...chosen, step_a: steps[0]?.step, step_b: steps.at(-1)?.step };
}

export async function draw(main, fresh) {
  const runs = (await ask("runs")).filter((one) => one.rollouts);
  if (!runs.length)
    return fresh() && main.replaceChildren(el("p", { class: "page" }, "No run here has rollouts (yet)."));
  if (!get("run_a") || !get("run_b")) {
    const found = await sensible(runs);
    return fresh() && set(found, { replace: true });
  }
  const choosers = await Promise.all(LETTERS.map((letter) => chooser(letter, runs)));
  const key = JSON.stringify(asked());
  if (list.key !== key) list = { key, ...(await ask("compare", asked())) };
  if (!fresh()) return;
  if (!get("prompt") && list.prompts.length) return set({ prompt: list.prompts[0].prompt }, { replace: true });
  const shown = list.prompts.length
    ? await pair()
    : el(
        "p",
        { class: "page" },
        "These two have no prompt in common: choose results of the same set, or steps of the same evaluation.",
      );
  if (!fresh()) return;
  const more = async () => {
    const page = await ask("compare", { ...asked(), after: list.next });
    list = { ...list, next: page.next, prompts: [...list.prompts, ...page.prompts] };
    await draw(main, fresh);
  };
  const scrolled = main.querySelector("aside")?.scrollTop ?? 0;
  main.replaceChildren(
    el(
      "section",
      { class: "split", "data-view": "compare" },
      el(
        "aside",
        {},
        choosers,
        summary(list),
        metrics(runs),
        el("ol", { class: "groups" }, list.prompts.map(item)),
        list.next !== null && el("button", { type: "button", class: "more", onclick: more }, "more"),
      ),
      el("article", {}, shown),
    ),
  );
  main.querySelector("aside").scrollTop = scrolled;
}

export function group(by) {
  const place = list.prompts.findIndex((one) => one.prompt === get("prompt"));
  const next = list.prompts[place + by];
  if (next) set({ prompt: next.prompt });
}
