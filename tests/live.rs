//! The live view of `pyheap attach`, driven in a terminal as a user drives it: keys go in by tmux, what is read is the screen.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::Picture;
use crate::common::pyheap::{self, binary, start};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, scratch, skip, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A new session on a busy machine may get no processor for a long time.
const PATIENCE: Duration = Duration::from_secs(120);

/// A terminal of its own.
struct Pane {
    server: String,
}

impl Pane {
    /// Runs `command` (words for a shell) in a terminal of this size; what it has shown can be read after its end.
    fn open(directory: &Path, (width, height): (u32, u32), command: &str) -> Pane {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let pane = Pane {
            server: format!("pyheap-test-{}-{number}", std::process::id()),
        };
        let config = directory.join("tmux.conf");
        std::fs::write(
            &config,
            "set -g remain-on-exit on\nset -g status off\nset -s escape-time 0\n",
        )
        .unwrap();
        let config = config.to_str().unwrap();
        let (width, height) = (width.to_string(), height.to_string());
        let mut words = vec![
            "-u",
            "-f",
            config,
            "new-session",
            "-d",
            "-s",
            "t",
            "-x",
            &width,
            "-y",
            &height,
            "-c",
        ];
        words.extend([directory.to_str().unwrap(), command]);
        pane.tmux(&words);
        pane
    }

    fn tmux(&self, words: &[&str]) -> String {
        let out = Command::new("tmux")
            .args(["-L", &self.server])
            .args(words)
            .env_remove("TMUX")
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "tmux {words:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Types keys, by their tmux names.
    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys", "-t", "t"], keys].concat());
    }

    /// Types a text as it is.
    fn text(&self, text: &str) {
        self.tmux(&["send-keys", "-t", "t", "-l", text]);
    }

