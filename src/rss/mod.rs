//! Where the resident memory of a Python process is: one table that adds up, from outside.
//!
//! [`resident`] has the mappings and which of their pages are in memory, [`pymalloc`], [`mimalloc`] and [`glibc`] find what the
//! allocators have made of the anonymous ones, and [`render`] shows it. Every resident byte is in exactly one row: first
//! the kernel's sums by mapping, then within a mapping what an allocator's own words prove; what nobody's words prove is a
//! row of its own.
//!
//! Nothing is put into the process and nothing is stopped. What changes while it is read may be in the wrong row, never
//! in none; of a frozen copy ([`crate::attach::frozen`]) all rows are of one moment.

pub mod glibc;
pub mod mimalloc;
pub mod pymalloc;
pub mod render;
pub mod resident;

use crate::attach::frozen::{Cost, Frozen};
use crate::attach::{Interpreter, Target};
use crate::dump::core::Core;
use crate::dump::types::Types;
use glibc::{THREAD_HEAP, Tally, Walker};
use mimalloc::Mimalloc;
use pyheap_injector::observe::{self, Doing};
use pyheap_injector::{ProcessMemory, RemoteAddr, RemoteMemory};
use pymalloc::Pymalloc;
use resident::{Kind, Mapping, PAGE, Resident};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// The largest stack of a thread that is believed to be one by its guard page alone.
const MAX_STACK: u64 = 64 << 20;
/// The largest guard.
const MAX_GUARD: u64 = 1 << 20;
/// Mappings whose pages are looked at.
const MAX_MAPPINGS: usize = 1 << 17;
/// What follows a library's data without a gap and is no longer than this is its `.bss`.
const MAX_BSS: u64 = 64 << 20;

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RssError {
    /// `/proc` could not be read.
    #[error("cannot read the mappings of process {pid}")]
    Mappings {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: procfs::ProcError,
    },
    /// `/proc/PID/pagemap` could not be read.
    #[error("cannot read which pages of process {pid} are in memory")]
    Pagemap {
        /// The process.
        pid: i32,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It has ended.
    #[error("process {pid} has ended")]
    Gone {
        /// The process.
        pid: i32,
    },
}

/// What a row counts as in the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Group {
    /// Objects that are in use.
    #[serde(rename = "Python objects")]
    Objects,
    /// Memory that C code has, as far as can be told.
    #[serde(rename = "native")]
    Native,
    /// Memory that is free inside of allocators.
    #[serde(rename = "fragmentation")]
    Fragmentation,
    /// Everything else.
    #[serde(rename = "not the heap at all")]
    NotHeap,
}

impl Group {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Objects, Self::Fragmentation, Self::Native, Self::NotHeap];

    /// As the verdict calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Objects => "Python objects",
            Self::Native => "native",
            Self::Fragmentation => "fragmentation",
            Self::NotHeap => "not the heap at all",
        }
    }
}

/// A row.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Row {
    /// What it counts as.
    pub group: Group,
    /// What it is.
    pub what: &'static str,
    /// Resident bytes.
    pub bytes: u64,
}

/// What it comes to.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Verdict {
    /// The group with the most bytes.
    pub word: Group,
    /// Its bytes.
    pub bytes: u64,
    /// Its part of all, 0 to 1.
    pub share: f64,
}

/// A file with its resident bytes.
#[derive(Debug, Clone, serde::Serialize)]
pub struct FileUse {
    /// Its path, as the process sees it.
    pub path: String,
    /// Resident bytes.
    pub bytes: u64,
}

/// The table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// The process.
    pub pid: i32,
    /// Its Python.
    pub python: String,
    /// Read from a frozen copy.
    pub frozen: bool,
    /// Read from a core file: what it holds counts as resident.
    pub core: bool,
    /// Resident bytes: the sum of the kernel's numbers for each mapping, and of the rows.
    pub rss_bytes: u64,
    /// The rows, also those with nothing in them.
    pub rows: Vec<Row>,
    /// The verdict.
    pub verdict: Verdict,
    /// pymalloc.
    pub pymalloc: Pymalloc,
    /// mimalloc, in a build without the GIL.
    pub mimalloc: Option<Mimalloc>,
    /// The heaps of glibc; `None` with another C library.
    pub malloc: Option<Tally>,
    /// Threads.
    pub threads: usize,
    /// The largest files, libraries included.
    pub files: Vec<FileUse>,
    /// Address space whose pages were not looked up.
    pub not_looked_at: u64,
    /// What the frozen copy cost.
    pub cost: Option<Cost>,
}

