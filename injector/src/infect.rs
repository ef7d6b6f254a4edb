//! Infecting: region, image, start.

use crate::arch::{Job, STUB_BYTES};
use crate::hijack::{self, HijackError, Hijacked};
use crate::image::{Image, ImageError};
use crate::memory::{MemoryError, ProcessMemory, RemoteMemory};
use crate::observe::{self, Watch};
use crate::region::{Plan, Sizes, XSAVE_BYTES};
use crate::seccomp;
use crate::space::{self, Tail};
use procfs::process::MemoryMap;
use pyheap_protocol::control::{Config, Control, Identity, ShimHeader, StartStatus};
use pyheap_protocol::{IDENTITY_MAGIC, MAPPED_NONCE, PROTOCOL, RemoteAddr};
use std::mem::offset_of;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Longest wait for a redirected thread to get through its stub. It only runs straight-line code, but it may have to wait
/// for a processor.
const STUB_DEADLINE: Duration = Duration::from_millis(800);
/// Longest wait for threads to be out of stubs. On a machine with many more running threads than processors it can take
/// a second until each has been on one.
const LEAVE_DEADLINE: Duration = Duration::from_secs(5);
/// Time that a thread which was not wanted any more gets to say that it had begun before.
const LAST_CHANCE: Duration = Duration::from_millis(100);
/// Slots of stubs. Two hijacks in a row use different ones, and each must be zero before.
pub(crate) const SLOTS: u64 = 2;
const _: () = assert!(SLOTS as usize * STUB_BYTES >= crate::arch::LONGEST_STUB);

/// Why the target could not be infected. It is as it was before, except that it may have an inert mapping of ours.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InfectError {
    /// No thread could be redirected.
    #[error("the target could not be entered")]
    Hijack(#[from] HijackError),
    /// Its memory could not be read or written.
    #[error("the target's memory could not be accessed")]
    Memory(#[from] MemoryError),
    /// A defect of this pyheap's build.
    #[error("the shim in this pyheap is unusable")]
    Image(#[from] ImageError),
    /// `/proc/PID/maps` could not be read.
    #[error("the target's mappings could not be read")]
    Maps(#[from] procfs::ProcError),
    /// No gap of this size in the address space.
    #[error("the target's address space has no room for {0} bytes")]
    NoGap(u64),
    /// No executable mapping has unused bytes at its end.
    #[error("no executable mapping of the target has {0} unused bytes at its end")]
    NoTail(u64),
    /// The mapping was refused (RLIMIT_AS, a memory limit, a seccomp filter), several times.
    #[error(
        "the target was refused {0} bytes of address space; look at its RLIMIT_AS (ulimit -v) and, if it locks its memory, its RLIMIT_MEMLOCK (ulimit -l)"
    )]
    MapRefused(u64),
    /// A redirected thread did not get through in time; it will.
    #[error(
        "the redirected thread {tid} got no processor for {waited:?}; it will find that it is not wanted any more, try again"
    )]
    Slow {
        /// Which.
        tid: i32,
        /// How long.
        waited: Duration,
    },
    /// `mprotect` said no.
    #[error("the kernel does not let the target make memory executable (SELinux execmem, MDWE or a seccomp filter)")]
    NotExecutable(#[source] std::io::Error),
    /// `madvise` said no.
    #[error("the kernel cannot keep forked children out of the shim (it needs Linux 4.14 or later)")]
    NotForkSafe(#[source] std::io::Error),
    /// Bytes that should be unused are not: stubs that a killed pyheap has left, with a thread still in them.
    #[error("a thread of the target is still in code that an earlier pyheap has left; try again")]
    OldStubs,
    /// The interpreter's allocators are not as expected.
    #[error("the interpreter's allocators are not in a state that can be wrapped ({0:#x})")]
    OddAllocators(u64),
    /// The program was changing them itself.
    #[error("the target was just changing its allocators itself (did tracemalloc start or stop?); try again")]
    Changing,
}

/// A region in a target, and how to reach it.
#[derive(Debug)]
pub struct Infection {
    pid: i32,
    memory: ProcessMemory,
    plan: Plan,
    identity: Identity,
    header: ShimHeader,
    /// What the hijacks cost so far.
    pub hijacks: Vec<Hijacked>,
}

/// Who we are, for [`Identity`].
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    /// Our process id.
    pub pid: u32,
    /// Our start time in clock ticks since boot.
    pub start: u64,
    /// The inode number of our pid namespace; 0 if it is not known.
    pub namespace: u32,
}

