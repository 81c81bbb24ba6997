// Rollouts side by side: reward with its parts, how it ended, and the text.

import { el, number } from "./dom.js";
import { body, token } from "./tokens.js";
import { trajectory } from "./trajectory.js";

const tip = document.getElementById("tip");

function parts(row, largest) {
  const entries = Object.entries(row.parts ?? {});
  if (entries.length < 1) return null;
  return el(
    "table",
    { class: "parts" },
    entries.map(([name, value]) => {
      const share = typeof value === "number" ? Math.min(Math.abs(value) / largest, 1) : 0;
      return el(
        "tr",
        {},
        el("th", { title: name }, name),
        el(
          "td",
          { class: "bar" },
          el("i", { class: value < 0 ? "negative" : "positive", style: { width: `${100 * share}%` } }),
        ),
        el("td", { class: "value" }, value === null ? "invalid" : number(value)),
      );
    }),
  );
}

function card(row, options, largest, middle) {
  const flags = [
    row.role !== "sample" && row.role,
    row.finish && row.finish !== "stop" ? row.finish : null,
    row.valid === false && "invalid",
    `${number(row.tokens)} tokens`,
    row.answer !== undefined && row.answer !== null && `answer ${row.answer}`,
  ].filter(Boolean);
  const above = row.reward - middle; // the colour says how it stands in its group
  const sign = row.reward === null ? "unknown" : above > 1e-9 ? "good" : above < -1e-9 ? "bad" : "zero";
  const played = row.branches && !options.shade; // colours are of the last branch's tokens
  const text = played ? trajectory(row, options) : body(row, options);
  if (row.streams?.token && !played) {
    text.addEventListener("mouseover", (event) => show(event, row));
    text.addEventListener("mouseleave", () => (tip.hidden = true));
  }
  return el(
    "section",
    { class: "card", "data-row": row.number },
    el(
      "header",
      {},
      el(
        "span",
        { class: `reward ${sign}`, title: "reward; green above its group's mean, red below" },
        row.reward === null ? "invalid" : number(row.reward),
      ),
      el(
        "span",
        { class: "flags" },
        flags.map((flag) => el("span", { class: `flag ${flag}` }, flag)),
      ),
    ),
    parts(row, largest),
    text,
  );
}

function show(event, row) {
  const at = event.target.dataset.t;
  if (at === undefined) return void (tip.hidden = true);
  tip.replaceChildren(...token(row, Number(at)));
  tip.hidden = false;
  const [box, size] = [event.target.getBoundingClientRect(), tip.getBoundingClientRect()];
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${box.bottom + size.height + 8 > innerHeight ? box.top - size.height - 4 : box.bottom + 4}px`;
}

// `among` are the rollouts that bars and colours compare with.
export function cards(rows, options, among = rows) {
  const sizes = among.flatMap((row) =>
    Object.values(row.parts ?? {}).map((x) => (typeof x === "number" ? Math.abs(x) : 0)),
  );
  const largest = Math.max(...sizes, 1e-9);
  const rewards = among.map((row) => row.reward).filter((x) => typeof x === "number");
  const middle = rewards.reduce((sum, x) => sum + x, 0) / (rewards.length || 1);
  return el(
    "div",
    { class: "cards" },
    rows.map((row) => card(row, options, largest, middle)),
  );
}

// The question and the reference of a prompt.
export function question(row) {
  return el(
    "section",
    { class: "question" },
    el("div", { class: "title" }, el("code", {}, row.prompt), row.source && el("span", { class: "flag" }, row.source)),
    el("div", { class: "text" }, row.question || el("em", {}, "no text")),
    row.reference && el("div", { class: "reference" }, el("b", {}, "reference "), row.reference),
  );
}

// A row of squares, one for each rollout's reward.
export function strip(rewards, matched) {
  const known = rewards.filter((x) => x !== null);
  const [low, high] = [Math.min(...known, 0), Math.max(...known, 1e-9)];
  return el(
    "span",
    { class: "strip" },
    rewards.map((x, i) => {
      const share = x === null ? 0 : (x - low) / (high - low || 1);
      return el("i", {
        class: x === null ? "unknown" : `r${Math.round(share * 4)}`,
        "data-out": matched && !matched[i],
        title: number(x),
      });
    }),
  );
}
