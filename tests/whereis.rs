//! Promise: `pyheap where` names the line that allocated a live object of a recorded process, and says "not sampled" of all
//! others.

use crate::common::interpreters;
use crate::common::pyheap::{record, run};
use crate::common::target::Target;
use crate::common::{DEADLINE, scratch, skip, until};
use serde_json::Value;

fn where_json(pid: i32, address: u64) -> Option<Value> {
    let finished = run(["where", &pid.to_string(), &format!("{address:#x}"), "--json"]);
    (finished.code() == 0).then(|| serde_json::from_str(&finished.stdout).expect("the answer is JSON"))
}

#[test]
fn live_objects_are_found_and_others_are_not() {
    const TEST: &str = "live_objects_are_found_and_others_are_not";
    let wanted = ["3.8", "3.11", "3.13"];
    let pythons = interpreters::some(&wanted);
    if pythons.is_empty() {
        skip!(TEST, "no CPython found");
    }
    for python in pythons {
        let mut target = Target::start(&python, "whereis.py", &[]);
        let dir = scratch();
        let base = dir.path().join("run");
        // Every allocation is recorded, so what must be found is certain.
        let recording = record(target.pid, base.to_str().expect("a plain path"), &["--period", "1"]);
        let made = target.ask("GO", "MADE");
        for name in ["bytes", "thing"] {
            let address = made[name].as_u64().expect("an address");
            // The files are written twice a second, later on a busy machine.
            let answer = until("an answer with a stack", DEADLINE, || where_json(target.pid, address));
            assert_eq!(answer["sampled"], true, "{} {name}", target.name);
            let stack = answer["stack"].as_array().expect("a stack");
            let last = stack.last().expect("a frame");
            assert_eq!(last["line"], made["lines"][name], "{} {name}: {answer}", target.name);
            assert_eq!(
                last["function"].as_str().and_then(|f| f.strip_prefix("make_")),
                Some(name)
            );
            assert!(answer["size"].as_u64().expect("a size") > if name == "bytes" { 8 << 20 } else { 0 });
        }
        let address = made["bytes"].as_u64().expect("an address");
        let text = run(["where", &target.pid.to_string(), &address.to_string()]).expect_code(0);
        text.expect_stdout("whereis.py:").expect_stdout(" make_bytes\n");
        // Before the recording; and freed, with its memory.
        target.ask("FREE", "FREED");
        let old = made["old"].as_u64().expect("an address");
        for address in [old, address] {
            let answer = run(["where", &target.pid.to_string(), &format!("{address:#x}")]).expect_code(0);
            answer.expect_stdout("not sampled: ");
        }
        recording.interrupt();
        run(["where", &target.pid.to_string(), "0x1000"])
            .expect_code(7)
            .expect_stderr("is not being recorded");
        target.exit_cleanly();
    }
}
