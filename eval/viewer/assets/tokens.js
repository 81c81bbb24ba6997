// A response as text: tokens coloured by a stream, chains of thought folded, what was searched for marked.

import { el, number } from "./dom.js";

const LEVELS = 9;
const THOUGHT = /<(think|thinking|reasoning|scratchpad)>|<\/(think|thinking|reasoning|scratchpad)>/g;

export const COLOURS = {
  "": { label: "no colour" },
  logprob: { label: "log-prob", unit: "nats", fixed: [-4, 0], flip: true },
  sampler_logprob: { label: "sampler log-prob", unit: "nats", fixed: [-4, 0], flip: true },
  entropy: { label: "entropy", unit: "nats", fixed: [0, 2] },
  advantage: { label: "advantage", diverging: true },
  gap: { label: "learner − sampler", unit: "nats", diverging: true },
};

// The values of a stream, one a token; undefined where the row has none.
export function stream(row, name) {
  const streams = row.streams;
  if (!streams) return undefined;
  if (name !== "gap") return name === "token" ? undefined : streams[name];
  const { logprob: learner, sampler_logprob: sampler } = streams;
  return learner && sampler && learner.map((x, i) => (x === null || sampler[i] === null ? null : x - sampler[i]));
}

export const available = (rows) =>
  Object.keys(COLOURS).filter((name) => !name || rows.some((row) => stream(row, name)));

// One scale for all rows, so that colours can be compared.
export function scale(name, rows) {
  const kind = COLOURS[name] ?? {};
  if (!name) return null;
  let largest = 0;
  if (kind.diverging)
    for (const row of rows) for (const x of stream(row, name) ?? []) largest = Math.max(largest, Math.abs(x ?? 0));
  const [low, high] = kind.fixed ?? [-(largest || 1), largest || 1];
  return { name, low, high, ...kind };
}

function level(value, { low, high, diverging, flip }) {
  if (value === null || value === undefined) return "";
  if (diverging) {
    const step = Math.round((LEVELS * Math.abs(value)) / high);
    return step ? (value > 0 ? `p${step}` : `n${step}`) : "";
  }
  const share = (value - low) / (high - low);
  const step = Math.round(LEVELS * Math.min(Math.max(flip ? 1 - share : share, 0), 1));
  return step ? `s${step}` : "";
}

export function legend(shade) {
  if (!shade) return null;
  const names = Array.from({ length: LEVELS + 1 }, (_, i) => (i ? `s${i}` : "s0"));
  const down = Array.from({ length: LEVELS }, (_, i) => `n${LEVELS - i}`);
  const classes = shade.diverging
    ? [...down, "s0", ...names.slice(1).map((x) => x.replace("s", "p"))]
    : shade.flip
      ? names.reverse()
      : names;
  return el(
    "span",
    { class: "legend", title: `${shade.label}${shade.unit ? `, ${shade.unit}` : ""}` },
    number(shade.low, 2),
    el(
      "span",
      { class: "ramp" },
      classes.map((name) => el("i", { class: name })),
    ),
    number(shade.high, 2),
    shade.unit ? ` ${shade.unit}` : "",
  );
}

// [start, end) of every chain of thought; one that is never closed runs to the end, one never opened starts at 0.
export function thoughts(text) {
  const found = [];
  let start = null;
  for (const tag of text.matchAll(THOUGHT)) {
    if (tag[1]) start ??= tag.index;
    else if (start !== null || !found.length) {
      found.push([start ?? 0, tag.index + tag[0].length]);
      start = null;
    }
  }
  if (start !== null) found.push([start, text.length]);
  return found;
}

function hits(text, sought) {
  const found = [];
  if (!sought) return found;
  const [lower, part] = [text.toLowerCase(), sought.toLowerCase()];
  for (let at = lower.indexOf(part); at >= 0; at = lower.indexOf(part, at + part.length))
    found.push([at, at + part.length]);
  return found;
}

// The body of a rollout's card.
export function body(row, { shade, folded, sought }) {
  const tokens = row.streams?.token ?? [];
  const pieces = tokens.length ? [...tokens, ...(row.streams.rest ? [row.streams.rest] : [])] : [row.response];
  const text = pieces.join("");
  const values = shade && stream(row, shade.name);
  const [chains, marks] = [thoughts(text), hits(text, sought)];
  const cuts = [...new Set([...chains, ...marks].flat())].sort((a, b) => a - b);
  const root = el("div", { class: "text", lang: "" });
  const folds = chains.map(([a, b]) =>
    el(
      "details",
      { class: "thought", open: !folded || marks.some(([c, d]) => c < b && d > a) },
      el("summary", {}, `thought · ${(b - a).toLocaleString("en")} characters`),
    ),
  );
  let [at, cut, chain, mark] = [0, 0, 0, 0];
  pieces.forEach((piece, i) => {
    const end = at + piece.length;
    while (at < end) {
      while (cut < cuts.length && cuts[cut] <= at) cut++;
      while (chain < chains.length && chains[chain][1] <= at) chain++;
      while (mark < marks.length && marks[mark][1] <= at) mark++;
      const stop = Math.min(end, cuts[cut] ?? end);
      const inside = chain < chains.length && chains[chain][0] <= at ? folds[chain] : null;
      if (inside && !inside.parentNode) root.append(inside);
      const hit = mark < marks.length && marks[mark][0] <= at;
      const said = text.slice(at, stop);
      const name = values ? level(values[i], shade) : "";
      const plain = i >= tokens.length && !hit;
      (inside ?? root).append(
        plain ? said : el(hit ? "mark" : "span", { class: name || null, "data-t": i < tokens.length ? i : null }, said),
      );
      at = stop;
    }
  });
  if (!text) root.append(el("em", {}, "empty"));
  return root;
}

// What is known of one token, for the tooltip.
export function token(row, i) {
  const values = Object.keys(COLOURS)
    .filter((name) => name && stream(row, name))
    .map((name) => el("tr", {}, el("th", {}, COLOURS[name].label), el("td", {}, number(stream(row, name)[i], 4))));
  return [
    el("code", {}, JSON.stringify(row.streams.token[i])),
    el("span", { class: "dim" }, ` token ${i}`),
    el("table", {}, values),
  ];
}