/// Makes the table of `target`, or of its frozen copy.
///
/// # Errors
/// See [`RssError`].
pub fn of(target: &Target, frozen: Option<&Frozen>) -> Result<Report, RssError> {
    let pid = target.facts.id.pid;
    let tid = observe::reachable(pid);
    let failed = |source| RssError::Mappings { pid, source };
    let mut maps = resident::mappings(tid).map_err(failed)?;
    let source = match frozen {
        Some(copy) => {
            let copied = resident::mappings(copy.pid()).map_err(failed)?;
            maps = merge(maps, copied);
            copy.pid()
        }
        None => tid,
    };
    maps.truncate(MAX_MAPPINGS);
    if maps.is_empty() {
        return Err(RssError::Gone { pid });
    }
    let private = maps.iter().filter(|map| is_private_memory(map));
    let resident = Resident::of(source, private).map_err(|source| RssError::Pagemap { pid, source })?;
    match frozen {
        Some(copy) => Ok(tabulate(&of_process(target), copy.memory(), &resident, &maps, true)),
        None => Ok(tabulate(
            &of_process(target),
            &ProcessMemory::new(tid),
            &resident,
            &maps,
            false,
        )),
    }
}

/// Makes the table of what a core file holds. It does not say which pages were resident: those that are not all zeros count. Nor does it say where
/// stacks are; files are those of which the process had changed something, mostly the data of libraries.
#[must_use]
pub fn of_core(core: &Core, interpreter: &Interpreter) -> Report {
    let resident = Resident::written(core, &core.memory());
    let mapping = |range: Range<u64>| {
        let file = core.file_at(range.start);
        let kind = match file {
            Some((_, path)) => Kind::File(path.to_string_lossy().into_owned()),
            None if begins_a_heap(core, range.start) => Kind::Heap,
            None => Kind::Anonymous,
        };
        Mapping {
            rss: resident.bytes(&range),
            range,
            kind,
            file: (0, 0, file.map_or(0, |(number, _)| number as u64 + 1)),
            access: [true, true, file.is_some()],
        }
    };
    let maps: Vec<Mapping> = core.memory().into_iter().map(mapping).take(MAX_MAPPINGS).collect();
    let process = Process {
        pid: core.pid(),
        interpreter,
        threads: core.threads(),
        stack_pointers: Vec::new(),
        is_core: true,
    };
    tabulate(&process, core, &resident, &maps, false)
}

/// What glibc puts first into `[heap]`: the chunk with the main thread's cache of free blocks.
fn begins_a_heap(core: &Core, start: u64) -> bool {
    const SIZES: Range<u64> = 0x240..0x400;
    /// The one before it is in use.
    const IN_USE: u64 = 1;
    let size = core.read_u64(RemoteAddr(start.saturating_add(8))).unwrap_or(0);
    core.read_u64(RemoteAddr(start)).is_ok_and(|before| before == 0) && SIZES.contains(&size) && size % 16 == IN_USE
}

/// Whose memory it is.
struct Process<'a> {
    pid: i32,
    interpreter: &'a Interpreter,
    threads: usize,
    stack_pointers: Vec<u64>,
    is_core: bool,
}

fn of_process(target: &Target) -> Process<'_> {
    let pid = target.facts.id.pid;
    let threads = observe::threads(pid);
    Process {
        pid,
        interpreter: &target.interpreter,
        threads: threads.len(),
        stack_pointers: threads.iter().filter_map(|&tid| stack_pointer(pid, tid)).collect(),
        is_core: false,
    }
}

fn tabulate<M: RemoteMemory>(
    process: &Process<'_>,
    memory: &M,
    resident: &Resident,
    maps: &[Mapping],
    frozen: bool,
) -> Report {
    let mut table = Table {
        process,
        memory,
        resident,
        maps,
        sums: Sums::default(),
        pymalloc: Pymalloc::default(),
        mimalloc: None,
    };
    table.fill();
    let Table {
        sums,
        pymalloc,
        mimalloc,
        ..
    } = table;
    let rss_bytes = maps.iter().map(|map| map.rss).sum();
    let rows = sums.rows(&pymalloc, mimalloc.as_ref(), rss_bytes);
    Report {
        pid: process.pid,
        python: process.interpreter.description(),
        frozen,
        core: process.is_core,
        rss_bytes,
        verdict: verdict(&rows),
        rows,
        pymalloc,
        mimalloc,
        malloc: sums.is_glibc.then_some(sums.malloc),
        threads: process.threads,
        files: largest_files(maps),
        not_looked_at: resident.unknown,
        cost: None,
    }
}

