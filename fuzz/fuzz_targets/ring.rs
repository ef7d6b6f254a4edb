//! Any bytes as records in the ring.
#![no_main]
#[path = "../../tests/common/every_record.rs"]
mod every_record;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = every_record::ring(bytes);
});
