// A filter above the page of settings: rows whose text holds every typed word stay, and sections without rows are hidden.
document.addEventListener("DOMContentLoaded", () => {
  const article = document.querySelector("article");
  if (!article || !/reference\/bindings(\.html|\/)?$/.test(location.pathname)) return;
  const box = document.createElement("input");
  box.type = "search";
  box.className = "settings-filter";
  box.placeholder = "Filter macros and fields: learning rate, clip, vllm port ...";
  box.setAttribute("aria-label", "Filter settings");
  const count = document.createElement("p");
  count.className = "settings-count";
  article.querySelector("h1").after(box, count);

  const sections = [];
  for (const child of [...article.children]) {
    if (child.tagName === "H2") sections.push({ parts: [child], rows: [], head: "" });
    else if (sections.length) sections.at(-1).parts.push(child);
  }
  for (const section of sections) {
    section.rows = section.parts.flatMap((part) => [...part.querySelectorAll("tbody tr")]);
    section.head = section.parts[0].textContent.toLowerCase();
    section.texts = section.rows.map((row) => `${section.head} ${row.textContent}`.toLowerCase().replaceAll("_", " "));
  }
  const filter = () => {
    const words = box.value.toLowerCase().replaceAll("_", " ").split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const section of sections) {
      let any = 0;
      section.rows.forEach((row, i) => {
        row.hidden = !words.every((word) => section.texts[i].includes(word));
        any += row.hidden ? 0 : 1;
      });
      shown += any;
      for (const part of section.parts) part.hidden = words.length > 0 && any === 0;
    }
    count.textContent = words.length ? `${shown} settings` : "";
  };
  box.addEventListener("input", filter);
});
