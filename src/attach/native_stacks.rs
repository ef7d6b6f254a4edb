//! Native stacks, the part that is done in the target: what the shim must know to copy pieces of stacks without ever reading what
//! is not there.
//!
//! That is the main thread's stack, which only grows, and where the C library keeps the address and size of each thread's own
//! stack in that thread's control block. No table of versions says where: the words are recognised, in the control blocks of the
//! threads that are there, as a page's address below the block and a size that reaches beyond it, all of it mapped.

use super::elf::ElfFile;
use super::native;
use super::own_state;
use crate::attach::interpreter::Interpreter;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory, space};
use pyheap_protocol::control::{Control, Doubled, Identity};
use std::collections::HashSet;
use std::mem::offset_of;
use std::ops::Range;
use zerocopy::IntoBytes;

/// Bytes of the ring of pieces: at 16 KiB a piece, what 250 samples take between two looks.
pub const RING_BYTES: u64 = 4 << 20;
/// Bytes of a piece, if nothing else was asked for.
pub const DEFAULT_PIECE: u64 = 16 << 10;
/// The least and the most that can be asked for.
pub const PIECES: std::ops::RangeInclusive<u64> = 1 << 10..=64 << 10;

/// Threads that are looked at.
const MAX_THREADS: usize = 64;
/// `struct pthread` of glibc has 2304 bytes, musl's is smaller.
const BLOCK_BYTES: usize = 2304;
/// How far below the end of its mapping a thread's control block is looked for.
const TOP_BYTES: u64 = 8 << 10;
/// Pages.
const PAGE: u64 = 4096;

/// What the shim knows so far.
#[derive(Debug)]
pub struct NativeStacks {
    memory: ProcessMemory,
    control: u64,
    low: u64,
    end: u64,
    is_block_known: bool,
}

impl NativeStacks {
    /// Tells the shim of `identity`, which is not started yet, to copy pieces of up to `piece_bytes` into `ring`.
    ///
    /// # Errors
    /// When the target's memory cannot be written.
    pub fn begin(
        memory: ProcessMemory,
        identity: &Identity,
        interpreter: &Interpreter,
        piece_bytes: u64,
        ring: &Range<u64>,
    ) -> Result<Self, MemoryError> {
        let mut stacks = Self {
            memory,
            control: identity.control,
            low: 0,
            end: 0,
            is_block_known: false,
        };
        let maps = space::maps(memory.pid()).unwrap_or_default();
        stacks.end = main_stack(&maps).map_or(0, |range| range.end);
        let words = [
            (offset_of!(Control, piece_bytes), piece_bytes & !7),
            (offset_of!(Control, pieces), ring.start),
            (offset_of!(Control, pieces_len), ring.end - ring.start),
            (offset_of!(Control, main_stack_end), stacks.end),
        ];
        for (offset, value) in words {
            memory.write(stacks.control(offset), &value.to_le_bytes())?;
        }
        stacks.look_at(&maps, interpreter)?;
        Ok(stacks)
    }

    /// Looks how far the main thread's stack has grown, and at the threads while it is not known where their stacks are. Call
    /// it once a second.
    ///
    /// # Errors
    /// When the target's memory cannot be written.
    pub fn look(&mut self, interpreter: &Interpreter) -> Result<(), MemoryError> {
        let maps = space::maps(self.memory.pid()).unwrap_or_default();
        self.look_at(&maps, interpreter)
    }

    fn look_at(&mut self, maps: &[MemoryMap], interpreter: &Interpreter) -> Result<(), MemoryError> {
        if let Some(stack) = main_stack(maps)
            && stack.end == self.end
            && (self.low == 0 || stack.start < self.low)
        {
            self.low = stack.start;
            self.write(offset_of!(Control, main_stack), self.low)?;
        }
        if !self.is_block_known
            && let Some(distance) = stack_block(&self.memory, maps, interpreter)
        {
            self.is_block_known = true;
            self.write(offset_of!(Control, stack_block), distance)?;
        }
        Ok(())
    }

    fn write(&self, offset: usize, value: u64) -> Result<(), MemoryError> {
        let doubled = Doubled { a: value, b: value };
        self.memory.write(self.control(offset), doubled.as_bytes())
    }

    fn control(&self, offset: usize) -> RemoteAddr {
        RemoteAddr(self.control + offset as u64)
    }
}

fn main_stack(maps: &[MemoryMap]) -> Option<Range<u64>> {
    let stack = maps.iter().find(|map| map.pathname == MMapPath::Stack)?;
    Some(stack.address.0..stack.address.1)
}

/// The distance from the thread pointer to the two words that say where a thread's stack is, if all threads agree on one.
fn stack_block(memory: &ProcessMemory, maps: &[MemoryMap], interpreter: &Interpreter) -> Option<u64> {
    let known = own_state::threads(memory, interpreter.runtime, &interpreter.layout).unwrap_or_default();
    let threads: HashSet<u64> = known
        .into_iter()
        .map(|(thread, _)| thread)
        .chain(control_blocks(memory, maps))
        .take(MAX_THREADS)
        .collect();
    let mut agreed: Option<HashSet<u64>> = None;
    let end = end_of_main(memory);
    for thread in threads {
        let Ok(block) = memory.read_vec(RemoteAddr(thread), BLOCK_BYTES) else {
            continue;
        };
        let found = pairs(&block, thread, maps, end);
        // With musl the main thread has no such words; nor has one that ends.
        if !found.is_empty() {
            agreed = Some(agreed.map_or_else(|| found.clone(), |before| &before & &found));
        }
    }
    let mut agreed = agreed?.into_iter();
    agreed.next().filter(|_| agreed.next().is_none())
}

