// Names in cells and headings may break after an underscore, a dot and a bracket, and before a capital.
document.addEventListener("DOMContentLoaded", () => {
  const headings = [...document.querySelectorAll("article :is(h1, h2, h3)")].map((heading) => heading.firstChild);
  const names = [...document.querySelectorAll("article :is(td, th) code .pre")].map((name) => name.firstChild);
  for (const text of [...headings, ...names]) {
    if (text?.nodeType !== Node.TEXT_NODE) continue;
    const pieces = text.data.split(/(?<=[_.(=/,])|(?<=[a-z])(?=[A-Z])/);
    text.replaceWith(...pieces.flatMap((piece) => [piece, document.createElement("wbr")]).slice(0, -1));
  }
});

// A table of more than forty rows gets a field above it, which hides the rows that lack one of its words.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.querySelectorAll("tbody tr")];
    if (rows.length <= 40) continue;
    const field = document.createElement("input");
    field.type = "search";
    field.className = "table-filter";
    field.placeholder = `filter ${rows.length} rows`;
    field.setAttribute("aria-label", field.placeholder);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    table.before(field);
  }
});
