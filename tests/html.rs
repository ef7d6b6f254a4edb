//! Promise: `pyheap html` writes one file that any browser shows without loading anything, whose numbers are those of the other
//! commands for whatever range is chosen, and that can be used by pointer, by keyboard, by ear, in the dark and on paper.
//!
//! All but the last test drive a real browser; without one they are skipped.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use crate::common::chromium::{Chromium, browser};
use crate::common::pyheap::run;
use crate::common::{scratch, skip, tests_dir};
use pyheap::profile::facts::{EndReason, Facts, Losses, MemorySample};
use pyheap::profile::names::SuffixStyle;
use pyheap::profile::writer::{AllocDetail, Frame, ProfileWriter};
use pyheap::report::human::{bytes, count};
use pyheap::report::top::interval_text;
use serde_json::{Value, json};

const EVIL: [&str; 6] = [
    "</script><script>window.harmed=1</script>",
    "\"quo'ted\" & <img src=x onerror=\"window.harmed=1\">",
    "new\nline\r\t",
    "right\u{202E}to left\u{2066}",
    "\u{1b}[2J\u{9b}31m\u{7}",
    "x\" onmouseover=\"window.harmed=1",
];

const DETAIL: AllocDetail = AllocDetail { domain: 2, thread: 7 };

fn writer(base: &Path, period: u64) -> ProfileWriter {
    let start = UNIX_EPOCH + Duration::from_secs(1_600_000_000);
    let facts = Facts {
        pid: Some(4242),
        cmdline: vec!["python3".to_owned(), "app.py".to_owned()],
        memory_limit_bytes: Some(150 << 20),
        ..Facts::default()
    };
    ProfileWriter::create(base, SuffixStyle::Underscore, start, period, &facts).expect("our folder")
}

/// A minute of a program with a leak, a table that is loaded, and 30 sites where blocks of many sizes come and go.
fn leaky(base: &Path) {
    let mut writer = writer(base, 4096);
    let frame = |file, line, function| Frame { file, line, function };
    let main = frame("app.py", 1, "main");
    let mut stack = |leaf| writer.add_trace(&[leaf, main]).expect("it is buffered");
    let leak = stack(frame("cache.py", 12, "remember"));
    let table = stack(frame("table.py", 3, "load"));
    let sites: Vec<u32> = (0..30).map(|line| stack(frame("work.py", line, "step"))).collect();
    let mut state = 3u64;
    let mut random = |most: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut live: Vec<(u32, u64)> = Vec::new();
    for step in 0..3000u64 {
        let at = Duration::from_millis(20 * step);
        match step {
            0..100 => writer.alloc(at, table, 9000, DETAIL),
            _ if step % 10 == 0 => writer.alloc(at, leak, 5000, DETAIL),
            _ if live.len() < 60 || live.len() < 90 && random(2) == 0 => {
                live.push((sites[random(30) as usize], 10 << random(12)));
                let (trace, size) = live[live.len() - 1];
                writer.alloc(at, trace, size, DETAIL);
            }
            _ => {
                let (trace, size) = live.swap_remove(random(live.len() as u64) as usize);
                writer.free(at, trace, size);
            }
        }
        if step % 50 == 0 {
            let rss = (100 << 20) + 7000 * step;
            let sample = MemorySample {
                rss,
                anon: Some(rss),
                ..MemorySample::default()
            };
            writer.memory(at, &sample);
        }
    }
    writer.thread(7, "MainThread");
    writer.types(leak, [("dict", 5000, 200), ("app.Session", 5000, 90)].into_iter());
    writer.types(table, std::iter::once(("buffer (mem)", 9000, 100)));
    for site in sites {
        let sizes = live.iter().filter(|(trace, _)| *trace == site).map(|(_, size)| *size);
        writer.types(site, sizes.map(|size| ("bytes", size, 1)));
    }
    writer.typed(Duration::from_secs(60));
    writer.losses(
        Duration::from_secs(60),
        &Losses([("frames_not_named".to_owned(), 2)].into()),
    );
    writer.end(Duration::from_secs(60), &EndReason::Stopped);
    writer.flush().expect("there is room");
}

