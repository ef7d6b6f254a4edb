//! What the tests with live interpreters share.
#![allow(
    dead_code,
    reason = "every test file is a crate of its own and uses its part of this"
)]

pub mod interpreters;
pub mod python;
