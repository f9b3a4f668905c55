// Show the values of a figure at the pointer, at a touch, or by arrow keys while it has the focus.
// The cursor is at one x of the points; on a surface it is at one step of the paths.
for (const svg of document.querySelectorAll("svg.figure")) {
  const data = JSON.parse(svg.dataset.points);
  const lengths = data.series.map((s) => s.points.length);
  const places = data.is_path
    ? [...Array(Math.max(0, ...lengths)).keys()]
    : [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const found = (series, place) =>
    data.is_path
      ? series.points[Math.min(place, series.points.length - 1)]
      : series.points.find((p) => p[0] === place);
  const cursor = svg.querySelector(".cursor");
  const tip = svg.parentElement.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.setAttribute("role", "status");
  let at = -1;

  const line = (text, role) => {
    const row = tip.appendChild(document.createElement("div"));
    if (role) {
      row.className = role;
      row.append(document.createElement("i"));
    }
    row.append(text);
  };
  const show = (index) => {
    if (!places.length) return;
    at = Math.max(0, Math.min(places.length - 1, index));
    const shown = data.series.map((s) => [s, found(s, places[at])]).filter(([, point]) => point);
    const [x, , name] = shown[0][1];
    tip.replaceChildren();
    line(data.is_path ? `step ${at}` : `${data.x}: ${name}`);
    for (const [series, point] of shown) {
      const value = data.is_path ? `(${point[2]}, ${point[3]})` : point[3];
      line(`${series.name}: ${value}`, series.role);
    }
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const box = svg.getBoundingClientRect();
    const frame = svg.parentElement.getBoundingClientRect();
    const left = box.left - frame.left + (x / 720) * box.width;
    tip.style.visibility = "visible";
    tip.style.top = `${box.top - frame.top + 8}px`;
    const isTooFar = left + 20 + tip.offsetWidth > frame.width;
    tip.style.left = `${isTooFar ? Math.max(4, left - tip.offsetWidth - 12) : left + 12}px`;
  };
  const hide = () => {
    tip.style.visibility = "hidden";
    cursor.setAttribute("visibility", "hidden");
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 720;
    const y = ((event.clientY - box.top) / box.width) * 720;
    const away = (place) =>
      data.is_path
        ? Math.min(...data.series.map((s) => found(s, place)).map((p) => Math.hypot(p[0] - x, p[1] - y)))
        : Math.abs(place - x);
    let best = 0;
    places.forEach((place, i) => { if (away(place) < away(places[best])) best = i; });
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

// The control of prices: its numbers were computed when the page was written.
for (const form of document.querySelectorAll("form.what-if")) {
  const data = JSON.parse(form.dataset.prices);
  const slider = form.querySelector("input");
  const steps = form.querySelector("select");
  const say = () => {
    const row = steps ? Number(steps.value) : 0;
    const at = Number(slider.value);
    const words = `${data.label} ${data.noise[at]}, ${data.steps[row]}`;
    form.querySelector("output").textContent =
      `${words}: epsilon ${data.epsilons[row][at]} at delta ${data.delta}`;
    slider.setAttribute("aria-valuetext", words);
  };
  form.addEventListener("input", say);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.reset();
  say();
}
