// Comfort only; the page says everything without it. What a <title> holds is shown at once, on a touch too, and all
// that belongs to one operator lights up together.
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  for (const part of document.querySelectorAll("[title]")) {
    part.dataset.tip = part.title;
    part.removeAttribute("title");
  }
  const light = (row) => {
    document.body.classList.toggle("some-lit", row !== undefined);
    for (const part of document.querySelectorAll("[data-row]")) part.classList.toggle("lit", part.dataset.row === row);
  };
  const show = (event) => {
    const part = event.target.closest("[data-tip], [data-row]");
    light(part?.dataset.row);
    tip.hidden = !part?.dataset.tip;
    if (tip.hidden) return;
    tip.textContent = part.dataset.tip;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, room)) + scrollX}px`;
    tip.style.top = `${event.clientY + scrollY + 18}px`;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("pointerdown", show);
})();
