//! The descendants of a recorded process: which are alive, and the shims that they have inherited by fork.

use super::interpreter::Interpreter;
use super::process::{self, ProcessId};
use super::session::{self, Cured, cure, regions};
use super::{chain, preflight};
use pyheap_injector::infect::Found;
use std::collections::BTreeMap;

/// Descendants that are kept in mind; more are found only while their parents live.
const MOST: usize = 4096;
/// Processes that are cured at the same time: each takes a second, of waiting.
const AT_ONCE: usize = 16;

/// A process and its descendants, as they were seen: one whose parent has ended is not forgotten.
#[derive(Debug)]
pub struct Family {
    root: i32,
    known: BTreeMap<i32, ProcessId>,
}

impl Family {
    /// The family of `root`; nobody is known until the first look.
    #[must_use]
    pub const fn of(root: i32) -> Self {
        Self {
            root,
            known: BTreeMap::new(),
        }
    }

    /// Looks who is new and who is gone. The descendants that live. It takes a look at every process there is.
    pub fn look(&mut self) -> Vec<i32> {
        self.known.retain(|_, id| id.is_alive());
        let parents = process::parents();
        for pid in process::descendants_of(&parents, &self.parents()) {
            self.meet(pid);
        }
        self.known.keys().copied().collect()
    }

    /// The same at the cost of the family and not of the whole machine, where the kernel says whose children there are.
    pub fn glance(&mut self) {
        self.known.retain(|_, id| id.is_alive());
        let mut parents = self.parents();
        let mut next = 0;
        while let Some(&parent) = parents.get(next) {
            next += 1;
            let Some(children) = process::children(parent) else {
                if parent == self.root {
                    self.look();
                    return;
                }
                continue;
            };
            for child in children {
                if !parents.contains(&child) && !pyheap_injector::copy::is_copy(child) && self.meet(child) {
                    parents.push(child);
                }
            }
        }
    }

    /// Those who may have children that belong to it.
    fn parents(&self) -> Vec<i32> {
        std::iter::once(self.root).chain(self.known.keys().copied()).collect()
    }

    /// Keeps a descendant in mind; false if there is no room, or no such process.
    fn meet(&mut self, pid: i32) -> bool {
        if self.known.contains_key(&pid) {
            return true;
        }
        let id = ProcessId::of(pid).ok().filter(|_| self.known.len() < MOST);
        id.is_some_and(|id| self.known.insert(pid, id).is_none())
    }
}

/// What became of one process's copies of the shim.
#[derive(Debug)]
pub struct Outcome {
    /// The process.
    pub pid: i32,
    /// What is left and why; `None` if nothing is.
    pub left: Option<String>,
}

/// True if `pid` carries a shim that nobody uses.
fn carries_copy(pid: i32) -> bool {
    let has_copies = !pyheap_injector::copy::find(pid).is_empty();
    has_copies
        || regions(pid).iter().any(|found| match found {
            Found::Region(identity) => session::user_of(pid, identity).is_none(),
            Found::Empty { .. } => true,
        })
}

/// Takes the shims that nobody uses out of `pids`. A process that has forked without exec has the `interpreter` of its
/// parent; without one it is looked for. Processes that carry nothing are not in the answer.
#[must_use]
pub fn cure_all(pids: &[i32], interpreter: Option<&Interpreter>) -> Vec<Outcome> {
    let carriers: Vec<i32> = pids.iter().copied().filter(|&pid| carries_copy(pid)).collect();
    let mut outcomes = Vec::new();
    for some in carriers.chunks(AT_ONCE) {
        std::thread::scope(|scope| {
            let running: Vec<_> = some
                .iter()
                .map(|&pid| (pid, scope.spawn(move || cure_one(pid, interpreter))))
                .collect();
            for (pid, one) in running {
                let left = one.join().unwrap_or_else(|_| Some("pyheap has failed".to_owned()));
                outcomes.push(Outcome { pid, left });
            }
        });
    }
    outcomes
}

/// What is left, if anything.
fn cure_one(pid: i32, interpreter: Option<&Interpreter>) -> Option<String> {
    let own;
    let interpreter = match interpreter {
        Some(parents) => parents,
        None => match preflight::look(pid) {
            Ok(target) => {
                own = target.interpreter;
                &own
            }
            Err(refusal) => return Some(refusal.to_string()),
        },
    };
    match cure(pid, interpreter) {
        Ok(cured) => cured.into_iter().find_map(|one| match one {
            Cured::Gone | Cured::InUse { .. } => None,
            Cured::Inert(why) => Some(why.to_string()),
            Cured::Copy(error) => Some(chain(&error)),
            Cured::OtherProtocol { protocol } => Some(format!(
                "it has hooks of another version of pyheap (protocol {protocol})"
            )),
        }),
        // It may have ended, or become another program, meanwhile.
        Err(_) if !carries_copy(pid) => None,
        Err(error) => Some(chain(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    /// A child and a grandchild are met, whether the kernel lists children or not, and forgotten when they have ended.
    #[test]
    fn a_glance_meets_the_whole_family() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 600 & echo started; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
        let pid = i32::try_from(shell.id()).unwrap();
        let mut family = Family::of(pid);
        family.glance();
        let by_glance: Vec<i32> = family.known.keys().copied().collect();
        assert_eq!(by_glance, Family::of(pid).look());
        assert_eq!(by_glance.len(), 1);
        let mut ours = Family::of(i32::try_from(std::process::id()).unwrap());
        ours.glance();
        assert!(ours.known.contains_key(&pid) && ours.known.contains_key(&by_glance[0]));
        shell.kill().unwrap();
        shell.wait().unwrap();
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(by_glance[0]),
            nix::sys::signal::Signal::SIGKILL,
        )
        .unwrap();
        ours.glance();
        assert!(!ours.known.contains_key(&pid));
    }
}
