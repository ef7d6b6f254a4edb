"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const ROW = 20, NARROWEST = 1.5, FIELDS = 8;
  const count = data.nodes.length / FIELDS;
  const field = (node, place) => data.nodes[node * FIELDS + place];
  const frameOf = (node) => data.frames[field(node, 0)];
  const depthOf = (node) => field(node, 1);
  let metric = data.first, zoomed = 0, current = 0, found = new Set(), boxes = new Map();
  const value = (node) => field(node, 2 + metric);

  // Nodes are in preorder: a node's parent is the last one before it that is less deep.
  const parents = new Array(count).fill(-1), children = Array.from({ length: count }, () => []);
  const path = [];
  for (let node = 0; node < count; node++) {
    path.length = depthOf(node);
    if (path.length) {
      parents[node] = path[path.length - 1];
      children[parents[node]].push(node);
    }
    path.push(node);
  }

  const number = (value) => Math.round(value).toLocaleString("en");
  function shown(value) {
    if (!data.metrics[metric][1]) return number(value);
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = 0;
    while (value >= 1023.95 && unit < units.length - 1) { value /= 1024; unit++; }
    return (unit ? value.toFixed(1) : number(value)) + " " + units[unit];
  }
  const share = (part, whole) => whole > 0 ? (100 * part / whole).toFixed(1) + " %" : "-";
  function amount(node) {
    const margin = metric < 2 ? " ± " + shown(field(node, 6 + metric)) : "";
    return shown(value(node)) + margin + (data.metrics[metric][1] ? "" : " objects");
  }
  const labels = data.frames.map(([name, site]) => site ? name + " (" + site + ")" : name);
  const label = (node) => labels[field(node, 0)];
  // The share of text and colour: one hue for each file.
  function hue(node) {
    const [name, site] = frameOf(node);
    const file = (site || name).replace(/:\d+$/, "");
    let hash = 7;
    for (let i = 0; i < file.length; i++) hash = (hash * 31 + file.charCodeAt(i)) % 9973;
    return hash % 360;
  }

  // Of what is zoomed to, its callers full width, and all that is wide enough to see.
  function layout() {
    const width = at("graph").clientWidth, places = [];
    for (let node = parents[zoomed]; node >= 0; node = parents[node]) {
      places.push({ node, x: 0, width, above: true });
    }
    const whole = value(zoomed), todo = [{ node: zoomed, x: 0, width }];
    while (todo.length) {
      const place = todo.pop();
      places.push(place);
      let x = place.x;
      for (const node of [...children[place.node]].sort((a, b) => value(b) - value(a))) {
        const width = whole > 0 ? place.width * value(node) / value(place.node) : 0;
        if (!(width >= NARROWEST)) break;
        todo.push({ node, x, width });
        x += width;
      }
    }
    return places;
  }

  function draw() {
    const graph = at("graph"), hadFocus = graph.contains(document.activeElement);
    if (!(value(zoomed) > 0)) zoomed = 0;
    let deepest = 0;
    boxes = new Map();
    const elements = layout().map(({ node, x, width, above }) => {
      const box = document.createElement("div"), depth = depthOf(node);
      deepest = Math.max(deepest, depth);
      box.className = "box" + (above ? " above" : "") + (width < 8 ? " thin" : "");
      if (found.size) box.className += found.has(node) ? " found" : " other";
      box.style.left = x + "px";
      box.style.top = depth * ROW + "px";
      box.style.width = Math.max(width, 1) + "px";
      box.style.background = "hsl(" + hue(node) + " 62% 76%)";
      if (width > 20) box.textContent = label(node);
      box.setAttribute("role", "treeitem");
      box.setAttribute("aria-level", depth + 1);
      box.setAttribute("aria-label", label(node) + ", " + amount(node));
      box.tabIndex = -1;
      box.addEventListener("click", () => { zoom(node); });
      box.addEventListener("mouseenter", () => tell(node));
      box.addEventListener("mouseleave", () => tell(current));
      box.addEventListener("focus", () => { mark(node); tell(node); });
      boxes.set(node, box);
      return box;
    });
    graph.replaceChildren(...elements);
    graph.style.height = (deepest + 1) * ROW + "px";
    mark(boxes.has(current) ? current : zoomed);
    if (hadFocus) boxes.get(current).focus({ preventScroll: true });
    tell(current);
  }
  function mark(node) {
    if (boxes.has(current)) boxes.get(current).tabIndex = -1;
    current = node;
    if (boxes.has(current)) boxes.get(current).tabIndex = 0;
  }
  function tell(node) {
    const inside = children[node].reduce((sum, child) => sum + value(child), 0);
    const parts = [label(node) + ": " + amount(node), share(value(node), value(0)) + " of all"];
    if (zoomed) parts.push(share(value(node), value(zoomed)) + " of what is shown");
    if (node) parts.push("by this very line " + shown(value(node) - inside));
    at("details").textContent = value(0) > 0 ? parts.join(", ") : "There are no " + data.metrics[metric][0] + " at this moment.";
  }
  function walk(node) {
    if (node === undefined || node < 0) return;
    if (!boxes.has(node)) { zoomed = node; current = node; draw(); }
    boxes.get(node).focus();
    boxes.get(node).scrollIntoView({ block: "nearest" });
  }
  function zoom(node) {
    zoomed = node;
    current = node;
    draw();
    walk(node);
  }
  const visible = (nodes) => nodes.filter((node) => boxes.has(node)).sort((a, b) => value(b) - value(a));
  function sibling(step) {
    const row = parents[current] < 0 ? [0] : visible(children[parents[current]]);
    return row[row.indexOf(current) + step];
  }

  // What was found, its total without counting a match within a match twice.
  function search() {
    const text = at("search").value.toLowerCase();
    const hits = labels.map((label) => label.toLowerCase().includes(text));
    found = new Set();
    let total = 0, until = 0;
    for (let node = 0; text && node < count; node++) {
      if (node && hits[field(node, 0)]) {
        found.add(node);
        if (node >= until) {
          total += value(node);
          for (until = node + 1; until < count && depthOf(until) > depthOf(node);) until++;
        }
      }
    }
    at("found").textContent = text ? number(found.size) + " found, " + shown(total) + ", " + share(total, value(0)) : "";
    draw();
  }
  function next(step) {
    const hits = [...found].filter((node) => value(node) > 0);
    if (!hits.length) return;
    let place = step > 0 ? hits.findIndex((node) => node > current) : hits.findLastIndex((node) => node < current);
    if (place < 0) place = step > 0 ? 0 : hits.length - 1;
    walk(hits[place]);
  }

  const keys = {
    ArrowDown: () => walk(visible(children[current])[0]),
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
    "/": () => { at("search").focus(); at("search").select(); },
  };
  document.addEventListener("keydown", (event) => {
    const element = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (element === at("search")) {
      if (event.key === "Escape") { element.value = ""; search(); walk(current); event.preventDefault(); }
      if (event.key === "Enter") { next(1); event.preventDefault(); }
      return;
    }
    const isControl = element === at("metric") || element === at("reset");
    if (!keys[event.key] || isControl && event.key !== "/" && event.key !== "Escape") return;
    event.preventDefault();
    keys[event.key]();
  });

  at("name").textContent = data.name;
  at("facts").textContent = data.facts;
  for (const note of data.notes) {
    at("notes").appendChild(document.createElement("li")).textContent = note;
  }
  data.metrics.forEach(([title], place) => {
    const option = at("metric").appendChild(document.createElement("option"));
    option.value = place;
    option.textContent = title;
  });
  at("metric").value = metric;
  at("metric").addEventListener("change", () => { metric = Number(at("metric").value); search(); });
  at("search").addEventListener("input", search);
  at("reset").addEventListener("click", () => { at("search").value = ""; zoomed = 0; search(); });
  window.addEventListener("resize", draw);
  draw();
})();
