//! The target's memory, as the kernel counts it, once a second.

use crate::attach::Session;
use crate::attach::cgroup::MemoryCgroup;
use crate::attach::process::{MemoryUse, ProportionalMemory, resident_bytes};
use crate::profile::facts::MemorySample;
use std::time::{Duration, Instant};

/// Of the time, this part at most is spent on having the kernel walk the page tables of all targets: one in so many.
const WALK_SHARE: u32 = 5000;
/// Between two walks, at least.
const WALK_PAUSE: Duration = Duration::from_millis(1500);
/// A larger target is not walked: it takes some 10 ms a GiB, with its memory map locked.
const WALK_MAX_BYTES: u64 = 4 << 30;

/// Looks at one target.
#[derive(Debug)]
pub struct MemoryProbe {
    pid: i32,
    region: (u64, u64),
    cgroup: Option<MemoryCgroup>,
    /// How many targets share that time.
    company: u32,
    next_walk: Instant,
}

impl MemoryProbe {
    /// For the target of `session`, one of so many.
    #[must_use]
    pub fn new(session: &Session, company: u32) -> Self {
        let pid = session.target.facts.id.pid;
        let identity = session.identity();
        Self {
            pid,
            region: (identity.base, identity.len),
            cgroup: MemoryCgroup::of(pid),
            company: company.max(1),
            next_walk: Instant::now(),
        }
    }

    /// What it has now; `None` if it is gone.
    pub fn sample(&mut self) -> Option<MemorySample> {
        let now = MemoryUse::of(self.pid).ok()?;
        let (base, len) = self.region;
        Some(MemorySample {
            rss: now.rss_bytes,
            pss: self.proportional(now.rss_bytes),
            anon: now.anonymous_bytes,
            file: now.file_bytes,
            swap: now.swap_bytes,
            pyheap: resident_bytes(self.pid, base, len),
            cgroup: self.cgroup.as_ref().and_then(MemoryCgroup::used_bytes),
        })
    }

    /// Proportional memory, as often as it is cheap.
    fn proportional(&mut self, rss: u64) -> Option<u64> {
        let begun = Instant::now();
        if rss > WALK_MAX_BYTES || begun < self.next_walk {
            return None;
        }
        let found = ProportionalMemory::of(self.pid);
        let pause = begun
            .elapsed()
            .saturating_mul(WALK_SHARE.saturating_mul(self.company))
            .max(WALK_PAUSE);
        self.next_walk = Instant::now() + pause;
        found.ok().map(|memory| memory.pss_bytes)
    }
}