/// Private memory as the copy has it, and everything else as the process has it: a copy begins without the pages of files that
/// can be had again.
fn merge(of_target: Vec<Mapping>, of_copy: Vec<Mapping>) -> Vec<Mapping> {
    let is_own = |map: &Mapping| matches!(map.kind, Kind::Anonymous | Kind::Heap | Kind::Stack);
    let mut own: Vec<Mapping> = of_copy.into_iter().filter(is_own).collect();
    own.extend(of_target.into_iter().filter(|map| !is_own(map)));
    own.sort_by_key(|map| map.range.start);
    own
}

fn is_private_memory(map: &Mapping) -> bool {
    matches!(map.kind, Kind::Anonymous | Kind::Heap) && map.access[0]
}

fn stack_pointer(pid: i32, tid: i32) -> Option<u64> {
    match observe::doing(pid, tid)? {
        Doing::Call { sp, .. } | Doing::Blocked { sp, .. } => Some(sp),
        Doing::Running => None,
    }
}

fn verdict(rows: &[Row]) -> Verdict {
    let sum = |group: Group| rows.iter().filter(|row| row.group == group).map(|row| row.bytes).sum();
    let all: u64 = rows.iter().map(|row| row.bytes).sum();
    let (word, bytes) = Group::ALL
        .into_iter()
        .map(|group| (group, sum(group)))
        .max_by_key(|(_, bytes): &(Group, u64)| *bytes)
        .unwrap_or((Group::NotHeap, 0));
    Verdict {
        word,
        bytes,
        share: if all > 0 { bytes as f64 / all as f64 } else { 0.0 },
    }
}

/// Files by their resident bytes, the largest first.
fn largest_files(maps: &[Mapping]) -> Vec<FileUse> {
    const MOST: usize = 10;
    let mut sums: HashMap<&str, u64> = HashMap::new();
    for map in maps {
        if let Kind::File(path) = &map.kind {
            *sums.entry(path).or_default() += map.rss;
        }
    }
    let mut files: Vec<FileUse> = sums
        .into_iter()
        .map(|(path, bytes)| FileUse {
            path: path.to_owned(),
            bytes,
        })
        .collect();
    files.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    files.truncate(MOST);
    files
}

/// Resident bytes that are neither pymalloc's nor mimalloc's.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    malloc: Tally,
    mapped: Tally,
    is_glibc: bool,
    foreign_heap: u64,
    other: u64,
    stacks: u64,
    libraries: u64,
    files: u64,
    shared: u64,
    kernel: u64,
}

impl Sums {
    fn rows(&self, pymalloc: &Pymalloc, mimalloc: Option<&Mimalloc>, rss: u64) -> Vec<Row> {
        use Group::{Fragmentation, Native, NotHeap, Objects};
        let row = |group, what, bytes| Row { group, what, bytes };
        let mut rows = vec![
            row(Objects, "small objects, in pymalloc's blocks", pymalloc.used_bytes),
            row(
                Objects,
                "large objects, in malloc's blocks",
                self.malloc.objects + self.mapped.objects,
            ),
            row(Fragmentation, "pymalloc: free in pools in use", pymalloc.free_in_pools),
            row(Fragmentation, "pymalloc: free pools in arenas", pymalloc.free_pools),
            row(Fragmentation, "malloc: free in its heaps", self.malloc.free),
            row(Native, "malloc: blocks that begin with no object", self.malloc.used),
            row(
                Native,
                "malloc: large ones with mappings of their own",
                self.mapped.used,
            ),
            row(Native, "malloc: heap that could not be followed", self.malloc.unknown),
            row(Native, "the heap of a C library that is not glibc", self.foreign_heap),
            row(Native, NOBODY, self.other),
            row(NotHeap, "thread stacks", self.stacks),
            row(NotHeap, "program and libraries", self.libraries),
            row(NotHeap, "mapped files", self.files),
            row(NotHeap, "shared memory", self.shared),
            row(NotHeap, "the kernel's pages", self.kernel),
        ];
        if let Some(mimalloc) = mimalloc {
            rows.insert(0, row(Objects, "objects, in mimalloc's blocks", mimalloc.used_bytes));
            rows.insert(
                3,
                row(Fragmentation, "mimalloc: free in its segments", mimalloc.free_bytes),
            );
        }
        balance(&mut rows, rss);
        rows
    }
}