impl Infection {
    /// Maps a region in `pid`, near the code at `near` if there is room, and writes the image into it. Nothing of it runs yet.
    ///
    /// # Errors
    /// See [`InfectError`].
    pub fn prepare(pid: i32, image: &Image, sizes: Sizes, owner: Owner, near: u64) -> Result<Self, InfectError> {
        let memory = ProcessMemory::new(pid);
        let plan = Plan::new(image, sizes);
        let maps = space::maps(pid)?;
        let tail = place_for_stubs(pid, &memory, &maps)?;
        let (base, hijacked) = map(pid, &memory, plan.len, tail, near)?;
        let image_base = base + plan.image;
        // Fresh memory is zero: the control block behind the image's bytes takes no memory before it is used.
        memory.write(RemoteAddr(image_base), &image.placed_at(image_base)?)?;
        let header = image.header_at(image_base)?;
        let text = image.text();
        let identity = Identity {
            magic: IDENTITY_MAGIC,
            protocol: PROTOCOL,
            owner_pid: owner.pid,
            owner_start: owner.start,
            base,
            len: plan.len,
            text: image_base + text.start,
            text_len: text.end - text.start,
            control: header.control,
            header: image_base + image.header_offset(),
            target_pid: pid as u32,
            owner_namespace: owner.namespace,
            heartbeat: 0,
            stub: tail.start,
            allocators: [0; 3],
            xsave: base + plan.xsave,
        };
        memory.write(RemoteAddr(base), identity.as_bytes())?;
        Ok(Self {
            pid,
            memory,
            plan,
            identity,
            header,
            hijacks: vec![hijacked],
        })
    }

    /// Where the parts are, as the shim's configuration wants them.
    #[must_use]
    pub fn config(&self) -> Config {
        let base = self.identity.base;
        Config {
            region: base,
            region_len: self.plan.len,
            slab: base + self.plan.slab,
            slab_entries: self.plan.sizes.live_samples,
            ring: base + self.plan.ring,
            ring_len: self.plan.sizes.ring_bytes,
            codes: base + self.plan.codes,
            codes_len: self.plan.sizes.codes,
            stacks: base + self.plan.stacks,
            stacks_len: self.plan.sizes.stacks,
            scratch: base + self.plan.scratch,
            ..Config::default()
        }
    }

    /// Makes the text executable and runs the start routine; returns when the wrappers are in place.
    ///
    /// # Errors
    /// See [`InfectError`]. After an error nothing is installed, and the region can be taken away.
    pub fn start(&mut self, config: &Config) -> Result<(), InfectError> {
        let at = self.identity.control + offset_of!(Control, config) as u64;
        self.memory.write(RemoteAddr(at), config.as_bytes())?;
        let job = call_job(&self.identity, self.header.start);
        let wanted = RemoteAddr(self.identity.control + offset_of!(Control, wanted) as u64);
        self.memory.write(wanted, &1_u64.to_le_bytes())?;
        if let Err(error) = self.run(job, 1) {
            // The thread may come to run it yet: then it must not install what nobody would serve.
            self.memory.write(wanted, &0_u64.to_le_bytes())?;
            let started = || Ok(self.read_control(offset_of!(Control, status))? != StartStatus::None as u64);
            if !matches!(error, InfectError::Slow { .. }) || !wait(LAST_CHANCE, started)? {
                return Err(error);
            }
        }
        // The stubs have done their work: give the bytes back once the thread is out of them.
        clear_stubs(self.pid, &self.memory, &self.identity, Some(&self.hijacks));
        let status = self.read_control(offset_of!(Control, status))?;
        let detail = self.read_control(offset_of!(Control, detail))?;
        let errno = || std::io::Error::from_raw_os_error(detail as i32);
        match status {
            s if s == StartStatus::Running as u64 => Ok(()),
            s if s == StartStatus::NotExecutable as u64 => Err(InfectError::NotExecutable(errno())),
            s if s == StartStatus::NotForkSafe as u64 => Err(InfectError::NotForkSafe(errno())),
            s if s == StartStatus::Stopped as u64 => Err(InfectError::Changing),
            _ => Err(InfectError::OddAllocators(detail)),
        }
    }

    /// Hijacks a thread for `job` from stub slot `slot` and waits for the shim's status to change.
    fn run(&mut self, job: Job, slot: u64) -> Result<(), InfectError> {
        let stub = self.identity.stub + slot * STUB_BYTES as u64;
        let hijacked = hijack::hijack(self.pid, &observe::by_preference(self.pid)?, stub, job)?;
        self.hijacks.push(hijacked);
        wait(STUB_DEADLINE, || {
            Ok(self.read_control(offset_of!(Control, status))? != StartStatus::None as u64)
        })?
        .then_some(())
        .ok_or(InfectError::Slow {
            tid: hijacked.tid,
            waited: STUB_DEADLINE,
        })
    }

