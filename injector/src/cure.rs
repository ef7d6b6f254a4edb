//! Curing: the originals back, then the memory away, once it is proven that no thread is inside.

use crate::arch::{Call, Job, STUB_BYTES};
use crate::hijack::{self, HijackError, Hijacked};
use crate::infect::{Found, SLOTS as STUB_SLOTS, call_job, clear_stubs, make_unused, page_of, wait, watch, write_code};
use crate::memory::{MemoryError, ProcessMemory, RemoteMemory};
use crate::observe;
use crate::seccomp;
use crate::space;
use pyheap_protocol::RemoteAddr;
use pyheap_protocol::control::{Control, Identity, SLOTS, ShimHeader, Slot, StartStatus};
use std::mem::offset_of;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Longest wait for the stop routine.
const STOP_DEADLINE: Duration = Duration::from_millis(800);
/// Longest wait for threads to leave the shim, in each round.
const LEAVE_DEADLINE: Duration = Duration::from_secs(5);
/// Pause before the last look: a thread that was preempted inside a function which reads and writes the allocators may
/// hold our pointers where nobody sees them.
const SETTLE: Duration = Duration::from_secs(1);
/// Stub slots of the two hijacks.
const STOP_SLOT: u64 = 0;
const UNMAP_SLOT: u64 = 1;

