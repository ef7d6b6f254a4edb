//! Any bytes as an interpreter's file, debug information included.
#![no_main]
#[path = "../../tests/common/every_record.rs"]
mod every_record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = every_record::elf(bytes);
});
