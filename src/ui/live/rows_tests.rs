use super::*;
use crate::collect::resolve::Event;
use crate::report::leaks::OwnCode;
use std::time::Duration;

fn frame(file: &str, line: u32, function: &str) -> NamedFrame {
    NamedFrame {
        file: file.into(),
        line,
        function: function.into(),
    }
}

/// Two lines of one function, the first with two callers; one line of another file. 600, 300, 50 and 7 bytes.
fn watch() -> Watch {
    let mut watch = Watch::new(1, OwnCode::default(), None);
    let main = frame("main.py", 9, "main");
    let parse = |line| frame("lib/parse.py", line, "parse");
    let stacks = [
        (vec![parse(1), frame("main.py", 5, "load"), main.clone()], 600),
        (vec![parse(1), frame("main.py", 6, "reload"), main.clone()], 300),
        (vec![parse(2), main.clone()], 50),
        (vec![main], 7),
    ];
    for (number, (frames, size)) in stacks.into_iter().enumerate() {
        let trace = number as u32 + 1;
        let at = Duration::from_secs(number as u64);
        let born = 1000 * number as u64;
        watch.events(&[
            Event::Trace(frames),
            Event::Alloc {
                at,
                trace,
                size,
                born,
                domain: 0,
                thread: 0,
            },
        ]);
    }
    watch
}

fn show(choice: &Choice) -> Vec<String> {
    let watch = watch();
    let picture = watch.picture(Duration::from_secs(10));
    let lines = lines(&picture, choice, &watch);
    let text = |line: &Line| format!("{}{} {}", " ".repeat(line.level), line.amount.live.bytes, line.label);
    lines.lines.iter().map(text).collect()
}

#[test]
fn groups() {
    let by = |group| {
        show(&Choice {
            group,
            ..Choice::default()
        })
    };
    assert_eq!(
        by(Group::Line),
        [
            "900 lib/parse.py:1 parse",
            "50 lib/parse.py:2 parse",
            "7 main.py:9 main"
        ]
    );
    assert_eq!(by(Group::Function), ["950 lib/parse.py parse", "7 main.py main"]);
    assert_eq!(by(Group::File), ["950 lib/parse.py", "7 main.py"]);
    assert_eq!(by(Group::Thread), ["957 <thread not known>"]);
}

#[test]
fn order_and_filter() {
    let mut choice = Choice {
        is_reverse: true,
        ..Choice::default()
    };
    assert_eq!(show(&choice)[0], "7 main.py:9 main");
    choice.sort = Column::Age;
    // The last one that was allocated is the youngest.
    assert_eq!(show(&choice)[0], "7 main.py:9 main");
    choice.is_reverse = false;
    assert_eq!(show(&choice)[0], "900 lib/parse.py:1 parse");
    choice.filter = "MAIN".to_owned();
    assert_eq!(show(&choice), ["7 main.py:9 main"]);
    let watch = watch();
    let found = lines(&watch.picture(Duration::from_secs(10)), &choice, &watch);
    assert_eq!((found.rows, found.all_rows), (1, 3));
}

#[test]
fn callers_below_a_line() {
    let watch = watch();
    let picture = watch.picture(Duration::from_secs(10));
    let mut choice = Choice::default();
    let row = lines(&picture, &choice, &watch).lines[0].clone();
    assert!(row.has_callers && !row.is_open);
    choice.opened.insert(row.key);
    assert_eq!(
        show(&choice)[..4],
        [
            "900 lib/parse.py:1 parse",
            " 600 main.py:5 load",
            " 300 main.py:6 reload",
            "50 lib/parse.py:2 parse"
        ]
    );
    let opened = lines(&picture, &choice, &watch).lines;
    assert!(opened[0].is_open && opened[1].has_callers);
    choice.opened.insert(opened[2].key);
    assert_eq!(show(&choice)[3], "  300 main.py:9 main");
    // The same line is not open elsewhere.
    assert_eq!(
        show(&choice).iter().filter(|line| line.contains("main.py:9")).count(),
        2
    );
    // By file, the lines themselves are one level down; an only caller is opened by itself.
    let mut choice = Choice {
        group: Group::File,
        ..Choice::default()
    };
    let rows = lines(&picture, &choice, &watch).lines;
    choice.opened.insert(rows[1].key);
    assert_eq!(show(&choice), ["950 lib/parse.py", "7 main.py", " 7 main.py:9 main"]);
    choice.opened.insert(rows[0].key);
    assert_eq!(
        show(&choice)[1..3],
        [" 900 lib/parse.py:1 parse", " 50 lib/parse.py:2 parse"]
    );
}

#[test]
fn a_line_with_very_many_callers_says_how_many_more() {
    let mut watch = Watch::new(1, OwnCode::default(), None);
    for number in 0..5000_u32 {
        let at = Duration::ZERO;
        watch.events(&[
            Event::Trace(vec![frame("a.py", 1, "a"), frame("b.py", number, "b")]),
            Event::Alloc {
                at,
                trace: number + 1,
                size: u64::from(number) + 1,
                born: 0,
                domain: 0,
                thread: 0,
            },
        ]);
    }
    let picture = watch.picture(Duration::from_secs(1));
    let mut choice = Choice::default();
    choice.opened.insert(lines(&picture, &choice, &watch).lines[0].key);
    let found = lines(&picture, &choice, &watch).lines;
    assert_eq!(found.len(), 1 + MAX_CALLERS + 2);
    assert_eq!(found[1].label, "b.py:4999 b");
    assert_eq!(found[MAX_CALLERS + 1].label, "(1980 further stacks)");
    assert_eq!(found[MAX_CALLERS + 2].label, "(3000 further stacks)");
    let below: f64 = found[1..].iter().map(|line| line.amount.live.bytes).sum();
    assert_eq!(below, found[0].amount.live.bytes);
}
