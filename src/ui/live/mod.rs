//! The live view of `pyheap attach`.
//!
//! [`watch`] knows what is alive, fed with the recording's events; [`rows`] makes the lines of a table of that, [`state`] turns
//! keys into choices, [`view`] draws them. None of these knows a terminal or a process, so that each is tested by itself.
//! [`terminal`] is the terminal, [`screen`] joins them all; [`lines`] is what is printed where there is no terminal.

pub mod lines;
pub mod rows;
pub mod screen;
pub mod series;
pub mod source;
pub mod state;
pub mod survivors;
pub mod terminal;
pub mod text;
pub mod view;
pub mod watch;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what a live view knows; a thread that panicked while it held the lock leaves numbers, not broken pointers.
pub fn lock(watch: &Mutex<watch::Watch>) -> MutexGuard<'_, watch::Watch> {
    watch.lock().unwrap_or_else(PoisonError::into_inner)
}
