use super::*;
use crate::collect::resolve::Event;
use crate::profile::facts::MemorySample;
use crate::report::human::is_unsafe;
use crate::report::leaks::OwnCode;
use crate::ui::live::rows::lines;
use crate::ui::live::watch::Watch;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::KeyCode;
use unicode_width::UnicodeWidthStr;

fn named(file: &str, line: u32, function: &str) -> NamedFrame {
    NamedFrame {
        file: file.into(),
        line,
        function: function.into(),
    }
}

/// A minute of two sites; `leak` of them keeps 10 KiB a second.
fn watch(names: [&str; 2]) -> Watch {
    let mut watch = Watch::new(1, OwnCode::default(), None);
    let caller = named("/srv/app/main.py", 40, "main");
    watch.events(&[
        Event::Trace(vec![named(names[0], 12, "open_session"), caller.clone()]),
        Event::Trace(vec![named(names[1], 7, "load"), caller]),
    ]);
    for second in 0..60 {
        let at = Duration::from_secs(second);
        let born = second * 1000;
        let mut events = vec![Event::Alloc {
            at,
            trace: 1,
            size: 10_240,
            born,
            domain: 0,
            thread: 0,
        }];
        if second < 2 {
            events.push(Event::Alloc {
                at,
                trace: 2,
                size: 51_200,
                born,
                domain: 0,
                thread: 0,
            });
        }
        watch.events(&events);
        let rss = (20 << 20) + (second << 14);
        watch.tick(
            at,
            Some(MemorySample {
                rss,
                ..MemorySample::default()
            }),
        );
    }
    watch
}

fn header() -> Header {
    Header {
        pid: 4242,
        command: "python app.py --serve".to_owned(),
        python: "3.12.7".to_owned(),
        attached_at: "15:03:11".to_owned(),
        rss_first: 20 << 20,
        rss: 21 << 20,
        stop_time: Duration::from_micros(15),
        ..Header::default()
    }
}

/// The screen, after these keys.
fn screen(watch: &mut Watch, size: (u16, u16), keys: &str, header: &Header) -> (Vec<String>, State) {
    screen_with(watch, size, keys, header, &[])
}

/// The same, with these types of survivors.
fn screen_with(
    watch: &mut Watch,
    size: (u16, u16),
    keys: &str,
    header: &Header,
    types: &[TypeRow],
) -> (Vec<String>, State) {
    let at = Duration::from_secs(60);
    let report = watch.judge(at);
    let picture = watch.picture(at);
    let mut state = State {
        has_baseline: picture.baseline.is_some(),
        ..State::default()
    };
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '↓' => KeyCode::Down,
            key => KeyCode::Char(key),
        };
        let found = lines(&picture, &state.choice, watch);
        state.key(code.into(), &found.lines);
    }
    let lines = lines(&picture, &state.choice, watch);
    let place = state.place(&lines.lines);
    let past = lines
        .lines
        .get(place)
        .map_or_else(Vec::new, |line| watch.past(&line.stacks, at));
    let view = View {
        header,
        picture: &picture,
        lines: &lines,
        place,
        past: &past,
        types,
        are_types_later: false,
        report: Some(&report),
        source: &|frame| Some(format!("source of {}", frame.line).into()),
        has_colour: false,
    };
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(frame, &view, &mut state)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let rows = buffer.content.chunks(usize::from(size.0).max(1));
    let mut shown = Vec::new();
    for row in rows {
        let mut text = String::new();
        let mut covered = 0;
        for cell in row {
            let symbol = cell.symbol();
            assert!(!symbol.chars().any(is_unsafe), "{symbol:?}");
            assert!(symbol.chars().count() <= 1, "piled up: {symbol:?}");
            assert_eq!(
                (cell.fg, cell.bg),
                (Color::Reset, Color::Reset),
                "colours were not wanted"
            );
            // The cell behind a wide character is not shown.
            if covered > 0 {
                covered -= 1;
                continue;
            }
            covered = symbol.width().saturating_sub(1);
            text.push_str(symbol);
        }
        shown.push(text.trim_end().to_owned());
    }
    (shown, state)
}

const APP: [&str; 2] = ["/srv/app/sessions.py", "/srv/app/table.py"];

