  // Numbers and names for people, as pyheap's own (src/report/human.rs).
  function bytes(value) {
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if (Math.abs(value) < 1023.5) return value.toFixed(0).replace(/^-0$/, "0") + " B";
    let scaled = value / 1024, unit = 0;
    while (Math.abs(scaled) >= 1023.95 && unit + 1 < units.length) { scaled /= 1024; unit++; }
    return scaled.toFixed(1) + " " + units[unit];
  }
  const count = (value) => Math.round(value).toLocaleString("en").replace(/^-0$/, "0");
  const share = (part, whole) => whole > 0 ? (100 * part / whole).toFixed(1) + "%" : "-";
  const signed = (value, text) => (value >= 0.5 ? "+" : value <= -0.5 ? "−" : "") + text(Math.abs(value));
  function time(seconds) {
    const millis = Math.round(seconds * 1000);
    if (!millis) return "0s";
    if (millis < 1000) return millis + "ms";
    if (millis < 60000) return +(millis / 1000).toFixed(millis % 100 ? 3 : 1) + "s";
    const whole = Math.round(seconds), parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"],
      [Math.floor(whole / 60) % 60, "m"], [whole % 60, "s"]];
    return parts.filter(([value]) => value).map(([value, unit]) => value + unit).join("");
  }
  // An estimate of bytes: `3.1 MiB ± 0.2 MiB`, or with its two limits where there are few samples.
  function between(value, variance, samples) {
    const [low, high] = limits(value, variance, samples);
    if (data.period === null && !samples) return "(no sample)";
    if (samples >= MANY || high <= value) return "± " + bytes(margin(variance));
    if (value < 0.5) return "(up to " + bytes(high) + ")";
    const [first, last] = [bytes(low), bytes(high)], [number, unit] = first.split(" ");
    return "(" + (last.endsWith(" " + unit) ? number : first) + " – " + last + ")";
  }
  // A number of a usage with its interval, by the measure that is chosen or another. Where there is no sample, nothing is known
  // of the error of objects and changes.
  function amount(values, base, measure = state.measure, unit = state.unit) {
    const [field, variance, samples] = MEASURES[measure][unit];
    const value = values[base + field], spread = values[base + variance];
    const text = unit === "bytes" ? bytes : count, isKnown = spread > 0 || value || data.period !== null && data.period <= 1;
    if (measure === "change") return [signed(value, text), isKnown ? "± " + text(margin(spread)) : "(no sample)"];
    if (unit === "objects") return [count(value), isKnown ? "± " + count(margin(spread)) : "(no sample)"];
    return [bytes(value), between(value, spread, values[base + samples])];
  }

  const UNNAMED = ["all", "(no Python stack)", "(callers left out)", "(small stacks)"];
  const frameFile = (frame) => data.strings[data.frames[frame * 3]];
  const frameLine = (frame) => data.frames[frame * 3 + 1];
  const frameFunction = (frame) => data.strings[data.frames[frame * 3 + 2]];
  // `file:line function`, as the tables have it, and `function (file:line)`, as the graph does.
  function siteText(frame) {
    if (frame < UNNAMED.length) return UNNAMED[frame];
    const name = frameFunction(frame);
    return frameFile(frame) + ":" + frameLine(frame) + (name ? " " + name : "");
  }
  function frameText(frame) {
    if (frame < UNNAMED.length) return UNNAMED[frame];
    const name = frameFunction(frame), place = frameFile(frame) + ":" + frameLine(frame);
    return name ? name + " (" + place + ")" : place;
  }

  // An element with text and what else it needs; names are never anything but text.
  function make(tag, text, properties = {}) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") element.className = value; else element.setAttribute(name, value);
    }
    return element;
  }
  const estimate = (tag, [value, range], properties) => {
    const cell = make(tag, value, { class: "number", ...properties });
    cell.append(" ", make("span", range, { class: "margin" }));
    return cell;
  };
