  // What the survivors are, by type and site: of the end of the recording, whatever the range.
  let typeRowsShown = FIRST_ROWS;

  function typeRows() {
    const isBySite = at("types-by").value === "site", text = state.text.toLowerCase();
    const chosen = state.chosen && new Set(state.chosen.groups), rows = new Map();
    for (const [place, number, ...values] of data.types.parts) {
      const group = groups[place], name = data.types.names[number], site = rowText(group);
      if (chosen && !chosen.has(group)) continue;
      if (text && !name.toLowerCase().includes(text) && !site.toLowerCase().includes(text)) continue;
      const key = number + (isBySite ? " " + keyOf(group) : "");
      let row = rows.get(key);
      if (!row) {
        row = { name, site, sites: new Set(), usage: new Float64Array(WIDTH) };
        rows.set(key, row);
      }
      row.sites.add(site);
      values.forEach((value, field) => { row.usage[field] += value; });
    }
    return [...rows.values()].sort((a, b) => b.usage[BYTES] - a.usage[BYTES] || (a.name + a.site < b.name + b.site ? -1 : 1));
  }

  function showTypes() {
    const isKnown = data.types.parts.length > 0;
    at("types-note").textContent = data.types.note || (isKnown ? "" : "Nothing was alive when pyheap looked.");
    at("types-note").hidden = !at("types-note").textContent;
    at("types-view").hidden = !isKnown;
    at("types-by").addEventListener("change", () => { typeRowsShown = FIRST_ROWS; updateTypes(); });
    at("more-types").addEventListener("click", () => { typeRowsShown *= 4; updateTypes(); });
  }

  function updateTypes() {
    if (!data.types.parts.length) return;
    const rows = typeRows();
    at("types").tBodies[0].replaceChildren(...rows.slice(0, typeRowsShown).map(({ name, site, sites, usage }) => {
      const row = make("tr");
      row.append(
        estimate("td", amount(usage, 0, "live", "bytes"), { "data-bytes": usage[BYTES] }),
        estimate("td", amount(usage, 0, "live", "objects"), { "data-objects": usage[OBJECTS] }),
        make("td", count(usage[SAMPLES]), { class: "number" }),
        make("th", name, { scope: "row", class: "type" }),
        make("td", sites.size === 1 ? site : count(sites.size) + " sites", { class: "site" }),
      );
      return row;
    }));
    const left = rows.length - Math.min(rows.length, typeRowsShown);
    at("more-types").hidden = !left;
    at("more-types").textContent = "Show more (" + count(left) + " left)";
    at("type-rows").textContent = count(rows.length) + (rows.length === 1 ? " row" : " rows") + (state.chosen ? ", of " + state.chosen.text + " only" : "");
    at("no-types").hidden = rows.length > 0;
  }
