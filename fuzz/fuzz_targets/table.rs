//! Any bytes as the table of live samples.
#![no_main]
#[path = "../../tests/common/every_record.rs"]
mod every_record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = every_record::table(bytes);
});
