//! The mappings of a process, and which of their pages are in memory.
//!
//! A page that is not there is not read either: reading it from outside would bring it there.

pub use crate::attach::pages::PAGE;
use crate::attach::pages::{PRESENT, Pagemap, SWAPPED};
use procfs::ProcResult;
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::ops::Range;

/// Pages of address space that are looked up in all, 256 GiB: an entry for each is read.
const MAX_PAGES: u64 = 64 << 20;

/// What is mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Private memory without a file.
    Anonymous,
    /// `[heap]`: what the C library got by `brk`.
    Heap,
    /// `[stack]`: the main thread's.
    Stack,
    /// A file.
    File(String),
    /// Shared memory: `/dev/shm`, memfd, System V, shared anonymous mappings.
    Shared,
    /// `[vdso]` and the like.
    Kernel,
}

/// A mapping.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// Where.
    pub range: Range<u64>,
    /// Resident bytes, as the kernel says.
    pub rss: u64,
    /// What.
    pub kind: Kind,
    /// Device and inode of a file.
    pub file: (i32, i32, u64),
    /// It can be read, written, executed.
    pub access: [bool; 3],
}

/// The mappings of `pid` with their resident bytes.
///
/// # Errors
/// When the process is gone or may not be looked into.
pub fn mappings(pid: i32) -> ProcResult<Vec<Mapping>> {
    let maps = Process::new(pid)?.smaps()?;
    Ok(maps.0.into_iter().map(mapping).collect())
}

/// The same without the resident bytes, which the kernel has to count.
///
/// # Errors
/// As [`mappings`].
pub fn uncounted(pid: i32) -> ProcResult<Vec<Mapping>> {
    let maps = Process::new(pid)?.maps()?;
    Ok(maps.0.into_iter().map(mapping).collect())
}

fn mapping(map: MemoryMap) -> Mapping {
    let shared = map.perms.contains(MMPermissions::SHARED);
    let kind = match &map.pathname {
        MMapPath::Heap => Kind::Heap,
        MMapPath::Stack | MMapPath::TStack(_) => Kind::Stack,
        MMapPath::Path(path) => {
            let name = path.to_string_lossy();
            // What has no name in a file system is shared memory.
            let is_memory = ["/dev/shm/", "/memfd:", "/SYSV", "/dev/zero"]
                .iter()
                .any(|begin| name.starts_with(begin));
            if is_memory {
                Kind::Shared
            } else {
                Kind::File(name.into_owned())
            }
        }
        MMapPath::Vsys(_) | MMapPath::Rollup | MMapPath::Vdso | MMapPath::Vvar | MMapPath::Vsyscall => Kind::Kernel,
        // A name that the program gave (PR_SET_VMA_ANON_NAME): `[anon:…]`.
        MMapPath::Anonymous | MMapPath::Other(_) if shared => Kind::Shared,
        _ => Kind::Anonymous,
    };
    let can = |what| map.perms.contains(what);
    Mapping {
        range: map.address.0..map.address.1,
        rss: map.extension.map.get("Rss").copied().unwrap_or(0),
        kind,
        file: (map.dev.0, map.dev.1, map.inode),
        access: [
            can(MMPermissions::READ),
            can(MMPermissions::WRITE),
            can(MMPermissions::EXECUTE),
        ],
    }
}

/// Ranges of addresses whose pages are in memory.
#[derive(Debug, Default)]
pub struct Resident {
    /// Sorted, apart from each other, each with the bytes of all before it.
    ranges: Vec<(Range<u64>, u64)>,
    /// Address space that was not looked up, since there was too much of it.
    pub unknown: u64,
}

