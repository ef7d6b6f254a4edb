//! What pyheap's command and its shim agree on.
#![no_std]

pub mod addr;

pub use addr::RemoteAddr;
