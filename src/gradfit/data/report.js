"use strict";
(() => {
  // A chart's points say what they are in the line below it, on hover, focus and touch.
  for (const chart of document.querySelectorAll(".chart")) {
    const said = chart.parentElement.querySelector(".said");
    if (!said) continue;
    for (const point of chart.querySelectorAll(".point")) {
      const say = () => { said.textContent = point.dataset.text; };
      for (const event of ["pointerenter", "focus", "click"]) point.addEventListener(event, say);
    }
  }
  const table = document.getElementById("plan-table");
  if (!table) return;
  const body = table.tBodies[0], rows = Array.from(body.rows), heads = Array.from(table.tHead.rows[0].cells);
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => {
      const x = key(a, column), y = key(b, column);
      const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows);
  }));
  const filter = document.getElementById("plan-filter"), action = document.getElementById("plan-action");
  const count = document.getElementById("plan-count");
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = (!action.value || row.dataset.action === action.value) && words.every((word) => text.includes(word));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} values`;
  };
  filter.addEventListener("input", show);
  action.addEventListener("change", show);
  show();
})();
