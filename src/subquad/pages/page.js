// tables sort by their headers, dots tell their values, the legend shows and hides a mechanism everywhere
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending" && column > 0 || head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => (isNaN(key(a)) ? key(a).localeCompare(key(b)) : key(a) - key(b)) * (down ? -1 : 1);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }));
}

const tip = document.getElementById("tip");
const show = (event) => {
  const text = event.target.dataset?.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const box = event.target.getBoundingClientRect();
  const left = Math.min(box.left + scrollX, scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${box.top + scrollY - tip.offsetHeight - 6}px`;
};
document.addEventListener("pointerover", show);
document.addEventListener("click", show);

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const part of document.querySelectorAll(`svg .series.${button.dataset.series}`)) part.classList.toggle("off", !on);
  });
}
