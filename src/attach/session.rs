//! Attached: the shim is in the target, and goes out again when the session ends.
//!
//! [`Session::attach`] puts it there, [`Session::detach`] takes it away and says what is left, [`cure()`] does the same for
//! what another pyheap left behind. Dropping a session detaches as well, so that an error or a panic on the way does
//! not leave hooks in the target.

use super::frozen;
use super::interpreter::Interpreter;
use super::native::{self, Coverage, Native, NativeError};
use super::native_stacks::{self, NativeStacks};
use super::pages::Words;
use super::preflight::Target;
use super::process::ProcessId;
use super::thread_number;
use crate::frames::Layout;
use crate::frames::layout::TopFrame;
use procfs::process::{MMapPath, MemoryMap};
use pyheap_injector::copy::CopyError;
use pyheap_injector::cure::{self, Cure, CureError, Depth, Inert};
use pyheap_injector::hijack::Hijacked;
use pyheap_injector::image::ImageError;
use pyheap_injector::infect::{self, Found, Owner};
use pyheap_injector::region::{Plan, Sizes};
use pyheap_injector::{Image, InfectError, Infection, MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::control::{
    Allocator, Config, Control, Identity, Mode, Originals, PyLayout, ShimHeader, StartStatus,
};
use pyheap_protocol::{OLDEST_CURABLE, domain};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// The shim, as the build made it.
static SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shim.so"));

/// The 513 route gives each sampled small block up to 512 bytes more. At shorter periods than this that would be more
/// than 1.6 % of a heap of small objects, so they are found by a filter at `free` instead.
const SHORTEST_ROUTED_PERIOD: u64 = 32 << 10;
/// A live pyheap raises its heartbeat this often at least.
const HEARTBEAT: Duration = Duration::from_millis(1500);
/// Most bytes of the interpreter's data that are searched for its allocators.
const MAX_DATA_BYTES: u64 = 64 << 20;

/// Most bytes of address space that the shim takes in a target.
#[must_use]
pub fn region_bytes() -> u64 {
    region_bytes_of(Sizes::default())
}

/// Bytes of address space that the shim takes in a target with tables of these sizes.
#[must_use]
pub fn region_bytes_of(sizes: Sizes) -> u64 {
    image().map_or(0, |image| Plan::new(image, sizes).len)
}

/// The shim, laid out: worked out once, since a pyheap may attach to many.
fn image() -> Result<&'static Image, ImageError> {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    match IMAGE.get() {
        Some(image) => Ok(image),
        None => {
            let image = Image::parse(SHIM)?;
            Ok(IMAGE.get_or_init(|| image))
        }
    }
}

/// What to record.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Mean distance of samples, in bytes of allocation; 1 = every allocation.
    pub period: u64,
    /// Bit per allocator domain.
    pub domains: u32,
    /// Sizes of the tables.
    pub sizes: Sizes,
    /// Also where the interpreter's remote debugging is switched off.
    pub even_if_disabled: bool,
    /// Also what other objects than the interpreter get from the C library, and mappings of so many bytes and more.
    pub native: Option<u64>,
    /// Beside `native`: at each sample so many bytes of the stack, to find its native frames in.
    pub native_stacks: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            period: DEFAULT_PERIOD,
            domains: 7,
            sizes: Sizes::default(),
            even_if_disabled: false,
            native: None,
            native_stacks: None,
        }
    }
}

/// The period that a recording begins with, in bytes.
pub const DEFAULT_PERIOD: u64 = 128 << 10;

/// Why attaching failed. The target runs on; what is left in it, if anything, is inert and said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Another pyheap is at it.
    #[error("process {pid} is already being recorded by pyheap (pid {owner}); stop that one first: kill -INT {owner}")]
    Recorded {
        /// The target.
        pid: i32,
        /// The other pyheap.
        owner: u32,
    },
    /// Whoever started it does not want it.
    #[error(
        "the Python in process {pid} was started with remote debugging disabled (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug, or a build without it), which pyheap honours: --even-if-remote-debug-disabled overrides that"
    )]
    Disabled {
        /// The target.
        pid: i32,
    },
    /// Another pyheap is attaching or detaching at this moment.
    #[error("another pyheap is just attaching to process {pid}, or leaving it; try again")]
    Busy {
        /// The target.
        pid: i32,
    },
    /// A function that the shim needs is not in the interpreter's symbol tables.
    #[error("the interpreter of process {pid} does not export {symbol}, which pyheap needs")]
    NoSymbol {
        /// The target.
        pid: i32,
        /// Its name.
        symbol: &'static str,
    },
    /// Its shim is of another version.
    #[error(
        "process {pid} still has hooks of another version of pyheap (protocol {protocol}); use that version's `pyheap cure {pid}`"
    )]
    OtherProtocol {
        /// The target.
        pid: i32,
        /// The other's protocol.
        protocol: u32,
    },
    /// Entering the target failed.
    #[error("cannot put the hooks into process {pid}")]
    Infect {
        /// The target.
        pid: i32,
        /// Why.
        #[source]
        source: InfectError,
    },
    /// A stale shim could not be taken out.
    #[error("cannot take out the hooks that an earlier pyheap left in process {pid}")]
    Stale {
        /// The target.
        pid: i32,
        /// Why.
        #[source]
        source: CureError,
    },
    /// Its memory cgroup is nearly full.
    #[error(
        "the memory cgroup of process {pid} has {left} bytes left, too few for the hooks' tables: raise its limit, or pyheap might be what gets it killed"
    )]
    NoMemory {
        /// The target.
        pid: i32,
        /// What is left, in bytes.
        left: u64,
    },
    /// The lock cannot be taken.
    #[error("cannot take the lock of process {pid}")]
    Lock {
        /// The target.
        pid: i32,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Reading or writing failed.
    #[error("cannot access the memory of process {pid}")]
    Memory {
        /// The target.
        pid: i32,
        /// Why.
        #[source]
        source: MemoryError,
    },
    /// The C library's functions could not be wrapped.
    #[error("cannot see what native code allocates in process {pid}; without --native it can be recorded")]
    Native {
        /// The target.
        pid: i32,
        /// Why.
        #[source]
        source: NativeError,
    },
    /// The shim inside this pyheap is broken.
    #[error("this pyheap was not built right")]
    Build(#[from] ImageError),
}

impl AttachError {
    /// The exit code for this failure, as [`super::Refusal::exit_code`] classifies them.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Recorded { .. } | Self::OtherProtocol { .. } | Self::Busy { .. } => 6,
            Self::NoSymbol { .. } => 5,
            _ => 7,
        }
    }
}

