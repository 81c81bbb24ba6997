// Metrics by step, one small chart each, all chosen runs in it.

import { ask } from "./api.js";
import { el, number, select, svg } from "./dom.js";
import { get, link, set } from "./state.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [420, 200, 52, 22, 10, 10];
const USUAL = ["reward/mean", "reward/unfiltered", "response/length", "entropy/mean", "gap/mean", "loss/total", "response/truncated"];

const SMOOTH = [0, 5, 11, 25, 51]; // points that a curve is averaged over

const listed = (name) => get(name).split(",").filter(Boolean);

function ticks(low, high, count = 4) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw);
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-6; x += step)
    found.push(Math.abs(x) < step * 1e-6 ? 0 : x);
  return found;
}

// Ticks of a log axis, given and returned as powers of ten: whole powers, and 2 and 5 times them where the axis is short.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const times of high - low > 2 ? [1] : [1, 2, 5]) found.push(power + Math.log10(times));
  const within = found.filter((x) => x >= low - 1e-9 && x <= high + 1e-9);
  return within.length > 1 ? within : ticks(low, high);
}

const brief = (x) =>
  Math.abs(x) >= 1e4 || (x !== 0 && Math.abs(x) < 1e-3)
    ? Number(x.toPrecision(2)).toExponential()
    : String(Number(x.toPrecision(3)));

// The mean of the `width` values around each.
const smoothed = (values, width) =>
  values.map((_, i) => {
    const half = Math.min(Math.floor(width / 2), i, values.length - 1 - i);
    const near = values.slice(i - half, i + half + 1);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });

// Where the stage changes, the first step of each stage but the first.
const boundaries = (stages) => [
  ...new Set(stages.flatMap(([steps, values]) => steps.filter((_, i) => i && Math.round(values[i]) !== Math.round(values[i - 1])))),
];