/// Why a target could not be cured completely.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CureError {
    /// No thread could be redirected.
    #[error("the target could not be entered to take the hooks out")]
    Hijack(#[from] HijackError),
    /// Its memory could not be read or written.
    #[error("the target's memory could not be accessed")]
    Memory(#[from] MemoryError),
    /// `/proc/PID/maps` could not be read.
    #[error("the target's mappings could not be read")]
    Maps(#[from] procfs::ProcError),
    /// A thread is still in stubs that an earlier pyheap has left.
    #[error("a thread is still in code of an earlier pyheap; the hooks are still there, try again: pyheap cure PID")]
    StillThere,
    /// Its seccomp filter would not let us take the hooks out.
    #[error("the hooks stay in the target, switched off: it cannot be entered any more")]
    Seccomp(#[from] seccomp::Forbidden),
    /// The stop routine did not run in time.
    #[error("the redirected thread {0} got no processor; the hooks are still there, try again: pyheap cure PID")]
    Slow(i32),
}

/// How a cure ended.
#[derive(Debug)]
pub enum Cure {
    /// Nothing of ours is left.
    Clean(Vec<Hijacked>),
    /// The hooks are out, but the memory stays for now: inert text that somebody may still call.
    Inert {
        /// Why.
        why: Inert,
        /// What the hijacks cost.
        hijacks: Vec<Hijacked>,
    },
}

/// Why the memory was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Inert {
    /// Another tool (tracemalloc, for example), or data of a library, has pointers to our wrappers and may put them back.
    #[error("another tool, or a library, holds pointers to our wrappers")]
    Foreign,
    /// Memory of the target holds addresses of our wrappers of the C library's functions.
    #[error("a library has copied the address of a wrapper")]
    Held,
    /// A thread was inside for too long.
    #[error("a thread was still inside")]
    Busy,
    /// [`Depth::Silent`] was asked for.
    #[error("it goes when the recording ends")]
    Later,
}

/// How far to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Only the originals back, if our wrappers are installed; a region without them is cured. Quick, where the proof that no
    /// thread can come back to the code takes a second: that can wait until the next recording ends.
    Silent,
    /// The memory away, too.
    Gone {
        /// Since when the originals are back: that is not done again.
        silent_since: Option<Instant>,
    },
}

/// Takes a region of ours out of `pid`, as far as `depth` says. `verify` re-reads the interpreter's allocators: true if none of them points into
/// the given range. `held`, where there are wrappers elsewhere too, looks for their addresses: true if somebody may still call one.
///
/// # Errors
/// See [`CureError`]; the region can be cured again later.
pub fn cure(
    pid: i32,
    found: &Found,
    depth: Depth,
    verify: impl Fn(&std::ops::Range<u64>) -> bool,
    held: Option<&dyn Fn() -> bool>,
) -> Result<Cure, CureError> {
    let memory = ProcessMemory::new(pid);
    let mut hijacks = Vec::new();
    if let Found::Region(identity) = found {
        // Whatever comes: from now on the hooks only pass on.
        let gate = RemoteAddr(identity.control + offset_of!(Control, gate) as u64);
        memory.write(gate, &0_u64.to_le_bytes())?;
    }
    // It may have put itself under a filter since we came.
    seccomp::check(pid)?;
    let identity = match *found {
        Found::Region(identity) => identity,
        Found::Empty { base, len } => {
            let tail = tail_for(pid, &memory)?;
            let used = unmap(pid, &memory, base, len, tail);
            make_unused(pid, &memory, &space::maps(pid)?, tail, None);
            hijacks.push(used?);
            return Ok(Cure::Clean(hijacks));
        }
    };
    let word = |offset: usize| memory.read_u64(RemoteAddr(identity.control + offset as u64));
    let header =
        ShimHeader::read_from_bytes(&memory.read_array::<{ size_of::<ShimHeader>() }>(RemoteAddr(identity.header))?)
            .map_err(|_| {
                CureError::Memory(MemoryError::Read {
                    addr: RemoteAddr(identity.header),
                    len: size_of::<ShimHeader>(),
                    source: std::io::ErrorKind::InvalidData.into(),
                })
            })?;
    let text = identity.text..identity.text + identity.text_len;
    // What the allocators say decides, not the status: whoever set that may have been killed.
    let is_started = |status: u64| {
        [StartStatus::Running, StartStatus::Stopping, StartStatus::Stopped]
            .iter()
            .any(|&s| s as u64 == status)
    };
    let was_stopped = word(offset_of!(Control, status))? == StartStatus::Stopped as u64;
    let mut silent_since = match depth {
        Depth::Gone { silent_since } => silent_since.filter(|_| was_stopped && verify(&text)),
        Depth::Silent => None,
    };
    loop {
        if silent_since.is_none() && (is_started(word(offset_of!(Control, status))?) || !verify(&text)) {
            let foreign = stop(pid, &memory, &identity, &header, &mut hijacks)?;
            silent_since = Some(Instant::now());
            // Not what we had put there, nor what was there before us; but still nothing that would call us.
            let why = match foreign {
                foreign if foreign != 0 && !verify(&text) => Some(Inert::Foreign),
                _ if depth == Depth::Silent && !was_stopped => Some(Inert::Later),
                _ => None,
            };
            if let Some(why) = why {
                clear_stubs(pid, &memory, &identity, Some(&hijacks));
                return Ok(Cure::Inert { why, hijacks });
            }
        }
        let rounds: &[bool] = match silent_since {
            None if held.is_none() => &[false, false],
            _ => &[false, false, true],
        };
        for &settle in rounds {
            if settle {
                let settled = silent_since.map_or(Duration::ZERO, |since| since.elapsed());
                std::thread::sleep(SETTLE.saturating_sub(settled));
            }
            if silent_since.is_some() && !verify(&text) {
                return Ok(Cure::Inert {
                    why: Inert::Foreign,
                    hijacks,
                });
            }
            if settle && held.is_some_and(|held| held()) {
                return Ok(Cure::Inert {
                    why: Inert::Held,
                    hijacks,
                });
            }
            if !nobody_inside(pid, &memory, &identity)? {
                return Ok(Cure::Inert {
                    why: Inert::Busy,
                    hijacks,
                });
            }
        }
        // A thread that an earlier pyheap had redirected may have started the shim only now.
        if silent_since.is_some() || !is_started(word(offset_of!(Control, status))?) && verify(&text) {
            break;
        }
    }
    // The stop routine has found the slots unused.
    if !clear_stubs(pid, &memory, &identity, (!hijacks.is_empty()).then_some(&hijacks)) {
        return Ok(Cure::Inert {
            why: Inert::Busy,
            hijacks,
        });
    }
    let tail = identity.stub + UNMAP_SLOT * STUB_BYTES as u64;
    hijacks.push(unmap(pid, &memory, identity.base, identity.len, tail)?);
    if clear_stubs(pid, &memory, &identity, Some(&hijacks)) {
        hijacks.extend(drop_page(pid, &memory, identity.stub));
    }
    Ok(Cure::Clean(hijacks))
}

/// Runs the stop routine; the bits of pointers that were not ours any more.
fn stop(
    pid: i32,
    memory: &ProcessMemory,
    identity: &Identity,
    header: &ShimHeader,
    hijacks: &mut Vec<Hijacked>,
) -> Result<u64, CureError> {
    let at = |offset: usize| RemoteAddr(identity.control + offset as u64);
    if !clear_stubs(pid, memory, identity, None) {
        return Err(CureError::StillThere);
    }
    memory.write(
        at(offset_of!(Control, status)),
        &(StartStatus::Stopping as u64).to_le_bytes(),
    )?;
    let stub = identity.stub + STOP_SLOT * STUB_BYTES as u64;
    let job = call_job(identity, header.stop);
    let hijacked = hijack::hijack(pid, &observe::by_preference(pid)?, stub, job)?;
    hijacks.push(hijacked);
    let done = || Ok(memory.read_u64(at(offset_of!(Control, status)))? == StartStatus::Stopped as u64);
    if !wait(STOP_DEADLINE, done)? {
        return Err(CureError::Slow(hijacked.tid));
    }
    Ok(memory.read_u64(at(offset_of!(Control, detail)))?)
}

/// Waits until no call is in flight and every thread has been seen outside of the region's code and stack.
fn nobody_inside(pid: i32, memory: &ProcessMemory, identity: &Identity) -> Result<bool, CureError> {
    let watch = watch(memory, &space::maps(pid)?, Some(identity), identity.stub);
    let deadline = Instant::now() + LEAVE_DEADLINE;
    if !wait(LEAVE_DEADLINE, || Ok(calls_in_flight(memory, identity)? == 0))? {
        return Ok(false);
    }
    Ok(observe::all_outside(pid, observe::threads(pid), &watch, deadline)? && calls_in_flight(memory, identity)? == 0)
}

/// Calls that will return into the shim.
fn calls_in_flight(memory: &ProcessMemory, identity: &Identity) -> Result<u64, MemoryError> {
    let at = |offset: usize| RemoteAddr(identity.control + offset as u64);
    let slow = memory.read_u64(at(offset_of!(Control, inflight)))?;
    let slots = memory.read_vec(at(offset_of!(Control, slots)), SLOTS * size_of::<Slot>())?;
    let depths = slots
        .chunks_exact(size_of::<Slot>())
        .filter_map(|bytes| Slot::read_from_bytes(bytes).ok());
    Ok(slow | depths.fold(0, |sum, slot| sum | slot.depth))
}

/// Stands where the stubs were until their page is dropped. A thread may come to drop it any time after it was redirected,
/// and take away what somebody has put there meanwhile: whoever finds the mark waits for that thread, as for one in a stub.
const TO_BE_DROPPED: [u8; 8] = *b"\xCC\xCCpyheap";

/// Drops the private copy of the page that held the stubs; its bytes are the file's again. If no thread is fit for it, the
/// copy stays: one page more, with the same content.
pub(crate) fn drop_page(pid: i32, memory: &ProcessMemory, stub: u64) -> Option<Hijacked> {
    // A shadow stack would have to agree with the frame.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    if status
        .lines()
        .any(|line| line.starts_with("x86_Thread_features:") && line.contains("shstk"))
    {
        return None;
    }
    let maps = space::maps(pid).ok()?;
    let gadgets = space::gadgets(memory, &maps)?;
    let threads = observe::by_preference(pid).ok()?;
    let call = Call::drop_page(page_of(stub));
    write_code(pid, stub, &TO_BE_DROPPED).ok()?;
    let Ok(hijacked) = hijack::call(pid, &threads, call, gadgets, &space::stacks(&maps)) else {
        // No thread is on its way.
        let _ = write_code(pid, stub, &[0; TO_BE_DROPPED.len()]);
        return None;
    };
    let is_marked = || {
        memory
            .read_u64(RemoteAddr(stub))
            .map(|word| word.to_le_bytes() == TO_BE_DROPPED)
    };
    if !wait(STOP_DEADLINE, || Ok(!is_marked()?)).unwrap_or(true) {
        // It was refused (locked memory, a seccomp filter), or the thread got no processor. If that goes on, the mark stays for
        // the next one who wants to come in.
        make_unused(pid, memory, &maps, stub, Some(&[hijacked]));
    }
    Some(hijacked)
}

/// A place for a stub where no identity names one.
fn tail_for(pid: i32, memory: &ProcessMemory) -> Result<u64, CureError> {
    let maps = space::maps(pid)?;
    space::largest_tail(memory, &maps, None)
        .filter(|tail| tail.len >= STUB_SLOTS * STUB_BYTES as u64 && make_unused(pid, memory, &maps, tail.start, None))
        .map(|tail| tail.start)
        .ok_or(CureError::Hijack(HijackError::Os {
            what: "finding unused bytes for a stub",
            source: std::io::ErrorKind::NotFound.into(),
        }))
}

/// Unmaps and sees that it is gone.
fn unmap(pid: i32, memory: &ProcessMemory, base: u64, len: u64, stub: u64) -> Result<Hijacked, CureError> {
    let job = Job::Unmap { address: base, len };
    let hijacked = hijack::hijack(pid, &observe::by_preference(pid)?, stub, job)?;
    let gone = wait(STOP_DEADLINE, || Ok(memory.read_u64(RemoteAddr(base)).is_err()))?;
    if gone {
        Ok(hijacked)
    } else {
        Err(CureError::Slow(hijacked.tid))
    }
}
