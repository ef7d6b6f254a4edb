//! Puts a freestanding image into a running process, and takes it away again. Knows nothing of Python.
//!
//! # How
//!
//! Infecting is two short *hijacks* of one thread, see [`hijack`]. Each stops the thread, writes a stub of straight-line
//! code into bytes that nobody uses (the zero tail of an executable mapping), redirects the thread to it by one
//! `PTRACE_SETREGS` and lets go at once: from that single commit point on the stub finishes by itself and restores the
//! thread, whatever happens to us. The first hijack maps a region of memory; the host then writes the image into it,
//! with nothing stopped; the second makes its text executable and calls its start routine on a private stack.
//! Curing is the same backwards, with rounds of [`observe`] in between that prove that no thread is inside.
//!
//! # What is never done
//!
//! No `PTRACE_ATTACH`, no single-stepping, no breakpoint, no change of a signal mask, no `PTRACE_O_EXITKILL`: each of them
//! leaves a target dead or changed when the tracer dies at the wrong moment. No descriptor is made in the target.

pub mod arch;
mod child;
pub mod copy;
pub mod cure;
pub mod freeze;
pub mod hijack;
pub mod image;
pub mod infect;
pub mod memory;
pub mod observe;
pub mod region;
pub mod seccomp;
pub mod space;

pub use cure::{Cure, CureError};
pub use image::Image;
pub use infect::{InfectError, Infection};
pub use memory::{MemoryError, MemoryFile, ProcessMemory, RemoteMemory};
pub use pyheap_protocol::RemoteAddr;