fn evil(base: &Path) {
    let mut writer = writer(base, 1);
    for (place, name) in EVIL.into_iter().enumerate() {
        let frame = Frame {
            file: name,
            line: 7,
            function: name,
        };
        let trace = writer.add_trace(&[frame, frame]).expect("it is buffered");
        let thread = place as u32 + 1;
        writer.thread(thread, name);
        writer.alloc(Duration::from_secs(1), trace, 1000, AllocDetail { domain: 0, thread });
        writer.types(trace, std::iter::once((name, 1000, 1)));
    }
    writer.typed(Duration::from_secs(1));
    writer.flush().expect("there is room");
}

/// 20,000 stacks of 15 to 40 frames, and 300,000 events of them.
fn large(base: &Path) {
    let mut writer = writer(base, 131_072);
    let files: Vec<String> = (0..200)
        .map(|file| format!("/srv/app/lib/python3.11/site-packages/part{}/mod{file}.py", file % 20))
        .collect();
    let functions: Vec<String> = (0..900).map(|function| format!("function_{function}")).collect();
    let mut state = 9u64;
    let mut random = |most: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let traces: Vec<u32> = (0..20_000u64)
        .map(|number| {
            let depth = 15 + number % 26;
            let stack: Vec<Frame<'_>> = (0..depth)
                .map(|level| {
                    // Callers are shared: the further out, the more.
                    let place = number % (1 << (2 + (depth - level).min(13))) * 31 + depth - level;
                    let (file, function) = (&files[(place % 200) as usize], &functions[(place % 900) as usize]);
                    Frame {
                        file,
                        line: (place % 997) as u32,
                        function,
                    }
                })
                .collect();
            writer.add_trace(&stack).expect("it is buffered")
        })
        .collect();
    let mut live: Vec<(u32, u64)> = Vec::new();
    for step in 0..300_000u64 {
        let at = Duration::from_millis(2 * step);
        if random(5) < 3 || live.is_empty() {
            let (trace, size) = (
                traces[(random(20_000) * random(20_000) / 20_000) as usize],
                20 << random(12),
            );
            live.push((trace, size));
            writer.alloc(at, trace, size, DETAIL);
        } else {
            let (trace, size) = live.swap_remove(random(live.len() as u64) as usize);
            writer.free(at, trace, size);
        }
    }
    writer.end(Duration::from_secs(600), &EndReason::Stopped);
    writer.flush().expect("there is room");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Writes the page of a profile; its path, and what the command said.
fn page(base: &Path) -> (PathBuf, String) {
    let path = base.with_extension("html");
    let said = run(["html", text(base), "-o", text(&path)]).expect_code(0).stdout;
    (path, said)
}

fn json_of(args: &[&str]) -> Value {
    let out = run(args).expect_code(0).stdout;
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// The rows of the page: what is in a row's last column, its estimates, and how the first of them is written.
fn rows(chromium: &mut Chromium) -> Vec<(String, [f64; 3], String)> {
    let script = "[...document.querySelectorAll('#sites tbody tr:not(.stacks)')].map((row) => [row.querySelector('[data-key]').textContent, \
                  ...[...row.querySelectorAll('td[data-bytes]')].map((cell) => Number(cell.dataset.bytes)), row.cells[0].textContent])";
    let found = chromium.eval(script);
    let number = |value: &Value| value.as_f64().expect("a number");
    let string = |value: &Value| value.as_str().expect("a text").to_owned();
    let row = |row: &Value| {
        (
            string(&row[0]),
            [1, 2, 3].map(|place| number(&row[place])),
            string(&row[4]),
        )
    };
    found.as_array().expect("rows").iter().map(row).collect()
}

fn site(row: &Value) -> String {
    let site = &row["site"];
    let name = |key: &str| site[key].as_str().unwrap_or_default().to_owned();
    format!("{}:{} {}", name("file"), site["line"], name("function"))
}

/// That the table is what `pyheap top` and `pyheap diff` say of these moments.
#[track_caller]
fn assert_table(chromium: &mut Chromium, base: &str, from: &str, to: &str) {
    let top = json_of(&["top", base, "--at", to, "--json", "--limit", "1000"]);
    let diff = json_of(&[
        "diff",
        &format!("{base}@{from}"),
        &format!("{base}@{to}"),
        "--json",
        "--limit",
        "1000",
    ]);
    let rows = rows(chromium);
    let number = |row: &Value, key: &str| row[key].as_f64().expect("a number");
    let of_top = top["rows"].as_array().unwrap();
    assert!(of_top.len() > 10, "{top}");
    let mut written = 0;
    for row in of_top {
        let (_, values, text) = rows
            .iter()
            .find(|(name, ..)| *name == site(row))
            .expect("every site is in the table");
        assert!((values[0] - number(row, "live_bytes")).abs() <= 1.0, "{row} {values:?}");
        let [live, margin, low, high] =
            ["live_bytes", "live_bytes_margin", "live_bytes_low", "live_bytes_high"].map(|key| number(row, key));
        let interval = interval_text(live, margin, low, high, row["samples"].as_u64().unwrap());
        let interval = if interval.starts_with('±') {
            interval
        } else {
            format!("({interval})")
        };
        // Where single bytes are shown, those that the page has rounded may be.
        let is_exact = low >= 2048.0 || low == high;
        let expected = format!("{} {interval}", bytes(live));
        assert!(
            !is_exact && text.starts_with(&bytes(live)) || *text == expected,
            "{text} for {expected}: {row}"
        );
        written += usize::from(is_exact);
    }
    assert!(written > 1, "{top}");
    let live = rows.iter().filter(|(_, values, _)| values[0] >= 0.5).count();
    assert_eq!(live, of_top.len(), "and no other");
    for row in diff["rows"].as_array().unwrap() {
        let (_, values, _) = rows
            .iter()
            .find(|(name, ..)| *name == site(row))
            .expect("every change is in the table");
        assert!((values[1] - number(row, "size_diff")).abs() <= 2.0, "{row} {values:?}");
    }
    let changed = rows.iter().filter(|(_, values, _)| values[1].abs() >= 1.0).count();
    assert!(changed <= diff["rows"].as_array().unwrap().len());
    let sum = |id: &str| format!("Number(document.getElementById('{id}').dataset.bytes)");
    let (live, change) = (chromium.eval(&sum("sum-live")), chromium.eval(&sum("sum-change")));
    assert!(
        (live.as_f64().unwrap() - number(&top, "live_bytes")).abs() < 40.0,
        "{live}"
    );
    assert!(
        (change.as_f64().unwrap() - number(&diff, "live_bytes_diff")).abs() < 80.0,
        "{change}"
    );
}

/// The rows of the table of types: type, site, and how bytes and objects are written.
fn type_rows(chromium: &mut Chromium) -> Vec<[String; 4]> {
    let script = "[...document.querySelectorAll('#types tbody tr')].map((row) => [3, 4, 0, 1].map((cell) => row.cells[cell].textContent))";
    let found = chromium.eval(script);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let row = |row: &Value| [0, 1, 2, 3].map(|place| text(&row[place]));
    found.as_array().expect("rows").iter().map(row).collect()
}

/// That the table of types is what `pyheap top` says of them, by site and in all.
#[track_caller]
fn assert_types(chromium: &mut Chromium, base: &str) {
    let number = |row: &Value, key: &str| row[key].as_f64().expect("a number");
    let objects = |many: f64, margin: f64| format!("{} ± {}", count(many), count(margin));
    let by_site = json_of(&["top", base, "--types", "--json", "--limit", "1000"]);
    let shown = type_rows(chromium);
    let mut expected = 0;
    for row in by_site["rows"].as_array().unwrap() {
        for kind in row["types"].as_array().unwrap() {
            expected += 1;
            let [name, _, size, many] = shown
                .iter()
                .find(|shown| shown[0] == kind["type"] && shown[1] == site(row))
                .unwrap_or_else(|| panic!("{kind} of {} is in the table: {shown:?}", row["site"]));
            // Where single bytes are shown, those that the page has rounded may be.
            let live = bytes(number(kind, "bytes"));
            assert!(size.starts_with(&live), "{name}: {size} for {live}");
            let all = objects(number(kind, "objects"), number(kind, "objects_margin"));
            assert_eq!(*many, all, "{name} of {}", row["site"]);
        }
    }
    assert!(expected > 10, "{by_site}");
    assert_eq!(shown.len(), expected, "and no other");
    choose_types(chromium, "type");
    let by_type = json_of(&["top", base, "--by", "type", "--json", "--limit", "1000"]);
    let shown = type_rows(chromium);
    let of_top = by_type["rows"].as_array().unwrap();
    assert_eq!(shown.len(), of_top.len());
    for (shown, row) in shown.iter().zip(of_top) {
        assert_eq!(shown[0], row["site"]["type"], "the same order: {row}");
        let all = objects(number(row, "live_objects"), number(row, "live_objects_margin"));
        assert_eq!(shown[3], all, "{row}");
    }
    choose_types(chromium, "site");
}

fn choose_types(chromium: &mut Chromium, by: &str) {
    chromium.eval(&format!(
        "{{ const by = document.getElementById('types-by'); by.value = '{by}'; by.dispatchEvent(new Event('change')); 1 }}"
    ));
}

/// Moves one end of the range as the arrow keys do, by so many moments.
fn set_range(chromium: &mut Chromium, from: u32, to: u32) {
    for (id, value) in [("from", 0), ("to", to), ("from", from)] {
        chromium.eval(&format!(
            "{{ const end = document.getElementById('{id}'); end.value = {value}; end.dispatchEvent(new Event('input', {{ bubbles: true }})); 1 }}"
        ));
    }
    chromium.wait(&format!("document.body.dataset.range === '{from}-{to}'"));
}

#[test]
fn a_browser_shows_what_the_commands_say() {
    let Some(browser) = browser() else {
        skip!("a_browser_shows_what_the_commands_say", "no chromium in PATH")
    };
    let dir = scratch();
    let base = dir.path().join("run");
    leaky(&base);
    let (path, said) = page(&base);
    let mut chromium = Chromium::start(browser);
    chromium.open(&path);

    // The verdict first, as `leaks` has it.
    let verdict = run(["leaks", text(&base), "--quiet"]).expect_code(0).stdout;
    assert!(
        verdict.starts_with("leak: cache.py:12 remember") && said.starts_with(&verdict),
        "{verdict}{said}"
    );
    let heading = chromium.eval("document.querySelector('h1').textContent");
    assert_eq!(heading, verdict.trim_end().replacen(':', "", 1));
    let leaks = json_of(&["leaks", text(&base), "--json"]);
    let first = chromium.eval("document.querySelector('#leaks tbody tr').cells[0].firstChild.textContent");
    assert_eq!(
        first,
        bytes(leaks["leaks"][0]["growth_bytes_per_min"].as_f64().unwrap())
    );

    // Whole, then a range by its ends: half a second apart.
    assert_table(&mut chromium, text(&base), "0s", "60s");
    assert_types(&mut chromium, text(&base));
    let before = rows(&mut chromium);
    let types = type_rows(&mut chromium);
    set_range(&mut chromium, 21, 83);
    let after = rows(&mut chromium);
    assert_ne!(before, after);
    assert_table(&mut chromium, text(&base), "10.5s", "41.5s");
    assert_eq!(types, type_rows(&mut chromium), "types are of the end");
    let change =
        |rows: &[(String, [f64; 3], String)]| rows.iter().find(|row| row.0 == "cache.py:12 remember").unwrap().1[1];
    assert!(
        change(&after) < 0.6 * change(&before),
        "a half of the time has a half of the leak"
    );
    let of_leak = chromium.eval("Number(document.querySelector('#leaks tbody tr').cells[5].dataset.bytes)");
    assert_eq!(
        of_leak.as_f64(),
        Some(change(&after)),
        "the table of leaks follows, too"
    );

    // By the pointer, from a quarter to three quarters.
    let chart = chromium.eval("document.getElementById('chart').scrollIntoView({ block: 'center' }), (({ x, y, width, height }) => [x, y + height / 2, width])(document.getElementById('chart').getBoundingClientRect())");
    let [x, y, width] = [0, 1, 2].map(|place| chart[place].as_f64().unwrap());
    for (kind, part) in [
        ("mousePressed", 0.25),
        ("mouseMoved", 0.5),
        ("mouseMoved", 0.75),
        ("mouseReleased", 0.75),
    ] {
        chromium.pointer(kind, x + part * width, y);
    }
    chromium.wait("document.body.dataset.range === '30-90'");
    assert_table(&mut chromium, text(&base), "15s", "45s");

    // Flame graph, tree and sizes follow as well, for each measure.
    let total = json_of(&["top", text(&base), "--at", "45s", "--json"])["live_objects"]
        .as_f64()
        .unwrap();
    chromium.eval("{ const unit = document.getElementById('unit'); unit.value = 'objects'; unit.dispatchEvent(new Event('change')); 1 }");
    let all = format!("all: {} ±", count(total));
    chromium.wait(&format!(
        "document.getElementById('details').textContent.startsWith('{all}')"
    ));
    chromium.wait(&format!(
        "document.querySelector('#tree .number').textContent.startsWith('{} ±')",
        count(total)
    ));
    for measure in ["change", "allocated", "live"] {
        chromium.eval(&format!("{{ const list = document.getElementById('measure'); list.value = '{measure}'; list.dispatchEvent(new Event('change')); 1 }}"));
        chromium.wait("document.querySelectorAll('#flame .box').length > 10 && document.querySelectorAll('#sizes tbody tr').length > 5");
    }
    assert_eq!(chromium.problems(), Vec::<&Value>::new(), "no error, no request");
}

#[test]
fn by_keyboard_by_ear_in_the_dark_and_on_paper() {
    let Some(browser) = browser() else {
        skip!("by_keyboard_by_ear_in_the_dark_and_on_paper", "no chromium in PATH")
    };
    let dir = scratch();
    let base = dir.path().join("run");
    leaky(&base);
    let (path, _) = page(&base);
    let mut chromium = Chromium::start(browser);
    chromium.open(&path);
    let focused = |id: &str| format!("document.activeElement === document.getElementById('{id}')");

    // Each end of the range is a slider.
    chromium.eval("document.getElementById('from').focus()");
    chromium.key("ArrowRight");
    chromium.key("ArrowRight");
    chromium.wait("document.body.dataset.range === '2-120'");
    assert_eq!(
        chromium.eval("document.getElementById('from').getAttribute('aria-valuetext')"),
        "1s"
    );
    chromium.key("Tab");
    chromium.wait(&focused("to"));
    chromium.key("Home");
    chromium.wait("document.body.dataset.range === '0-1'");
    chromium.key("End");
    chromium.wait("document.body.dataset.range === '0-120'");

    // Search: the table shows what fits, the graph marks it, Enter goes there.
    chromium.key("/");
    chromium.wait(&focused("search"));
    "cache".chars().for_each(|letter| chromium.key(&letter.to_string()));
    chromium.wait("document.querySelectorAll('#sites tbody tr').length === 1");
    assert_eq!(rows(&mut chromium)[0].0, "cache.py:12 remember");
    let found: Vec<String> = type_rows(&mut chromium).into_iter().map(|[name, ..]| name).collect();
    assert_eq!(found, ["dict", "app.Session"], "types of what was searched");
    assert_eq!(chromium.eval("document.querySelectorAll('#flame .found').length"), 1);
    assert!(
        chromium
            .eval("document.getElementById('found').textContent")
            .as_str()
            .unwrap()
            .starts_with("1 place, ")
    );
    chromium.key("Enter");
    chromium.wait(
        "document.activeElement.classList.contains('box') && document.activeElement.textContent.startsWith('remember')",
    );
    chromium.wait("document.getElementById('details').textContent.startsWith('remember (cache.py:12): ')");
    // The graph: up to the caller, in, and out again.
    chromium.key("ArrowUp");
    chromium.wait("document.activeElement.textContent === 'main (app.py:1)'");
    chromium.key("Enter");
    chromium.wait("document.querySelectorAll('#flame .above').length === 1");
    chromium.key("Escape");
    chromium.wait(
        "document.querySelectorAll('#flame .above').length === 0 && document.activeElement.textContent === 'all'",
    );
    chromium.eval("document.getElementById('search').focus()");
    chromium.key("Escape");
    chromium.wait("document.querySelectorAll('#sites tbody tr').length > 10");

    // A row opens its stacks, and keeps the focus.
    chromium.eval("document.querySelector('#sites button.row').focus()");
    chromium.key("Enter");
    chromium.wait("document.querySelectorAll('#sites tr.stacks li').length === 2 && document.querySelectorAll('#chosen svg').length === 1");
    chromium.wait("document.activeElement.getAttribute('aria-expanded') === 'true'");
    let open = chromium.eval("document.activeElement.textContent");
    let narrowed = type_rows(&mut chromium);
    assert!(
        !narrowed.is_empty() && narrowed.iter().all(|row| open == row[1]),
        "types of {open}: {narrowed:?}"
    );
    let said = format!(", of {} only", open.as_str().unwrap());
    assert!(
        chromium
            .eval("document.getElementById('type-rows').textContent")
            .as_str()
            .unwrap()
            .ends_with(&said)
    );
    // The tree.
    chromium.eval("document.querySelector('#tree [tabindex=\"0\"]').focus()");
    let open = chromium.eval("document.querySelectorAll('#tree [data-node]').length");
    chromium.key("ArrowLeft");
    chromium.wait("document.querySelectorAll('#tree [data-node]').length === 1 && document.activeElement.getAttribute('aria-expanded') === 'false'");
    chromium.key("ArrowRight");
    chromium.wait(&format!(
        "document.querySelectorAll('#tree [data-node]').length > 1 && {open} > 1"
    ));
    chromium.key("ArrowDown");
    chromium.wait("document.activeElement.getAttribute('aria-level') === '2'");

    // Everything that can be used has a name, every table a head, every list of choices its label.
    let nameless = "[...document.querySelectorAll('button, input, select, [role=tree], [role=treeitem], [role=group], section')].filter((element) => \
                    !element.hidden && !(element.getAttribute('aria-label') || element.getAttribute('aria-labelledby') || \
                    (element.labels && element.labels.length) || element.textContent.trim())).map((element) => element.outerHTML)";
    assert_eq!(chromium.eval(nameless), json!([]));
    let headless =
        "[...document.querySelectorAll('table')].filter((table) => !table.querySelector('thead th[scope=col]')).length";
    assert_eq!(chromium.eval(headless), 0);
    assert_eq!(
        chromium.eval(
            "[document.documentElement.lang, document.querySelectorAll('[aria-live], [role=status]').length > 2]"
        ),
        json!(["en", true])
    );

    // In the dark the paper is dark and the ink is bright; on paper never.
    let lightness = "(() => { const of = (name) => getComputedStyle(document.body)[name].match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3; \
                     return [of('backgroundColor'), of('color')]; })()";
    let mut light = |media: &str, scheme: &str| {
        chromium.call(
            "Emulation.setEmulatedMedia",
            json!({"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        );
        let found = chromium.eval(lightness);
        [0, 1].map(|place| found[place].as_f64().unwrap())
    };
    let [paper, ink] = light("screen", "light");
    assert!(paper > 230.0 && ink < 60.0, "{paper} {ink}");
    let [paper, ink] = light("screen", "dark");
    assert!(paper < 40.0 && ink > 200.0, "{paper} {ink}");
    let [paper, ink] = light("print", "dark");
    assert!(paper > 230.0 && ink < 60.0, "{paper} {ink}");
    assert_eq!(
        chromium.eval("getComputedStyle(document.getElementById('controls')).display"),
        "none"
    );
    let pdf = chromium.call("Page.printToPDF", json!({"printBackground": false}));
    assert!(pdf["data"].as_str().unwrap().len() > 10_000);
    // At the width of a telephone nothing but tables is wider than the window.
    chromium.call("Emulation.setEmulatedMedia", json!({"media": "screen", "features": []}));
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        json!({"width": 380, "height": 700, "deviceScaleFactor": 1, "mobile": false}),
    );
    chromium.wait("document.documentElement.scrollWidth <= 380");
    assert_eq!(chromium.problems(), Vec::<&Value>::new(), "no error, no request");
}

/// That the page says why it knows no types, and shows no empty table.
#[track_caller]
fn assert_types_unknown(chromium: &mut Chromium, why: &str) {
    let said = chromium.eval("document.getElementById('types-note').innerText");
    assert!(said.as_str().unwrap().contains(why), "{said}");
    assert_eq!(
        chromium.eval("document.getElementById('types').checkVisibility()"),
        false
    );
}

#[test]
fn any_profile_is_a_page() {
    let Some(browser) = browser() else {
        skip!("any_profile_is_a_page", "no chromium in PATH")
    };
    let dir = scratch();
    let mut chromium = Chromium::start(browser);
    // Names are text and nothing else.
    let base = dir.path().join("evil\u{202E}<b>");
    evil(&base);
    let (path, _) = page(&base);
    let link = dir.path().join("evil.html");
    std::fs::rename(path, &link).expect("our folder");
    chromium.open(&link);
    assert_eq!(
        chromium.eval("[window.harmed === undefined, document.images.length, document.scripts.length]"),
        json!([true, 0, 2])
    );
    assert!(
        rows(&mut chromium).iter().any(|row| row.0.contains(EVIL[0])),
        "it is shown as it is"
    );
    assert!(
        type_rows(&mut chromium).iter().any(|row| row[0] == EVIL[0]),
        "and so are types"
    );
    assert_eq!(
        chromium.eval("/[\\u202e\\u2066\\x1b]/.test(document.body.textContent)"),
        false
    );
    assert_eq!(chromium.problems(), Vec::<&Value>::new());

    // Of the original heapprof: no functions, no period.
    for name in ["json_parse", "deep_recursion", "unicode_paths"] {
        for suffix in ["hpm", "hpd"] {
            let file = format!("{name}.{suffix}");
            std::fs::copy(tests_dir().join("golden/heapprof").join(&file), dir.path().join(&file)).expect("a copy");
        }
        let (path, _) = page(&dir.path().join(name));
        chromium.open(&path);
        let shown = rows(&mut chromium).into_iter().filter(|row| row.1[0] >= 0.5).count();
        let top = json_of(&["top", text(&dir.path().join(name)), "--json", "--limit", "1000"]);
        assert_eq!(shown.min(50), top["rows"].as_array().unwrap().len().min(50), "{name}");
        assert!(
            chromium
                .eval("document.getElementById('unknown').textContent")
                .as_str()
                .unwrap()
                .contains("no ._hpx file")
        );
        assert_types_unknown(&mut chromium, "no ._hpx file");
        assert_eq!(chromium.problems(), Vec::<&Value>::new(), "{name}");
    }

    // Cut in the middle of an event, as while it is written; damaged; empty.
    let run = dir.path().join("run");
    leaky(&run);
    let events = std::fs::read(run.with_extension("_hpd")).expect("it is there");
    let side = std::fs::read(run.with_extension("_hpx")).expect("it is there");
    let half = &events[..events.len() / 2 + 1];
    for (name, events, side) in [
        ("cut", half, &side[..side.len() / 2]),
        ("damaged", &[half, &[0xFF; 50]].concat(), &side[..]),
        ("empty", b"", &side[..]),
        ("nothing", b"", b""),
    ] {
        let base = dir.path().join(name);
        std::fs::copy(run.with_extension("_hpm"), base.with_extension("_hpm")).expect("a copy");
        std::fs::write(base.with_extension("_hpd"), events).expect("our folder");
        std::fs::write(base.with_extension("_hpx"), side).expect("our folder");
        let (path, _) = page(&base);
        chromium.open(&path);
        assert_eq!(chromium.problems(), Vec::<&Value>::new(), "{name}");
        let has_rows = !rows(&mut chromium).is_empty();
        assert_eq!(has_rows, !events.is_empty(), "{name}");
    }

    // An older recording.
    let base = dir.path().join("older");
    writer(&base, 4096).flush().expect("there is room");
    let (path, _) = page(&base);
    chromium.open(&path);
    assert_types_unknown(&mut chromium, "after ten seconds for the first time");

    // 20,000 stacks: all that is alive is there, in a file that can be mailed.
    let base = dir.path().join("large");
    large(&base);
    let (path, _) = page(&base);
    let size = std::fs::metadata(&path).expect("it is there").len();
    assert!(size < 10_000_000, "{size}");
    chromium.open(&path);
    let live = chromium
        .eval("Number(document.getElementById('sum-live').dataset.bytes)")
        .as_f64()
        .unwrap();
    let truth = json_of(&["top", text(&base), "--json"])["live_bytes"].as_f64().unwrap();
    assert!((live - truth).abs() < 20_001.0, "{live} {truth}");
    assert_eq!(chromium.problems(), Vec::<&Value>::new());
}

#[test]
fn the_command() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = scratch();
    let base = dir.path().join("run");
    leaky(&base);
    let (path, said) = page(&base);
    let file = std::fs::metadata(&path).expect("it is there");
    assert_eq!(file.permissions().mode() & 0o777, 0o600, "it names code");
    assert_eq!(said.lines().count(), 2, "{said}");
    let printed = run(["html", text(&base)]).expect_code(0);
    assert_eq!(
        printed.stdout.trim_end(),
        std::fs::read_to_string(&path).expect("UTF-8").trim_end()
    );
    run(["html", "/nonexistent/run", "-o", text(&dir.path().join("no.html"))])
        .expect_code(1)
        .expect_stderr("no profile");
    assert!(!dir.path().join("no.html").exists());
    run(["html", text(&base), "-o", "/nonexistent/no.html"])
        .expect_code(1)
        .expect_stderr("cannot write");
    let limited = run(["html", text(&base), "-o", "-", "--limit", "1GiB", "--own", "work.py"])
        .expect_code(0)
        .stdout;
    assert!(limited.contains("1.0 GiB used (the limit given)"), "the limit is in it");
}
