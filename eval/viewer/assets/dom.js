// Elements from tags, attributes and children.
// Strings always become text nodes: nothing of a rollout is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((x) => x !== undefined && x !== null && x !== false));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// A labelled select; options are values, or [value, label] pairs.
export function select(label, value, options, change) {
  const items = options.map((option) => {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    return el("option", { value: key, selected: String(key) === String(value) }, String(text));
  });
  return el("label", {}, label, el("select", { name: label, onchange: (event) => change(event.target.value) }, items));
}

// A labelled input that reports when it is left or Enter is pressed, or while typing after a pause.
export function input(label, value, attributes, change) {
  let timer;
  let reported = value ?? "";
  const report = (event) => {
    clearTimeout(timer);
    if (event.target.value !== reported) change((reported = event.target.value));
  };
  const typed = (event) => {
    clearTimeout(timer);
    timer = setTimeout(report, 80, event);
  };
  return el("label", {}, label, el("input", { value: value ?? "", ...attributes, oninput: typed, onchange: report }));
}

export function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? x.toExponential(2) : x.toFixed(size >= 100 ? 1 : digits);
}
