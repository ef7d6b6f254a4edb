//! What is on the heap now: all objects by type, read from outside, without running anything in the process and without
//! stopping it.
//!
//! [`lists`] and [`mimalloc`] find the objects that the garbage collector knows, [`stacks`] what running calls hold. [`heap`]
//! reads objects, whose types' [`kinds`] say where their references are: so those that the collector does not know (strings,
//! numbers, bytes) are reached, too. [`small`] finds what only C code holds, in the allocators' blocks. [`marks`] remembers what was met, [`blocks`] makes the reads few, [`layout`] says what
//! is where, [`table`] is what comes out, [`render`] is for people. [`why`] tells who holds what, by a [`graph`].
//!
//! The memory may be that of a process that runs, of one that stands still, or a core file: a [`Source`] is all that is asked.
//!
//! What it refuses to do: count what is not there. A word that leads to no object is left out and counted as such.

pub mod blocks;
pub mod graph;
pub mod heap;
pub mod kinds;
pub mod layout;
pub mod lists;
pub mod marks;
pub mod mimalloc;
pub mod render;
pub mod small;
pub mod stacks;
pub mod table;
#[cfg(test)]
mod tests;
pub mod why;

use crate::attach::Interpreter;
use crate::dump::budget::Budget;
use crate::dump::walk::{RawInterpreter, Walker};
use heap::{DOUBTFUL, Heap, met_by};
use layout::Layouts;
use marks::{Marks, Met};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Finding the threads may take so long.
const MAX_THREADS: Duration = Duration::from_secs(5);
/// Objects between two looks at the clock.
const CLOCK: u64 = 1 << 14;

/// A memory, and where objects may be in it.
#[derive(Debug)]
pub struct Source<'a, M> {
    /// The memory.
    pub memory: &'a M,
    /// Its writable parts.
    pub writable: Vec<Range<u64>>,
    /// Where small blocks may be: anonymous memory that is there.
    pub small: Vec<Range<u64>>,
    /// It is that of a process that runs.
    pub changes: bool,
    /// The census ends after so long, with what there is until then.
    pub limit: Duration,
}

/// Why there is no census.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CensusError {
    /// A version whose objects are not known.
    #[error("the objects of Python 3.{0} are not known")]
    Unsupported(u8),
    /// The list of interpreters cannot be read.
    #[error("the interpreters cannot be read")]
    Memory(#[from] MemoryError),
    /// The collector's lists are not where they should be.
    #[error("no list of objects was found: this Python has them elsewhere, or its memory is damaged")]
    NoLists,
}

/// What a walk over the heap has found.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// The types that were met, with what was counted of each.
    pub types: Vec<kinds::TypeInfo>,
    /// What did not fit.
    pub doubts: heap::Doubts,
    /// Objects that were met and not looked at, since time was over.
    pub left: u64,
    /// The small blocks in use; `None` where time was over before.
    pub small: Option<small::Small>,
    /// The collector was at work: what it was looking at is missing.
    pub collecting: bool,
    /// Interpreters.
    pub interpreters: usize,
    /// How long it took.
    pub elapsed: Duration,
}

/// The writable parts of a process's memory, in which objects may be.
///
/// # Errors
/// When the process is gone or may not be looked at.
pub fn writable(pid: i32) -> Result<Vec<Range<u64>>, procfs::ProcError> {
    use procfs::process::{MMPermissions, MMapPath, Process};
    let maps = Process::new(pid)?.maps()?;
    let wanted = |map: &&procfs::process::MemoryMap| {
        let both = MMPermissions::READ | MMPermissions::WRITE;
        // Reading a device may do something.
        let device = matches!(&map.pathname, MMapPath::Path(path) if path.starts_with("/dev"));
        map.perms.contains(both) && !device && !matches!(map.pathname, MMapPath::Vsys(_))
    };
    let ranges = maps.0.iter().filter(wanted).map(|map| map.address.0..map.address.1);
    Ok(ranges.collect())
}

/// Where small blocks may be in a process: its private memory without a file, as far as it is there.
#[must_use]
pub fn small_areas(pid: i32) -> Vec<Range<u64>> {
    use crate::rss::resident::{Kind, Resident, uncounted};
    let maps = uncounted(pid).unwrap_or_default();
    let wanted = maps
        .iter()
        .filter(|map| map.kind == Kind::Anonymous && map.access[0] && map.access[1]);
    Resident::or_swapped(pid, wanted).map_or_else(|_| Vec::new(), |there| there.ranges())
}

/// Walks over the heap of `interpreter`.
///
/// # Errors
/// See [`CensusError`].
pub fn take<M: RemoteMemory>(source: &Source<'_, M>, interpreter: &Interpreter) -> Result<Found, CensusError> {
    ask(source, interpreter, None).map(|(found, _)| found)
}

