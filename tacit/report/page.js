// Reads values off a figure: by pointer, by touch, or by the arrow keys when it has the focus.
for (const svg of document.querySelectorAll("svg.figure")) {
  const data = JSON.parse(svg.dataset.points);
  const places = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const cursor = svg.querySelector(".cursor");
  const tip = svg.parentElement.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.setAttribute("role", "status");
  let at = -1;

  const show = (index) => {
    if (!places.length) return;
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    tip.replaceChildren();
    let title = null;
    for (const series of data.series) {
      const point = series.points.find((p) => p[0] === x);
      if (!point) continue;
      if (!title) {
        title = tip.appendChild(document.createElement("div"));
        title.textContent = `${data.x}: ${point[2]}`;
      }
      const row = tip.appendChild(document.createElement("div"));
      row.className = series.role;
      row.append(document.createElement("i"), `${series.name}: ${point[3]}`);
    }
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const box = svg.getBoundingClientRect();
    const frame = svg.parentElement.getBoundingClientRect();
    const left = box.left - frame.left + (x / 720) * box.width;
    tip.style.visibility = "visible";
    tip.style.top = `${box.top - frame.top + 8}px`;
    tip.style.left = `${Math.min(left + 12, frame.width - tip.offsetWidth - 8)}px`;
    if (left + 12 + tip.offsetWidth > frame.width) tip.style.left = `${Math.max(4, left - tip.offsetWidth - 12)}px`;
  };
  const hide = () => {
    tip.style.visibility = "hidden";
    cursor.setAttribute("visibility", "hidden");
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 720;
    let best = 0;
    places.forEach((p, i) => { if (Math.abs(p - x) < Math.abs(places[best] - x)) best = i; });
    show(best);
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => show(at < 0 ? 0 : at));
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: places.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}
