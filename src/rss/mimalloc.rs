//! mimalloc, which a Python without the GIL allocates with: by the pages that its threads have.
//!
//! What it refuses to do: count what threads that have ended left behind ("abandoned" segments) until another one takes it.

use super::resident::Resident;
use crate::attach::Target;
use pyheap_injector::RemoteMemory;
use std::ops::Range;

/// All of it, in resident bytes.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Mimalloc {
    /// Blocks in use.
    pub used_bytes: u64,
    /// In its segments, but in no block in use.
    pub free_bytes: u64,
    /// Where the segments are.
    #[serde(skip)]
    pub ranges: Vec<Range<u64>>,
}

/// Looks for mimalloc's segments in `areas`.
#[must_use]
pub fn find(_memory: &impl RemoteMemory, _resident: &Resident, _target: &Target, _areas: &[Range<u64>]) -> Option<Mimalloc> {
    None
}
