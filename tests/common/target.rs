//! A Python program that is profiled, driven by the line protocol of `tests/targets/protocol.py`.

use super::interpreters::Interpreter;
use super::lines::Lines;
use super::{DEADLINE, target_script, until};
use serde_json::Value;
use std::io::Write as _;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

pub struct Target {
    child: Child,
    stdin: Option<ChildStdin>,
    pub out: Lines,
    pub err: Lines,
    pub pid: i32,
    /// What came with READY.
    pub facts: Value,
    pub name: String,
}

impl Target {
    /// Starts `tests/targets/SCRIPT` and waits for its READY.
    pub fn start(interpreter: &Interpreter, script: &str, args: &[&str]) -> Target {
        let mut command = Command::new(&interpreter.path);
        command.arg(target_script(script)).args(args);
        Target::start_command(command, &format!("{} {script} {}", interpreter.name, args.join(" ")))
    }

    pub fn start_command(mut command: Command, name: &str) -> Target {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env_remove("PYTHONMALLOC");
        // A program that was just written may still be open for writing in a child that another test forks, until that is another program.
        let mut child = until(&format!("{name}: its file is not busy"), DEADLINE, || {
            match command.spawn() {
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => None,
                other => Some(other.unwrap_or_else(|e| panic!("{name}: {e}"))),
            }
        });
        let mut target = Target {
            stdin: child.stdin.take(),
            out: Lines::new(name, child.stdout.take().expect("piped above")),
            err: Lines::new(name, child.stderr.take().expect("piped above")),
            pid: i32::try_from(child.id()).expect("pids are below 2^22"),
            child,
            facts: Value::Null,
            name: name.to_owned(),
        };
        target.facts = target.expect("READY");
        target
    }

    pub fn send(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("the target's input is open until exit()");
        if let Err(e) = stdin
            .write_all(format!("{command}\n").as_bytes())
            .and_then(|()| stdin.flush())
        {
            let state = self.child.try_wait();
            let said = self.stderr();
            panic!("{}: cannot send {command}: {e}; {state:?}; stderr:\n{said}", self.name);
        }
    }

    /// The object of the next line with this tag.
    pub fn expect(&mut self, tag: &str) -> Value {
        self.expect_within(tag, DEADLINE)
    }

    pub fn expect_within(&mut self, tag: &str, deadline: Duration) -> Value {
        let wanted = |line: &str| line.split(' ').next() == Some(tag);
        match self.out.wait_for(tag, deadline, wanted) {
            Ok(line) => match line.split_once(' ') {
                Some((_, json)) => serde_json::from_str(json).unwrap_or_else(|e| panic!("{}: {e}: {line}", self.name)),
                None => Value::Null,
            },
            Err(e) => {
                let said = self.stderr();
                panic!("{e}\nstate: {:?}\nstderr:\n{said}", self.child.try_wait())
            }
        }
    }

    pub fn ask(&mut self, command: &str, tag: &str) -> Value {
        self.send(command);
        self.expect(tag)
    }

    pub fn stderr(&mut self) -> String {
        self.err.poll();
        self.err.text()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Waits for the end that the target chose by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        until(&format!("{}: end", self.name), DEADLINE, || {
            child.try_wait().expect("our own child")
        })
    }

    /// Asks for the end, and checks that it is an orderly one with nothing on stderr.
    pub fn exit_cleanly(mut self) {
        self.send("EXIT");
        self.stdin = None;
        let status = self.wait();
        let err = self.err.all(Duration::from_secs(5));
        let noise = |line: &&str| !line.contains("DeprecationWarning") && !line.trim().starts_with("pid = os.fork()");
        let err: Vec<&str> = err.lines().filter(noise).collect();
        assert!(
            status.success() && err.is_empty(),
            "{}: {status}; stderr: {err:?}",
            self.name
        );
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
