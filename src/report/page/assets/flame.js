  // The flame graph: callers above what they call, everything by keyboard.
  const ROW = 20, NARROWEST = 2, MOST_BOXES = 2500;
  let zoomed = 0, current = 0, found = new Set(), boxes = new Map();
  const labelOf = (node) => node ? frameText(frames[node]) : "all";
  const changeField = () => state.unit === "bytes" ? CHANGE : OBJECT_CHANGE;

  function tellNode(node) {
    const base = node * WIDTH, parts = [labelOf(node) + ": " + amount(nodeUsage, base).join(" ") + (state.unit === "objects" ? " objects" : "") + " " + MEASURES[state.measure].title];
    if (state.measure === "change") {
      parts.push(share(moved[node], moved[0]) + " of all that grew or shrank");
    } else {
      parts.push(share(sizeOf(node), sizeOf(0)) + " of all", "change over the range " + amount(nodeUsage, base, "change").join(" "));
    }
    return parts.join(", ");
  }
  function hueOf(node) {
    const file = frameFile(frames[node]);
    let hash = 7;
    for (let i = 0; i < file.length; i++) hash = (hash * 31 + file.charCodeAt(i)) % 9973;
    return hash % 360;
  }

  // Callers of what is zoomed to, and of the rest the widest boxes.
  function layout() {
    const places = [], narrowest = NARROWEST / Math.max(200, at("flame").clientWidth);
    for (let node = parents[zoomed]; node >= 0; node = parents[node]) places.push({ node, x: 0, width: 1, above: true });
    let row = [{ node: zoomed, x: 0, width: 1 }], left = 0;
    while (row.length) {
      const next = [];
      for (const place of row) {
        if (places.length >= MOST_BOXES) { left++; continue; }
        places.push(place);
        const whole = sizeOf(place.node);
        let x = place.x;
        for (const node of childrenOf(place.node).sort((a, b) => sizeOf(b) - sizeOf(a))) {
          const width = whole > 0 ? place.width * sizeOf(node) / whole : 0;
          if (!(width >= narrowest)) { left += sizeOf(node) > 0 ? 1 : 0; continue; }
          next.push({ node, x, width });
          x += width;
        }
      }
      row = next;
    }
    return [places, left];
  }
  function updateFlame() {
    const graph = at("flame"), hadFocus = graph.contains(document.activeElement);
    if (!(sizeOf(zoomed) > 0)) zoomed = 0;
    const [places, left] = layout(), field = changeField();
    let deepest = 0, most = 1;
    for (const child of childrenOf(0)) most = Math.max(most, Math.abs(nodeUsage[child * WIDTH + field]));
    boxes = new Map();
    graph.replaceChildren(...places.map(({ node, x, width, above }) => {
      const depth = depths[node], change = nodeUsage[node * WIDTH + field];
      deepest = Math.max(deepest, depth);
      const box = make("div", width > 0.02 ? labelOf(node) : "", { role: "treeitem", "aria-level": depth + 1, "aria-label": labelOf(node) + ", " + share(sizeOf(node), sizeOf(0)), tabindex: -1, "data-node": node });
      const tone = state.colour === "file" ? " by-file" : change >= 0 ? " grew" : " shrank";
      box.className = "box" + tone + (above ? " above" : "") + (width < 0.008 ? " thin" : "") + (found.size ? found.has(node) ? " found" : " other" : "");
      box.style.left = 100 * x + "%";
      box.style.width = 100 * width + "%";
      box.style.top = depth * ROW + "px";
      if (state.colour === "file") box.style.setProperty("--hue", hueOf(node));
      else box.style.setProperty("--tone", (100 * Math.sqrt(Math.min(1, Math.abs(change) / most))).toFixed(0) + "%");
      boxes.set(node, box);
      return box;
    }));
    graph.style.height = (deepest + 1) * ROW + "px";
    mark(boxes.has(current) ? current : zoomed);
    if (hadFocus) boxes.get(current).focus({ preventScroll: true });
    tell(current);
    at("narrow").textContent = left ? "Places too narrow to be seen are not drawn; zoom in for them, or use the tree below." : "";
    at("empty").hidden = sizeOf(0) > 0;
  }
  function mark(node) {
    if (boxes.has(current)) boxes.get(current).tabIndex = -1;
    current = node;
    if (boxes.has(current)) boxes.get(current).tabIndex = 0;
  }
  const tell = (node) => { at("details").textContent = tellNode(node); };
  function walk(node) {
    if (node === undefined || node < 0) return;
    if (!boxes.has(node)) { zoomed = node; current = node; updateFlame(); }
    boxes.get(node).focus();
    boxes.get(node).scrollIntoView({ block: "nearest" });
  }
  function zoom(node) {
    zoomed = node;
    current = node;
    updateFlame();
    walk(node);
  }
  const visible = (nodes) => nodes.filter((node) => boxes.has(node)).sort((a, b) => sizeOf(b) - sizeOf(a));
  function sibling(step) {
    const row = parents[current] < 0 ? [0] : visible(childrenOf(parents[current]));
    return row[row.indexOf(current) + step];
  }
  function next(step) {
    const hits = [...found].filter((node) => sizeOf(node) > 0).sort((a, b) => sizeOf(b) - sizeOf(a));
    if (hits.length) walk(hits[(hits.indexOf(current) + (hits.includes(current) || step > 0 ? step : 0) + hits.length) % hits.length]);
  }

  // What fits the text, and its total without counting a match within a match twice.
  function search() {
    const text = state.text.toLowerCase();
    const hits = new Map();
    const fits = (frame) => {
      if (!hits.has(frame)) hits.set(frame, frameText(frame).toLowerCase().includes(text));
      return hits.get(frame);
    };
    found = new Set();
    const inside = new Uint8Array(nodeCount), sum = new Float64Array(WIDTH);
    let part = 0;
    for (let node = 1; text && node < nodeCount; node++) {
      inside[node] = inside[parents[node]];
      if (!fits(frames[node])) continue;
      found.add(node);
      if (!inside[node]) {
        addUsage(nodeUsage, node * WIDTH, sum, 0);
        part += sizeOf(node);
        inside[node] = 1;
      }
    }
    at("found").textContent = text ? count(found.size) + (found.size === 1 ? " place, " : " places, ") + amount(sum, 0).join(" ") + ", " + share(part, sizeOf(0)) : "";
  }

  const flameKeys = {
    ArrowDown: () => walk(visible(childrenOf(current))[0]),
    ArrowUp: () => walk(parents[current]),
    ArrowRight: () => walk(sibling(1)),
    ArrowLeft: () => walk(sibling(-1)),
    Home: () => walk(0),
    Enter: () => zoom(current),
    " ": () => zoom(current),
    Backspace: () => zoom(Math.max(parents[zoomed], 0)),
    Escape: () => zoom(0),
    n: () => next(1),
    N: () => next(-1),
  };
  function showFlame() {
    const graph = at("flame"), nodeOf = (event) => {
      const box = event.target.closest(".box");
      return box ? Number(box.dataset.node) : null;
    };
    graph.addEventListener("click", (event) => { const node = nodeOf(event); if (node !== null) zoom(node); });
    graph.addEventListener("mouseover", (event) => { const node = nodeOf(event); if (node !== null) tell(node); });
    graph.addEventListener("mouseleave", () => tell(current));
    graph.addEventListener("focusin", (event) => { const node = nodeOf(event); if (node !== null) { mark(node); tell(node); } });
    graph.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !flameKeys[event.key]) return;
      event.preventDefault();
      flameKeys[event.key]();
    });
    at("reset").addEventListener("click", () => { zoomed = 0; updateFlame(); });
  }
