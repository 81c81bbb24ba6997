// Rollouts of a run: groups by filter on the left, one group's rollouts side by side on the right.

import { ask } from "./api.js";
import { cards, question, strip } from "./cards.js";
import { el, input, number, select } from "./dom.js";
import { newest } from "./runs.js";
import { all, get, link, set } from "./state.js";
import { available, COLOURS, legend, scale } from "./tokens.js";

const FILTERS = ["run", "step", "kind", "role", "finish", "source", "low", "high", "text", "order"];
const ORDERS = [
  ["", "file's order"],
  ["low reward", "low reward first"],
  ["high reward", "high reward first"],
  ["spread", "most mixed first"],
  ["long", "longest first"],
];

const FRESH_MS = 3000;

let list = { key: null, groups: [], next: null, rows: 0, total: 0 };
let about = { key: null };
let opened = { key: null };
let painted = []; // the rows whose tokens are shown, here or in a comparison

const filters = () => Object.fromEntries(FILTERS.map((name) => [name, get(name)]));
const chosen = () => ({ run: get("run"), step: get("at"), kind: get("of"), prompt: get("prompt") });
const where = (group) => ({ at: group.step, of: group.kind, prompt: group.prompt, first: "" });

// What the run has; asked again after a while, as the run may still be writing.
async function describe() {
  const key = JSON.stringify([get("run"), get("kind")]);
  if (about.key !== key || about.growing || performance.now() - about.at > FRESH_MS) {
    const [run, runs] = await Promise.all([ask("run", { run: get("run"), kind: get("kind") }), ask("runs")]);
    const mine = runs.find((one) => one.name === get("run"));
    if (mine?.rollouts !== about.rollouts) list.key = null;
    about = {
      key,
      ...run,
      runs: runs.filter((one) => one.rollouts || one.name === get("run")),
      rollouts: mine?.rollouts,
      growing: mine?.progress < 1,
      progress: mine?.progress,
      at: performance.now(),
    };
  }
  if (get("step").startsWith("~")) {
    const wanted = Number(get("step").slice(1));
    const near = about.steps.reduce(
      (best, one) => (Math.abs(one.step - wanted) < Math.abs(best - wanted) ? one.step : best),
      about.steps[0]?.step ?? "",
    );
    set({ step: String(near) }, { replace: true });
  }
}

async function fetchList(more = false) {
  const key = JSON.stringify(filters());
  if (!more && list.key === key) return;
  const before = more ? list : { groups: [], next: 0 };
  const page = await ask("groups", { ...filters(), after: more ? list.next : 0 });
  const known = new Map(before.groups.map((group) => [group.group, group]));
  for (const group of page.groups) {
    const old = known.get(group.group);
    known.set(group.group, old ? { ...group, matched: group.matched.map((x, i) => x || old.matched[i]) } : group);
  }
  list = { ...page, key, groups: [...known.values()] };
}

// Steps a text search on until it has a page or has seen everything.
async function complete(fresh, redraw) {
  while (get("text") && list.next !== null && list.groups.length < 50 && fresh()) {
    await fetchList(true);
    if (fresh()) redraw();
  }
}

function form() {
  const change = (name) => (value) => set({ [name]: value, at: "", of: "", prompt: "", first: "" });
  const steps = about.steps.map((one) => one.step);
  const any = (values) => [["", "any"], ...values];
  const place = steps.indexOf(Number(get("step")));
  const stepping =
    steps.length > 1 &&
    el(
      "div",
      { class: "stepping" },
      el("button", { type: "button", title: "previous step ([)", onclick: () => step(-1) }, "◀"),
      select("step", get("step"), [["", `all ${steps.length}`], ...steps.map((x) => [x, number(x)])], change("step")),
      el("button", { type: "button", title: "next step (])", onclick: () => step(1) }, "▶"),
      el("span", { class: "dim" }, place >= 0 ? `reward ${number(about.steps[place].reward)}` : ""),
    );
  return el(
    "form",
    { class: "filters", onsubmit: (event) => event.preventDefault() },
    select(
      "run",
      get("run"),
      about.runs.map((one) => one.name),
      (value) => set({ ...Object.fromEntries(FILTERS.map((x) => [x, ""])), run: value, at: "", of: "", prompt: "" }),
    ),
    stepping,
    input(
      "search",
      get("text"),
      { type: "search", placeholder: "in questions and responses", "data-search": true },
      change("text"),
    ),
    el(
      "div",
      { class: "pair" },
      input("reward ≥", get("low"), { type: "number", step: "any" }, change("low")),
      input("≤", get("high"), { type: "number", step: "any" }, change("high")),
    ),
    el(
      "div",
      { class: "pair" },
      about.names.kind.length > 1 && select("of", get("kind"), any(about.names.kind), change("kind")),
      about.names.role.length > 1 && select("role", get("role"), any(about.names.role), change("role")),
      about.names.finish.length > 1 && select("finish", get("finish"), any(about.names.finish), change("finish")),
      about.names.source.length > 1 && select("source", get("source"), any(about.names.source), change("source")),
    ),
    select("order", get("order"), ORDERS, change("order")),
  );
}

function item(group, current) {
  const here = group.prompt === current.prompt && String(group.step) === current.step && group.kind === current.kind;
  return el(
    "li",
    {},
    el(
      "a",
      { href: link(where(group)), class: "group", "aria-current": here && "true" },
      el(
        "span",
        { class: "line" },
        el("code", {}, group.prompt),
        about.steps.length > 1 && !get("step") && el("span", { class: "dim" }, `step ${group.step}`),
        group.kind.startsWith("eval/") && el("span", { class: "flag" }, group.kind.slice(5)),
      ),
      el("span", { class: "excerpt" }, group.excerpt),
      strip(group.rewards, get("text") || get("low") || get("high") || get("finish") ? group.matched : null),
    ),
  );
}