    /// A word of the control block.
    ///
    /// # Errors
    /// When the target's memory cannot be read.
    pub fn read_control(&self, offset: usize) -> Result<u64, MemoryError> {
        self.memory.read_u64(RemoteAddr(self.identity.control + offset as u64))
    }

    /// The identity as it was written.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The target's process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The target's memory.
    #[must_use]
    pub fn memory(&self) -> ProcessMemory {
        self.memory
    }

    /// The image's header, as relocated in the target.
    #[must_use]
    pub fn header(&self) -> &ShimHeader {
        &self.header
    }
}

/// Bytes that nobody uses, for [`SLOTS`] stubs; what an earlier pyheap has left there is cleared.
pub(crate) fn place_for_stubs(pid: i32, memory: &ProcessMemory, maps: &[MemoryMap]) -> Result<Tail, InfectError> {
    let program = std::fs::metadata(format!("/proc/{}/exe", observe::reachable(pid)))
        .ok()
        .map(|file| {
            use std::os::unix::fs::MetadataExt;
            (
                nix::sys::stat::major(file.dev()) as i32,
                nix::sys::stat::minor(file.dev()) as i32,
                file.ino(),
            )
        });
    let needed = SLOTS * STUB_BYTES as u64;
    let tail = space::largest_tail(memory, maps, program).filter(|tail| tail.len >= needed);
    let tail = tail.ok_or(InfectError::NoTail(needed))?;
    if !make_unused(pid, memory, maps, tail.start, None) {
        return Err(InfectError::OldStubs);
    }
    Ok(tail)
}

/// The job that runs one of the shim's routines.
pub(crate) fn call_job(identity: &Identity, function: u64) -> Job {
    Job::Call {
        text: identity.text,
        text_len: identity.text_len,
        function,
        xsave: identity.xsave,
        status: identity.control + offset_of!(Control, status) as u64,
        refused: StartStatus::NotExecutable as u64,
    }
}
const _: () = assert!(offset_of!(Control, detail) == offset_of!(Control, status) + 8);
const _: () = assert!(XSAVE_BYTES.is_multiple_of(4096));

/// Polls `done` until it is true; false at the deadline.
pub(crate) fn wait(
    deadline: Duration,
    mut done: impl FnMut() -> Result<bool, MemoryError>,
) -> Result<bool, MemoryError> {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_micros(20);
    loop {
        if done()? {
            return Ok(true);
        }
        if Instant::now() > end {
            return Ok(false);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(2));
    }
}