#[test]
fn a_small_screen() {
    let (shown, _) = screen(&mut watch(APP), (80, 24), "", &header());
    assert_eq!(shown.len(), 24);
    assert_eq!(shown[0], "pyheap  PID 4242  Python 3.12.7  python app.py --serve");
    assert_eq!(
        shown[1],
        "attached 15:03:11 UTC, 1m ago  RSS 20.0 MiB → 21.0 MiB  stopped 15 µs"
    );
    assert!(
        shown[2].starts_with("live 700.0 KiB ± 0 B  ") && shown[2].ends_with("of 1 B  nothing lost"),
        "{}",
        shown[2]
    );
    assert!(
        shown[3].starts_with("leak: /srv/app/sessions.py:12 open_session grows by "),
        "{}",
        shown[3]
    );
    assert!(
        shown[4].starts_with("heap ") && shown[4].ends_with("█      700.0 KiB"),
        "{}",
        shown[4]
    );
    assert!(
        shown[5].starts_with("RSS ") && shown[5].ends_with("21.0 MiB"),
        "{}",
        shown[5]
    );
    assert_eq!(shown[6], "     ▾LIVE     ± 95 % GROWTH/MIN     ± 95 %   SITE");
    assert_eq!(
        shown[7],
        " 600.0 KiB        0 B +600.0 KiB        0 B ▸ …v/app/sessions.py:12 open_session"
    );
    assert!(
        shown[8].starts_with(" 100.0 KiB        0 B +100.0 KiB        0 B ▸ /srv/app/table.py:7 load"),
        "{}",
        shown[8]
    );
    assert!(
        shown[19].starts_with("…ns.py:12 open_session ── 600.0 KiB in 60 samples"),
        "{}",
        shown[19]
    );
    assert_eq!(shown[20], "   source of 12");
    assert!(shown[21].starts_with(" 600.0 KiB "), "{}", shown[21]);
    assert!(
        shown[23].starts_with("q quit  ? help  by line  o sort"),
        "{}",
        shown[23]
    );
}

#[test]
fn a_large_screen_has_all_columns_and_source_lines() {
    let (shown, _) = screen(&mut watch(APP), (200, 50), "", &header());
    let head = "     ▾LIVE     ± 95 % GROWTH/MIN     ± 95 %     OBJECTS     ALLOC/S   AGE   SITE";
    assert_eq!((shown.len(), shown[6].as_str()), (50, head));
    let row = " 600.0 KiB        0 B +600.0 KiB        0 B          60    10.0 KiB   30s ▸ /srv/app/sessions.py:12 open_session  │ source of 12";
    assert_eq!(shown[7], row);
}

#[test]
fn keys_change_what_is_shown() {
    let header = header();
    let show = |keys: &str| screen(&mut watch(APP), (80, 24), keys, &header).0;
    assert!(show("r")[7].contains("table.py"));
    assert_eq!(show("5")[6], "      LIVE     ± 95 %  ▾AGE   SITE");
    assert!(
        show("5")[7].contains("60s ▸ /srv/app/table.py:7 load"),
        "{}",
        show("5")[7]
    );
    assert_eq!(show("3")[6], "      LIVE     ± 95 %    ▾OBJECTS   SITE");
    let opened = show("\n");
    assert!(opened[7].contains("▾ …v/app/sess"), "{}", opened[7]);
    assert!(opened[8].contains("    /srv/app/main.py:40 main"), "{}", opened[8]);
    let filtered = show("/table\n");
    assert!(
        filtered[7].contains("table.py") && filtered[8].is_empty(),
        "{filtered:?}"
    );
    assert!(filtered[23].contains("filter “table”: 1 of 2"), "{}", filtered[23]);
    assert_eq!(show("/tab")[23], "filter: tab▏");
    assert!(show("/nowhere\n")[7].starts_with("no row has the text"));
    assert!(show("t")[7].contains("/srv/app/sessions.py open_session"));
    assert!(show("t")[6].ends_with("  FUNCTION"));
    assert!(show("?").iter().any(|line| line.contains("quit and detach")));
    assert!(show("v").iter().any(|line| line.contains("A MINUTE")));
    assert!(show("p")[0].ends_with("PAUSED"));
    let saved = Header {
        saving: "saving into run (s ends)".to_owned(),
        losses: "7 frees_missed".to_owned(),
        ..header.clone()
    };
    let shown = screen(&mut watch(APP), (80, 24), "", &saved).0;
    assert!(
        shown[23].contains("saving into run") && shown[2].ends_with("lost: 7 frees_missed"),
        "{shown:?}"
    );
}