const counted = (n, noun, more) => `${number(n)}${more ? "+" : ""} ${noun}${n === 1 && !more ? "" : "s"}`;

function side(fresh) {
  const searching = get("text") && list.next !== null;
  const count = get("text")
    ? `${counted(list.groups.length, "group", searching)} found`
    : `${counted(list.total, "group")}, ${counted(list.rows, "rollout")}`;
  const more = async () => {
    await fetchList(true);
    if (fresh()) replaceSide(fresh);
  };
  const current = chosen();
  return [
    el(
      "div",
      { class: "count", role: "status" },
      about.growing ? `indexing ${Math.floor(100 * about.progress)}%: ` : "",
      count,
    ),
    el(
      "ol",
      { class: "groups" },
      list.groups.map((group) => item(group, current)),
    ),
    list.next !== null
      ? el("button", { type: "button", class: "more", onclick: more }, searching ? "search on" : "more")
      : null,
    list.groups.length ? null : el("p", { class: "dim" }, "nothing passes these filters"),
  ];
}

const replaceSide = (fresh) => document.getElementById("side")?.replaceChildren(...side(fresh).filter(Boolean));

export function toolbar(rows) {
  painted = rows;
  const names = available(rows);
  const colour = names.includes(get("colour")) ? get("colour") : "";
  const shade = scale(colour, rows);
  const folded = get("fold", "1") === "1";
  return [
    { shade, folded, sought: get("text") },
    el(
      "div",
      { class: "toolbar" },
      names.length > 1
        ? select(
            "colour",
            colour,
            names.map((name) => [name, COLOURS[name].label]),
            (value) => set({ colour: value }),
          )
        : el("span", { class: "dim" }, "no values of tokens were written for these"),
      legend(shade),
      el(
        "label",
        {},
        el("input", { type: "checkbox", checked: folded, onchange: () => set({ fold: folded ? "0" : "" }) }),
        "fold thoughts",
      ),
    ),
  ];
}

async function content() {
  const asked = { ...chosen(), first: get("first") };
  if (!asked.prompt) return el("p", { class: "dim page" }, "No group is chosen.");
  const key = JSON.stringify(asked);
  if (opened.key !== key) opened = { key, ...(await ask("group", asked)) };
  if (!opened.rows.length) return el("p", { class: "page" }, "This group is not there (any more).");
  const [options, tools] = toolbar(opened.rows);
  const first = Number(get("first") || 0);
  const pages =
    opened.total > opened.rows.length &&
    el(
      "div",
      { class: "pages" },
      `${first + 1} to ${first + opened.rows.length} of ${opened.total} `,
      first > 0 && el("a", { href: link({ first: Math.max(0, first - 32) || "" }) }, "previous"),
      " ",
      first + opened.rows.length < opened.total && el("a", { href: link({ first: first + 32 }) }, "next"),
    );
  return [question(opened.rows[0]), tools, pages, cards(opened.rows, options)];
}

export async function draw(main, fresh) {
  if (!get("run")) {
    const runs = (await ask("runs")).filter((one) => one.rollouts);
    const one = runs.find((one) => one.name === get("newest")) ?? runs[0];
    if (fresh() && one) return set({ ...newest(one), newest: "" }, { replace: true });
    return fresh() && main.replaceChildren(el("p", { class: "page" }, "No run here has rollouts (yet)."));
  }
  await describe();
  await fetchList();
  if (!fresh()) return;
  if (!get("prompt") && list.groups.length) return set(where(list.groups[0]), { replace: true });
  const shown = await content();
  if (!fresh()) return;
  const old = main.querySelector(".split[data-view=rollouts]");
  const scrolled = document.getElementById("side")?.parentNode.scrollTop ?? 0;
  const focus = document.activeElement?.closest?.("aside form") ? document.activeElement : null;
  const typing = focus?.matches("input"); // the form that is typed into stays; another one would lose the cursor
  const aside = el(
    "aside",
    {},
    typing ? focus.closest("form") : form(),
    el("div", { id: "side" }, side(fresh).filter(Boolean)),
  );
  main.replaceChildren(el("section", { class: "split", "data-view": "rollouts" }, aside, el("article", {}, shown)));
  if (typing) focus.focus();
  else if (focus?.name) aside.querySelector(`[name="${focus.name}"]`)?.focus();
  if (old) aside.scrollTop = scrolled;
  complete(fresh, () => replaceSide(fresh));
  if (about.growing) setTimeout(() => fresh() && draw(main, fresh), 1000);
}

// -- keys ---------------------------------------------------------------------------------------------------------------

export function step(by) {
  const steps = about.steps.map((one) => one.step);
  const place = steps.indexOf(Number(get("step") || NaN));
  const next = get("step") ? steps[place + by] : steps[by > 0 ? 0 : steps.length - 1];
  if (next !== undefined) set({ step: String(next), at: "", of: "", prompt: "", first: "" });
}

export async function group(by) {
  const current = chosen();
  const place = list.groups.findIndex(
    (one) => one.prompt === current.prompt && String(one.step) === current.step && one.kind === current.kind,
  );
  if (place + by >= list.groups.length && list.next !== null) await fetchList(true);
  const next = list.groups[place + by];
  if (!next) return;
  set(where(next));
  requestAnimationFrame(() => document.querySelector("aside [aria-current]")?.scrollIntoView({ block: "nearest" }));
}

export function colour() {
  const names = available(painted);
  set({ colour: names[(names.indexOf(all().colour ?? "") + 1) % names.length] });
}

export const fold = () => set({ fold: get("fold", "1") === "1" ? "0" : "" });
