//! What depends on the processor: registers, restarts, stubs.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

// Its instructions are only bytes: the tests make and check them everywhere.
#[cfg(any(test, target_arch = "aarch64"))]
#[cfg_attr(
    not(target_arch = "aarch64"),
    allow(dead_code, unused_imports, reason = "the tests use the parts that make bytes")
)]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub use aarch64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("pyheap runs on x86-64 Linux, and reads processes and profiles on aarch64");

/// The type of ptrace's first argument, which C libraries do not agree on.
#[cfg(not(target_env = "musl"))]
pub(crate) type PtraceRequest = libc::c_uint;
/// The type of ptrace's first argument, which C libraries do not agree on.
#[cfg(target_env = "musl")]
pub(crate) type PtraceRequest = libc::c_int;

/// What a stub does before it restores the thread.
#[derive(Debug, Clone, Copy)]
pub enum Job {
    /// Maps `len` bytes of private anonymous memory at `address`, read-write, and writes `nonce` there. Fails (and leaves
    /// nothing) when the place is taken. `len` is written behind the nonce.
    Map {
        /// Where.
        address: u64,
        /// How much.
        len: u64,
        /// Proof of success.
        nonce: u64,
        /// The process may lock all that it maps (`mlockall`): the kernel would make every page of it resident at once,
        /// while the thread waits. So it is mapped without access, unlocked, and made accessible then.
        locked: bool,
    },
    /// Makes `text` executable, saves the extended registers at `xsave`, and calls `function` on the stack that ends at
    /// `xsave`. When the kernel refuses, stores `refused` and then the errno at `status`.
    Call {
        /// First page of text.
        text: u64,
        /// Its length.
        text_len: u64,
        /// `extern "C" fn()`
        function: u64,
        /// 64-byte aligned area of [`crate::region::XSAVE_BYTES`], zero at first; the stack ends here.
        xsave: u64,
        /// Two words.
        status: u64,
        /// See above.
        refused: u64,
    },
    /// Unmaps.
    Unmap {
        /// Where.
        address: u64,
        /// How much.
        len: u64,
    },
    /// Makes a copy of the process that runs nothing but the stub: it lets go of all descriptors, names itself, sleeps and
    /// ends. See [`crate::copy`].
    Copy {
        /// How long it sleeps: seconds.
        seconds: u64,
        /// And nanoseconds.
        nanos: u64,
        /// Its name, with a zero at the end.
        name: [u8; 16],
    },
    /// Takes the exit status of such a copy that has ended, so that it is gone for good. Does nothing if it has not.
    Reap {
        /// Its pid, as the process sees it.
        child: i32,
    },
}

/// The most slots of [`STUB_BYTES`] that a stub takes.
const MOST_SLOTS: usize = 2;

/// The longest stub, in bytes.
pub const LONGEST_STUB: usize = MOST_SLOTS * STUB_BYTES;

impl Job {
    /// How long its stub may be, in bytes.
    #[must_use]
    pub const fn room(&self) -> usize {
        self.slots() * STUB_BYTES
    }

    /// And in slots.
    const fn slots(&self) -> usize {
        match self {
            Self::Copy { .. } => MOST_SLOTS,
            _ => 1,
        }
    }
}

/// The signals of a thread and its process, a bit each, as a stub needs them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Signals {
    /// Blocked by the thread.
    pub blocked: u64,
    /// With a handler.
    pub caught: u64,
}

/// A system call with up to three arguments.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Its number.
    pub number: u64,
    /// Its arguments.
    pub args: [u64; 3],
}

impl Call {
    /// `madvise(page, 4096, MADV_DONTNEED)`: a private copy of a file's page goes away.
    #[must_use]
    pub const fn drop_page(page: u64) -> Self {
        Self {
            number: libc::SYS_madvise.unsigned_abs(),
            args: [page, 4096, libc::MADV_DONTNEED as u64],
        }
    }
}

/// Instructions of the target's own C library.
#[derive(Debug, Clone, Copy)]
pub struct Gadgets {
    /// A system call and a return.
    pub call: u64,
    /// What signal handlers return to: the call of `rt_sigreturn`.
    pub restorer: u64,
}
