//! Any bytes as the files of one profile, through every reader and every export.
#![no_main]
#[path = "../../tests/common/every_way.rs"]
mod every_way;

use std::cell::OnceCell;

/// Separates the files in the input.
const BORDER: &[u8] = b"\xFE--\n";

thread_local! {
    static DIR: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    DIR.with(|dir| {
        let dir = dir.get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
        let base = dir.path().join("run");
        let mut rest = bytes;
        for suffix in ["hpm", "hpd", "hpx"] {
            let end = rest.windows(BORDER.len()).position(|window| window == BORDER);
            let (file, after) = match end {
                Some(end) => (&rest[..end], &rest[end + BORDER.len()..]),
                None => (rest, &[][..]),
            };
            std::fs::write(base.with_extension(suffix), file).expect("room for a small file");
            rest = after;
        }
        every_way::profile(&base);
    });
});