    fn screen(&self) -> Vec<String> {
        self.tmux(&["capture-pane", "-p", "-t", "t"])
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// A format of tmux, such as `#{pane_pid}`.
    fn ask(&self, format: &str) -> String {
        self.tmux(&["display-message", "-p", "-t", "t", format])
            .trim()
            .to_owned()
    }

    /// The first screen on which `wanted` is true.
    #[track_caller]
    fn wait(&self, what: &str, mut wanted: impl FnMut(&[String]) -> bool) -> Vec<String> {
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            assert!(std::time::Instant::now() < end, "no {what}:\n{}", screen.join("\n"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits for a text.
    #[track_caller]
    fn wait_text(&self, text: &str) -> Vec<String> {
        self.wait(text, |screen| screen.iter().any(|line| line.contains(text)))
    }

    /// The pid of the program in it.
    fn pid(&self) -> i32 {
        self.ask("#{pane_pid}").parse().unwrap()
    }

    /// Waits for the program's end with this code (it was opened by [`then_code`]), and sees that it has left the terminal as it was.
    #[track_caller]
    fn wait_end(&self, code: u32) {
        self.wait_text(&format!("code {code}."));
        assert_eq!(self.ask("#{alternate_on} #{cursor_flag}"), "0 1");
    }
}

impl Drop for Pane {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.server, "kill-server"]).output();
    }
}

/// tmux and an interpreter, or the reason why not.
fn ready(test: &str) -> Option<Interpreter> {
    let python = interpreters::any();
    match &python {
        None => common::skipped(test, "no CPython found"),
        Some(_) if !have("tmux") => common::skipped(test, "no tmux"),
        Some(_) => return python,
    }
    None
}

/// `pyheap attach` of a process, every allocation recorded.
fn attach(pid: i32) -> String {
    format!("exec {} attach {pid} --period 1 --interval 200ms", binary())
}

/// The same, with the exit code said after it.
fn then_code(command: &str) -> String {
    format!("{}; echo code $?.; sleep 600", command.replace("exec ", ""))
}

/// The number of the table's line that ends with `live.py:LINE FUNCTION`, source line or not.
fn row(screen: &[String], truth: &Value, function: &str) -> Option<usize> {
    let name = format!("live.py:{} {function}", truth[function]["line"]);
    let head = screen.iter().position(|line| line.contains("SITE"))?;
    let is_row = |line: &String| line.contains(&name) && !line.contains(" ── ");
    screen.iter().skip(head).position(is_row).map(|place| place + head)
}

/// Whether one function stands above another.
fn is_above(screen: &[String], truth: &Value, first: &str, second: &str) -> bool {
    match (row(screen, truth, first), row(screen, truth, second)) {
        (Some(first), Some(second)) => first < second,
        _ => false,
    }
}

fn live_bytes(report: &Value, function: &str) -> f64 {
    let sites = report["sites"]
        .as_array()
        .or(report["rows"].as_array())
        .expect("a list of sites");
    let has_name = |site: &&Value| site["function"] == function || site["site"]["function"] == function;
    let bytes = sites
        .iter()
        .filter(has_name)
        .map(|site| site["live_bytes"].as_f64().expect("a number"));
    bytes.sum()
}

/// What is not memory that the target has allocated itself must be as it was.
fn assert_clean(before: &Picture, target: &Target) {
    let pid = target.pid.to_string();
    let info = pyheap::run(["info", &pid]).stdout;
    let after = Picture::of(target.pid);
    let code = |picture: &Picture| -> Vec<String> {
        let maps = picture.maps.iter();
        maps.filter(|line| line.contains("x"))
            .filter(|line| line.contains("xp "))
            .cloned()
            .collect()
    };
    let differences: Vec<_> = before
        .differences(&after, &info)
        .into_iter()
        .filter(|line| !line.starts_with("maps"))
        .collect();
    assert!(differences.is_empty(), "{differences:?}");
    let left: Vec<_> = code(&after)
        .into_iter()
        .filter(|line| !code(before).contains(line))
        .collect();
    let is_told = |line: &String| info.contains(line.split('-').next().unwrap_or("?"));
    assert!(left.iter().all(is_told), "{left:?}");
}

fn walk(test: &str, size: (u32, u32)) {
    let Some(python) = ready(test) else { return };
    let directory = scratch();
    let mut target = Target::start(&python, "live.py", &[]);
    let before = Picture::of(target.pid);
    let pane = Pane::open(directory.path(), size, &then_code(&attach(target.pid)));
    let first = pane.wait_text("q quit");
    assert!(
        first[0].starts_with(&format!("pyheap  PID {}  Python ", target.pid)),
        "{first:?}"
    );
    assert_eq!(first.len(), size.1 as usize);

    // Sort.
    let truth = target.ask("GO", "TRUTH");
    pane.wait("big above many", |screen| is_above(screen, &truth, "big", "many"));
    pane.keys(&["3"]);
    pane.wait("▾OBJECTS", |screen| {
        screen.iter().any(|line| line.contains("▾OBJECTS")) && is_above(screen, &truth, "many", "big")
    });
    pane.keys(&["1"]);
    pane.wait("big above many again", |screen| is_above(screen, &truth, "big", "many"));

    // Filter, expand.
    pane.text("/many");
    pane.wait_text("filter: many▏");
    pane.keys(&["Enter"]);
    pane.wait("rows of many only", |screen| {
        row(screen, &truth, "big").is_none() && row(screen, &truth, "many").is_some()
    });
    pane.keys(&["Enter"]);
    let opened = pane.wait_text(" first_caller");
    assert!(opened.iter().any(|line| line.contains(" second_caller")), "{opened:?}");
    if size.0 >= 200 {
        pane.wait_text("│ many(2000)");
    }
    pane.wait_text("   bytes ×3,000 ± 0");
    pane.keys(&["Escape"]);
    pane.wait("all rows", |screen| row(screen, &truth, "big").is_some());

    // Threads.
    // The program does not import threading, so that the thread has the name that the kernel knows.
    let main = format!(" ({})", target.pid);
    pane.keys(&["t", "t", "t"]);
    pane.wait("the main thread", |screen| {
        screen.iter().any(|line| line.ends_with("  THREAD")) && screen.iter().any(|line| line.contains(&main))
    });
    pane.keys(&["t"]);
    pane.wait("lines again", |screen| row(screen, &truth, "big").is_some());

    // Baseline, pause.
    pane.keys(&["b"]);
    pane.wait_text("▾CHANGE");
    let more = target.ask("MORE", "TRUTH");
    let screen = pane.wait("later first", |screen| is_above(screen, &more, "later", "big"));
    let line = &screen[row(&screen, &more, "later").unwrap()];
    assert!(line.trim_start().starts_with("+488.6 KiB"), "{line}");
    pane.keys(&["B", "p"]);
    pane.wait("LIVE, paused", |screen| {
        screen[0].ends_with("PAUSED") && screen.iter().any(|line| line.contains("▾LIVE"))
    });
    pane.keys(&["p"]);
    pane.wait("no PAUSED", |screen| !screen[0].ends_with("PAUSED"));

    // Save.
    pane.keys(&["s"]);
    pane.wait_text("save from now on as: pyheap-");
    pane.keys(&["C-u"]);
    pane.text("kept");
    pane.wait_text("save from now on as: kept▏");
    pane.keys(&["Enter"]);
    pane.wait_text("saving into kept");
    let truth = target.ask("MORE", "TRUTH");
    let wanted = format!("{} ", truth["later"]["objects"]);
    assert_eq!(wanted, "20 ");
    pane.wait("all of later", |screen| {
        row(screen, &truth, "later").is_some_and(|place| screen[place].trim_start().starts_with("977.2 KiB"))
    });
    pane.keys(&["s"]);
    pane.wait_text("saved kept");

    // Help, another size.
    pane.keys(&["?"]);
    pane.wait_text("Every number is an estimate");
    pane.keys(&["Escape"]);
    pane.wait_text("q quit");
    pane.tmux(&["resize-window", "-t", "t", "-x", "60", "-y", "15"]);
    pane.wait("the smaller screen", |screen| {
        screen.len() == 15 && screen[0].starts_with("pyheap  PID") && screen[14].starts_with("q quit")
    });
    pane.tmux(&[
        "resize-window",
        "-t",
        "t",
        "-x",
        &size.0.to_string(),
        "-y",
        &size.1.to_string(),
    ]);
    pane.wait("the larger screen", |screen| {
        screen.len() == size.1 as usize && screen.last().is_some_and(|line| line.starts_with("q quit"))
    });

    // Quit.
    pane.keys(&["q"]);
    pane.wait_text(&format!("detached from PID {} after ", target.pid));
    pane.wait_text("saved kept; look at it with");
    pane.wait_end(0);
    assert_clean(&before, &target);
    target.exit_cleanly();
    let base = directory.path().join("kept");
    let top = pyheap::run(["top", base.to_str().unwrap(), "--json"])
        .expect_code(0)
        .stdout;
    let top: Value = serde_json::from_str(&top).unwrap();
    for function in ["big", "many", "later"] {
        assert_eq!(
            live_bytes(&top, function),
            truth[function]["bytes"].as_f64().unwrap(),
            "{function}: {top}"
        );
    }
}

#[test]
fn keys_at_80_by_24() {
    walk("keys_at_80_by_24", (80, 24));
}

#[test]
fn keys_at_200_by_50() {
    walk("keys_at_200_by_50", (200, 50));
}

/// All of the process as it was, with what pyheap itself says is left.
fn wait_until_clean(before: &Picture, target: &Target) {
    let pid = target.pid.to_string();
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let info = pyheap::run(["info", &pid]).stdout;
        let differences = before.differences(&Picture::of(target.pid), &info);
        if differences.is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < end, "{differences:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_terminal_that_goes_leaves_nothing_behind() {
    const TEST: &str = "a_terminal_that_goes_leaves_nothing_behind";
    let Some(python) = ready(TEST) else { return };
    let directory = scratch();
    let target = Target::start(&python, "live.py", &[]);
    let before = Picture::of(target.pid);
    let pane = Pane::open(directory.path(), (80, 24), &attach(target.pid));
    pane.wait_text("q quit");
    let viewer = pane.pid();
    pane.tmux(&["kill-session", "-t", "t"]);
    until("the end of pyheap", PATIENCE, || {
        (!Path::new(&format!("/proc/{viewer}")).exists()).then_some(())
    });
    wait_until_clean(&before, &target);
    target.exit_cleanly();
}

#[test]
fn a_killed_view_is_cured_as_any_other() {
    const TEST: &str = "a_killed_view_is_cured_as_any_other";
    let Some(python) = ready(TEST) else { return };
    let directory = scratch();
    let target = Target::start(&python, "live.py", &[]);
    let before = Picture::of(target.pid);
    let pane = Pane::open(directory.path(), (80, 24), &attach(target.pid));
    pane.wait_text("q quit");
    kill(Pid::from_raw(pane.pid()), Signal::SIGKILL).unwrap();
    until("the end of the program", PATIENCE, || {
        (pane.ask("#{pane_dead}") == "1").then_some(())
    });
    pyheap::run(["cure", &target.pid.to_string()]).expect_code(0);
    wait_until_clean(&before, &target);
    target.exit_cleanly();
}

/// What the next test runs in a terminal.
#[test]
#[ignore = "panics, for a_panic_gives_the_terminal_back"]
fn panics_in_a_terminal() {
    use ::pyheap::ui::live::terminal::Terminal;
    let mut terminal = Terminal::open(&std::sync::Arc::default()).expect("this runs in a terminal");
    terminal
        .draw(|frame| frame.render_widget("drawn", frame.area()))
        .unwrap();
    panic!("on purpose");
}

#[test]
fn a_panic_gives_the_terminal_back() {
    const TEST: &str = "a_panic_gives_the_terminal_back";
    if !have("tmux") {
        skip!(TEST, "no tmux");
    }
    let directory = scratch();
    let this = std::env::current_exe().unwrap();
    let run = format!(
        "{} --exact live::panics_in_a_terminal --ignored --nocapture; stty -a; sleep 600",
        this.display()
    );
    let pane = Pane::open(directory.path(), (120, 40), &run);
    let screen = pane.wait("the terminal's settings", |screen| {
        screen.iter().any(|line| line.contains("icanon"))
    });
    let screen = screen.join("\n");
    assert!(screen.contains("on purpose"), "{screen}");
    for setting in [" icanon", " echo ", "isig", "opost"] {
        assert!(
            screen.contains(setting) && !screen.contains(&format!("-{} ", setting.trim())),
            "{setting}: {screen}"
        );
    }
    assert_eq!(pane.ask("#{alternate_on} #{cursor_flag}"), "0 1");
}

#[test]
fn suspended_continued_and_terminated() {
    const TEST: &str = "suspended_continued_and_terminated";
    let Some(python) = ready(TEST) else { return };
    if !have("bash") {
        skip!(TEST, "no bash");
    }
    let directory = scratch();
    let target = Target::start(&python, "live.py", &[]);
    let before = Picture::of(target.pid);
    // A shell with job control, which says the number of what it has started.
    let pane = Pane::open(directory.path(), (80, 24), "PS1='$ ' exec bash --norc --noprofile -i");
    pane.wait("a prompt", |screen| screen.iter().any(|line| line.starts_with('$')));
    pane.text(&attach(target.pid).replace("exec ", ""));
    pane.keys(&["Enter"]);
    pane.wait_text("q quit");
    pane.keys(&["C-z"]);
    pane.wait("suspended", |screen| {
        let screen = screen.join("");
        screen.contains("pyheap is suspended") && screen.contains("Stopped")
    });
    assert_eq!(pane.ask("#{alternate_on} #{cursor_flag}"), "0 1");
    pane.text("fg");
    pane.keys(&["Enter"]);
    pane.wait("the view again", |screen| {
        screen[0].starts_with("pyheap  PID") && pane.ask("#{alternate_on}") == "1"
    });
    let shell = pane.pid();
    let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).unwrap();
    let viewer: i32 = children.split_whitespace().next().unwrap().parse().unwrap();
    kill(Pid::from_raw(viewer), Signal::SIGTERM).unwrap();
    pane.wait_text(&format!("detached from PID {} after ", target.pid));
    until("the screen given back", PATIENCE, || {
        (pane.ask("#{alternate_on} #{cursor_flag}") == "0 1").then_some(())
    });
    // The terminal echoes and obeys as before.
    pane.text("echo still $((6*7))");
    pane.keys(&["Enter"]);
    pane.wait("nothing of the view beside it", |screen| {
        let screen = screen.join("\n");
        screen.contains("still 42") && !screen.contains("live.py:")
    });
    wait_until_clean(&before, &target);
    target.exit_cleanly();
}