/// The right to work in a target: held by one pyheap at a time, and by the short-lived processes that trace for it, so that
/// it is free only when the last of them is gone. The name of an abstract socket: it needs no file and is gone with its
/// holders.
#[derive(Debug)]
pub(super) struct Lock {
    _socket: std::os::unix::net::UnixDatagram,
}

impl Lock {
    /// Longest wait for a pyheap that is leaving, or for what a killed one has left running.
    const PATIENCE: Duration = Duration::from_millis(1500);

    /// Takes the lock of process `id`, if it is free within `patience`; `None` when another one has it.
    pub(super) fn take(id: ProcessId, patience: Duration) -> std::io::Result<Option<Self>> {
        use std::os::linux::net::SocketAddrExt;
        let name = format!("pyheap/{}/{}", id.pid, id.start_time);
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        let end = Instant::now() + patience;
        loop {
            match std::os::unix::net::UnixDatagram::bind_addr(&address) {
                Ok(socket) => return Ok(Some(Self { _socket: socket })),
                Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => return Err(error),
                Err(_) if Instant::now() >= end => return Ok(None),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

/// Takes the lock of the target, or says who has it. (Who holds it in another network namespace, [`clear_stale`] finds.)
pub(super) fn lock(id: ProcessId) -> Result<Lock, AttachError> {
    let pid = id.pid;
    for patience in [Duration::ZERO, Lock::PATIENCE] {
        match Lock::take(id, patience) {
            Ok(Some(lock)) => return Ok(lock),
            Ok(None) => recorded_by_another(pid)?,
            Err(source) => return Err(AttachError::Lock { pid, source }),
        }
    }
    Err(AttachError::Busy { pid })
}

/// Refuses when a living pyheap has a region in `pid`.
pub(super) fn recorded_by_another(pid: i32) -> Result<(), AttachError> {
    for found in regions(pid) {
        if let Found::Region(identity) = found
            && let Some(owner) = user_of(pid, &identity)
        {
            return Err(AttachError::Recorded { pid, owner });
        }
    }
    Ok(())
}

/// An attached target.
#[derive(Debug)]
pub struct Session {
    /// Held as long as the shim is there.
    _lock: Lock,
    infection: Infection,
    /// The target and its interpreter.
    pub target: Target,
    /// How the domains are wrapped.
    pub modes: [Mode; 3],
    period: u64,
    /// Regions of others that were there, by their base: since when they are silent. They go with ours.
    silent: Vec<(u64, Instant)>,
    /// The wrappers of the C library's functions.
    native: Option<Mutex<Native>>,
    /// What the shim knows of stacks.
    native_stacks: Option<Mutex<NativeStacks>>,
    /// The ring of pieces of stacks; empty if there is none.
    pieces: Range<u64>,
    detached: bool,
}

impl Session {
    /// Puts the shim into `target` and starts it.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(target: Target, options: Options) -> Result<Self, AttachError> {
        let pid = target.facts.id.pid;
        let memory_error = |source| AttachError::Memory { pid, source };
        if !options.even_if_disabled {
            allowed(&target)?;
        }
        let piece_bytes = options.native_stacks.map_or(0, |_| native_stacks::RING_BYTES);
        let sizes = fitting(
            pid,
            Sizes {
                piece_bytes,
                ..options.sizes
            },
        )?;
        let lock = lock(target.facts.id)?;
        let silent = clear_stale(pid, &target.interpreter)?;
        // A zombie harms nobody: if it cannot go now, the next one tries again.
        let _ = frozen::clear(pid);
        let infect_error = |source| AttachError::Infect { pid, source };
        let image = image()?;
        let own = ProcessId::of(i32::try_from(std::process::id()).unwrap_or(0));
        let owner = Owner {
            pid: std::process::id(),
            start: own.map_or(0, |id| id.start_time),
            namespace: pid_namespace(),
        };
        let mut infection = Infection::prepare(pid, image, sizes, owner, largest_text(&target.interpreter).start)
            .map_err(infect_error)?;
        let config = match config(&infection, &target, options) {
            Ok(config) => config,
            Err(error) => {
                take_away(&infection, &target.interpreter);
                return Err(error);
            }
        };
        if let Some(known) = known_allocators(&target.interpreter) {
            let at = infection.identity().base + offset_of!(Identity, allocators) as u64;
            let write = infection.memory().write(RemoteAddr(at), known.as_bytes());
            write.map_err(memory_error)?;
        }
        let pieces = config.ring + config.ring_len;
        let pieces = pieces..pieces + sizes.piece_bytes;
        let native_stacks = match options.native_stacks {
            Some(bytes) => NativeStacks::begin(
                infection.memory(),
                infection.identity(),
                &target.interpreter,
                bytes,
                &pieces,
            )
            .map(Some)
            .map_err(memory_error)?,
            None => None,
        };
        if let Err(source) = infection.start(&config) {
            // Nothing is installed, and the region can go; unless a thread is yet to come to it. Then it stays, inert, for
            // the next pyheap.
            if !matches!(source, InfectError::Slow { .. }) {
                take_away(&infection, &target.interpreter);
            }
            return Err(infect_error(source));
        }
        let mut session = Self {
            _lock: lock,
            infection,
            target,
            modes: [Mode::Off; 3],
            period: options.period,
            silent,
            native: None,
            native_stacks: native_stacks.map(Mutex::new),
            pieces,
            detached: false,
        };
        session.note_allocators().map_err(memory_error)?;
        session.modes = session.read_modes().map_err(memory_error)?;
        if let Some(mmap_bytes) = options.native {
            let native = session.begin_native(mmap_bytes);
            session.native = Some(Mutex::new(
                native.map_err(|source| AttachError::Native { pid, source })?,
            ));
        }
        Ok(session)
    }

    /// Puts the wrappers of the C library's functions into place. The shim is ready for them.
    fn begin_native(&self, mmap_bytes: u64) -> Result<Native, NativeError> {
        let memory = self.memory();
        let python = read_originals(&memory, self.identity());
        let originals = Originals {
            allocators: python.map(Option::unwrap_or_default),
        };
        Native::begin(
            memory,
            self.identity(),
            &self.target.interpreter,
            &originals,
            mmap_bytes,
        )
    }

    /// Sees to the objects that the process has loaded and unloaded. Call it once a second.
    pub fn look_for_objects(&self) {
        if let Some(mut native) = self.native() {
            // A process that cannot be looked into is one that ends.
            let _ = native.look();
        }
        if let Some(stacks) = &self.native_stacks {
            let mut stacks = stacks.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = stacks.look(&self.target.interpreter);
        }
    }

    /// Where the ring of pieces of stacks is; empty if there is none.
    #[must_use]
    pub fn pieces(&self) -> Range<u64> {
        self.pieces.clone()
    }

    /// What of its native code is covered; `None` without `native`.
    #[must_use]
    pub fn coverage(&self) -> Option<Coverage> {
        Some(self.native()?.coverage())
    }

    /// The slots of native code that have wrappers, and what they held before.
    #[must_use]
    pub fn native_slots(&self) -> BTreeMap<u64, u64> {
        self.native().map(|native| native.slots().clone()).unwrap_or_default()
    }

    fn native(&self) -> Option<MutexGuard<'_, Native>> {
        let native = self.native.as_ref()?;
        Some(native.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes down where the live allocators are, for detaching and for whoever has to clean up after us.
    fn note_allocators(&mut self) -> Result<(), MemoryError> {
        let identity = *self.infection.identity();
        let structs = allocator_structs(&self.memory(), &self.target.interpreter, self.infection.header());
        let at = identity.base + offset_of!(Identity, allocators) as u64;
        self.memory().write(RemoteAddr(at), structs.as_bytes())
    }

    fn read_modes(&self) -> Result<[Mode; 3], MemoryError> {
        let mut modes = [Mode::Off; 3];
        for (number, mode) in modes.iter_mut().enumerate() {
            let at = self.control(offset_of!(Control, modes) + number * 4);
            *mode = match self.memory().read_u32(at)? {
                m if m == Mode::Raw as u32 => Mode::Raw,
                m if m == Mode::Pymalloc as u32 => Mode::Pymalloc,
                m if m == Mode::Generic as u32 => Mode::Generic,
                m if m == Mode::Flat as u32 => Mode::Flat,
                _ => Mode::Off,
            };
        }
        Ok(modes)
    }

    /// The target's memory.
    #[must_use]
    pub fn memory(&self) -> ProcessMemory {
        self.infection.memory()
    }

    /// Address of a word of the control block.
    #[must_use]
    pub fn control(&self, offset: usize) -> RemoteAddr {
        RemoteAddr(self.infection.identity().control + offset as u64)
    }

    /// Where everything is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        self.infection.identity()
    }

    /// Addresses of the tables.
    #[must_use]
    pub fn places(&self) -> Config {
        self.infection.config()
    }

    /// What the hijacks cost so far.
    #[must_use]
    pub fn hijacks(&self) -> &[Hijacked] {
        &self.infection.hijacks
    }

    /// Mean distance of samples in bytes.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.period
    }

    /// Which of the wrapped domains still have our wrappers; `None` where that is not known.
    ///
    /// # Errors
    /// When the target's memory cannot be read.
    pub fn hooks_in_place(&self) -> Result<[Option<bool>; 3], MemoryError> {
        let memory = self.memory();
        let at = self.identity().base + offset_of!(Identity, allocators) as u64;
        let structs: [u8; 24] = memory.read_array(RemoteAddr(at))?;
        let text = text_of(self.identity());
        let mut answers = [None; 3];
        for ((answer, address), mode) in answers.iter_mut().zip(structs.chunks_exact(8)).zip(self.modes) {
            let address = u64::from_le_bytes(address.try_into().unwrap_or_default());
            if address != 0 && mode != Mode::Off {
                *answer = Some(
                    read_allocator(&memory, address)?
                        .functions
                        .iter()
                        .any(|f| text.contains(f)),
                );
            }
        }
        Ok(answers)
    }

    /// Takes the shim out again.
    ///
    /// # Errors
    /// When the hooks could not be taken out; `pyheap cure PID` can be tried again.
    pub fn detach(mut self) -> Result<Cure, CureError> {
        self.detach_once()
    }

    fn detach_once(&mut self) -> Result<Cure, CureError> {
        self.detached = true;
        if let Some(mut native) = self.native() {
            native.take_out();
        }
        let pid = self.infection.pid();
        let own = *self.infection.identity();
        // What an earlier pyheap had to leave may be free by now.
        let others = regions(pid).into_iter().filter(|found| match found {
            Found::Region(identity) => {
                identity.base != own.base && identity.protocol >= OLDEST_CURABLE && user_of(pid, identity).is_none()
            }
            Found::Empty { .. } => true,
        });
        let all: Vec<Found> = std::iter::once(Found::Region(own)).chain(others).collect();
        let mut outcomes = cure_regions(pid, &self.target.interpreter, &all, How::Gone(&self.silent)).into_iter();
        match outcomes.next() {
            Some(Ok(Cure::Inert { hijacks, .. })) if self.is_rid_of(own.base) => Ok(Cure::Clean(hijacks)),
            Some(Err(_)) if self.is_rid_of(own.base) => Ok(Cure::Clean(Vec::new())),
            Some(outcome) => outcome,
            None => Ok(Cure::Clean(Vec::new())),
        }
    }

    /// True if the region at `base` is not there any more: the process has ended while we left, or become another program. One
    /// that is ending has no memory, some time before it is a zombie.
    fn is_rid_of(&self, base: u64) -> bool {
        match infect::find(self.infection.pid()) {
            Ok(found) => !found
                .iter()
                .any(|found| matches!(found, Found::Region(identity) if identity.base == base)),
            Err(_) => !self.target.facts.id.is_alive(),
        }
    }

    /// The target is gone or has become another program: there is nothing to take out.
    pub fn forget(mut self) {
        self.detached = true;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.detached && self.target.facts.id.is_alive() {
            let _ = self.detach_once();
        }
    }
}

/// Refuses where the interpreter's own switch against remote debugging (from 3.14) is off.
pub(super) fn allowed(target: &Target) -> Result<(), AttachError> {
    let pid = target.facts.id.pid;
    match target.interpreter.remote_debugging(&ProcessMemory::new(pid)) {
        Some(false) => Err(AttachError::Disabled { pid }),
        _ => Ok(()),
    }
}

/// Headroom of a memory cgroup from which on the tables have the size that was asked for, and below which there are none.
const AMPLE: u64 = 128 << 20;
const TOO_LITTLE: u64 = 6 << 20;

/// Sizes that the target's memory cgroup has room for: in a narrow one those that take 2 MiB when they are full.
pub(super) fn fitting(pid: i32, wanted: Sizes) -> Result<Sizes, AttachError> {
    match super::headroom::of(pid) {
        Some(left) if left < TOO_LITTLE => Err(AttachError::NoMemory { pid, left }),
        Some(left) if left < AMPLE => Ok(Sizes {
            live_samples: wanted.live_samples.min(1 << 14),
            ring_bytes: wanted.ring_bytes.min(1 << 18),
            codes: wanted.codes.min(1 << 12),
            stacks: wanted.stacks.min(1 << 13),
            piece_bytes: wanted.piece_bytes.min(1 << 19),
        }),
        _ => Ok(wanted),
    }
}

fn largest_text(interpreter: &Interpreter) -> Range<u64> {
    let largest = interpreter.text.iter().max_by_key(|range| range.end - range.start);
    largest.cloned().unwrap_or(0..0)
}

fn text_of(identity: &Identity) -> Range<u64> {
    identity.text..identity.text.saturating_add(identity.text_len)
}

fn read_allocator(memory: &ProcessMemory, address: u64) -> Result<Allocator, MemoryError> {
    let bytes: [u8; size_of::<Allocator>()] = memory.read_array(RemoteAddr(address))?;
    Ok(Allocator::read_from_bytes(&bytes).unwrap_or_default())
}

/// What the shim found before it; `None` for a domain where it has not looked (it was never started).
fn read_originals(memory: &ProcessMemory, identity: &Identity) -> [Option<Allocator>; 3] {
    let header: Option<[u8; size_of::<ShimHeader>()]> = memory.read_array(RemoteAddr(identity.header)).ok();
    let header = header.and_then(|bytes| ShimHeader::read_from_bytes(&bytes).ok());
    let Some(header) = header else { return [None; 3] };
    [0, 1, 2].map(|domain| {
        let at = header.originals + domain * size_of::<Allocator>() as u64;
        read_allocator(memory, at)
            .ok()
            .filter(|found| found.functions != [1; 4])
    })
}

/// The three allocators of an interpreter: raw, mem, obj.
type Allocators = [Allocator; 3];

/// The allocators that a region found when nobody wrapped them: bare pymalloc, which calls nobody. While they are
/// installed, nobody can come to call a wrapper, whatever else was there at other times.
fn bare_allocators(memory: &ProcessMemory, identity: &Identity) -> Option<Allocators> {
    let at = identity.control + offset_of!(Control, modes) as u64;
    let modes: [u8; 12] = memory.read_array(RemoteAddr(at)).ok()?;
    let is_pymalloc = |bytes: &[u8]| bytes == (Mode::Pymalloc as u32).to_le_bytes();
    let [raw, mem, obj] = read_originals(memory, identity);
    modes
        .chunks_exact(4)
        .skip(1)
        .all(is_pymalloc)
        .then_some([raw?, mem?, obj?])
}

/// How far regions are cured.
#[derive(Debug, Clone, Copy)]
enum How<'a> {
    /// See [`Depth::Silent`].
    Silent,
    /// Until nothing is left; of these regions (by their base) the originals are back since then.
    Gone(&'a [(u64, Instant)]),
}

/// Takes away what could not be started.
fn take_away(infection: &Infection, interpreter: &Interpreter) {
    let region = Found::Region(*infection.identity());
    let _ = cure_regions(infection.pid(), interpreter, &[region], How::Gone(&[]));
}

/// Cures regions of one process, one after the other. Where one could not go because of another one that has gone now
/// (a tool had wrapped the first, and the second had wrapped the tool), it is tried again. The outcomes in the same order.
fn cure_regions(pid: i32, interpreter: &Interpreter, all: &[Found], how: How<'_>) -> Vec<Result<Cure, CureError>> {
    let memory = ProcessMemory::new(pid);
    let bare: Vec<Allocators> = all
        .iter()
        .filter_map(|found| match found {
            Found::Region(identity) => bare_allocators(&memory, identity),
            Found::Empty { .. } => None,
        })
        .collect();
    let cure_one = |found: &Found| match found {
        Found::Region(identity) => cure_region(pid, interpreter, *identity, &bare, how),
        Found::Empty { .. } => cure::cure(pid, found, Depth::Gone { silent_since: None }, |_| true, None),
    };
    let mut outcomes: Vec<_> = all.iter().map(cure_one).collect();
    let is_clean = |outcome: &Result<Cure, CureError>| matches!(outcome, Ok(Cure::Clean(_)));
    if outcomes.iter().any(is_clean) {
        for (outcome, found) in outcomes.iter_mut().zip(all) {
            if matches!(
                outcome,
                Ok(Cure::Inert {
                    why: Inert::Foreign,
                    ..
                })
            ) {
                *outcome = cure_one(found);
            }
        }
    }
    outcomes
}

/// Cures a region that this interpreter's allocators may point into; `bare` are allocators that call nobody.
fn cure_region(
    pid: i32,
    interpreter: &Interpreter,
    identity: Identity,
    bare: &[Allocators],
    how: How<'_>,
) -> Result<Cure, CureError> {
    let memory = ProcessMemory::new(pid);
    let mut identity = identity;
    // Slots first: as long as one leads to us, nobody can be proven to be outside.
    let is_native = native::restore(&memory, &identity);
    // What stands in the target is newer than what we were told when we mapped it.
    if let Ok(bytes) = memory.read_array::<{ size_of::<Identity>() }>(RemoteAddr(identity.base))
        && let Ok(now) = Identity::read_from_bytes(&bytes)
        && now.base == identity.base
    {
        identity.allocators = now.allocators;
    }
    if identity.allocators == [0; 3]
        && let Ok(bytes) = memory.read_array::<{ size_of::<ShimHeader>() }>(RemoteAddr(identity.header))
        && let Ok(header) = ShimHeader::read_from_bytes(&bytes)
    {
        identity.allocators = allocator_structs(&memory, interpreter, &header);
        let at = identity.base + offset_of!(Identity, allocators) as u64;
        let _ = memory.write(RemoteAddr(at), identity.allocators.as_bytes());
    }
    let is_copy = is_wiped(&memory, &identity);
    if is_copy {
        revive(&memory, &identity)?;
    }
    let structs = identity.allocators;
    let originals = read_originals(&memory, &identity);
    // Not only free of our wrappers, but what was there before us, or what calls nobody: a tool that wrapped us meanwhile
    // will call us.
    let verify = |text: &Range<u64>| {
        let now = structs.map(|address| read_allocator(&memory, address).ok().filter(|_| address != 0));
        // So do functions of the interpreter itself: where those keep what they call is searched below.
        let is_own = |allocator: Allocator| {
            let mut functions = allocator.functions.iter();
            functions.all(|function| interpreter.text.iter().any(|text| text.contains(function)))
        };
        let is_bare = bare.iter().any(|bare| now == bare.map(Some)) || now.iter().all(|now| now.is_some_and(is_own));
        structs
            .iter()
            .zip(now)
            .zip(originals)
            .filter(|&((&address, _), _)| address != 0)
            .all(|((_, now), original)| {
                now.is_some_and(|now| {
                    let is_original = is_bare || original.is_none_or(|was| was == now);
                    is_original && !now.functions.iter().any(|f| text.contains(f))
                })
            })
            && !is_remembered(&memory, interpreter, text)
            && !is_wrapped(&memory, &identity)
    };
    let is_held = || is_native.is_err() || native::is_held(&memory, &identity);
    let held: Option<&dyn Fn() -> bool> = if matches!(is_native, Ok(false)) {
        None
    } else {
        Some(&is_held)
    };
    let found = Found::Region(identity);
    let depth = match how {
        How::Silent => Depth::Silent,
        How::Gone(silent) => {
            let known = silent.iter().find(|(base, _)| *base == identity.base);
            Depth::Gone {
                silent_since: known.map(|(_, since)| *since),
            }
        }
    };
    let outcome = cure::cure(pid, &found, depth, verify, held);
    if is_copy && !matches!(outcome, Ok(Cure::Clean(_))) {
        // What stays is to be known as a copy again, which nobody uses.
        memory.write(config_word(&identity, offset_of!(Config, region)), &[0; 8])?;
    }
    outcome
}

/// True if another region has found the wrappers of this one when it came, and calls them: a tool put them back in between.
fn is_wrapped(memory: &ProcessMemory, identity: &Identity) -> bool {
    let text = text_of(identity);
    let calls = |found: Found| match found {
        Found::Region(other) if other.base != identity.base => {
            let mut originals = read_originals(memory, &other).into_iter().flatten();
            originals.any(|original| original.functions.iter().any(|function| text.contains(function)))
        }
        _ => false,
    };
    // What cannot be read may be there.
    infect::find(memory.pid()).map_or(true, |regions| regions.into_iter().any(calls))
}

/// True if data of the interpreter or of a library holds a pointer into `text`. tracemalloc keeps what it found when it was
/// last started, and calls it when it is started again, before it looks anew; others keep theirs in static data, too.
fn is_remembered(memory: &ProcessMemory, interpreter: &Interpreter, text: &Range<u64>) -> bool {
    let Ok(maps) = pyheap_injector::space::maps(memory.pid()) else {
        return true;
    };
    let mut ranges = interpreter.writable.clone();
    let first_of_file = |map: &&MemoryMap| map.offset == 0 && matches!(map.pathname, MMapPath::Path(_));
    for map in maps.iter().filter(first_of_file) {
        ranges.extend(writable_segments(memory, map.address.0));
    }
    // Some are there twice.
    ranges.sort_by_key(|range| (range.start, range.end));
    ranges.dedup();
    let (mut left, mut words) = (MAX_DATA_BYTES, Words::default());
    ranges.into_iter().any(|range| {
        let len = range.end.saturating_sub(range.start).min(left);
        left -= len;
        words.any(memory, range.start..range.start.saturating_add(len), |word| {
            text.contains(&word)
        })
    })
}

/// The writable segments of the ELF file whose first page is mapped at `start`, .bss included and nothing else; none if it
/// is no ELF file. (What follows .bss without a gap in /proc/PID/maps may be a stack.)
fn writable_segments(memory: &ProcessMemory, start: u64) -> Vec<Range<u64>> {
    const HEADER: usize = 4096;
    const LOAD: u32 = 1;
    const WRITABLE: u32 = 2;
    let Ok(bytes) = memory.read_vec(RemoteAddr(start), HEADER) else {
        return Vec::new();
    };
    let word = |at: usize, len: usize| {
        let mut word = [0; 8];
        word.get_mut(..len)?
            .copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
        Some(u64::from_le_bytes(word))
    };
    let is_elf = bytes.starts_with(b"\x7fELF\x02\x01");
    let (Some(table), Some(count)) = (word(0x20, 8).filter(|_| is_elf), word(0x38, 2)) else {
        return Vec::new();
    };
    let (mut first, mut found) = (None, Vec::new());
    for number in 0..count as usize {
        let Some(at) = usize::try_from(table)
            .ok()
            .and_then(|table| table.checked_add(number * 56))
        else {
            break;
        };
        let (Some(kind), Some(flags), Some(address), Some(len)) =
            (word(at, 4), word(at + 4, 4), word(at + 16, 8), word(at + 40, 8))
        else {
            break;
        };
        if kind != u64::from(LOAD) {
            continue;
        }
        let bias = start.wrapping_sub(*first.get_or_insert(address & !0xfff));
        if flags & u64::from(WRITABLE) != 0 {
            // Pointers are aligned.
            let begin = bias.wrapping_add(address) & !7;
            found.push(begin..bias.wrapping_add(address).saturating_add(len));
        }
    }
    found
}

/// True for a forked child's copy of its parent's region: the kernel has wiped its control block, so that the shim's words
/// about where it is are zero. (So they are in a region that was never started.)
fn is_wiped(memory: &ProcessMemory, identity: &Identity) -> bool {
    let at = config_word(identity, offset_of!(Config, region));
    memory.read_u64(at).is_ok_and(|region| region == 0)
}

/// Address of a word of the shim's configuration.
fn config_word(identity: &Identity, offset: usize) -> RemoteAddr {
    RemoteAddr(identity.control + (offset_of!(Control, config) + offset) as u64)
}

/// Tells the shim in a forked child's copy what its stop routine must know, as far as our wrappers are still installed
/// there: the way to take it out is then the same as in the parent.
fn revive(memory: &ProcessMemory, identity: &Identity) -> Result<(), MemoryError> {
    let bytes: [u8; size_of::<ShimHeader>()] = memory.read_array(RemoteAddr(identity.header))?;
    let Ok(header) = ShimHeader::read_from_bytes(&bytes) else {
        return Ok(());
    };
    let [raw, small_mem, small_obj, generic_mem, generic_obj, flat_mem, flat_obj] = header.wrappers;
    // Families share functions: the one that fits best is installed.
    let families: [&[(Mode, [u64; 4])]; 3] = [
        &[(Mode::Raw, raw)],
        &[
            (Mode::Pymalloc, small_mem),
            (Mode::Generic, generic_mem),
            (Mode::Flat, flat_mem),
        ],
        &[
            (Mode::Pymalloc, small_obj),
            (Mode::Generic, generic_obj),
            (Mode::Flat, flat_obj),
        ],
    ];
    let mut installed = false;
    for (domain, (families, address)) in families.into_iter().zip(identity.allocators).enumerate() {
        if address == 0 {
            continue;
        }
        let functions = read_allocator(memory, address)?.functions;
        let ours = |wrappers: &[u64; 4]| {
            let pairs = functions.iter().zip(wrappers);
            pairs.filter(|&(now, ours)| *ours != 0 && now == ours).count()
        };
        let best = families.iter().max_by_key(|(_, wrappers)| ours(wrappers));
        if let Some((mode, _)) = best.filter(|(_, wrappers)| ours(wrappers) > 0) {
            let at = identity.control + (offset_of!(Control, modes) + domain * 4) as u64;
            memory.write(RemoteAddr(at), &(*mode as u32).to_le_bytes())?;
            installed = true;
        }
    }
    if installed {
        let word = |offset: usize| config_word(identity, offset);
        memory.write(word(offset_of!(Config, region)), &identity.base.to_le_bytes())?;
        memory.write(word(offset_of!(Config, region_len)), &identity.len.to_le_bytes())?;
        memory.write(
            RemoteAddr(identity.control + offset_of!(Control, status) as u64),
            &(StartStatus::Running as u64).to_le_bytes(),
        )?;
    }
    Ok(())
}

/// Takes out what an earlier pyheap left; refuses if that one is alive. Of what was still installed only the hooks: its memory
/// goes later. Which regions those are.
fn clear_stale(pid: i32, interpreter: &Interpreter) -> Result<Vec<(u64, Instant)>, AttachError> {
    let all = regions(pid);
    for found in &all {
        if let Found::Region(identity) = found {
            if let Some(owner) = user_of(pid, identity) {
                return Err(AttachError::Recorded { pid, owner });
            }
            if identity.protocol < OLDEST_CURABLE {
                return Err(AttachError::OtherProtocol {
                    pid,
                    protocol: identity.protocol,
                });
            }
        }
    }
    let mut silent = Vec::new();
    for (outcome, found) in cure_regions(pid, interpreter, &all, How::Silent).into_iter().zip(&all) {
        let outcome = outcome.map_err(|source| AttachError::Stale { pid, source })?;
        if let (Cure::Inert { why: Inert::Later, .. }, Found::Region(identity)) = (outcome, found) {
            silent.push((identity.base, Instant::now()));
        }
    }
    Ok(silent)
}

/// The regions of pyheap in a process; none if it cannot be looked into.
#[must_use]
pub fn regions(pid: i32) -> Vec<Found> {
    infect::find(pid).unwrap_or_default()
}

/// The inode number of our pid namespace; 0 if it cannot be read.
fn pid_namespace() -> u32 {
    use std::os::unix::fs::MetadataExt;
    // The kernel numbers namespaces with 32 bits.
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| u32::try_from(namespace.ino()).unwrap_or(0))
}

/// The pyheap that has made a region, alive or not.
fn owner_of(identity: &Identity) -> Option<ProcessId> {
    Some(ProcessId {
        pid: i32::try_from(identity.owner_pid).ok()?,
        start_time: identity.owner_start,
    })
}

/// The pyheap that a region belongs to, if it is alive: by its pid and start time, or (it may live in another pid
/// namespace) by its heartbeat.
fn live_owner(pid: i32, identity: &Identity) -> Option<u32> {
    let owner = owner_of(identity)?;
    if owner.is_alive() {
        return Some(identity.owner_pid);
    }
    // Its number counts here, and nothing hides it (hidepid): it is gone.
    let is_listed = std::path::Path::new(&format!("/proc/{}", owner.pid)).exists();
    let is_free = nix::sys::signal::kill(nix::unistd::Pid::from_raw(owner.pid), None) == Err(nix::errno::Errno::ESRCH);
    let counts_here = identity.owner_namespace != 0 && identity.owner_namespace == pid_namespace();
    if counts_here && owner.pid > 0 && (is_listed || is_free) {
        return None;
    }
    let memory = ProcessMemory::new(pid);
    let heartbeat = || {
        memory
            .read_u64(RemoteAddr(identity.base + offset_of!(Identity, heartbeat) as u64))
            .ok()
    };
    let before = heartbeat()?;
    if before == 0 {
        return None;
    }
    std::thread::sleep(HEARTBEAT);
    (heartbeat()? != before).then_some(identity.owner_pid)
}

/// The pyheap that records `pid`, if its process is to be seen from here: no waiting for heartbeats.
#[must_use]
pub fn recorder_of(pid: i32) -> Option<u32> {
    regions(pid).iter().find_map(|found| match found {
        Found::Region(identity) if !is_copy(pid, identity) => {
            owner_of(identity)?.is_alive().then_some(identity.owner_pid)
        }
        _ => None,
    })
}

/// The live pyheap that uses a region of `pid`; none for a forked child's copy, which nobody uses.
#[must_use]
pub fn user_of(pid: i32, identity: &Identity) -> Option<u32> {
    if is_copy(pid, identity) {
        None
    } else {
        live_owner(pid, identity)
    }
}

/// True for a forked child's copy of a region that was made for another process. It is not wiped if the child was forked
/// before the shim was started.
#[must_use]
pub fn is_copy(pid: i32, identity: &Identity) -> bool {
    let counts_here = identity.owner_namespace != 0 && identity.owner_namespace == pid_namespace();
    identity.target_pid != pid as u32 && (counts_here || is_wiped(&ProcessMemory::new(pid), identity))
}

/// What [`cure()`] did with one region.
#[derive(Debug)]
pub enum Cured {
    /// It is gone.
    Gone,
    /// The hooks are out, inert memory stays.
    Inert(Inert),
    /// It belongs to a pyheap that is alive.
    InUse {
        /// Its pid.
        owner: u32,
    },
    /// It belongs to a version of pyheap that this one cannot clean up after.
    OtherProtocol {
        /// Its protocol.
        protocol: u32,
    },
    /// A frozen copy of the process is left.
    Copy(CopyError),
}

/// Takes out everything that pyheaps which are no more have left in `pid`.
///
/// # Errors
/// When a region could not be cured.
pub fn cure(pid: i32, interpreter: &Interpreter) -> Result<Vec<Cured>, CureError> {
    let mut done = Vec::new();
    let id = ProcessId::of(pid).ok();
    let lock = id.and_then(|id| Lock::take(id, Lock::PATIENCE).ok()).flatten();
    let mut free = Vec::new();
    for found in regions(pid) {
        if let Found::Region(identity) = found
            && identity.protocol < OLDEST_CURABLE
        {
            let protocol = identity.protocol;
            done.push(Cured::OtherProtocol { protocol });
        } else if let Found::Region(identity) = found
            && let Some(owner) = user_of(pid, &identity).or(lock.is_none().then_some(identity.owner_pid))
        {
            done.push(Cured::InUse { owner });
        } else {
            free.push(found);
        }
    }
    if lock.is_some() {
        match frozen::clear(pid) {
            Ok(0) => {}
            Ok(_) => done.push(Cured::Gone),
            Err(error) => done.push(Cured::Copy(error)),
        }
    }
    for outcome in cure_regions(pid, interpreter, &free, How::Gone(&[])) {
        done.push(match outcome? {
            Cure::Clean(_) => Cured::Gone,
            Cure::Inert { why, .. } => Cured::Inert(why),
        });
    }
    Ok(done)
}

/// What the shim calls or writes in the interpreter.
pub(super) struct Entries {
    current_tstate: RemoteAddr,
    /// Where the allocators are, where they are stored directly.
    table: Option<u64>,
    get: RemoteAddr,
    set: RemoteAddr,
}

/// Finds these, or says which is missing.
pub(super) fn entries(target: &Target) -> Result<Entries, AttachError> {
    let pid = target.facts.id.pid;
    let interpreter = &target.interpreter;
    let symbols = &interpreter.symbols;
    let need = |symbol: Option<RemoteAddr>, name| symbol.ok_or(AttachError::NoSymbol { pid, symbol: name });
    let getter = if interpreter.version.minor < 13 {
        "_PyThreadState_UncheckedGet"
    } else {
        "PyThreadState_GetUnchecked"
    };
    let current_tstate = match interpreter.own_state {
        Some(_) => RemoteAddr::NULL,
        None => need(symbols.current_thread_state, getter)?,
    };
    let table = interpreter
        .layout
        .runtime
        .allocators
        .map(|table| interpreter.runtime.0 + table.raw);
    let (get, set) = if table.is_some() {
        (RemoteAddr::NULL, RemoteAddr::NULL)
    } else {
        (
            need(symbols.get_allocator, "PyMem_GetAllocator")?,
            need(symbols.set_allocator, "PyMem_SetAllocator")?,
        )
    };
    Ok(Entries {
        current_tstate,
        table,
        get,
        set,
    })
}

/// The shim's configuration for this target.
fn config(infection: &Infection, target: &Target, options: Options) -> Result<Config, AttachError> {
    let pid = target.facts.id.pid;
    let interpreter = &target.interpreter;
    let symbols = &interpreter.symbols;
    let Entries {
        current_tstate,
        table,
        get,
        set,
    } = entries(target)?;
    let text = largest_text(interpreter);
    Ok(Config {
        period: options.period,
        finalizing: interpreter.runtime.0 + interpreter.layout.runtime.finalizing,
        seed: rand::random(),
        allocators: table.unwrap_or(0),
        get_allocator: get.0,
        set_allocator: set.0,
        current_tstate: current_tstate.0,
        gilstate_tstate: symbols.this_thread_state.map_or(0, |address| address.0),
        text: text.start,
        text_len: text.end - text.start,
        domains: options.domains,
        // Without the GIL, mem and obj are mimalloc.
        allow_pymalloc: u32::from(options.period >= SHORTEST_ROUTED_PERIOD && !interpreter.layout.free_threaded),
        layout: py_layout(interpreter, pid),
        ..infection.config()
    })
}

/// The offsets that the shim's frame walk uses.
fn py_layout(interpreter: &Interpreter, pid: i32) -> PyLayout {
    let Layout {
        thread,
        frame,
        code,
        unicode,
        bytes,
        ..
    } = &interpreter.layout;
    // Offsets within structs are far below 2^32: `Layout` has checked them.
    let small = |offset: u64| u32::try_from(offset).unwrap_or(PyLayout::ABSENT);
    let maybe = |offset: Option<u64>| offset.map_or(PyLayout::ABSENT, small);
    let (walk, tstate_frame, cframe_current_frame) = match thread.top {
        TopFrame::Direct(offset) if frame.owner.is_none() => (PyLayout::WALK_FRAME_OBJECTS, offset, 0),
        TopFrame::Direct(offset) => (PyLayout::WALK_CURRENT, offset, 0),
        TopFrame::ByCFrame { cframe, current_frame } => (PyLayout::WALK_CFRAME, cframe, current_frame),
    };
    let memory = ProcessMemory::new(pid);
    let thread_number = thread_number::distance(&memory, interpreter.runtime, &interpreter.layout, pid);
    PyLayout {
        version: u32::from(interpreter.version.minor) << 8 | u32::from(interpreter.version.micro),
        walk,
        tstate_thread_id: small(thread.thread_id),
        tstate_frame: small(tstate_frame),
        cframe_current_frame: small(cframe_current_frame),
        frame_back: small(frame.back),
        frame_code: small(frame.code),
        frame_instr: small(frame.instr),
        frame_owner: maybe(frame.owner),
        owner_cstack: frame.owner_c_stack.map_or(u32::from(u8::MAX) + 1, u32::from),
        code_size: small(code.size.min(u64::from(PyLayout::MAX_CODE_SIZE))),
        code_filename: small(code.filename),
        code_name: small(code.name),
        code_qualname: maybe(code.qualname),
        code_linetable: small(code.line_table),
        code_firstlineno: small(code.first_line),
        code_version: maybe(code.version),
        code_instructions: code.code_adaptive.map_or(0, small),
        str_length: small(unicode.length),
        str_hash: small(unicode.hash),
        str_state: small(unicode.state),
        str_kind_bit: u32::from(unicode.kind_bit),
        str_ascii_data: small(unicode.ascii_data),
        str_compact_data: small(unicode.compact_data),
        var_size: small(bytes.size),
        bytes_data: small(bytes.data),
        tstate_state: maybe(thread.state),
        frame_tlbc_index: maybe(frame.tlbc_index),
        code_tlbc: maybe(code.tlbc),
        // A distance of -1 would not be aligned, so it is none.
        own_tstate: interpreter.own_state.map_or(PyLayout::ABSENT, i32::cast_unsigned),
        thread_number: thread_number.map_or(PyLayout::ABSENT, i32::cast_unsigned),
        frame_entry: match (interpreter.version.minor, frame.owner) {
            // `is_entry` and `owner` are two neighbours of one byte each.
            (11, Some(owner)) => small(owner - 1),
            _ => PyLayout::ABSENT,
        },
    }
}

/// Where the interpreter's layout or its symbol table says that its three `PyMemAllocatorEx` are.
fn known_allocators(interpreter: &Interpreter) -> Option<[u64; 3]> {
    if let Some(table) = interpreter.layout.runtime.allocators {
        return Some([table.raw, table.mem, table.obj].map(|offset| interpreter.runtime.0 + offset));
    }
    interpreter
        .symbols
        .allocators
        .map(|known| known.map(|address| address.0))
}

/// Where the interpreter keeps its three `PyMemAllocatorEx`: by its runtime's layout from 3.12 on, by its symbol table, or
/// else found by the pointers to our wrappers that are in them now. Zeroes where not found.
fn allocator_structs(memory: &ProcessMemory, interpreter: &Interpreter, header: &ShimHeader) -> [u64; 3] {
    if let Some(known) = known_allocators(interpreter) {
        return known;
    }
    let [raw, small_mem, small_obj, generic_mem, generic_obj, flat_mem, flat_obj] = header.wrappers;
    let wanted = [(domain::RAW, raw), (domain::MEM, small_mem), (domain::OBJ, small_obj)]
        .into_iter()
        .chain([(domain::MEM, generic_mem), (domain::OBJ, generic_obj)])
        .chain([(domain::MEM, flat_mem), (domain::OBJ, flat_obj)]);
    let mut found = [0; 3];
    for range in &interpreter.writable {
        let len = range.end.saturating_sub(range.start).min(MAX_DATA_BYTES);
        let Ok(bytes) = memory.read_vec(RemoteAddr(range.start), len as usize) else {
            continue;
        };
        for (domain, [malloc, calloc, realloc, _]) in wanted.clone() {
            let mut pattern = [0; 24];
            for (place, word) in pattern.chunks_exact_mut(8).zip([malloc, calloc, realloc]) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            let hit = bytes
                .windows(pattern.len())
                .step_by(8)
                .position(|window| window == pattern);
            if let (Some(hit), Some(place)) = (hit, found.get_mut(usize::from(domain))) {
                // The functions follow `ctx`.
                *place = range.start + hit as u64 * 8 - 8;
            }
        }
    }
    found
}

/// True if our region is in the process's memory, as we have made it: then the process is alive, and runs the same program.
#[must_use]
pub fn is_there(session: &Session) -> bool {
    /// What of it never changes.
    const FIXED: usize = offset_of!(Identity, heartbeat);
    let identity = session.identity();
    let there: Result<[u8; FIXED], _> = session.memory().read_array(RemoteAddr(identity.base));
    there.is_ok_and(|there| there == identity.as_bytes()[..FIXED])
}

/// True if the process has become another program: it has memory, but our region is not in it. A process that is ending
/// has none.
#[must_use]
pub fn is_replaced(session: &Session) -> bool {
    let identity = session.identity();
    let magic: Result<[u8; 16], _> = session.memory().read_array(RemoteAddr(identity.base));
    let ours = magic.is_ok_and(|magic| magic == pyheap_protocol::IDENTITY_MAGIC);
    let maps = pyheap_injector::space::maps(session.target.facts.id.pid);
    !ours && maps.is_ok_and(|maps| !maps.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// A child that was forked while its parent was attached to has a copy that the kernel has not wiped.
    #[test]
    fn a_region_for_another_process_is_a_copy() {
        let own = i32::try_from(std::process::id()).unwrap();
        let mut identity = Identity::new_zeroed();
        (identity.target_pid, identity.owner_namespace) = (own as u32, pid_namespace());
        assert!(!is_copy(own, &identity));
        identity.target_pid += 1;
        assert!(is_copy(own, &identity));
        assert_eq!(user_of(own, &identity), None);
        // In another namespace it may have that number: then only what is wiped is a copy, and here nothing can be read.
        identity.owner_namespace = 0;
        assert!(!is_copy(own, &identity));
    }
}
