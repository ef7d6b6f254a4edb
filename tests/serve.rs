//! `pyheap serve` and `pyheap push` against real Python processes: the answers are true, and no client harms anybody.

use crate::common::interpreters::{self, Interpreter};
use crate::common::picture::Picture;
use crate::common::pprof::Profile;
use crate::common::pyheap::{self, Running, start};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, have, scratch, skip, skipped, until};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;

/// What `bytes(n)` takes beside its content.
const HEAD: i64 = 33;

fn python(wanted: &str) -> Option<Interpreter> {
    interpreters::some(&[wanted]).pop().or_else(interpreters::any)
}

/// A pyheap that serves, and where.
struct Service {
    running: Running,
    client: Client,
}

/// Where it is to be asked.
#[derive(Clone, Copy)]
struct Client {
    address: SocketAddr,
}

impl std::ops::Deref for Service {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Service {
    fn start(args: &[&str]) -> Service {
        let mut running = start([&["serve", "--listen", "127.0.0.1:0"], args].concat());
        let line = running.wait_stderr("serving ");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address = address.and_then(|text| text.parse().ok());
        Service {
            running,
            client: Client {
                address: address.unwrap_or_else(|| panic!("no address in {line}")),
            },
        }
    }

    /// Of one process, every allocation of which is recorded.
    fn exact(target: &Target, more: &[&str]) -> Service {
        let pid = target.pid.to_string();
        Service::start(&[&[pid.as_str(), "--period", "1"], more].concat())
    }
}

impl Client {
    fn get(&self, path: &str) -> Reply {
        self.try_get(path, "")
            .unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    fn try_get(&self, path: &str, headers: &str) -> std::io::Result<Reply> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n", self.address);
        self.send(request.as_bytes())
    }

    fn send(&self, request: &[u8]) -> std::io::Result<Reply> {
        exchange(self.address, request)
    }

    #[track_caller]
    fn profile(&self, path: &str) -> Profile {
        let reply = self.get(path);
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        Profile::read(&reply.body)
    }

    fn metrics(&self) -> HashMap<String, f64> {
        let reply = self.get("/metrics");
        assert_eq!(reply.status, 200);
        metrics(&reply.text())
    }

    /// Until what a function keeps is this, in bytes.
    #[track_caller]
    fn wait_kept(&self, path: &str, function: &str, bytes: i64) -> Profile {
        let mut last = 0;
        let found = || {
            let profile = self.profile(path);
            last = profile.sum("inuse_space", function);
            (last == bytes).then_some(profile)
        };
        until(&format!("{bytes} bytes kept by {function}"), DEADLINE, found)
    }
}

/// What a server has said.
struct Reply {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Reply {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    Ok(stream)
}

/// Sends these bytes and takes all that comes back. That the server closes early is no error: it has said why.
fn exchange(address: SocketAddr, request: &[u8]) -> std::io::Result<Reply> {
    let mut stream = connect(address)?;
    let _ = stream.write_all(request);
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => Err(error),
        _ => parse(&all),
    }
}

fn parse(all: &[u8]) -> std::io::Result<Reply> {
    let nothing = || std::io::Error::new(ErrorKind::UnexpectedEof, "no whole answer");
    let end = all
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .ok_or_else(nothing)?;
    let head = String::from_utf8_lossy(&all[..end]).into_owned();
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let body = all[end + 4..].to_vec();
    let len = headers.get("content-length").and_then(|len| len.parse().ok());
    if len != Some(body.len()) {
        return Err(nothing());
    }
    Ok(Reply {
        status: status.ok_or_else(nothing)?,
        headers,
        body,
    })
}

/// The text format of Prometheus, read strictly: value by name and labels.
#[track_caller]
fn metrics(text: &str) -> HashMap<String, f64> {
    assert!(text.ends_with('\n'), "the last line ends, too");
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let (mut found, mut typed, mut closed) = (HashMap::new(), HashMap::new(), HashSet::new());
    let mut family = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (what, name, more) = (words.next(), words.next().expect("a name"), words.next().expect("more"));
            if family != name {
                closed.insert(std::mem::replace(&mut family, name.to_owned()));
                assert!(!closed.contains(name), "{name} is in one piece");
            }
            match what {
                Some("TYPE") => {
                    assert!(["gauge", "counter"].contains(&more), "{line}");
                    assert!(typed.insert(name.to_owned(), more.to_owned()).is_none(), "{line}");
                }
                Some("HELP") => {}
                _ => panic!("{line}"),
            }
            continue;
        }
        let end = line.find(['{', ' ']).expect("a name and a value");
        let name = &line[..end];
        assert!(is_name(name) && name == family && typed.contains_key(name), "{line}");
        let mut rest = &line[end..];
        if let Some(mut labels) = rest.strip_prefix('{') {
            loop {
                let (label, value) = labels.split_once("=\"").expect("a label");
                assert!(is_name(label), "{line}");
                let mut escaped = false;
                let end = value.find(|c| match (escaped, c) {
                    (true, c) => {
                        assert!("\\\"n".contains(c), "{line}");
                        escaped = false;
                        false
                    }
                    (false, '\\') => {
                        escaped = true;
                        false
                    }
                    (false, c) => c == '"',
                });
                labels = &value[end.expect("the end of a label's value") + 1..];
                match labels.strip_prefix(',') {
                    Some(more) => labels = more,
                    None => break,
                }
            }
            rest = labels.strip_prefix('}').expect("the end of the labels");
        }
        let value: f64 = rest
            .strip_prefix(' ')
            .and_then(|text| text.parse().ok())
            .expect("a value");
        assert!(
            typed[name] != "counter" || value >= 0.0 && name.ends_with("_total"),
            "{line}"
        );
        let key = line[..line.len() - rest.len()].to_owned();
        assert!(found.insert(key, value).is_none(), "twice: {line}");
    }
    found
}

