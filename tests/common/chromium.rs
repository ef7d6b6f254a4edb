//! A real browser without a window, driven through its debugging pipe.

use super::{DEADLINE, have};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A browser takes its time to start on a loaded machine.
const LONG: Duration = Duration::from_secs(120);

/// The name of the browser, if there is one.
pub fn browser() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| have(name))
}

/// A running browser with one page.
pub struct Chromium {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    /// What has happened in the page since it was opened.
    pub events: Vec<Value>,
    session: Option<String>,
    last: u64,
    _home: tempfile::TempDir,
}

impl Chromium {
    /// Starts it.
    pub fn start(browser: &str) -> Chromium {
        let home = super::scratch();
        let mut flags = vec![
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ];
        flags.extend([
            "--disable-background-networking",
            "--disable-extensions",
            "--remote-debugging-pipe",
        ]);
        if super::is_root() {
            flags.push("--no-sandbox");
        }
        // It reads commands from descriptor 3 and answers on 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh", browser])
            .args(flags)
            .arg(format!("--user-data-dir={}", home.path().display()))
            .arg("about:blank")
            .env("HOME", home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh runs");
        let (sender, from) = channel();
        let mut pipe = BufReader::new(child.stdout.take().expect("piped above"));
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while pipe.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                if serde_json::from_slice(&message).is_ok_and(|value: Value| sender.send(value).is_err()) {
                    return;
                }
                message.clear();
            }
        });
        let mut chromium = Chromium {
            to: child.stdin.take().expect("piped above"),
            child,
            from,
            events: Vec::new(),
            session: None,
            last: 0,
            _home: home,
        };
        chromium.attach();
        chromium
    }

    fn attach(&mut self) {
        let end = Instant::now() + LONG;
        let page = loop {
            let targets = self.call("Target.getTargets", json!({}));
            let targets = targets["targetInfos"].as_array().expect("a list").clone();
            if let Some(page) = targets.into_iter().find(|target| target["type"] == "page") {
                break page;
            }
            assert!(Instant::now() < end, "the browser has no page");
            std::thread::sleep(Duration::from_millis(20));
        };
        let attached = self.call(
            "Target.attachToTarget",
            json!({"targetId": page["targetId"], "flatten": true}),
        );
        self.session = Some(attached["sessionId"].as_str().expect("a name").to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
    }

    /// One command; its answer.
    #[track_caller]
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = Value::from(session.as_str());
        }
        let mut text = message.to_string().into_bytes();
        text.push(0);
        self.to
            .write_all(&text)
            .and_then(|()| self.to.flush())
            .expect("the browser listens");
        let end = Instant::now() + LONG;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let answer = self.from.recv_timeout(left).unwrap_or_else(|e| panic!("{method}: {e}"));
            if answer["id"] == self.last {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let answer = self.call(
            "Runtime.evaluate",
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true}),
        );
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub fn wait(&mut self, expression: &str) {
        let end = Instant::now() + DEADLINE;
        while self.eval(expression) != Value::Bool(true) {
            assert!(Instant::now() < end, "never: {expression}; {:#?}", self.problems());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Opens a file and waits until its script is through.
    #[track_caller]
    pub fn open(&mut self, path: &Path) {
        self.events.clear();
        self.call("Page.navigate", json!({"url": format!("file://{}", path.display())}));
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'");
        self.wait("Boolean(document.body.dataset.ready)");
    }

    /// Presses a key.
    pub fn key(&mut self, key: &str) {
        // A letter is typed as well, and Enter presses buttons.
        let text = match key {
            "Enter" => "\r",
            _ if key.chars().count() == 1 => key,
            _ => "",
        };
        let down = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        let code = match key {
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            "Enter" => 13,
            "Escape" => 27,
            "Tab" => 9,
            "Home" => 36,
            "End" => 35,
            "Backspace" => 8,
            _ => 0,
        };
        for kind in [down, "keyUp"] {
            self.call(
                "Input.dispatchKeyEvent",
                json!({"type": kind, "key": key, "code": key, "text": text, "windowsVirtualKeyCode": code}),
            );
        }
    }

    /// Moves, presses or releases the pointer.
    pub fn pointer(&mut self, kind: &str, x: f64, y: f64) {
        let button = if kind == "mouseMoved" { "none" } else { "left" };
        let buttons = i32::from(kind != "mouseReleased");
        self.call(
            "Input.dispatchMouseEvent",
            json!({"type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1}),
        );
    }

    /// Errors and warnings of the page, and requests for anything but itself.
    pub fn problems(&self) -> Vec<&Value> {
        let is_problem = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded") => true,
            Some("Network.requestWillBeSent") => {
                let url = event["params"]["request"]["url"].as_str().unwrap_or_default();
                !(url.starts_with("file://") && event["params"]["type"] == "Document")
            }
            _ => false,
        };
        self.events.iter().filter(is_problem).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // It is asked to close, so that all its processes are gone when its folder is removed.
        let _ = self.to.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        for _ in 0..500 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
