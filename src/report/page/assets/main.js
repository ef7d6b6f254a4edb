  // Everything together.
  let pending = false;
  function schedule() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; update(); });
  }
  function update() {
    measure();
    search();
    updateTime();
    updateVerdict();
    updateTable();
    updateTypes();
    updateFlame();
    updateTree();
    updateSizes();
    document.body.dataset.range = state.from + "-" + state.to;
  }
  function showFacts() {
    at("name").textContent = data.name;
    const when = new Date(data.start * 1000);
    const started = Number.isNaN(when.getTime()) || data.start <= 0 ? "" : ", recorded " + when.toISOString().slice(0, 19).replace("T", " ") + " UTC";
    at("made").textContent = started + " for " + time(data.clock.end) + "; page by pyheap " + data.version;
    for (const [name, value] of data.facts) at("facts").append(make("dt", name), make("dd", value));
    for (const line of data.unknown) at("unknown").append(make("li", line));
  }
  showVerdict();
  showTime();
  showTable();
  showTypes();
  showFlame();
  showTree();
  showFacts();
  for (const id of ["measure", "unit", "colour"]) {
    at(id).value = state[id];
    at(id).addEventListener("change", () => { state[id] = at(id).value; schedule(); });
  }
  at("by").value = state.by;
  at("search").addEventListener("input", () => { state.text = at("search").value; rowsShown = FIRST_ROWS; schedule(); });
  at("search").addEventListener("keydown", (event) => {
    if (event.key === "Escape") { at("search").value = state.text = ""; schedule(); event.preventDefault(); }
    if (event.key === "Enter") { next(1); event.preventDefault(); }
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input[type=search], select");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    at("search").focus();
    at("search").select();
    event.preventDefault();
  });
  window.addEventListener("resize", schedule);
  measure();
  openHottest();
  update();
  document.body.dataset.ready = Math.round(performance.now());
