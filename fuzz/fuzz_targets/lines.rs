//! Any bytes as a table of lines.
#![no_main]
#[path = "../../tests/common/every_record.rs"]
mod every_record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = every_record::lines(bytes);
});