/// What glibc has as the size of the main thread's stack, whose begin it says is 0: the loader's `__libc_stack_end`.
fn end_of_main(memory: &ProcessMemory) -> Option<u64> {
    const NAME: &str = "__libc_stack_end";
    let (loader, bias) = ElfFile::in_memory(memory, native::loader(memory.pid())).ok()?;
    let end = *loader.symbols(&[NAME]).ok()?.get(NAME)?;
    let end = memory.read_u64(RemoteAddr(end.address.wrapping_add(bias)));
    end.ok().filter(|&end| end >= PAGE)
}

/// Where in a thread's control block two words stand that can be the begin and the size of its stack. `main`: what they are in
/// the main thread's.
fn pairs(block: &[u8], thread: u64, maps: &[MemoryMap], main: Option<u64>) -> HashSet<u64> {
    let words: Vec<u64> = block
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| u64::from_le_bytes(*bytes))
        .collect();
    let fits = |&(_, pair): &(usize, &[u64])| {
        let &[base, len] = pair else { return false };
        let Some(end) = base.checked_add(len) else { return false };
        if base == 0 && main == Some(len) {
            return true;
        }
        let is_pages = base.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
        base >= PAGE && is_pages && base < thread && thread < end && is_mapped(maps, base..end)
    };
    let found = words.windows(2).enumerate().skip(1).filter(fits);
    found.map(|(at, _)| at as u64 * 8).collect()
}

/// Whether there is a mapping everywhere in `range`, be it a guard.
fn is_mapped(maps: &[MemoryMap], range: Range<u64>) -> bool {
    let mut at = range.start;
    for map in maps {
        if (map.address.0..map.address.1).contains(&at) {
            at = map.address.1;
        }
        if at >= range.end {
            return true;
        }
    }
    false
}

/// Control blocks of threads that Python may not know: each begins with its own address, close to the end of a mapping with a guard below it.
fn control_blocks(memory: &ProcessMemory, maps: &[MemoryMap]) -> Vec<u64> {
    let mut found = Vec::new();
    for pair in maps.windows(2) {
        let [guard, stack] = pair else { continue };
        let is_stack = guard.perms & MMPermissions::all() == MMPermissions::PRIVATE
            && guard.address.1 == stack.address.0
            && stack.perms.contains(MMPermissions::READ | MMPermissions::WRITE)
            && stack.pathname == MMapPath::Anonymous;
        if !is_stack || found.len() >= MAX_THREADS {
            continue;
        }
        let start = stack.address.0.max(stack.address.1.saturating_sub(TOP_BYTES));
        let Ok(bytes) = memory.read_vec(RemoteAddr(start), (stack.address.1 - start) as usize) else {
            continue;
        };
        let words = bytes.as_chunks::<8>().0.iter().enumerate();
        let is_own = |(at, word): (usize, &[u8; 8])| {
            let address = start + at as u64 * 8;
            (u64::from_le_bytes(*word) == address).then_some(address)
        };
        found.extend(words.filter_map(is_own));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::thread::JoinHandleExt as _;

    #[test]
    fn the_stack_of_a_thread_is_found() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let made = std::thread::spawn(move || {
            let here = 0_u64;
            tell.send(&raw const here as u64).unwrap();
            let _ = ended.recv();
        });
        let here = told.recv().unwrap();
        let pid = std::process::id() as i32;
        let memory = ProcessMemory::new(pid);
        let maps = space::maps(pid).unwrap();
        // The thread's number for the C library is the address of its block.
        let thread = made.as_pthread_t() as u64;
        let block = memory.read_vec(RemoteAddr(thread), BLOCK_BYTES).unwrap();
        let found = pairs(&block, thread, &maps, None);
        assert_eq!(found.len(), 1, "{found:?}");
        let at = RemoteAddr(thread + found.iter().next().unwrap());
        let base = memory.read_u64(at).unwrap();
        assert!((base..thread).contains(&here));
        assert!(control_blocks(&memory, &maps).contains(&thread));
        // The main thread's block says the same, in its way.
        let end_of_stack = end_of_main(&memory).expect("glibc's loader has it");
        assert!(main_stack(&maps).unwrap().contains(&end_of_stack));
        drop(end);
        made.join().unwrap();
    }

    #[test]
    fn what_is_not_mapped_is_no_stack() {
        let pid = std::process::id() as i32;
        let maps = space::maps(pid).unwrap();
        let stack = main_stack(&maps).unwrap();
        assert!(is_mapped(&maps, stack.clone()));
        assert!(!is_mapped(&maps, stack.start - (256 << 10)..stack.end));
        let words: Vec<u8> = [0_u64, stack.start - (1 << 20), 2 << 20]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        assert!(pairs(&words, stack.start + 64, &maps, None).is_empty());
        assert_eq!(pairs(&[0; 24], 64, &maps, Some(4096)).len(), 0);
    }
}
