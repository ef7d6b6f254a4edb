  // Sites, largest first, for the range.
  const FIRST_ROWS = 50;
  let sortBy = "change", descending = true, rowsShown = FIRST_ROWS;
  const COLUMNS = [
    ["live", "Live at its end", (row) => row.usage[BYTES]],
    ["change", "Change over it", (row) => row.usage[CHANGE]],
    ["allocated", "Allocated in it", (row) => row.usage[ALLOC]],
    ["objects", "Live objects", (row) => row.usage[OBJECTS]],
    ["samples", "Samples", (row) => row.usage[SAMPLES]],
    ["site", "Site", (row) => row.text],
  ];

  function keyOf(group) {
    const frame = frames[group.node];
    if (state.by === "thread") return "t" + group.thread;
    if (frame < UNNAMED.length) return "u" + frame;
    switch (state.by) {
      case "file": return "f" + data.frames[frame * 3];
      case "function": return data.has_functions ? data.frames[frame * 3] + "/" + data.frames[frame * 3 + 2] : "l" + frame;
      case "stack": return "s" + group.node;
      default: return "l" + frame;
    }
  }
  function rowText(group) {
    const frame = frames[group.node];
    if (state.by === "thread") return group.thread ? "thread " + data.threads[group.thread - 1] : "(thread not known, or several)";
    if (frame < UNNAMED.length) return UNNAMED[frame];
    if (state.by === "file") return frameFile(frame);
    if (state.by === "function" && data.has_functions) return frameFile(frame) + (frameFunction(frame) ? " " + frameFunction(frame) : "");
    return siteText(frame);
  }
  function rowsNow() {
    const rows = new Map();
    groups.forEach((group, place) => {
      const key = keyOf(group);
      let row = rows.get(key);
      if (!row) {
        row = { key, text: rowText(group), usage: new Float64Array(WIDTH), groups: [] };
        rows.set(key, row);
      }
      addUsage(usage, place * WIDTH, row.usage, 0);
      row.groups.push(place);
    });
    const text = state.text.toLowerCase();
    const value = COLUMNS.find(([name]) => name === sortBy)[2], sign = descending ? -1 : 1;
    return [...rows.values()]
      .filter((row) => row.usage[BYTES] >= 0.5 || Math.abs(row.usage[CHANGE]) >= 0.5 || row.usage[ALLOC] >= 0.5)
      .filter((row) => !text || row.text.toLowerCase().includes(text) || state.by === "stack" && row.groups.some((place) => found.has(groups[place].node)))
      .sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return x < y ? -sign : x > y ? sign : a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
      });
  }

  function showTable() {
    const head = at("sites").tHead.insertRow();
    for (const [name, title] of COLUMNS) {
      const cell = make("th", null, { scope: "col", "data-column": name, class: name === "site" ? "" : "number" });
      const button = make("button", title, { type: "button", class: "sort" });
      button.addEventListener("click", () => {
        descending = sortBy === name ? !descending : name !== "site";
        sortBy = name;
        updateTable();
      });
      cell.append(button);
      head.append(cell);
    }
    at("by").addEventListener("change", () => { state.by = at("by").value; rowsShown = FIRST_ROWS; choosePlace(null); });
    at("more").addEventListener("click", () => { rowsShown *= 4; updateTable(); });
  }

  function updateTable() {
    const rows = rowsNow();
    for (const cell of at("sites").tHead.rows[0].cells) {
      const isSorted = cell.dataset.column === sortBy;
      cell.setAttribute("aria-sort", isSorted ? descending ? "descending" : "ascending" : "none");
    }
    const focused = document.activeElement && document.activeElement.closest("#sites tbody") ? document.activeElement.dataset.key : null;
    at("sites").tBodies[0].replaceChildren(...rows.slice(0, rowsShown).flatMap(rowElements));
    if (focused) [...at("sites").querySelectorAll("[data-key]")].find((button) => button.dataset.key === focused)?.focus();
    const left = rows.length - Math.min(rows.length, rowsShown);
    at("more").hidden = !left;
    at("more").textContent = "Show more (" + count(left) + " left)";
    at("rows").textContent = count(rows.length) + (rows.length === 1 ? " site" : " sites");
    at("nothing").hidden = rows.length > 0;
  }
  function rowElements(row) {
    const { usage } = row, element = make("tr");
    const open = state.chosen && state.chosen.key === row.key;
    element.append(
      estimate("td", amount(usage, 0, "live", "bytes"), { "data-bytes": usage[BYTES] }),
      estimate("td", amount(usage, 0, "change", "bytes"), { "data-bytes": usage[CHANGE] }),
      estimate("td", amount(usage, 0, "allocated", "bytes"), { "data-bytes": usage[ALLOC] }),
      estimate("td", amount(usage, 0, "live", "objects")),
      make("td", count(usage[SAMPLES]), { class: "number" }),
    );
    const cell = element.insertCell(), button = make("button", row.text, { type: "button", class: "row", "aria-expanded": Boolean(open), "data-key": row.key });
    cell.className = "site";
    button.addEventListener("click", () => choosePlace(open ? null : row));
    cell.append(button);
    return open ? [element, stacksOf(row)] : [element];
  }
  function choosePlace(row) {
    state.chosen = row && { key: row.key, text: row.text, groups: row.groups.map((place) => groups[place]) };
    schedule();
  }
  // The stacks of a row with most of what is chosen, innermost first.
  function stacksOf(row) {
    const field = MEASURES[state.measure].bytes[0], element = make("tr", null, { class: "stacks" });
    const cell = make("td", null, { colspan: COLUMNS.length });
    const sorted = [...row.groups].sort((a, b) => Math.abs(usage[b * WIDTH + field]) - Math.abs(usage[a * WIDTH + field]));
    for (const place of sorted.slice(0, 5)) {
      const group = groups[place];
      cell.append(make("p", amount(usage, place * WIDTH, state.measure, "bytes").join(" ") + " " + MEASURES[state.measure].title +
        (group.thread ? ", thread " + data.threads[group.thread - 1] : "") + (group.kind === STACK ? "" : ", of " + count(group.members) + " stacks whose callers are left out")));
      const list = make("ol", null, { class: "stack" });
      for (let node = group.node, depth = 0; node > 0; node = parents[node], depth++) {
        if (depth === 40) { list.append(make("li", "… " + (depths[node]) + " more")); break; }
        list.append(make("li", siteText(frames[node])));
      }
      cell.append(list);
    }
    if (sorted.length > 5) cell.append(make("p", count(sorted.length - 5) + " more stacks"));
    element.append(cell);
    return element;
  }