/// Maps `len` bytes in the target. The chosen gap can be taken before the stub runs; then another one is tried.
fn map(pid: i32, memory: &ProcessMemory, len: u64, tail: Tail, near: u64) -> Result<(u64, Hijacked), InfectError> {
    const ATTEMPTS: u64 = 4;
    for attempt in 0..ATTEMPTS {
        let maps = space::maps(pid)?;
        let salt = attempt * 7 + u64::from(std::process::id());
        let address = space::gap(&maps, len, near, salt).ok_or(InfectError::NoGap(len))?;
        let job = Job::Map {
            address,
            len,
            nonce: MAPPED_NONCE,
            locked: seccomp::locks_memory(pid),
        };
        let hijacked = hijack::hijack(pid, &observe::by_preference(pid)?, tail.start, job)?;
        let watch = watch(memory, &maps, None, tail.start);
        let end = Instant::now() + STUB_DEADLINE;
        loop {
            if memory
                .read_u64(RemoteAddr(address))
                .is_ok_and(|word| word == MAPPED_NONCE)
            {
                return Ok((address, hijacked));
            }
            // Without a nonce: either the thread is still on its way, or it is through and was refused.
            let mut waiting = vec![hijacked.tid];
            let through = observe::round(pid, &watch, &mut waiting)?;
            if memory
                .read_u64(RemoteAddr(address))
                .is_ok_and(|word| word == MAPPED_NONCE)
            {
                return Ok((address, hijacked));
            }
            if through {
                // Refused: the place was taken, or more is not allowed.
                make_unused(pid, memory, &maps, tail.start, Some(&[hijacked]));
                break;
            }
            if Instant::now() > end {
                return Err(InfectError::Slow {
                    tid: hijacked.tid,
                    waited: STUB_DEADLINE,
                });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    Err(InfectError::MapRefused(len))
}

/// Start of the page that holds the stubs at `stub`.
pub(crate) const fn page_of(stub: u64) -> u64 {
    const PAGE: u64 = 4096;
    stub / PAGE * PAGE
}

/// What threads must be out of: the stubs at `stub`, and all of a region.
pub(crate) fn watch(memory: &ProcessMemory, maps: &[MemoryMap], identity: Option<&Identity>, stub: u64) -> Watch {
    Watch {
        text: identity.map_or(0..0, |identity| identity.text..identity.text + identity.text_len),
        stubs: stub..stub + SLOTS * STUB_BYTES as u64,
        stack: identity.map_or(0..0, |identity| identity.text + identity.text_len..identity.xsave + 1),
        restorer: space::gadgets(memory, maps).map(|gadgets| gadgets.restorer),
        page: page_of(stub)..page_of(stub) + 1,
    }
}

/// Zeroes the stubs again, if the threads that may be there are out of them, see [`make_unused`].
pub(crate) fn clear_stubs(pid: i32, memory: &ProcessMemory, identity: &Identity, used: Option<&[Hijacked]>) -> bool {
    space::maps(pid).is_ok_and(|maps| make_unused(pid, memory, &maps, identity.stub, used))
}

/// Sees that the slots at `stub` are zero: at once, or after what is there has been left by every thread; by those of `used`
/// only, if they have all been redirected since the slots were zero. Two looks, since a thread that was blocked in the first
/// one may have been on its way back from a signal handler.
pub(crate) fn make_unused(
    pid: i32,
    memory: &ProcessMemory,
    maps: &[MemoryMap],
    stub: u64,
    used: Option<&[Hijacked]>,
) -> bool {
    let len = (SLOTS * STUB_BYTES as u64) as usize;
    let is_zero = || {
        memory
            .read_vec(RemoteAddr(stub), len)
            .is_ok_and(|bytes| bytes.iter().all(|&b| b == 0))
    };
    if is_zero() {
        return true;
    }
    let watch = watch(memory, maps, None, stub);
    let deadline = Instant::now() + LEAVE_DEADLINE;
    let threads = || match used {
        Some(hijacks) => hijacks.iter().map(|hijack| hijack.tid).collect(),
        None => observe::threads(pid),
    };
    let outside = || observe::all_outside(pid, threads(), &watch, deadline).unwrap_or(false);
    outside() && outside() && write_code(pid, stub, &vec![0; len]).is_ok()
}

/// Writes to executable memory, which only `/proc/PID/mem` can.
pub(crate) fn write_code(pid: i32, address: u64, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    std::fs::File::options()
        .write(true)
        .open(format!("/proc/{}/mem", observe::reachable(pid)))?
        .write_all_at(bytes, address)
}

/// A region of ours in a process.
#[derive(Debug, Clone, Copy)]
pub enum Found {
    /// With an identity.
    Region(Identity),
    /// Mapped, but abandoned before anything was written into it.
    Empty {
        /// Where.
        base: u64,
        /// How long.
        len: u64,
    },
}

/// Looks for regions of pyheap in `pid`: whoever put them there, also in a forked child.
///
/// # Errors
/// When the mappings cannot be read.
pub fn find(pid: i32) -> Result<Vec<Found>, procfs::ProcError> {
    use procfs::process::{MMPermissions, MMapPath};
    let memory = ProcessMemory::new(pid);
    let mut found = Vec::new();
    for map in space::maps(pid)? {
        // Its first part is never anything else but private memory to read and write.
        let wanted = MMPermissions::READ | MMPermissions::WRITE | MMPermissions::PRIVATE;
        if map.perms != wanted || !matches!(map.pathname, MMapPath::Anonymous | MMapPath::Other(_)) {
            continue;
        }
        let (base, end) = map.address;
        let Ok(bytes) = memory.read_array::<{ size_of::<Identity>() }>(RemoteAddr(base)) else {
            continue;
        };
        let Ok(identity) = Identity::read_from_bytes(&bytes) else {
            continue;
        };
        let ours = |at: u64, len: u64| at >= base && at.checked_add(len).is_some_and(|e| e <= base + identity.len);
        if identity.magic == IDENTITY_MAGIC {
            let sane = identity.base == base
                && identity.len < 1 << 40
                && base.checked_add(identity.len).is_some()
                && ours(identity.text, identity.text_len)
                && ours(identity.control, size_of::<Control>() as u64)
                && ours(identity.header, size_of::<ShimHeader>() as u64)
                && ours(identity.xsave, XSAVE_BYTES);
            if sane {
                found.push(Found::Region(identity));
            }
        } else if bytes[..8] == MAPPED_NONCE.to_le_bytes() && bytes[16..].iter().all(|&b| b == 0) {
            // The stub has written how long it is: what else may have grown together with it is not ours.
            let len = u64::from_le_bytes(bytes[8..16].try_into().unwrap_or_default());
            if len > 0 && len <= end - base {
                found.push(Found::Empty { base, len });
            }
        }
    }
    Ok(found)
}
