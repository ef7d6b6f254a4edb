//! What depends on the processor: registers, restarts, stubs.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("pyheap runs on x86-64 Linux only so far");