/// What is different in a process that has gone on allocating: all but its own heap.
fn touched(before: &Picture, pid: i32) -> Vec<String> {
    let code = |picture: &Picture| {
        let mut picture = picture.clone();
        picture
            .maps
            .retain(|line| line.contains(" r-x") || line.contains("rwx") || line.contains("/memfd"));
        picture
    };
    code(before).differences(&code(&Picture::of(pid)), "")
}

#[track_caller]
fn assert_untouched(before: &Picture, pid: i32) {
    let touched = touched(before, pid);
    assert!(touched.is_empty(), "{touched:?}");
}

/// Sums of what the target says that it keeps.
fn kept(target: &mut Target, command: &str) -> (i64, i64) {
    let truth = target.ask(command, "KEPT");
    (truth["bytes"].as_i64().unwrap(), truth["objects"].as_i64().unwrap())
}

/// `go tool pprof -top` of what an address answers: flat values by function, and the total.
fn go_top(home: &Path, url: &str, index: &str) -> (BTreeMap<String, f64>, f64) {
    let output = Command::new("go")
        .args([
            "tool",
            "pprof",
            "-symbolize=none",
            "-top",
            "-unit=B",
            "-nodecount=100000",
        ])
        .args([
            "-nodefraction=0",
            "-edgefraction=0",
            &format!("-sample_index={index}"),
            url,
        ])
        .env("HOME", home)
        .env("PPROF_TMPDIR", home)
        .env("GOTOOLCHAIN", "local")
        .output()
        .expect("go is in PATH");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let number = |word: &str| word.trim_end_matches('B').trim_end_matches(',').parse::<f64>().unwrap();
    let total = text
        .lines()
        .find(|line| line.starts_with("Showing nodes"))
        .expect(&text);
    let total = total
        .strip_suffix(" total")
        .and_then(|line| line.split_whitespace().last());
    let rows = text
        .lines()
        .skip_while(|line| !line.contains("flat%"))
        .skip(1)
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            (words[5..].join(" "), number(words[0]))
        });
    (rows.collect(), number(total.expect(&text)))
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&pyheap::run(args).expect_code(0).stdout).expect("JSON")
}

/// Where the service, the files of the same recording and what Go shows differ.
fn disagreements(service: &Service, pid: i32, base: &str, home: &Path) -> Vec<String> {
    let mut problems = Vec::new();
    let mut compare = |what: &str, found: f64, wanted: &Value, tolerance: f64| {
        let wanted = wanted.as_f64().expect("a number");
        if (found - wanted).abs() > tolerance {
            problems.push(format!("{what}: {found} instead of {wanted}"));
        }
    };
    let profile = service.profile("/debug/pprof/heap");
    let total = json(&["export", base, "--to", "json"])["total"].clone();
    for (kind, key) in [
        ("alloc_objects", "allocated_objects"),
        ("alloc_space", "allocated_bytes"),
        ("inuse_objects", "live_objects"),
        ("inuse_space", "live_bytes"),
    ] {
        // Rounded sums: off by half.
        compare(kind, profile.total(kind) as f64, &total[key], 1.0);
    }
    let top = json(&["top", base, "--json", "--by", "function", "--limit", "1000"]);
    let metrics = service.metrics();
    for (name, key) in [
        ("", "live_bytes"),
        ("_low", "live_bytes_low"),
        ("_high", "live_bytes_high"),
    ] {
        let name = format!("pyheap_live_bytes{name}{{pid=\"{pid}\"}}");
        compare(&name, metrics[&name], &top[key], 1.0);
    }
    let fetched = [
        ("heap", "inuse_space", "live_bytes"),
        ("allocs", "inuse_objects", "live_objects"),
    ];
    for (path, index, key) in fetched.into_iter().filter(|_| have("go")) {
        let (rows, total) = go_top(home, &format!("http://{}/debug/pprof/{path}", service.address), index);
        compare(index, total, &top[key], 1.0);
        for row in top["rows"].as_array().expect("rows") {
            let name = row["site"]["function"].as_str().unwrap_or("(no Python stack)");
            // Each of its stacks is off by less than one.
            compare(name, rows.get(name).copied().unwrap_or(0.0), &row[key], 10.0);
        }
    }
    problems
}

