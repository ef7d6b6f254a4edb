//! Puts code into a running process, and takes it away again. Knows nothing of Python.

pub mod memory;

pub use memory::{MemoryError, ProcessMemory, RemoteMemory};
pub use pyheap_protocol::RemoteAddr;
