  // The answer, and the sites that it is about.
  const WORDS = { leak: "leak", native: "native", fragmentation: "fragmentation", no_leak: "no leak" };
  const SITE_WORDS = { leak: "leak", plateau: "plateau", steady: "steady", one_off: "one-off" };
  const siteRows = [];

  function showVerdict() {
    const { verdict } = data;
    document.body.dataset.verdict = verdict.long_enough ? verdict.word : "too_short";
    at("word").textContent = verdict.long_enough ? WORDS[verdict.word] || verdict.word : "too short";
    // The headline begins with its word, which stands before it already.
    at("answer").textContent = verdict.lines[0].replace(/^(leak|native|fragmentation|no leak|too short): /, "");
    for (const line of verdict.lines.slice(1)) at("answers").append(make("p", line));
    for (const note of verdict.notes) at("answers").append(make("p", "Note: " + note, { class: "note" }));
    const leaks = verdict.sites.filter((site) => site.verdict === "leak");
    const others = verdict.sites.filter((site) => site.verdict !== "leak");
    if (leaks.length) at("leaks").append(siteTable(leaks, "Sites that leak; rates are of the whole recording"));
    if (verdict.leaking > leaks.length) at("leaks").append(make("p", count(verdict.leaking - leaks.length) + " more leak; pyheap leaks --rows lists them."));
    if (others.length) {
      const details = make("details");
      details.append(make("summary", "What is no leak: " + others.length + " sites"), siteTable(others, "Other sites, by growth"));
      at("leaks").append(details);
    }
    at("leaks-section").hidden = !verdict.sites.length;
  }

  function siteTable(sites, caption) {
    const table = make("table");
    table.append(make("caption", caption));
    const head = table.createTHead().insertRow();
    for (const title of ["Growth a minute", "Share", "Live at the end", "Objects", "Age", "Change in the range", "Site"]) {
      head.append(make("th", title, { scope: "col", class: title === "Site" ? "" : "number" }));
    }
    const body = table.createTBody();
    for (const site of sites) {
      const row = body.insertRow();
      row.append(
        estimate("td", [bytes(site.rate), "± " + bytes((site.high - site.low) / 2)], { title: "95 %: " + bytes(site.low) + " to " + bytes(site.high) + " a minute; in the last third " + bytes(site.last_third) }),
        make("td", site.share === null ? "-" : share(site.share, 1), { class: "number" }),
        estimate("td", [bytes(site.live), "± " + bytes(site.margin)]),
        make("td", count(site.objects), { class: "number" }),
        make("td", site.age ? site.age[0].toFixed(0) + " s" : "-", { class: "number", title: site.age ? "half of it is younger; the oldest sample " + site.age[1].toFixed(0) + " s" : "not recorded" }),
      );
      const change = row.insertCell();
      change.className = "number";
      siteRows.push({ site, change });
      const place = row.insertCell(), below = body.insertRow(), details = below.insertCell();
      place.className = "site";
      below.className = "stacks";
      below.hidden = true;
      details.colSpan = 7;
      const button = make("button", site.place, { type: "button", class: "row", "aria-expanded": false });
      button.addEventListener("click", () => {
        below.hidden = !below.hidden;
        button.setAttribute("aria-expanded", !below.hidden);
      });
      if (site.verdict !== "leak") place.append(make("span", SITE_WORDS[site.verdict], { class: "badge" }), " ");
      place.append(button);
      for (const [line, rate] of site.lines) {
        if (line !== site.place) details.append(make("p", bytes(rate) + " a minute allocated at " + line));
      }
      const origin = [site.domain && "domain " + site.domain, site.thread && "thread " + site.thread, count(site.stacks) + (site.stacks === 1 ? " stack" : " stacks")];
      details.append(make("p", origin.filter(Boolean).join(", ")));
      const list = make("ol", null, { class: "stack", "aria-label": "The stack with most of the growth, innermost first" });
      for (const frame of site.stack) list.append(make("li", frame));
      if (site.more_frames) list.append(make("li", "… " + count(site.more_frames) + " more"));
      details.append(list);
    }
    const scroll = make("div", null, { class: "scroll" });
    scroll.append(table);
    return scroll;
  }

  // The part of the sites' tables that follows the range.
  function updateVerdict() {
    for (const { site, change } of siteRows) {
      if (!site.groups) {
        change.textContent = "-";
        change.title = "its stacks are not told apart in this page";
        continue;
      }
      const sum = new Float64Array(WIDTH);
      for (const group of site.groups) addUsage(usage, group * WIDTH, sum, 0);
      const [value, range] = amount(sum, 0, "change", "bytes");
      change.replaceChildren(value, " ", make("span", range, { class: "margin" }));
      change.dataset.bytes = sum[CHANGE];
    }
  }