/// What is served, what Go shows of it and what `pyheap top` reads from the files of the same recording are the same numbers.
#[test]
fn the_service_go_and_pyheap_top_agree() {
    let Some(interpreter) = python("3.11") else {
        skip!("the_service_go_and_pyheap_top_agree", "no interpreter");
    };
    let dir = scratch();
    let base = dir.path().join("run").to_str().unwrap().to_owned();
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let before = Picture::of(target.pid);
    let service = Service::start(&[&target.pid.to_string(), "--period", "64KiB", "--output", &base]);
    kept(&mut target, "KEEP 3000 5000");
    target.ask("CHURN 3000", "CHURNED");
    kept(&mut target, "DROP");
    // From here on nothing happens in it; what has is on its way, and then all say the same.
    let allocated = || service.profile("/debug/pprof/heap").total("alloc_space");
    until("files, service and Go to agree", DEADLINE, || {
        let before = allocated();
        let problems = disagreements(&service, target.pid, &base, dir.path());
        // The files are half a second behind. Shown if it never comes to that.
        problems.iter().for_each(|problem| println!("{problem}"));
        (before == allocated() && problems.is_empty() && before > 10_000_000).then_some(())
    });
    if !have("go") {
        skipped("the_service_go_and_pyheap_top_agree", "no go (Debian: golang-go)");
    }
    let ended = service.running.interrupt();
    assert!(!ended.stderr.contains("error:"), "{}", ended.stderr);
    assert_untouched(&before, target.pid);
    target.exit_cleanly();
}