/// Makes the rows add up to `rss`. The kernel's sums and its list of pages are not of the same moment; besides, a page that was
/// only read, never written, is the same one page of zeros for everybody: it is in the list, and not in the sums. So what
/// is too much is taken from what is free, as far as there is that.
fn balance(rows: &mut [Row], rss: u64) {
    let sum: u64 = rows.iter().map(|row| row.bytes).sum();
    if let Some(other) = rows.iter_mut().find(|row| row.what == NOBODY) {
        other.bytes += rss.saturating_sub(sum);
    }
    let mut excess = sum.saturating_sub(rss);
    let (free, others): (Vec<_>, Vec<_>) = rows.iter_mut().partition(|row| row.group == Group::Fragmentation);
    for row in free.into_iter().chain(others) {
        let taken = excess.min(row.bytes);
        row.bytes -= taken;
        excess -= taken;
    }
}

/// The row of what is left.
const NOBODY: &str = "anonymous memory of nobody known";

/// The table in the making.
struct Table<'a, M> {
    process: &'a Process<'a>,
    memory: &'a M,
    resident: &'a Resident,
    maps: &'a [Mapping],
    sums: Sums,
    pymalloc: Pymalloc,
    mimalloc: Option<Mimalloc>,
}

impl<M: RemoteMemory> Table<'_, M> {
    fn fill(&mut self) {
        let layout = &self.process.interpreter.layout;
        self.sums.is_glibc = self.maps.iter().any(|map| is_glibc(&map.kind));
        let areas: Vec<Range<u64>> = self
            .maps
            .iter()
            .filter(|map| map.kind == Kind::Anonymous && map.access[1])
            .map(|map| map.range.clone())
            .collect();
        if layout.free_threaded {
            self.mimalloc = mimalloc::find(self.memory, self.resident, self.process.interpreter, &areas);
        } else {
            self.pymalloc = pymalloc::find(self.memory, self.resident, &areas, layout.minor);
        }
        let types = Types::new(self.memory, layout);
        let mut walker = Walker::new(self.memory, self.resident, types);
        let libraries: HashSet<(i32, i32, u64)> = self
            .maps
            .iter()
            .filter(|map| map.access[2] && matches!(map.kind, Kind::File(_)))
            .map(|map| map.file)
            .collect();
        let mut before: Option<&Mapping> = None;
        for map in self.maps {
            match &map.kind {
                Kind::File(_) if libraries.contains(&map.file) => self.sums.libraries += map.rss,
                Kind::File(_) => self.sums.files += map.rss,
                Kind::Shared => self.sums.shared += map.rss,
                Kind::Kernel => self.sums.kernel += map.rss,
                Kind::Stack => self.sums.stacks += map.rss,
                Kind::Heap if self.sums.is_glibc => {
                    let tally = capped(walker.main_heap(&map.range), map.rss);
                    self.sums.malloc.add(&tally);
                }
                Kind::Heap => self.sums.foreign_heap += map.rss,
                Kind::Anonymous => self.anonymous(map, before, &libraries, &mut walker),
            }
            before = Some(map);
        }
    }

    /// Divides a mapping among the allocators; the rest of it is a stack, a library's data, or nobody's.
    fn anonymous(
        &mut self,
        map: &Mapping,
        before: Option<&Mapping>,
        libraries: &HashSet<(i32, i32, u64)>,
        walker: &mut Walker<'_, M>,
    ) {
        let mut left = map.rss;
        let mut rest = Vec::new();
        let mut at = map.range.start;
        let mimallocs = self.mimalloc.as_ref().map_or(&[][..], |found| &found.ranges);
        let within = |range: &&Range<u64>| range.start >= map.range.start && range.start < map.range.end;
        let mut taken: Vec<&Range<u64>> = self.pymalloc.ranges.iter().chain(mimallocs).filter(within).collect();
        taken.sort_by_key(|range| range.start);
        for range in taken {
            rest.push(at..range.start.max(at));
            left = left.saturating_sub(self.resident.bytes(range));
            at = at.max(range.end.min(map.range.end));
        }
        rest.push(at..map.range.end);
        for area in rest.into_iter().filter(|area| !area.is_empty()) {
            let bytes = self.resident.bytes(&area).min(left);
            if bytes == 0 {
                continue;
            }
            left -= bytes;
            let (unclaimed, tally, mapped) = if self.sums.is_glibc && map.access[1] {
                claimed(walker, self.resident, &area)
            } else {
                (bytes, Tally::default(), Tally::default())
            };
            let (tally, mapped) = (capped(tally, bytes), capped(mapped, bytes));
            self.sums.malloc.add(&tally);
            self.sums.mapped.add(&mapped);
            let unclaimed = unclaimed.min(bytes.saturating_sub(tally.sum() + mapped.sum()));
            if self.is_stack(map, &area, before) {
                self.sums.stacks += unclaimed;
            } else if is_bss(map, before, libraries) {
                self.sums.libraries += unclaimed;
            } else {
                self.sums.other += unclaimed;
            }
        }
    }

    /// A thread's stack: one of them is in it, or its guard is below it.
    fn is_stack(&self, map: &Mapping, area: &Range<u64>, before: Option<&Mapping>) -> bool {
        let has_guard = before.is_some_and(|guard| {
            guard.range.end == map.range.start
                && guard.access == [false; 3]
                && guard.kind == Kind::Anonymous
                && guard.range.end - guard.range.start <= MAX_GUARD
        });
        let len = map.range.end - map.range.start;
        self.process.stack_pointers.iter().any(|sp| area.contains(sp)) || (has_guard && len <= MAX_STACK)
    }
}

