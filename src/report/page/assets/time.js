  // Memory over time, and the range that is chosen.
  const SVG = "http://www.w3.org/2000/svg", HIGH = 100;
  const all = overTime(groups);
  const partOf = (seconds) => data.clock.end > 0 ? seconds / data.clock.end : 1;

  function drawn(tag, properties) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
    return element;
  }
  // One diagram: points of (part of the width, value), a band around it if there is one, and a line at a limit.
  function panel(title, points, band, kind, limit) {
    let most = Math.max(1, ...points.map(([, value]) => value), ...(band || []).map(([, , high]) => high));
    const isLimit = limit && limit <= 2 * most;
    if (isLimit) most = Math.max(most, limit);
    const y = (value) => (HIGH - 4 - (HIGH - 22) * value / most).toFixed(2), x = (part) => (1000 * part).toFixed(2);
    const path = (list) => list.map(([part, value], place) => (place ? "L" : "M") + x(part) + " " + y(value)).join("");
    const svg = drawn("svg", { viewBox: "0 0 1000 " + HIGH, preserveAspectRatio: "none", class: "panel " + kind, "aria-hidden": "true" });
    if (band && band.length) {
      const upper = band.map(([part, , high]) => [part, high]), lower = band.map(([part, low]) => [part, low]).reverse();
      svg.append(drawn("path", { class: "band", d: path(upper) + path(lower).replace("M", "L") + "Z" }));
    }
    if (isLimit) svg.append(drawn("path", { class: "limit", d: "M0 " + y(limit) + "L1000 " + y(limit) }));
    svg.append(drawn("path", { class: "curve", d: path(points) }));
    const box = make("div", null, { class: "panel-box" });
    box.append(svg, make("span", bytes(most) + (isLimit && most === limit ? ", the limit" : ""), { class: "panel-top" }), make("span", title, { class: "panel-title" }), make("span", "0", { class: "panel-zero" }));
    return box;
  }
  function livePanel(title, series, kind) {
    const points = [], band = [];
    series.bytes.forEach((value, moment) => {
      const part = partOf(timeOf(moment)), spread = margin(series.variance[moment]);
      points.push([part, Math.max(0, value)]);
      band.push([part, Math.max(0, value - spread), value + spread]);
    });
    return panel(title, points, band, kind, null);
  }
  function showTime() {
    at("panels").append(livePanel("live since the start", all, "live"));
    if (data.memory.length > 1) {
      at("panels").append(panel("resident set of the process", data.memory.map(([seconds, rss]) => [partOf(seconds), rss]), null, "rss", data.limit));
    }
    for (const place of [0, 0.25, 0.5, 0.75, 1]) {
      const label = make("span", rounded(data.clock.end * place));
      label.style.left = 100 * place + "%";
      at("axis").append(label);
    }
    for (const id of ["from", "to"]) {
      at(id).max = data.clock.last;
      at(id).addEventListener("input", () => choose(id, Number(at(id).value)));
    }
    at("whole").addEventListener("click", () => setRange(0, data.clock.last));
    at("last").addEventListener("click", () => setRange(Math.floor(data.clock.last * 2 / 3), data.clock.last));
    drag();
  }
  // Of a time as much as its axis needs.
  const rounded = (seconds) => time(data.clock.end < 1 ? seconds : data.clock.end < 20 ? +seconds.toFixed(1) : Math.round(seconds));
  function choose(id, moment) {
    if (id === "from") setRange(Math.min(moment, data.clock.last - 1), Math.max(state.to, moment + 1));
    else setRange(Math.min(state.from, moment - 1), Math.max(moment, 1));
  }
  function setRange(from, to) {
    state.from = Math.max(0, Math.min(from, data.clock.last - 1));
    state.to = Math.min(data.clock.last, Math.max(to, state.from + 1));
    schedule();
  }
  // With the pointer: press, draw, release. Everything follows on the way.
  function drag() {
    const chart = at("chart");
    let start = null;
    const momentAt = (event) => {
      const box = chart.getBoundingClientRect();
      const part = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      return part * data.clock.end / data.clock.width;
    };
    chart.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      start = momentAt(event);
      chart.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    chart.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const now = momentAt(event), [from, to] = start < now ? [start, now] : [now, start];
      setRange(Math.round(from), Math.max(Math.round(to), Math.round(from) + 1));
    });
    for (const name of ["pointerup", "pointercancel"]) chart.addEventListener(name, () => { start = null; });
  }

  function updateTime() {
    const [from, to] = [timeOf(state.from), timeOf(state.to)];
    for (const [id, seconds] of [["from", from], ["to", to]]) {
      at(id).value = state[id];
      at(id).setAttribute("aria-valuetext", time(seconds));
      at(id + "-text").textContent = seconds === data.clock.end ? time(seconds) + ", the end" : time(seconds);
    }
    at("selection").style.left = 100 * partOf(from) + "%";
    at("selection").style.width = 100 * (partOf(to) - partOf(from)) + "%";
    const live = amount(total, 0, "live", "bytes"), objects = amount(total, 0, "live", "objects");
    const change = amount(total, 0, "change", "bytes"), allocated = amount(total, 0, "allocated", "bytes");
    const minutes = (to - from) / 60;
    const rate = minutes > 0 ? "; " + signed(total[CHANGE] / minutes, bytes) + " ± " + bytes(margin(total[CHANGE_VAR]) / minutes) + " a minute" : "";
    const rss = rssAt(to), before = rssAt(from);
    const parts = [
      ["live", "Live at " + time(to), live.join(" ") + " in " + objects.join(" ") + " objects"],
      ["change", "Change from " + time(from), change.join(" ") + rate],
      ["allocated", "Allocated meanwhile", allocated.join(" ")],
    ];
    if (rss !== null) parts.push(["rss", "Resident set", bytes(before === null ? rss : before) + " → " + bytes(rss)]);
    at("summary").replaceChildren(...parts.map(([name, title, text]) => {
      const item = make("div");
      item.append(make("dt", title), make("dd", text, { id: "sum-" + name }));
      return item;
    }));
    at("sum-live").dataset.bytes = total[BYTES];
    at("sum-change").dataset.bytes = total[CHANGE];
    const base = /^[\w.-]+$/.test(data.name) ? data.name : "BASE";
    at("same").textContent = "pyheap top " + base + " --at " + precise(to) + "   ·   pyheap diff " + base + "@" + precise(from) + " " + base + "@" + precise(to);
    at("chosen").replaceChildren();
    if (state.chosen) at("chosen").append(livePanel("live: " + state.chosen.text, overTime(state.chosen.groups), "site-curve"));
  }
  const precise = (seconds) => +seconds.toFixed(6) + "s";
  // What was last known of the resident set at a time.
  function rssAt(seconds) {
    let found = null;
    for (const [when, rss] of data.memory) if (when <= seconds + 1e-9 || found === null) found = rss; else break;
    return found;
  }
