  // The data, and sums of it for a range of moments. series.rs and stacks.rs say how it is encoded.
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const ADDED = 0, GONE = 5, CELL = 10;
  const reader = (() => {
    const raw = atob(data.blob);
    let place = 0;
    return () => {
      let value = 0, scale = 1, byte;
      do {
        byte = raw.charCodeAt(place++);
        value += (byte & 127) * scale;
        scale *= 128;
      } while (byte > 127);
      return value;
    };
  })();

  // Places of the tree: parents come before their children.
  const nodeCount = reader();
  const parents = new Int32Array(nodeCount), frames = new Int32Array(nodeCount), depths = new Int32Array(nodeCount);
  parents[0] = -1;
  for (let node = 1; node < nodeCount; node++) {
    parents[node] = node - reader();
    frames[node] = reader();
    depths[node] = depths[parents[node]] + 1;
  }

  // Running sums at each moment where one changes: bytes, objects, samples, variance of bytes, of objects; added, then gone.
  // All series are in two arrays, one after the other.
  const moments = new Uint16Array(data.cells), sums = new Float64Array(data.cells * CELL);
  let cells = 0;
  function readSeries() {
    const units = [1, 1 / 256, 1, 2 ** (reader() - 1024), 2 ** (reader() - 1024)];
    const begin = cells, end = cells + reader();
    let moment = 0;
    for (; cells < end; cells++) {
      const head = reader(), base = cells * CELL;
      moment += Math.floor(head / 4);
      moments[cells] = moment;
      for (let field = 0; cells > begin && field < CELL; field++) sums[base + field] = sums[base - CELL + field];
      if (head & 1) for (let field = 0; field < 5; field++) sums[base + ADDED + field] += reader() * units[field];
      if (head & 2) for (let field = 0; field < 5; field++) sums[base + GONE + field] += reader() * units[field];
    }
    return { begin, end };
  }
  const STACK = 0;
  const groups = Array.from({ length: reader() }, () => {
    const [kind, node, thread, members] = [reader(), reader(), reader(), reader()];
    return { kind, node, thread, members, ...readSeries() };
  });
  const classes = Array.from({ length: reader() }, () => {
    const [low, high] = [reader(), reader()];
    return { low, high, ...readSeries() };
  });

  // The last cell that is not after a moment, or -1.
  function cellAt({ begin, end }, moment) {
    let low = begin, high = end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (moments[middle] <= moment) low = middle + 1; else high = middle;
    }
    return low > begin ? low - 1 : -1;
  }

  // What a range of a series comes to, added to `out` from `base` on. Variances of changes: what was alive at the start
  // and cannot have been freed since counts for neither end.
  const BYTES = 0, OBJECTS = 1, SAMPLES = 2, VAR = 3, OBJECT_VAR = 4, CHANGE = 5, OBJECT_CHANGE = 6, CHANGE_VAR = 7,
    OBJECT_CHANGE_VAR = 8, ALLOC = 9, OBJECT_ALLOC = 10, ALLOC_SAMPLES = 11, ALLOC_VAR = 12, OBJECT_ALLOC_VAR = 13, WIDTH = 14;
  function addRange(series, from, to, out, base) {
    const last = cellAt(series, to);
    if (last < 0) return;
    const first = cellAt(series, from);
    const a = first * CELL, b = last * CELL;
    const added = (field) => sums[b + field] - (first < 0 ? 0 : sums[a + field]);
    const gone = (field) => sums[b + GONE + field] - (first < 0 ? 0 : sums[a + GONE + field]);
    const then = (field) => first < 0 ? 0 : sums[a + field] - sums[a + GONE + field];
    const now = (field) => sums[b + field] - sums[b + GONE + field];
    const changed = (field) => then(field) + now(field) - 2 * Math.max(0, then(field) - gone(field));
    for (let field = 0; field < 5; field++) out[base + field] += now(field);
    out[base + CHANGE] += now(0) - then(0);
    out[base + OBJECT_CHANGE] += now(1) - then(1);
    out[base + CHANGE_VAR] += Math.max(0, changed(3));
    out[base + OBJECT_CHANGE_VAR] += Math.max(0, changed(4));
    out[base + ALLOC] += added(0);
    out[base + OBJECT_ALLOC] += added(1);
    out[base + ALLOC_SAMPLES] += added(2);
    out[base + ALLOC_VAR] += added(3);
    out[base + OBJECT_ALLOC_VAR] += added(4);
  }
  function addUsage(from, base, out, at) {
    for (let field = 0; field < WIDTH; field++) out[at + field] += from[base + field];
  }

  // All that is alive at each moment, with its variance, of some groups.
  function overTime(some) {
    const count = data.clock.last + 1, bytes = new Float64Array(count), variance = new Float64Array(count);
    for (const { begin, end } of some) {
      let before = 0, beforeVariance = 0;
      for (let cell = begin; cell < end; cell++) {
        const base = cell * CELL, now = sums[base] - sums[base + GONE], nowVariance = sums[base + 3] - sums[base + GONE + 3];
        bytes[moments[cell]] += now - before;
        variance[moments[cell]] += nowVariance - beforeVariance;
        before = now;
        beforeVariance = nowVariance;
      }
    }
    for (let moment = 1; moment < count; moment++) {
      bytes[moment] += bytes[moment - 1];
      variance[moment] += variance[moment - 1];
    }
    return { bytes, variance };
  }
  const timeOf = (moment) => Math.min(moment * data.clock.width, data.clock.end);

  // What the page shows, and how much that is: of each group and of each place of the tree, for the range.
  const state = { from: 0, to: data.clock.last, measure: "live", unit: "bytes", by: "line", colour: "change", text: "", chosen: null };
  const usage = new Float64Array(groups.length * WIDTH), nodeUsage = new Float64Array(nodeCount * WIDTH);
  const moved = new Float64Array(nodeCount), total = new Float64Array(WIDTH);
  const MEASURES = {
    live: { title: "live at its end", bytes: [BYTES, VAR, SAMPLES], objects: [OBJECTS, OBJECT_VAR, -1] },
    change: { title: "change over it", bytes: [CHANGE, CHANGE_VAR, -1], objects: [OBJECT_CHANGE, OBJECT_CHANGE_VAR, -1] },
    allocated: { title: "allocated in it", bytes: [ALLOC, ALLOC_VAR, ALLOC_SAMPLES], objects: [OBJECT_ALLOC, OBJECT_ALLOC_VAR, -1] },
  };
  const fieldOf = () => MEASURES[state.measure][state.unit][0];

  function measure() {
    usage.fill(0);
    nodeUsage.fill(0);
    moved.fill(0);
    const change = state.unit === "bytes" ? CHANGE : OBJECT_CHANGE;
    groups.forEach((group, place) => {
      addRange(group, state.from, state.to, usage, place * WIDTH);
      addUsage(usage, place * WIDTH, nodeUsage, group.node * WIDTH);
      moved[group.node] += Math.abs(usage[place * WIDTH + change]);
    });
    for (let node = nodeCount - 1; node > 0; node--) {
      addUsage(nodeUsage, node * WIDTH, nodeUsage, parents[node] * WIDTH);
      moved[parents[node]] += moved[node];
    }
    total.set(nodeUsage.subarray(0, WIDTH));
  }
  // How wide a place of the tree is drawn, never negative: of changes, what grew and what shrank together.
  const sizeOf = (node) => state.measure === "change" ? moved[node] : Math.max(0, nodeUsage[node * WIDTH + fieldOf()]);

  // What a place calls.
  const firstChild = new Int32Array(nodeCount + 1), callees = new Int32Array(Math.max(0, nodeCount - 1));
  for (let node = 1; node < nodeCount; node++) firstChild[parents[node] + 1]++;
  for (let node = 0; node < nodeCount; node++) firstChild[node + 1] += firstChild[node];
  const filled = firstChild.slice();
  for (let node = 1; node < nodeCount; node++) callees[filled[parents[node]]++] = node;
  const childrenOf = (node) => [...callees.subarray(firstChild[node], firstChild[node + 1])];
