//! Promise: a target that works against pyheap, and a name that works against who reads it, cannot hurt: it ends in time, within
//! 256 MiB, with an answer, and keeps what was valid.

use crate::common::interpreters::{self, Interpreter};
use crate::common::target::Target;
use crate::common::{self, DEADLINE, every_record, pyheap, scratch, until};
use ::pyheap::attach::session::regions;
use pyheap_injector::infect::Found;
use pyheap_protocol::control::{BUCKETS, Config, Control, Counters, Identity};
use serde_json::json;
use std::mem::offset_of;

/// Most memory that pyheap may have used.
const MOST_KIB: u64 = 256 << 10;

/// Up to 3.10, from 3.11 and from 3.13 on frames are found in different ways.
fn representative() -> Vec<Interpreter> {
    interpreters::some(&["3.8", "3.11", "3.13"])
}

fn memory_kib(pid: i32, what: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(what));
    line.and_then(|line| line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

fn read_u64(pid: i32, at: u64) -> Option<u64> {
    use std::os::unix::fs::FileExt as _;
    let mut bytes = [0; 8];
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    memory.read_exact_at(&mut bytes, at).ok()?;
    Some(u64::from_le_bytes(bytes))
}

/// Where in the target what can be scribbled over is.
fn places(pid: i32, mode: &str) -> serde_json::Value {
    let region: Identity = regions(pid)
        .into_iter()
        .find_map(|found| match found {
            Found::Region(identity) => Some(identity),
            Found::Empty { .. } => None,
        })
        .expect("it is recorded");
    let control = region.control;
    let config = |field: usize| {
        let at = control + (offset_of!(Control, config) + field) as u64;
        read_u64(pid, at).expect("the shim's memory")
    };
    json!({
        "mode": mode,
        "gate": control + offset_of!(Control, gate) as u64,
        "head": control + offset_of!(Control, ring_head) as u64,
        "tail": control + offset_of!(Control, ring_tail) as u64,
        "counters": control + (offset_of!(Control, counters) + offset_of!(Counters, samples)) as u64,
        "slab_used": control + offset_of!(Control, slab_used) as u64,
        "last_id": control + offset_of!(Control, last_id) as u64,
        "buckets": control + offset_of!(Control, buckets) as u64,
        "buckets_len": size_of::<u32>() * BUCKETS,
        "ring": config(offset_of!(Config, ring)),
        "ring_len": config(offset_of!(Config, ring_len)),
        "slab": config(offset_of!(Config, slab)),
        "slab_entries": config(offset_of!(Config, slab_entries)),
        "period": config(offset_of!(Config, period)),
    })
}

/// Records a target that scribbles; gives what pyheap said, and the most memory it had.
fn scribble(python: &Interpreter, mode: &str) -> (pyheap::Finished, u64, String) {
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let mut target = Target::start(python, "hostile.py", &["ring"]);
    let mut recording = pyheap::record(target.pid, &base, &[]);
    let places = places(target.pid, mode);
    target.send(&format!("SCRIBBLE {places}"));
    target.expect("SCRIBBLING");
    let (pid, mut most) = (recording.pid(), 0);
    // Until it gives up by itself, or has seen so much that it would have.
    let mut enough = 0;
    until("the end, or 24 MiB of records", 4 * DEADLINE, || {
        most = most.max(memory_kib(pid, "VmHWM"));
        if !recording.is_running() {
            return Some(());
        }
        let tail = read_u64(target.pid, places["tail"].as_u64().unwrap_or(0));
        let has_seen_enough = match mode {
            "samples" | "names" => tail.is_some_and(|tail| tail < 1 << 40 && tail > 24 << 20),
            // The last counter that was read: the table is read whenever it has changed.
            "table" => {
                read_u64(target.pid, places["last_id"].as_u64().unwrap_or(0)).is_some_and(|id| id > (1 << 40) + 200_000)
            }
            _ => false,
        };
        enough += u32::from(has_seen_enough);
        (enough > 3).then_some(())
    });
    if recording.is_running() {
        // While it has our addresses in its hands, our code stays.
        target.ask("STOP", "STOPPED");
        recording.signal(nix::sys::signal::Signal::SIGINT);
    }
    let finished = recording.finish(2 * DEADLINE);
    let info = pyheap::run(["info", &base]).expect_code(0);
    (finished, most, info.stdout)
}

/// What no shim can have written ends the recording, in words, and what was there before is kept.
#[test]
fn a_ring_that_is_scribbled_over() {
    for python in representative() {
        for mode in ["noise", "head", "unmap"] {
            let (finished, most, info) = scribble(&python, mode);
            println!("{} {mode}: {most} KiB, {}", python.name, finished.code());
            let what = format!("{} {mode}: {finished:?}\n{info}", python.name);
            assert_eq!(finished.code(), 1, "{what}");
            let said = ["the ring in the target is corrupt", "the target has ended"];
            assert!(said.iter().any(|said| finished.stderr.contains(said)), "{what}");
            assert!(!finished.stderr.contains("panicked"), "{what}");
            assert!(most < MOST_KIB, "{most} KiB: {what}");
        }
    }
}

/// What is well-formed has to be believed, but not kept without end.
#[test]
fn records_without_end() {
    for python in interpreters::some(&["3.8", "3.13"]) {
        for mode in ["samples", "names", "table"] {
            let (finished, most, info) = scribble(&python, mode);
            let what = format!("{} {mode}: {finished:?}\n{info}", python.name);
            println!("{} {mode}: {most} KiB, {}", python.name, finished.code());
            assert!(!finished.stderr.contains("panicked"), "{what}");
            assert!(most < MOST_KIB, "{most} KiB: {what}");
            assert!(matches!(finished.code(), 0 | 1), "{what}");
        }
    }
}

/// Frames, code objects and names that change while they are read: `PYHEAP_HOSTILE_ROUNDS` dumps of each version (25).
#[test]
fn frames_that_are_rewritten_while_they_are_read() {
    let rounds = std::env::var("PYHEAP_HOSTILE_ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok());
    for python in representative() {
        let mut target = Target::start(&python, "hostile.py", &["frames"]);
        let pid = target.pid.to_string();
        for round in 0..rounds.unwrap_or(25) {
            let how: &[&str] = if round % 4 == 0 {
                &["dump", &pid]
            } else {
                &["dump", &pid, "--nonblocking"]
            };
            let mut dump = pyheap::start(how);
            let (dump_pid, mut most) = (dump.pid(), 0);
            until("the end of a dump", DEADLINE, || {
                most = most.max(memory_kib(dump_pid, "VmHWM"));
                (!dump.is_running()).then_some(())
            });
            let finished = dump.finish(DEADLINE);
            let what = format!("{} round {round}: {finished:?}", python.name);
            assert!(matches!(finished.code(), 0 | 1), "{what}");
            assert!(!finished.stderr.contains("panicked"), "{what}");
            assert!(most < MOST_KIB, "{most} KiB: {what}");
            assert!(target.is_running(), "{what}");
        }
        let rounds = target.ask("STATUS", "ROUNDS");
        assert!(rounds.as_u64() > Some(1000), "{}: {rounds}", python.name);
    }
}

/// What the fuzz targets do with a ring is what a recording does with it: they understand a real one. `PYHEAP_SEEDS` keeps
/// it as an example for them to begin with (`scripts/fuzz`).
#[test]
fn a_real_ring_is_understood() {
    use std::os::unix::fs::FileExt as _;
    for python in representative() {
        let dir = scratch();
        let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
        let target = Target::start(&python, "hard.py", &["busy"]);
        // Few samples: the ring has not come round when it is looked at.
        let recording = pyheap::record(target.pid, &base, &["--period", "128KiB"]);
        let places = places(target.pid, "");
        let place = |name: &str| places[name].as_u64().expect("an address");
        let head = until("a few records", DEADLINE, || {
            read_u64(target.pid, place("head")).filter(|&head| head > 16 << 10)
        });
        let mut bytes = vec![0; 1 + (head.min(48 << 10).min(place("ring_len"))) as usize];
        let minor: u8 = python.minor().trim_start_matches("3.").parse().expect("3.x");
        bytes[0] = minor - 7;
        let memory = std::fs::File::open(format!("/proc/{}/mem", target.pid)).expect("our own child");
        memory.read_exact_at(&mut bytes[1..], place("ring")).expect("the ring");
        recording.interrupt();
        let found = every_record::ring(&bytes);
        assert!(found > 10, "{}: {found} samples in {} bytes", python.name, bytes.len());
        every_record::table(&bytes);
        if let Some(folder) = std::env::var_os("PYHEAP_SEEDS") {
            let path = std::path::Path::new(&folder).join(&python.name);
            std::fs::write(path, &bytes).expect("the folder for seeds");
        }
        target.exit_cleanly();
    }
}

/// While it reads what the target offers, pyheap can do less than root.
#[test]
fn most_of_root_is_given_up() {
    let Some(python) = interpreters::any() else { return };
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let dir = scratch();
    let base = dir.path().join("run").to_str().expect("UTF-8").to_owned();
    let target = Target::start(&python, "hard.py", &["busy"]);
    let recording = pyheap::record(target.pid, &base, &[]);
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_SYS_NICE
    let needed: u64 = [1, 2, 5, 19, 21, 23].into_iter().map(|bit| 1 << bit).sum();
    let tasks = std::fs::read_dir(format!("/proc/{}/task", recording.pid())).expect("it runs");
    for task in tasks {
        let status = std::fs::read_to_string(task.expect("a thread").path().join("status")).unwrap_or_default();
        let set = status.lines().find_map(|line| line.strip_prefix("CapPrm:"));
        let Some(set) = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()) else {
            continue;
        };
        assert_eq!(set & !needed, 0, "{status}");
    }
    recording.interrupt();
    target.exit_cleanly();
}

/// Where others may write, what they have put at the place of an output is neither followed nor used.
#[test]
fn what_others_have_planted_is_refused() {
    use nix::fcntl::{AT_FDCWD, AtFlags};
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    if !nix::unistd::geteuid().is_root() {
        common::skipped(
            "what_others_have_planted_is_refused",
            "only root can make files of others",
        );
        return;
    }
    let Some(python) = interpreters::any() else { return };
    let (dir, own) = (scratch(), scratch());
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).expect("our own folder");
    let victim = own.path().join("victim");
    std::fs::write(&victim, "precious").expect("our own folder");
    let nobody = Some(nix::unistd::Uid::from_raw(65_534));
    let plant = |name: &str, how: &dyn Fn(&std::path::Path)| {
        let path = dir.path().join(name);
        how(&path);
        nix::unistd::fchownat(AT_FDCWD, &path, nobody, None, AtFlags::AT_SYMLINK_NOFOLLOW).expect("root may");
        path.to_str().expect("UTF-8").to_owned()
    };
    let link = plant("link", &|path| symlink(&victim, path).expect("a link"));
    let pipe = plant("pipe", &|path| {
        nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe")
    });
    let golden = "tests/golden/heapprof/unicode_paths.hpm";
    for planted in [&link, &pipe] {
        let finished = pyheap::run(["flame", golden, "-o", planted]).expect_code(1);
        finished.expect_stderr("others may write to");
    }
    let target = Target::start(&python, "hard.py", &["busy"]);
    let pid = target.pid.to_string();
    for part in ["_hpm", "_hpd", "_hpx"] {
        for kind in ["link", "file"] {
            let name = format!("{kind}{part}.{part}");
            let how: &dyn Fn(&std::path::Path) = &|path| match kind {
                "link" => symlink(&victim, path).expect("a link"),
                _ => std::fs::write(path, "theirs").expect("a file"),
            };
            plant(&name, how);
            let base = dir.path().join(format!("{kind}{part}"));
            let base = base.to_str().expect("UTF-8");
            let finished = pyheap::run(["record", &pid, "--duration", "100ms", "-o", base]).expect_code(1);
            finished.expect_stderr("others may write to");
        }
    }
    assert_eq!(std::fs::read_to_string(&victim).expect("our own file"), "precious");
    target.exit_cleanly();
}
