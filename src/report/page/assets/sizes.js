  // How large the blocks are, in powers of two.
  function updateSizes() {
    const rows = classes.map((series) => {
      const sums = new Float64Array(WIDTH);
      addRange(series, state.from, state.to, sums, 0);
      return { series, sums };
    }).filter(({ sums }) => sums[BYTES] >= 0.5 || Math.abs(sums[CHANGE]) >= 0.5 || sums[ALLOC] >= 0.5);
    const field = fieldOf(), most = Math.max(1, ...rows.map(({ sums }) => Math.abs(sums[field])));
    at("sizes").tBodies[0].replaceChildren(...rows.map(({ series, sums }) => {
      const row = make("tr");
      row.append(make("th", bytes(series.low) + " – " + bytes(series.high), { scope: "row", class: "number" }),
        estimate("td", amount(sums, 0, "live", "bytes"), { "data-bytes": sums[BYTES] }), estimate("td", amount(sums, 0, "change", "bytes")),
        estimate("td", amount(sums, 0, "live", "objects")));
      const bar = make("td", null, { class: "bar-cell" }), fill = make("div", null, { class: "bar" + (sums[field] < 0 ? " shrank" : "") });
      fill.style.width = 100 * Math.abs(sums[field]) / most + "%";
      bar.append(fill);
      row.append(bar);
      return row;
    }));
    at("bar-title").textContent = MEASURES[state.measure].title.replace(/^./, (first) => first.toUpperCase()) + ", " + state.unit;
    at("no-sizes").hidden = rows.length > 0;
  }
