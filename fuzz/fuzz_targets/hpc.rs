//! Any bytes as a .hpc.
#![no_main]
#[path = "../../tests/common/every_way.rs"]
mod every_way;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| every_way::hpc(bytes));