function chart(name, every, order, width, { log, stages }) {
  const positive = every.every(([, [, values]]) => values.every((v) => v > 0));
  const scaled = log && positive;
  const raw = scaled ? every.map(([run, [s, v]]) => [run, [s, v.map(Math.log10)]]) : every;
  const told = (value) => number(scaled ? 10 ** value : value);
  const curves = width ? raw.map(([run, [s, v]]) => [run, [s, smoothed(v, width)]]) : raw;
  const points = raw.flatMap(([, [steps, values]]) => steps.map((step, i) => [step, values[i]]));
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.1, y1 + (Math.abs(y1) || 1) * 0.1];
  const x = (step) => LEFT + ((step - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - BOTTOM - TOP);
  const grid = (scaled ? logTicks : ticks)(y0, y1).map((v) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }),
    svg("text", { x: LEFT - 6, y: y(v) + 3.5, "text-anchor": "end" }, brief(scaled ? 10 ** v : v)),
  ]);
  const marks = boundaries(stages)
    .filter((step) => step > x0 && step < x1)
    .map((step) => svg("line", { class: "stage", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }));
  const steps = ticks(x0, x1, 5).map((v) => svg("text", { x: x(v), y: HEIGHT - 6, "text-anchor": "middle" }, brief(v)));
  const drawn = (kind, from) =>
    from.map(([run, [s, v]]) =>
      s.length > 1
        ? svg("path", {
            class: `${kind} c${order.indexOf(run) % 8}`,
            d: s.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(v[i]).toFixed(1)}`).join(""),
          })
        : svg("circle", { class: `dot c${order.indexOf(run) % 8}`, cx: x(s[0]), cy: y(v[0]), r: 3 }),
    );
  const lines = [width ? drawn("line faint", raw) : [], drawn("line", curves)];
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const reading = el("div", { class: "reading" });
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const at = x0 + ((((event.clientX - box.left) * WIDTH) / box.width - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
    return curves.map(([run, [s, v]]) => {
      const i = s.reduce((best, step, k) => (Math.abs(step - at) < Math.abs(s[best] - at) ? k : best), 0);
      return [run, s[i], v[i]];
    });
  };
  const hover = (event) => {
    const found = nearest(event);
    cross.setAttribute("x1", x(found[0][1]));
    cross.setAttribute("x2", x(found[0][1]));
    cross.setAttribute("visibility", "visible");
    reading.replaceChildren(
      `step ${number(Math.round(found[0][1]))}  `,
      ...found.map(([run, , value]) =>
        el("span", { class: `c${order.indexOf(run) % 8}`, title: run }, `${told(value)} `),
      ),
    );
  };
  const leave = () => {
    cross.setAttribute("visibility", "hidden");
    reading.replaceChildren();
  };
  const open = (event) => {
    const [[run, step]] = nearest(event);
    set({ view: "rollouts", run, step: `~${Math.round(step)}`, runs: "", metrics: "" });
  };
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": name,
      onmousemove: hover,
      onmouseleave: leave,
      onclick: open,
    },
    grid,
    steps,
    marks,
    lines,
    cross,
  );
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const range = el("span", { class: "range", title: "least and greatest value" }, `${told(low)} … ${told(high)}${log && !positive ? " (not positive: linear)" : ""}`);
  return el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, name), reading, range), picture);
}

// The bindings of a gin text, {name: value}; an indented line goes on with the value above it.
function bindings(text) {
  const found = new Map();
  let name = "";
  for (const line of text.split("\n")) {
    const [, key, value] = line.match(/^([\w./]+) = (.*)$/) ?? [];
    if (key) found.set((name = key), value === "\\" ? "" : value);
    else if (name && /^\s+\S/.test(line)) found.set(name, `${found.get(name)} ${line.trim()}`.trim());
    else name = "";
  }
  return found;
}

// [name, value in a, value in b] of the bindings that differ.
function difference(a, b) {
  const [left, right] = [bindings(a.config), bindings(b.config)];
  const names = new Set([...left.keys(), ...right.keys()]);
  return [...names].filter((name) => left.get(name) !== right.get(name)).map((name) => [name, left.get(name) ?? "–", right.get(name) ?? "–"]);
}

function configurations(chosen, about) {
  if (chosen.length !== 2) return null;
  const rows = difference(about[0], about[1]);
  return el(
    "details",
    { class: "diff", open: get("diff") === "1" },
    el("summary", {}, rows.length ? `${rows.length} ${rows.length === 1 ? "setting differs" : "settings differ"}` : "the configurations are the same"),
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ["setting", ...chosen].map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))),
    ),
  );
}

export async function draw(main, fresh) {
  const runs = (await ask("runs")).filter((one) => one.kind === "run" && one.steps !== null);
  if (!runs.length)
    return fresh() && main.replaceChildren(el("p", { class: "page" }, "No run here has metrics by step."));
  const chosen = listed("runs").length ? listed("runs") : runs.slice(0, 8).map((one) => one.name);
  const about = await Promise.all(chosen.map((run) => ask("run", { run })));
  const known = new Set(about.flatMap((one) => one.metrics));
  const usual = [
    ...USUAL,
    ...[...known].filter((name) => /^eval\/[^/]+\/(greedy|sampled|accuracy|pass@1)$/.test(name)),
  ].filter((name) => known.has(name));
  const metrics = listed("metrics").length ? listed("metrics") : usual;
  const curves = await ask("curves", { runs: chosen.join(","), metrics: [...metrics, "stage"].join(",") });
  if (!fresh()) return;
  const text = get("text").toLowerCase();
  const toggle = (name, all, key, standard) => (event) =>
    set({ [key]: (event.target.checked ? [...all, name] : all.filter((x) => x !== name)).join(",") || standard });
  const box = (name, all, key, mark) =>
    el(
      "label",
      { class: "choice", title: name },
      el("input", { type: "checkbox", checked: all.includes(name), onchange: toggle(name, all, key, "") }),
      mark,
      name,
    );
  const list = [...known].sort().filter((name) => !text || name.toLowerCase().includes(text));
  const search = el("input", {
    type: "search",
    placeholder: "filter metrics",
    value: get("text"),
    "data-search": true,
    oninput: (event) => set({ text: event.target.value }, { replace: true }),
  });
  const width = Number(get("smooth", "0"));
  const smooth = select(
    "smooth over ",
    get("smooth"),
    SMOOTH.map((n) => [n || "", n ? `${n} points` : "nothing"]),
    (value) => set({ smooth: value }),
  );
  const log = get("log") === "1";
  const logs = select("axis ", get("log"), [["", "linear"], ["1", "log"]], (value) => set({ log: value }));
  const stages = chosen.map((run) => curves[run]?.stage).filter(Boolean);
  const group = (name) => name.split("/")[0];
  const focused = document.activeElement?.matches("[data-search]");
  const place = main.querySelector(".choices")?.scrollTop ?? 0;
  const inGroups = metrics.toSorted((a, b) => metrics.findIndex((x) => group(x) === group(a)) - metrics.findIndex((x) => group(x) === group(b)));
  const drawn = inGroups
    .map((name) => [
      name,
      chosen.filter((run) => curves[run]?.[name]?.[0].length).map((run) => [run, curves[run][name]]),
    ])
    .filter(([, c]) => c.length);
  main.replaceChildren(
    el(
      "section",
      { class: "split" },
      el(
        "aside",
        {},
        el("h3", {}, "runs"),
        runs.map((one) =>
          box(
            one.name,
            chosen,
            "runs",
            el("i", { class: `swatch ${chosen.includes(one.name) ? `c${chosen.indexOf(one.name) % 8}` : "none"}` }),
          ),
        ),
        el("h3", {}, "metrics"),
        search,
        el(
          "div",
          { class: "choices" },
          list.map((name, i) => [
            i === 0 || group(list[i - 1]) !== group(name) ? el("h4", {}, group(name)) : null,
            box(name, metrics, "metrics"),
          ]),
        ),
      ),
      el(
        "article",
        {},
        el(
          "p",
          { class: "dim" },
          "Click a point to read that step's rollouts. ",
          el("a", { href: link({ metrics: "", runs: "" }) }, "the usual curves"),
          smooth,
          logs,
        ),
        configurations(chosen, about),
        el(
          "div",
          { class: "charts" },
          drawn.map(([name, c], i) => [
            i === 0 || group(drawn[i - 1][0]) !== group(name) ? el("h3", {}, group(name)) : null,
            chart(name, c, chosen, width, { log, stages }),
          ]),
        ),
      ),
    ),
  );
  main.querySelector(".choices").scrollTop = place;
  if (focused) main.querySelector("[data-search]").focus();
}
