// A rollout that an environment or an agent played: its branches, and who wrote what in each.

import { el, number } from "./dom.js";

const WRITERS = {
  policy: "sampled, and learned from here",
  copied: "sampled, and learned from in an earlier branch",
  told: "of the environment, a tool or an agent: never learned from",
};

// Calls of the sampler, rewards that the environment gave, and what it says beside them.
function facts(row) {
  const info = { ...(row.info ?? {}) };
  const rewards = Object.entries(row.rewards ?? {}).map(([name, x]) => [`reward ${name}`, x === null ? "unknown" : number(x)]);
  const entries = [...rewards, ...Object.entries(info).map(([name, x]) => [name, typeof x === "object" ? JSON.stringify(x) : `${x}`])];
  if (!entries.length) return null;
  return el(
    "details",
    { class: "thought" },
    el("summary", {}, `ended by ${info.stop ?? "itself"}`),
    el("table", {}, entries.map(([name, x]) => el("tr", {}, el("th", {}, name), el("td", {}, x)))),
  );
}

function marked(text, sought) {
  if (!sought) return [text];
  const [found, lower, part] = [[], text.toLowerCase(), sought.toLowerCase()];
  let at = 0;
  for (let hit = lower.indexOf(part); hit >= 0; hit = lower.indexOf(part, at)) {
    found.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + part.length)));
    at = hit + part.length;
  }
  return [...found, text.slice(at)];
}

function branch(found, place, count, options) {
  const turns = found.turns?.length ?? 0;
  const title = `branch ${place + 1} of ${count} · ${turns} ${turns === 1 ? "turn" : "turns"} · ${found.finish}`;
  return el(
    "section",
    { class: "branch" },
    count > 1 && el("h4", {}, title),
    el("details", { class: "thought" }, el("summary", {}, "prompt"), el("div", { class: "told" }, marked(found.prefix, options.sought))),
    found.pieces.map(({ by, text }) => el("span", { class: by, title: WRITERS[by] }, marked(text, options.sought))),
  );
}

// The body of the card of such a rollout.
export function trajectory(row, options) {
  const count = row.branches.length;
  return el(
    "div",
    { class: "text", lang: "" },
    row.error && el("p", { class: "error" }, row.error),
    row.branches.map((found, place) => branch(found, place, count, options)),
    facts(row),
  );
}