fn type_row(name: &str, objects: f64) -> TypeRow {
    TypeRow {
        name: name.to_owned(),
        objects,
        objects_margin: objects / 10.0,
        bytes: objects * 64.0,
        bytes_margin: objects * 6.4,
        samples: 10,
    }
}

#[test]
fn types_of_the_selected_row() {
    let mut rows = vec![type_row("dict", 41_000.0), type_row("str", 300.0)];
    let show = |rows: &[TypeRow], width| screen_with(&mut watch(APP), (width, 24), "", &header(), rows).0;
    assert_eq!(show(&rows, 80)[21], "   dict ×41,000 ± 4,100, str ×300 ± 30");
    assert!(show(&rows, 80)[22].starts_with(" 600.0 KiB "));
    // Whatever there is, the line has one row; a long name is cut at its beginning, and none is obeyed.
    rows.push(type_row(&format!("\x1b[2J\u{301}{}Last", "package.".repeat(500)), 20.0));
    rows.extend((0..1000).map(|number| type_row(&format!("T{number}"), 10.0)));
    assert_eq!(
        show(&rows, 80)[21],
        "   dict ×41,000 ± 4,100, str ×300 ± 30, 1,001 more types"
    );
    let shown = &show(&rows, 120)[21];
    assert!(
        shown.contains(".package.Last ×20 ± 2, T0 ×10 ± 1, 999 more types"),
        "{shown}"
    );
    assert_eq!(show(&rows[..2], 30)[21], "   dict ×41,000 ± 4,100, 1 mo…");
    assert_eq!(
        show(&[type_row("\x1b[2J\u{301}", 1.0)], 80)[21],
        "   \\u{1b}[2J\\u{301} ×1 ± 0"
    );
}

#[test]
fn a_baseline_is_said_in_the_head() {
    let mut watch = watch(APP);
    watch.set_baseline(Duration::from_secs(59));
    let at = Duration::from_secs(59);
    watch.events(&[Event::Alloc {
        at,
        trace: 2,
        size: 2048,
        born: 59_000,
        domain: 0,
        thread: 0,
    }]);
    let (shown, _) = screen(&mut watch, (80, 24), "", &header());
    assert!(shown[6].starts_with("   ▾CHANGE"), "{}", shown[6]);
    assert!(
        shown[7].starts_with("  +2.0 KiB        0 B") && shown[7].contains("table.py"),
        "{}",
        shown[7]
    );
    assert!(shown[23].contains("baseline 1s ago"), "{}", shown[23]);
}

/// No size is a reason to panic, nor is any name; what is selected is visible.
#[test]
fn any_size_and_any_name() {
    let hostile = [
        "\x1b[2J\x1b]0;owned\x07\u{202e}evil\u{301}\u{301}\u{301}.py",
        "日本語の長いファイル名がここにある/とても長い/👩\u{200d}💻.py",
    ];
    let header = Header {
        command: "\x1b[31mred\u{301}\n漢字漢字漢字".to_owned(),
        python: "3\x1b[1m".to_owned(),
        losses: "\x1b[2J".to_owned(),
        saving: "\n\x07".to_owned(),
        ..header()
    };
    let mut watch = watch(hostile);
    for keys in ["", "\n", "?", "v", "5/x", "s", "ttt"] {
        for width in (0..40).chain([79, 80, 81, 99, 100, 101, 200]) {
            for height in [0, 1, 3, 4, 5, 9, 10, 15, 16, 24, 50] {
                if width > 0 && height > 0 {
                    screen(&mut watch, (width, height), keys, &header);
                }
            }
        }
    }
    let mut many = Watch::new(1, OwnCode::default(), None);
    for number in 0..300 {
        let at = Duration::from_secs(1);
        many.events(&[
            Event::Trace(vec![named("a.py", number + 1, "f")]),
            Event::Alloc {
                at,
                trace: number + 1,
                size: 1000 - u64::from(number),
                born: 0,
                domain: 0,
                thread: 0,
            },
        ]);
    }
    let (shown, state) = screen(&mut many, (80, 24), &"↓".repeat(150), &header);
    assert!(shown.iter().any(|line| line.contains("a.py:151 f")), "{shown:?}");
    assert_eq!(state.cursor, 150);
}