/// Walks over the heap of `interpreter`, and then finds out who holds what is `wanted`: nothing where there is no such thing.
///
/// # Errors
/// See [`CensusError`].
pub fn ask<M: RemoteMemory>(
    source: &Source<'_, M>,
    interpreter: &Interpreter,
    wanted: Option<&why::Wanted>,
) -> Result<(Found, Option<why::Why>), CensusError> {
    let started = Instant::now();
    let unsupported = CensusError::Unsupported(interpreter.layout.minor);
    let Some(at) = Layouts::of(&interpreter.layout) else {
        return Err(unsupported);
    };
    let Some(mut heap) = Heap::new(source.memory, at, Marks::new(source.writable.clone())) else {
        return Err(unsupported);
    };
    let budget = Budget::of(MAX_THREADS);
    let walker = Walker::new(source.memory, interpreter.runtime, &interpreter.layout, budget);
    let interpreters = walker.interpreters()?;
    let collecting = roots(source, interpreter.runtime, &interpreters, &mut heap)?;
    let mut found = Found {
        interpreters: interpreters.len(),
        collecting,
        ..Found::default()
    };
    count(&mut heap, started, source.limit, false);
    if heap.marks.waiting() == 0 {
        let until = started.checked_add(source.limit).unwrap_or(started);
        let rest = small::seed(&mut heap, &source.small, until);
        count(&mut heap, started, source.limit, true);
        found.small = Some(rest.settle(&mut heap));
    }
    found.left = heap.marks.waiting();
    found.doubts = heap.doubts;
    found.types = heap.infos.clone();
    let tables = |interpreter: &RawInterpreter| {
        let at = interpreter.address.checked_add(heap.at.objects.modules)?;
        source.memory.read_u64(at).ok()
    };
    let tables: Vec<u64> = interpreters.iter().filter_map(tables).collect();
    let why = wanted.and_then(|wanted| why::why(&mut heap, &tables, wanted));
    found.elapsed = started.elapsed();
    Ok((found, why))
}

/// Marks all that a walk begins with; whether the collector was at work.
fn roots<M: RemoteMemory>(
    source: &Source<'_, M>,
    runtime: RemoteAddr,
    interpreters: &[RawInterpreter],
    heap: &mut Heap<'_, M>,
) -> Result<bool, CensusError> {
    let mut collecting = false;
    let owners: Vec<u64> = match heap.at.census.lists {
        Some(lists) if lists.in_runtime => vec![runtime.0],
        _ => interpreters.iter().map(|interpreter| interpreter.address.0).collect(),
    };
    for owner in owners {
        let flag = RemoteAddr(owner.saturating_add(heap.at.census.collecting));
        collecting |= !lists::quiet(source.memory, flag, source.changes);
        if let Some(lists) = heap.at.census.lists {
            lists::mark(heap, &lists, owner).ok_or(CensusError::NoLists)?;
            collecting |= !lists::quiet(source.memory, flag, false);
        }
    }
    if heap.at.base.free_threaded {
        mimalloc::mark(heap).ok_or(CensusError::NoLists)?;
    }
    for thread in interpreters.iter().flat_map(|interpreter| &interpreter.threads) {
        stacks::mark(heap, thread.address.0);
    }
    Ok(collecting)
}

/// Looks at all objects that were met, and at those that these refer to.
fn count<M: RemoteMemory>(heap: &mut Heap<'_, M>, started: Instant, limit: Duration, from_c: bool) {
    let mut looked = 0;
    while heap.marks.waiting() > 0 {
        for region in heap.marks.round() {
            let mut from = 0;
            while let Some((object, met)) = heap.marks.take(region, &mut from) {
                one(heap, object, met, from_c);
                looked += 1;
                if looked % CLOCK == 0 && started.elapsed() > limit {
                    return;
                }
            }
        }
    }
}

fn one<M: RemoteMemory>(heap: &mut Heap<'_, M>, object: u64, met: Met, from_c: bool) {
    let doubtful = met == Met::Doubtful;
    let doubts = heap.doubts;
    let looked = heap.look(object, doubtful);
    if doubtful {
        // It may be what is left of an object: then what is wrong with it, and with what it leads to, tells nothing.
        heap.doubts = doubts;
    }
    let references = std::mem::take(&mut heap.references);
    for reference in &references {
        let met = if doubtful { Met::Doubtful } else { met_by(*reference) };
        heap.marks.mark(reference & !DOUBTFUL, met);
    }
    heap.references = references;
    if looked.is_some() {
        heap.marks.is_object(object);
    }
    if let Some(looked) = looked
        && let Some(info) = heap.infos.get_mut(looked.info)
    {
        info.count += 1;
        info.tracked += u64::from(met == Met::Listed);
        info.bytes = info.bytes.saturating_add(looked.bytes);
        if from_c {
            info.from_c += 1;
            info.from_c_bytes = info.from_c_bytes.saturating_add(looked.bytes);
        }
    }
}
