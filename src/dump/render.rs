//! A dump for people. Names of the target are shown without control characters.

use super::native::Native;
use super::{Dump, Mode, OtherThread, ThreadDump};
use crate::report::human::clean;
use std::fmt::Write;

/// The whole dump as text.
#[must_use]
pub fn render(dump: &Dump) -> String {
    let threads: usize = dump
        .interpreters
        .iter()
        .map(|interpreter| interpreter.threads.len())
        .sum();
    let mut text = format!(
        "process {}: {}\nPython {}, {threads} Python thread{}, {}\n",
        dump.pid,
        clean(&dump.command),
        dump.python,
        if threads == 1 { "" } else { "s" },
        how(dump),
    );
    for interpreter in &dump.interpreters {
        if dump.interpreters.len() > 1 {
            let _ = write!(text, "\ninterpreter {}\n", interpreter.id);
        }
        for thread in &interpreter.threads {
            add_thread(&mut text, thread);
        }
        if let Some(why) = interpreter.incomplete {
            let _ = write!(text, "\nthere may be more threads: {why}\n");
        }
    }
    if !dump.other_threads.is_empty() {
        text += "\nwithout Python:\n";
        for thread in &dump.other_threads {
            let _ = writeln!(text, "    {}", other(thread));
        }
    }
    text
}

fn how(dump: &Dump) -> String {
    match dump.mode {
        Mode::Core => "from a core file".to_owned(),
        Mode::Nonblocking if dump.consistent => "read while it ran".to_owned(),
        Mode::Nonblocking => "read while it ran; what may be torn is marked".to_owned(),
        Mode::Stopped if !dump.consistent => {
            "some threads could not be kept from running; what may be torn is marked".to_owned()
        }
        Mode::Stopped if dump.stopped_threads == 0 => "none had to be stopped".to_owned(),
        Mode::Stopped => format!(
            "{} stopped for {:.1} ms",
            dump.stopped_threads,
            dump.stopped_seconds * 1e3
        ),
    }
}

/// `thread 4243 "worker-1", holds the GIL, running`
fn add_thread(text: &mut String, thread: &ThreadDump) {
    let number = thread
        .tid
        .map_or_else(|| format!("{:#x}", thread.ident), |tid| tid.to_string());
    let _ = write!(text, "\nthread {number}");
    if let Some(name) = thread.name.as_ref().or(thread.os_name.as_ref()) {
        let _ = write!(text, " \"{}\"", clean(name));
    }
    if thread.second_state {
        *text += ", a second state of that thread";
    }
    if thread.holds_gil {
        *text += ", holds the GIL";
    }
    match (&thread.system_call, thread.state) {
        (Some(call), _) if thread.waits_for_gil => {
            let _ = write!(text, ", waits for the GIL ({call})");
        }
        (Some(call), _) => {
            let _ = write!(text, ", in {call}");
        }
        (None, Some(state)) => {
            let _ = write!(text, ", {state}");
        }
        (None, None) => {}
    }
    if thread.may_be_torn {
        *text += " (ran meanwhile: may be torn)";
    }
    text.push('\n');
    if let Some(remark) = remark(thread.native.as_ref(), thread.system_call.as_deref()) {
        let _ = writeln!(text, "    C: {}", clean(&remark));
    }
    for (number, frame) in thread.frames.iter().enumerate() {
        if let Some(omitted) = thread.omitted.filter(|omitted| omitted.after == number) {
            let _ = writeln!(text, "    … {} frames are left out", omitted.frames);
        }
        let _ = writeln!(
            text,
            "    {} ({}:{})",
            clean(&frame.function),
            clean(&frame.file),
            frame.line
        );
    }
    if let Some(why) = thread.incomplete {
        let _ = writeln!(text, "    … {why}");
    } else if thread.frames.is_empty() {
        *text += "    no Python frames\n";
    }
}

fn remark(native: Option<&Native>, system_call: Option<&str>) -> Option<String> {
    native?.remark(system_call)
}

fn other(thread: &OtherThread) -> String {
    let name = thread
        .os_name
        .as_ref()
        .map_or_else(String::new, |name| format!(" \"{}\"", clean(name)));
    let what = thread.system_call.as_ref().map(|call| format!("in {call}"));
    let what = what.or_else(|| thread.state.map(str::to_owned));
    let remark = remark(thread.native.as_ref(), thread.system_call.as_deref());
    let remark = remark.map_or_else(String::new, |remark| format!(", {}", clean(&remark)));
    format!(
        "thread {}{name}{}{remark}",
        thread.tid,
        what.map_or_else(String::new, |what| format!(", {what}"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::walk::Frame;
    use crate::dump::{InterpreterDump, Omitted};

    fn thread() -> ThreadDump {
        let frame = |function: &str, line| Frame {
            function: function.to_owned(),
            file: "a\u{1b}.py".to_owned(),
            line,
        };
        ThreadDump {
            tid: Some(43),
            ident: 0x7f00,
            name: Some("worker".to_owned()),
            os_name: Some("python".to_owned()),
            holds_gil: false,
            waits_for_gil: true,
            state: Some("sleeping"),
            system_call: Some("futex".to_owned()),
            native: Some(Native {
                function: Some("sem_wait".to_owned()),
                library: "libc.so.6".to_owned(),
            }),
            second_state: false,
            may_be_torn: true,
            incomplete: None,
            frames: vec![frame("f", 7), frame("<module>", 9)],
            omitted: Some(Omitted { after: 1, frames: 5 }),
        }
    }

    #[test]
    fn a_dump_as_text() {
        let main = ThreadDump {
            tid: None,
            name: None,
            os_name: None,
            holds_gil: true,
            waits_for_gil: false,
            state: Some("running"),
            system_call: None,
            native: None,
            may_be_torn: false,
            frames: Vec::new(),
            omitted: None,
            ..thread()
        };
        let dump = Dump {
            pid: 42,
            command: "python a.py".to_owned(),
            python: "3.12.1".to_owned(),
            mode: Mode::Stopped,
            consistent: true,
            stopped_seconds: 0.0004,
            stopped_threads: 1,
            interpreters: vec![InterpreterDump {
                id: 0,
                incomplete: None,
                threads: vec![main, thread()],
            }],
            other_threads: vec![OtherThread {
                tid: 44,
                os_name: Some("jemalloc".to_owned()),
                state: Some("sleeping"),
                system_call: None,
                native: None,
            }],
        };
        let expected = "process 42: python a.py
Python 3.12.1, 2 Python threads, 1 stopped for 0.4 ms

thread 0x7f00, holds the GIL, running
    no Python frames

thread 43 \"worker\", waits for the GIL (futex) (ran meanwhile: may be torn)
    C: sem_wait in libc.so.6
    f (a?.py:7)
    … 5 frames are left out
    <module> (a?.py:9)

without Python:
    thread 44 \"jemalloc\", sleeping
";
        let text = render(&dump);
        let shown = clean("a\u{1b}.py").into_owned();
        assert_eq!(text, expected.replace("a?.py", &shown));
        assert!(!text.contains('\u{1b}'));
    }
}
