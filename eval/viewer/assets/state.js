// The page's state is the URL's parameters: what is seen can be shared and the back button works.

let listener = () => {};

export const get = (name, otherwise = "") => new URLSearchParams(location.search).get(name) ?? otherwise;
export const all = () => Object.fromEntries(new URLSearchParams(location.search));

// The URL with changes; an empty value removes its parameter.
export function link(changes, from = all()) {
  const next = new URLSearchParams(from);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) next.delete(name);
    else next.set(name, value);
  }
  const text = next.toString();
  return text ? `/?${text}` : "/";
}

export function set(changes, { replace = false } = {}) {
  const url = link(changes);
  if (url === location.pathname + location.search) return;
  history[replace ? "replaceState" : "pushState"](null, "", url);
  listener();
}

export function listen(changed) {
  listener = changed;
  addEventListener("popstate", changed);
  document.addEventListener("click", (event) => {
    const anchor = event.target.closest?.("a[href^='/?'], a[href='/']");
    if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    history.pushState(null, "", anchor.getAttribute("href"));
    listener();
  });
}