#[test]
fn lines_of_json_where_there_is_no_terminal() {
    const TEST: &str = "lines_of_json_where_there_is_no_terminal";
    let Some(python) = interpreters::any() else {
        skip!(TEST, "no CPython found")
    };
    let mut target = Target::start(&python, "live.py", &[]);
    let pid = target.pid.to_string();
    let mut view = start([
        "attach",
        &pid,
        "--json",
        "--period",
        "1",
        "--interval",
        "100ms",
        "--rows",
        "5",
    ]);
    // A line comes when the hooks are in place.
    view.out
        .wait_for("a first line", DEADLINE, |line| line.starts_with('{'))
        .unwrap();
    let truth = target.ask("GO", "TRUTH");
    let has_all = |line: &str| {
        let Ok(line) = serde_json::from_str::<Value>(line) else {
            return false;
        };
        ["big", "many"]
            .iter()
            .all(|function| live_bytes(&line, function) == truth[*function]["bytes"].as_f64().unwrap())
    };
    let line = view
        .out
        .wait_for("a line with all of it", DEADLINE, has_all)
        .unwrap_or_else(|e| panic!("{e}"));
    let line: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        (&line["pid"], &line["period_bytes"], &line["losses"]),
        (&target.pid.into(), &1.into(), &serde_json::json!({}))
    );
    assert!(line["sites"].as_array().unwrap().len() <= 5);
    assert!(line["leaks"].is_array(), "{line}");
    let site = &line["sites"][0];
    assert_eq!(
        (&site["function"], &site["line"], &site["live_bytes_margin"]),
        (&"big".into(), &truth["big"]["line"], &0.0.into())
    );
    let end = view.interrupt();
    assert!(end.stderr.contains("detached from PID"), "{}", end.stderr);
    assert!(
        end.stdout
            .lines()
            .all(|line| serde_json::from_str::<Value>(line).is_ok()),
        "{}",
        end.stdout
    );

    // Quiet: one line each time, and nothing else but who did what to whom.
    let end = pyheap::run(["attach", &pid, "--quiet", "--interval", "100ms", "--duration", "300ms"]).expect_code(0);
    assert!(
        end.stdout.lines().count() >= 1 && end.stdout.lines().all(|line| line.starts_with("live since")),
        "{end:?}"
    );
    assert!(
        end.stderr.lines().all(|line| line.starts_with("audit: ")),
        "{}",
        end.stderr
    );
    // In a file, if there is to be one.
    let dir = common::scratch();
    let audit = dir.path().join("audit");
    let file = audit.to_str().expect("UTF-8");
    let end = pyheap::run(["attach", &pid, "--quiet", "--duration", "300ms", "--audit", file]).expect_code(0);
    let noted = std::fs::read_to_string(&audit).expect("it was written");
    let is_of_us = |line: &str| line.contains(&format!("\"pid\":{pid}"));
    assert!(noted.lines().count() == 2 && noted.lines().all(is_of_us), "{noted}");
    assert!(!end.stderr.contains("audit: "), "{}", end.stderr);
    target.exit_cleanly();
}