/// What glibc has in `area`: what it has not, its threads' heaps, its blocks with mappings of their own.
fn claimed<M: RemoteMemory>(walker: &mut Walker<'_, M>, resident: &Resident, area: &Range<u64>) -> (u64, Tally, Tally) {
    let (mut unclaimed, mut heaps, mut mapped) = (0, Tally::default(), Tally::default());
    let mut at = area.start;
    while at < area.end {
        if at.is_multiple_of(THREAD_HEAP)
            && let Some((tally, end)) = walker.thread_heap(at, area.end)
        {
            heaps.add(&tally);
            at = end.next_multiple_of(PAGE);
            continue;
        }
        let next_heap = (at / THREAD_HEAP + 1) * THREAD_HEAP;
        let (tally, end) = walker.mapped_blocks(&(at..area.end));
        if end > at {
            mapped.add(&tally);
            at = end;
            continue;
        }
        // Not ours from here to the next page that is there.
        let next = resident
            .parts(at + PAGE..area.end.max(at + PAGE))
            .next()
            .map_or(area.end, |part| part.start);
        let next = next.min(next_heap).max(at + PAGE);
        unclaimed += resident.bytes(&(at..next.min(area.end)));
        at = next;
    }
    (unclaimed, heaps, mapped)
}

/// No more than there is: the pages were listed after the sums were made.
fn capped(tally: Tally, bytes: u64) -> Tally {
    let mut left = bytes;
    let mut take = |wanted: u64| {
        let taken = wanted.min(left);
        left -= taken;
        taken
    };
    Tally {
        objects: take(tally.objects),
        used: take(tally.used),
        free: take(tally.free),
        unknown: take(tally.unknown),
        blocks: tally.blocks,
    }
}

fn is_glibc(kind: &Kind) -> bool {
    let Kind::File(path) = kind else { return false };
    let name = path.trim_end_matches(" (deleted)").rsplit('/').next().unwrap_or("");
    name == "libc.so.6" || (name.starts_with("libc-2.") && name.ends_with(".so"))
}

/// What follows a library's last mapping without a gap.
fn is_bss(map: &Mapping, before: Option<&Mapping>, libraries: &HashSet<(i32, i32, u64)>) -> bool {
    before.is_some_and(|file| {
        file.range.end == map.range.start
            && matches!(file.kind, Kind::File(_))
            && libraries.contains(&file.file)
            && map.range.end - map.range.start <= MAX_BSS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_add_up_whatever_the_kernel_says() {
        let pymalloc = Pymalloc {
            used_bytes: 1000,
            free_in_pools: 50,
            free_pools: 70,
            ..Pymalloc::default()
        };
        let sums = Sums {
            libraries: 500,
            ..Sums::default()
        };
        for rss in [0, 10, 1520, 1620, 5000] {
            let rows = sums.rows(&pymalloc, None, rss);
            assert_eq!(rows.iter().map(|row| row.bytes).sum::<u64>(), rss);
        }
        let rows = sums.rows(&pymalloc, None, 1520);
        assert!(
            rows.iter()
                .all(|row| row.group != Group::Fragmentation || row.bytes <= 20),
            "free memory first"
        );
        let found = verdict(&rows);
        assert_eq!((found.word, found.bytes), (Group::Objects, 1000));
    }

    #[test]
    fn glibc_is_known_by_its_name() {
        let file = |path: &str| is_glibc(&Kind::File(path.to_owned()));
        assert!(
            file("/usr/lib/x86_64-linux-gnu/libc.so.6")
                && file("/lib/libc-2.31.so")
                && file("/lib/libc.so.6 (deleted)")
        );
        assert!(!file("/lib/ld-musl-x86_64.so.1") && !file("/lib/libc-client.so"));
    }
}