#[test]
fn all_answers_are_true_and_say_since_when() {
    let Some(interpreter) = python("3.13") else {
        skip!("all_answers_are_true_and_say_since_when", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let service = Service::exact(&target, &[]);
    let (bytes, objects) = kept(&mut target, "KEEP 2000 700");
    let profile = service.wait_kept("/debug/pprof/heap", "keep_one", bytes);
    assert_eq!(profile.sum("inuse_objects", "keep_one"), objects);
    assert_eq!(
        profile.kinds,
        ["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"]
    );
    assert_eq!((profile.shown_first.as_str(), profile.period), ("inuse_space", 1));
    let pid = target.pid.to_string();
    let since = format!("process {pid}: allocations are seen since ");
    assert!(
        profile.comments.iter().any(|line| line.starts_with(&since)),
        "{:?}",
        profile.comments
    );
    assert!(profile.samples.iter().all(|sample| sample.labels["pid"] == pid));
    let allocs = service.profile(&format!("/{pid}/debug/pprof/allocs?gc=1&debug=0"));
    assert_eq!(allocs.shown_first, "alloc_space");
    let bare = service.profile("/debug/pprof/heap?labels=0");
    assert!(bare.samples.iter().all(|sample| sample.labels.is_empty()));

    let text = service.get("/debug/pprof/heap?debug=1");
    let wanted = format!("\n{objects}: {bytes} [{objects}: {bytes}] @\n#\tkeep_one");
    assert!(
        text.text().starts_with("heap profile: ") && text.text().contains(&wanted),
        "{}",
        text.text()
    );
    let stamp = &text.headers["x-pyheap-since"];
    assert!(
        stamp.len() == 20 && stamp.ends_with('Z') && text.text().contains(stamp.as_str()),
        "{stamp}"
    );

    let command = service.get("/debug/pprof/cmdline").text();
    let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert_eq!(command, words.trim_end_matches('\0'));
    let index = service.get("/debug/pprof/").text();
    assert!(
        index.contains(&format!("/{pid}/debug/pprof/heap\"")) && index.contains(stamp.as_str()),
        "{index}"
    );
    assert_eq!(service.get("/healthz").text(), "ok\n");

    let metrics = service.metrics();
    let own = format!("{{pid=\"{pid}\"}}");
    assert_eq!(
        metrics[&format!("pyheap_live_bytes{own}")],
        service.profile("/debug/pprof/heap").total("inuse_space") as f64
    );
    assert_eq!(metrics[&format!("pyheap_attached{own}")], 1.0);
    let sites: Vec<_> = metrics.keys().filter(|key| key.starts_with("pyheap_site_")).collect();
    assert!((1..=10).contains(&sites.len()), "{sites:?}");
    until("the process's memory", DEADLINE, || {
        service
            .metrics()
            .get(&format!("pyheap_process_resident_bytes{own}"))
            .filter(|rss| **rss > 1e6)
            .copied()
    });
    for (path, status) in [
        ("/debug/pprof/goroutine", 404),
        ("/nothing", 404),
        ("/1/debug/pprof/heap", 404),
        ("/debug/pprof/heap?seconds=x", 400),
    ] {
        assert_eq!(service.get(path).status, status, "{path}");
    }
    service.running.interrupt();
    target.exit_cleanly();
}

/// A difference that is asked for while half of what is kept goes and something else comes, to the byte.
#[test]
fn seconds_give_what_has_changed() {
    let Some(interpreter) = python("3.12") else {
        skip!("seconds_give_what_has_changed", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let service = Service::exact(&target, &[]);
    let (mut before, _) = kept(&mut target, "KEEP 1000 900");
    service.wait_kept("/debug/pprof/heap", "keep_one", before);
    // On a machine that stalls, the seconds may be over too early.
    for attempt in 1.. {
        assert!(attempt < 20, "the seconds are always over too early");
        let (ready, over) = mpsc::channel();
        let done = std::thread::scope(|scope| {
            let client = service.client;
            scope.spawn(move || ready.send(client.profile("/debug/pprof/heap?seconds=2")));
            // The sums at the beginning are taken before any answer to a request that comes later.
            let mut early = None;
            until("the request to run", DEADLINE, || {
                early = over.try_recv().ok();
                (early.is_some() || service.metrics()["pyheap_http_in_flight"] >= 2.0).then_some(())
            });
            service.get("/");
            let (half, _) = kept(&mut target, "DROP");
            let (all, _) = kept(&mut target, "KEEP 10 5000");
            service.wait_kept("/debug/pprof/heap", "keep_one", all);
            let is_over = early.is_some() || over.try_recv().is_ok();
            let change = if is_over { None } else { over.recv().ok() };
            let from = std::mem::replace(&mut before, all);
            change.map(|change| (change, from, half, all))
        });
        let Some((change, from, half, all)) = done else {
            continue;
        };
        assert!(
            half < from && change.sum("inuse_space", "keep_one") == all - from,
            "{all} {from}"
        );
        assert_eq!(change.sum("alloc_space", "keep_one"), 10 * (5000 + HEAD));
        assert_eq!(change.sum("alloc_objects", "keep_one"), 10);
        assert!(
            (1_000_000_000..120_000_000_000).contains(&change.duration_nanos),
            "{}",
            change.duration_nanos
        );
        break;
    }
    service.running.interrupt();
    target.exit_cleanly();
}

/// Clients that send nothing, or a byte, or too much, or nonsense, and some that want more than there is: the service goes on, in
/// bounded memory, and the process loses nothing by it.
#[test]
fn no_client_harms_the_service_or_the_process() {
    let Some(interpreter) = python("3.11") else {
        skip!("no_client_harms_the_service_or_the_process", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let service = Service::start(&[&target.pid.to_string(), "--period", "128KiB"]);
    let pyheap = service.running.pid();
    let peak = || {
        let status = std::fs::read_to_string(format!("/proc/{pyheap}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    service.profile("/debug/pprof/heap");
    let before = peak();
    let begins: [&[u8]; 4] = [
        b"",
        b"G",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /debug/pprof/heap HT",
    ];
    let mut slow: Vec<_> = (0..100)
        .map(|place| {
            let mut stream = connect(service.address).expect("a connection");
            stream.write_all(begins[place % 4]).expect("a few bytes");
            stream
        })
        .collect();
    // Who wants to wait for long: so many may, the others are told to come again.
    let mut long: Vec<_> = (0..40)
        .map(|_| connect(service.address).expect("a connection"))
        .collect();
    for stream in &mut long {
        let request = "GET /debug/pprof/heap?seconds=600 HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("a request");
    }
    let is_full = || (service.get("/debug/pprof/heap").status == 503).then_some(());
    until("no room for more requests", DEADLINE, is_full);
    assert_eq!(service.get("/healthz").status, 200, "that is always answered");
    drop(long);
    until("room again", DEADLINE, || {
        (service.get("/debug/pprof/heap").status == 200).then_some(())
    });

    let long_header = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n",
        "a".repeat(1 << 20)
    );
    let long_path = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(1 << 20));
    let many_headers = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: y\r\n".repeat(10_000));
    let body = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{}",
        "a".repeat(1_000_000)
    );
    let nonsense: [(&[u8], u16); 20] = [
        (long_header.as_bytes(), 431),
        (long_path.as_bytes(), 431),
        (many_headers.as_bytes(), 431),
        (body.as_bytes(), 413),
        (b"POST /debug/pprof/heap HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (
            b"GET /debug/pprof/heap?seconds=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            400,
        ),
        (b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
            413,
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello", 0),
        (b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\r\n\r\n", 0),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0),
        (b"GET / HTTP/9.9\r\n\r\n", 0),
        (b"GET  / HTTP/1.1\r\n\r\n", 0),
        (b"\r\n\r\n\r\n\r\nGET", 0),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost\x00: b\r\n\r\n", 0),
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", 0),
    ];
    for (request, status) in nonsense {
        let shown = String::from_utf8_lossy(&request[..request.len().min(60)]).into_owned();
        let mut stream = connect(service.address).expect("a connection");
        let _ = stream.write_all(request);
        // Who has hung up gets no answer; who has not said all that it announced is not waited for.
        if status == 0 {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let found = parse(&answer).map_or(0, |reply| reply.status);
        // The kernel drops the answer where the server does not read all that is sent.
        let is_dropped = found == 0 && request.len() > 10_000;
        let is_refused = if status == 0 {
            found == 0 || (400..=505).contains(&found)
        } else {
            found == status
        };
        assert!(is_refused || is_dropped, "{shown:?}: {found} instead of {status}");
    }
    // Pieces of a good request, cut and changed at every byte of it.
    let good = format!(
        "GET /debug/pprof/cmdline?x=%41 HTTP/1.1\r\nHost: {}\r\nAccept: */*\r\n\r\n",
        service.address
    );
    for place in 0..good.len() {
        for with in [0x00, 0x0A, b' ', 0xFF] {
            let mut bad = good.clone().into_bytes();
            bad[place] = with;
            let mut stream = connect(service.address).expect("a connection");
            let _ = stream.write_all(&bad);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
        }
    }
    let time = target.ask("CHURN 100000", "CHURNED");
    assert!(time["seconds"].as_f64().unwrap() > 0.0);
    kept(&mut target, "KEEP 1000 5000");
    let grown = || (service.profile("/debug/pprof/heap").sum("inuse_space", "keep_one") > 1_000_000).then_some(());
    until("the service to go on", DEADLINE, grown);
    let lost: Vec<_> = service
        .metrics()
        .into_iter()
        .filter(|(name, _)| name.starts_with("pyheap_lost_total"))
        .collect();
    assert!(lost.is_empty(), "{lost:?}");
    assert!(peak() < before + (64 << 10), "{before} KiB and then {} KiB", peak());
    // Who never asks is cut off.
    for stream in &mut slow {
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("it is not cut off: {error}"),
            _ => {}
        }
    }
    service.running.interrupt();
    target.exit_cleanly();
}

#[test]
fn only_who_may_is_answered() {
    let Some(interpreter) = interpreters::any() else {
        skip!("only_who_may_is_answered", "no interpreter");
    };
    let dir = scratch();
    let target = Target::start(&interpreter, "served.py", &[]);
    let pid = target.pid.to_string();
    let refused = |args: &[&str], code: i32, why: &str| {
        pyheap::run([&["serve"], args].concat())
            .expect_code(code)
            .expect_stderr(why);
    };
    refused(&[&pid, "--listen", "0.0.0.0:0"], 2, "--allow-remote");
    refused(&[&pid, "--listen", "[::]:0"], 2, "--allow-remote");
    refused(&["2000000000", "--listen", "127.0.0.1:0"], 3, "2000000000");
    refused(&["--tree", "2000000000", "--listen", "127.0.0.1:0"], 3, "2000000000");
    let file = dir.path().join("token");
    let path = file.to_str().unwrap();
    refused(&[&pid, "--token-file", path], 2, path);
    std::fs::write(&file, "short\n").unwrap();
    refused(&[&pid, "--token-file", path], 2, "8");
    std::fs::write(&file, "c0rrect-horse\nsecond line\n").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    refused(&[&pid, "--listen", &address], 1, &address);

    let service = Service::start(&[&pid, "--token-file", path]);
    // What strangers talk to has no rights.
    let tasks = std::fs::read_dir(format!("/proc/{}/task", service.running.pid())).unwrap();
    let status = tasks
        .flatten()
        .map(|task| std::fs::read_to_string(task.path().join("status")).unwrap());
    let strangers: Vec<_> = status.filter(|text| text.starts_with("Name:\thttp\n")).collect();
    assert!(strangers.len() == 1 && strangers[0].contains("CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n"));
    let basic = |secret: &str| match secret {
        "c0rrect-horse" => "cHloZWFwOmMwcnJlY3QtaG9yc2U=",
        _ => "cHloZWFwOndyb25n",
    };
    for (secret, status) in [
        ("c0rrect-horse", 200),
        ("c0rrect-hors", 401),
        ("c0rrect-horse2", 401),
        ("", 401),
        ("second line", 401),
    ] {
        let bearer = format!("Authorization: Bearer {secret}\r\n");
        assert_eq!(
            service.try_get("/debug/pprof/heap", &bearer).unwrap().status,
            status,
            "{secret}"
        );
        let basic = format!("Authorization: Basic {}\r\n", basic(secret));
        assert_eq!(service.try_get("/metrics", &basic).unwrap().status, status, "{secret}");
    }
    let asked = service.get("/");
    assert_eq!(
        (asked.status, asked.headers["www-authenticate"].as_str()),
        (401, "Bearer, Basic realm=\"pyheap\"")
    );
    assert_eq!(service.get("/healthz").status, 200);
    if have("go") {
        let url = format!("http://pyheap:c0rrect-horse@{}/debug/pprof/heap", service.address);
        go_top(dir.path(), &url, "inuse_space");
    }
    service.running.interrupt();
    target.exit_cleanly();
}

/// Nobody asks, and the hooks go; somebody asks, and they come back.
#[test]
fn who_is_not_asked_for_is_left_alone() {
    let Some(interpreter) = python("3.14") else {
        skip!("who_is_not_asked_for_is_left_alone", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let before = Picture::of(target.pid);
    let mut service = Service::exact(&target, &["--idle-detach", "1s"]);
    let own = format!("pyheap_attached{{pid=\"{}\"}}", target.pid);
    service
        .running
        .wait_stderr("(nobody has asked for its profile for a while)");
    service.running.wait_stderr("nobody has asked for 1s");
    assert_eq!(service.metrics()[&own], 0.0, "asking for that is no asking");
    until("the hooks to be gone", DEADLINE, || {
        touched(&before, target.pid).is_empty().then_some(())
    });
    kept(&mut target, "KEEP 100 1000");
    let reply = service.get("/debug/pprof/heap");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(
        Profile::read(&reply.body).sum("alloc_space", "keep_one"),
        0,
        "that was not seen"
    );
    // On a machine that stalls, nobody may have asked for another second: what is seen is never the first lot.
    let seen = until("what comes now to be seen", DEADLINE, || {
        kept(&mut target, "KEEP 50 3000");
        let seen = service.profile("/debug/pprof/heap").sum("alloc_space", "keep_one");
        (seen > 0).then_some(seen)
    });
    assert_eq!(seen % (3000 + HEAD), 0, "{seen}");
    service.running.interrupt();
    until("the hooks to be gone", DEADLINE, || {
        touched(&before, target.pid).is_empty().then_some(())
    });
    target.exit_cleanly();
}

/// A parent and its workers, those that come later included: each by itself, and all together.
#[test]
fn a_tree_is_served_together_and_one_by_one() {
    let Some(interpreter) = python("3.9") else {
        skip!("a_tree_is_served_together_and_one_by_one", "no interpreter");
    };
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let root = target.pid.to_string();
    let first = target.ask("FORK", "FORKED")["pid"].as_i64().unwrap();
    let service = Service::start(&["--tree", &root, "--period", "1", "--match", "served[.]py"]);
    let second = target.ask("FORK", "FORKED")["pid"].as_i64().unwrap();
    let workers = [first, second];
    for pid in workers.iter().map(i64::to_string).chain([root.clone()]) {
        until(&format!("{pid} to be attached to"), DEADLINE, || {
            (service.metrics().get(&format!("pyheap_attached{{pid=\"{pid}\"}}")) == Some(&1.0)).then_some(())
        });
    }
    let (bytes, _) = kept(&mut target, "KEEP 10 4000");
    target.ask("KEEPALL", "KEPT");
    let each = 4000 * (5000 + HEAD);
    for pid in workers {
        let profile = service.wait_kept(&format!("/{pid}/debug/pprof/heap"), "work_one", each);
        assert_eq!(profile.sum("inuse_space", "keep_one"), 0);
    }
    service.wait_kept(&format!("/{root}/debug/pprof/heap"), "keep_one", bytes);
    let all = service.profile("/debug/pprof/heap");
    let of = |pid: &str| {
        all.sum_of("inuse_space", |sample| {
            sample.labels["pid"] == pid && sample.labels["domain"] == "obj"
        })
    };
    assert!(of(&root) >= bytes && of(&root) < each, "{}", of(&root));
    assert!(workers.iter().all(|pid| of(&pid.to_string()) >= each));
    assert_eq!(
        service.get("/debug/pprof/heap?debug=1").headers["x-pyheap-since"]
            .split(", ")
            .count(),
        3
    );
    // The tree ends, and with it the service.
    target.exit_cleanly();
    service.running.finish(DEADLINE).expect_code(0);
}

/// A server that takes what is pushed: it hangs up on the first attempt, says 503 to the second, and takes what comes then.
struct Sink {
    address: SocketAddr,
    taken: mpsc::Receiver<(String, String, Vec<u8>)>,
}

impl Sink {
    fn start() -> Sink {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (send, taken) = mpsc::channel();
        std::thread::spawn(move || {
            for (place, stream) in listener.incoming().flatten().enumerate() {
                if place == 0 {
                    continue;
                }
                let _ = take(stream, place == 1, &send);
            }
        });
        Sink { address, taken }
    }
}

/// Reads a request; its first line, its headers and its body.
fn take(mut stream: TcpStream, is_busy: bool, send: &mpsc::Sender<(String, String, Vec<u8>)>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(DEADLINE))?;
    let (mut all, mut part) = (Vec::new(), [0; 4096]);
    let (end, len) = loop {
        let n = stream.read(&mut part)?;
        if n == 0 {
            return Ok(());
        }
        all.extend_from_slice(&part[..n]);
        if let Some(end) = all.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&all[..end]).to_lowercase();
            let len = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            break (end + 4, len.expect("a length"));
        }
    };
    while all.len() < end + len {
        let n = stream.read(&mut part)?;
        all.extend_from_slice(&part[..n]);
    }
    if is_busy {
        return stream.write_all(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy");
    }
    let head = String::from_utf8_lossy(&all[..end]).into_owned();
    let line = head.lines().next().unwrap_or_default().to_owned();
    let _ = send.send((line, head.to_lowercase(), all[end..].to_vec()));
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
}

/// What arrives is the truth, to the byte, though the server fails at first.
#[test]
fn what_is_pushed_arrives() {
    let Some(interpreter) = python("3.10") else {
        skip!("what_is_pushed_arrives", "no interpreter");
    };
    let dir = scratch();
    let token = dir.path().join("token");
    std::fs::write(&token, "c0rrect-horse\n").unwrap();
    let sink = Sink::start();
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let before = Picture::of(target.pid);
    let url = format!("http://{}", sink.address);
    let pid = target.pid.to_string();
    let words = [
        "push",
        &pid,
        "--url",
        &url,
        "--every",
        "1s",
        "--period",
        "1",
        "--label",
        "env=te st",
    ];
    let more = ["--token-file", token.to_str().unwrap(), "--tenant", "t1"];
    let mut running = start([&words[..], &more].concat());
    running.wait_stderr("pushing ");
    let (bytes, objects) = kept(&mut target, "KEEP 500 2000");
    running.wait_stderr("cannot push: ");
    running.wait_stderr("pushing again");
    let (mut all, mut allocated) = (Vec::new(), (0, 0));
    let mut take = |found: (String, String, Vec<u8>)| {
        let profile = Profile::read(&found.2);
        allocated.0 += profile.sum("alloc_space", "keep_one");
        allocated.1 += profile.sum("alloc_objects", "keep_one");
        all.push((found.0, found.1, profile));
        allocated.0
    };
    while take(sink.taken.recv_timeout(DEADLINE).expect("a profile")) < bytes {}
    // What was seen last is sent at the end.
    let (half, _) = kept(&mut target, "DROP");
    let ended = running.interrupt().expect_stderr(" profiles have arrived, 0 have not");
    sink.taken.try_iter().for_each(|found| {
        take(found);
    });
    assert_eq!(allocated, (bytes, objects), "nothing is said twice");
    assert!(
        ended.stderr.contains(&format!("{} profiles have arrived", all.len())),
        "{}",
        ended.stderr
    );
    assert_eq!(all.last().unwrap().2.sum("inuse_space", "keep_one"), half);
    let mut end: Option<u64> = None;
    for (line, head, profile) in &all {
        let query = line
            .strip_prefix("POST /ingest?")
            .and_then(|rest| rest.strip_suffix(" HTTP/1.1"))
            .expect(line);
        let pairs: HashMap<_, _> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        let name = pairs["name"];
        assert!(
            name.starts_with(&format!("served%7Bpid%3D{pid}%2Chost%3D")) && name.ends_with("%2Cenv%3Dte_st%7D"),
            "{name}"
        );
        assert_eq!((pairs["format"], pairs["spyName"]), ("pprof", "pyheap"));
        let (from, until): (u64, u64) = (pairs["from"].parse().unwrap(), pairs["until"].parse().unwrap());
        assert!(
            from <= until && end.is_none_or(|end| end == from),
            "{from} to {until} after {end:?}"
        );
        end = Some(until);
        assert!(
            head.contains("\r\nauthorization: bearer c0rrect-horse\r\n") && head.contains("\r\nx-scope-orgid: t1\r\n"),
            "{head}"
        );
        assert!(
            profile.samples.iter().all(|sample| sample.labels.is_empty()),
            "each would make a series of its own"
        );
    }
    assert_untouched(&before, target.pid);
    target.exit_cleanly();
}

#[test]
fn nowhere_to_push_to_is_an_error_and_no_harm() {
    let Some(interpreter) = interpreters::any() else {
        skip!("nowhere_to_push_to_is_an_error_and_no_harm", "no interpreter");
    };
    pyheap::run(["push", "1", "--url", "http://example.invalid/", "--ca-file", "x"])
        .expect_code(2)
        .expect_stderr("--ca-file is for a URL with https");
    pyheap::run([
        "push",
        "1",
        "--url",
        "https://example.invalid/",
        "--ca-file",
        "/dev/null",
    ])
    .expect_code(2)
    .expect_stderr("no certificates in /dev/null");
    let nobody = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let target = Target::start(&interpreter, "served.py", &[]);
    let mut running = start(["push", &target.pid.to_string(), "--url", &nobody, "--every", "1s"]);
    running.wait_stderr("cannot push: ");
    running.signal(nix::sys::signal::Signal::SIGINT);
    let ended = running.finish(DEADLINE).expect_code(1);
    assert!(
        ended.stderr.contains("nothing could be pushed: ") && ended.stderr.contains(" 0 profiles have arrived")
            || ended.stderr.contains("0 profiles have arrived"),
        "{}",
        ended.stderr
    );
    target.exit_cleanly();
}

/// By https it arrives as well, at a server that proves who it is, and nowhere else.
#[test]
fn what_is_pushed_by_https_arrives() {
    const TEST: &str = "what_is_pushed_by_https_arrives";
    let Some(interpreter) = python("3.12").filter(|_| have("openssl")) else {
        skip!(TEST, "needs openssl and an interpreter");
    };
    let dir = scratch();
    let file = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let (certificate, key) = (file("certificate.pem"), file("key.pem"));
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=pyheap-test"]);
    openssl.args(["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]);
    openssl.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    openssl.args(["-addext", "subjectAltName=IP:127.0.0.1"]);
    openssl.args(["-keyout", &key, "-out", &certificate]);
    let made = openssl.output().expect("openssl runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let script = common::target_script("tls_sink.py");
    let mut command = Command::new(&interpreter.path);
    command.args([&script, &certificate, &key]);
    let mut sink = Target::start_command(command, "tls_sink");
    let port = sink.facts["port"].as_u64().expect("a port");
    let mut target = Target::start(&interpreter, "served.py", &[]);
    let pid = target.pid.to_string();
    let push = |host: &str, more: &[&str]| {
        let url = format!("https://{host}:{port}");
        let words = ["push", &pid, "--url", &url, "--every", "1s", "--period", "1"];
        start([&words[..], more].concat())
    };
    // One that nobody knows, and one with another name than that of its certificate.
    let trusted = ["--ca-file", certificate.as_str()];
    for (host, more) in [("127.0.0.1", &[][..]), ("localhost", &trusted)] {
        let mut running = push(host, more);
        let said = running.wait_stderr("cannot push: ");
        assert!(said.contains("certificate"), "{said}");
        running.signal(nix::sys::signal::Signal::SIGINT);
        running.finish(DEADLINE).expect_code(1);
    }
    let mut running = push("127.0.0.1", &trusted);
    running.wait_stderr("pushing ");
    let (bytes, _) = kept(&mut target, "KEEP 500 2000");
    loop {
        let taken = sink.expect("TAKEN");
        let line = taken["line"].as_str().expect("a line");
        assert!(line.starts_with("POST /ingest?name=served%7B"), "{line}");
        let hex = taken["body"].as_str().expect("hex").as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("hex"), 16).expect("hex");
        let body: Vec<u8> = hex.chunks(2).map(byte).collect();
        if Profile::read(&body).sum("inuse_space", "keep_one") == bytes {
            break;
        }
    }
    running.interrupt().expect_stderr(", 0 have not");
    target.exit_cleanly();
    drop(sink);
}

/// A parent and 31 workers, chosen by their cgroup where one can be made, else by their command line: all are served, all is noted,
/// and nothing is left in any.
#[test]
fn many_workers_are_served_and_left_clean() {
    const TEST: &str = "many_workers_are_served_and_left_clean";
    const WORKERS: usize = 31;
    let Some(interpreter) = python("3.11") else {
        skip!(TEST, "no interpreter");
    };
    let dir = scratch();
    let audit = dir.path().join("audit");
    let mut target = Target::start(&interpreter, "fleet.py", &[&WORKERS.to_string(), "1"]);
    let workers = target.ask("STATUS", "STATUS")["workers"].clone();
    let workers = workers.as_array().expect("a list").iter();
    let mut all: Vec<i64> = workers.map(|pid| pid.as_i64().expect("a number")).collect();
    all.push(target.pid.into());
    let group = common::cgroup::Cgroup::make();
    let is_grouped = |group: &common::cgroup::Cgroup| all.iter().all(|pid| group.add(&pid.to_string()));
    let words = match group.as_ref().filter(|group| is_grouped(group)) {
        Some(group) => ["--cgroup", group.path()].map(str::to_owned),
        None => ["--match".to_owned(), format!("fleet[.]py {WORKERS} 1$")],
    };
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.extend(["--audit", audit.to_str().expect("UTF-8")]);
    let service = Service::start(&words);
    until("all to be attached to", DEADLINE, || {
        let metrics = service.metrics();
        let is_attached = |pid: &i64| metrics.get(&format!("pyheap_attached{{pid=\"{pid}\"}}")) == Some(&1.0);
        all.iter().all(is_attached).then_some(())
    });
    until("allocations of all to be seen", DEADLINE, || {
        let metrics = service.metrics();
        let of = |pid: &i64| metrics.get(&format!("pyheap_samples_total{{pid=\"{pid}\"}}"));
        all[..WORKERS]
            .iter()
            .all(|pid| of(pid).is_some_and(|samples| *samples > 0.0))
            .then_some(())
    });
    assert_eq!(service.get("/debug/pprof/heap").status, 200);
    service.running.interrupt();
    for pid in &all {
        let info = pyheap::run(["info", &pid.to_string()]).expect_code(0);
        info.expect_stdout("nothing of pyheap is in it");
    }
    let deeds = std::fs::read_to_string(&audit).expect("an audit file");
    for what in ["attach", "detach"] {
        let of = |deed: &Value| (deed["event"] == what).then(|| deed["pid"].as_i64().expect("a number"));
        let lines = deeds.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        let mut pids: Vec<i64> = lines.filter_map(|deed: Value| of(&deed)).collect();
        let mut wanted = all.clone();
        pids.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(pids, wanted, "{what}: {deeds}");
    }
    target.exit_cleanly();
}