impl Resident {
    /// Looks up the pages of some of the `mappings` of `pid`, which are sorted.
    ///
    /// # Errors
    /// When `/proc/PID/pagemap` cannot be read: it needs the rights of a debugger.
    pub fn of<'a>(pid: i32, mappings: impl Iterator<Item = &'a Mapping>) -> std::io::Result<Self> {
        Self::with(pid, mappings.filter(|map| map.rss > 0), PRESENT)
    }

    /// The same with those pages that are swapped out.
    ///
    /// # Errors
    /// As [`Resident::of`].
    pub fn or_swapped<'a>(pid: i32, mappings: impl Iterator<Item = &'a Mapping>) -> std::io::Result<Self> {
        Self::with(pid, mappings, PRESENT | SWAPPED)
    }

    fn with<'a>(pid: i32, mappings: impl Iterator<Item = &'a Mapping>, bits: u64) -> std::io::Result<Self> {
        let pagemap = Pagemap::open(pid)?;
        let mut found = Self::default();
        let mut left = MAX_PAGES;
        for map in mappings {
            let pages = (map.range.end / PAGE).saturating_sub(map.range.start / PAGE);
            if pages > left {
                found.unknown += map.range.end - map.range.start;
                continue;
            }
            left -= pages;
            pagemap.pages(map.range.clone(), bits, |page| found.add(page / PAGE))?;
        }
        Ok(found)
    }

    fn add(&mut self, page: u64) {
        let start = page.saturating_mul(PAGE);
        match self.ranges.last_mut() {
            Some((range, _)) if range.end == start => range.end += PAGE,
            _ => {
                let before = self
                    .ranges
                    .last()
                    .map_or(0, |(range, before)| before + (range.end - range.start));
                self.ranges.push((start..start.saturating_add(PAGE), before));
            }
        }
    }

    /// The pages of `ranges`, which are sorted, that are not all zeros: a memory that does not say which were ever written to.
    #[must_use]
    pub fn written(memory: &impl RemoteMemory, ranges: &[Range<u64>]) -> Self {
        const STEP: u64 = 256 << 10;
        let mut found = Self::default();
        let mut bytes = vec![0_u8; STEP as usize];
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let len = STEP.min(range.end - at);
                let Some(bytes) = bytes.get_mut(..len as usize) else {
                    break;
                };
                if memory.read_into(RemoteAddr(at), bytes).is_ok() {
                    let pages = bytes.chunks(PAGE as usize).zip(at / PAGE..);
                    let pages = pages.filter(|(page, _)| page.iter().any(|byte| *byte != 0));
                    pages.for_each(|(_, number)| found.add(number));
                }
                at += len;
            }
        }
        found
    }

    /// Resident bytes below `address`.
    fn below(&self, address: u64) -> u64 {
        let next = self.ranges.partition_point(|(range, _)| range.start < address);
        match next.checked_sub(1).and_then(|last| self.ranges.get(last)) {
            Some((range, before)) => before + (address.min(range.end) - range.start),
            None => 0,
        }
    }

    /// Resident bytes within `range`; parts of pages count as parts.
    #[must_use]
    pub fn bytes(&self, range: &Range<u64>) -> u64 {
        self.below(range.end).saturating_sub(self.below(range.start))
    }

    /// All of them.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        self.ranges.iter().map(|(range, _)| range.clone()).collect()
    }

    /// The resident parts of `range`.
    pub fn parts(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.ranges.partition_point(|(part, _)| part.end <= range.start);
        let rest = self.ranges.get(first..).unwrap_or_default();
        rest.iter().map_while(move |(part, _)| {
            (part.start < range.end).then(|| part.start.max(range.start)..part.end.min(range.end))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_parts_are_counted_to_the_byte() {
        let mut resident = Resident::default();
        for page in [1, 2, 5] {
            resident.add(page);
        }
        assert_eq!(resident.bytes(&(0..u64::MAX)), 3 * PAGE);
        assert_eq!(resident.bytes(&(PAGE + 100..PAGE + 300)), 200);
        assert_eq!(resident.bytes(&(2 * PAGE..6 * PAGE)), 2 * PAGE);
        assert_eq!(resident.bytes(&(3 * PAGE..5 * PAGE)), 0);
        let parts: Vec<_> = resident.parts(2 * PAGE + 8..5 * PAGE + 8).collect();
        assert_eq!(parts, [2 * PAGE + 8..3 * PAGE, 5 * PAGE..5 * PAGE + 8]);
    }

    #[test]
    fn a_page_of_our_own_is_resident_once_it_is_touched() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let page = vec![1_u8; 64 << 10];
        let at = page.as_ptr() as u64;
        let maps = mappings(pid).unwrap();
        let map = maps.iter().find(|map| map.range.contains(&at)).unwrap();
        let resident = Resident::of(pid, std::iter::once(map)).unwrap();
        assert_eq!(resident.bytes(&(at..at + page.len() as u64)), page.len() as u64);
    }
}
