//! The target's address space: a gap for our region, unused bytes for our stubs.

use crate::arch::{self, Gadgets};
use crate::hijack::Stack;
use crate::memory::{ProcessMemory, RemoteMemory};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use pyheap_protocol::RemoteAddr;

/// Pages.
const PAGE: u64 = 4096;
/// Lowest address that we choose.
const USER_START: u64 = 0x1_0000_0000;

/// The mappings of `pid`.
///
/// # Errors
/// When `/proc/PID/maps` cannot be read: the process is gone, or it is not ours.
pub fn maps(pid: i32) -> Result<Vec<MemoryMap>, procfs::ProcError> {
    Ok(Process::new(crate::observe::reachable(pid))?.maps()?.0)
}

/// What the branch predictors of some processors take for near: a jump from one aligned block of so many bytes to another
/// took 1 ns longer on an AMD Zen 4 (`docs/performance.md`).
const NEAR: u64 = 1 << 37;
/// Least room in the block of the interpreter's code: then half of it is between us and where the kernel puts the next mapping.
const ROOM: u64 = 1 << 30;
/// Least distance from the end of the heap, which grows towards us.
const HEAP_GROWTH: u64 = 16 << 30;

/// Memory that is in use, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    Heap,
    Stack,
    Other,
}

/// An address for `len` bytes: near the code at `near`, in the middle of the largest gap there, or of the largest gap of all
/// if there is little room; in any case far from where the kernel puts the next mapping, from the heap's end and from the
/// stack. `salt` makes a second attempt land elsewhere.
#[must_use]
pub fn gap(maps: &[MemoryMap], len: u64, near: u64, salt: u64) -> Option<u64> {
    let taken = maps.iter().map(|map| {
        let what = match map.pathname {
            MMapPath::Heap => Taken::Heap,
            MMapPath::Stack => Taken::Stack,
            _ => Taken::Other,
        };
        (map.address.0, map.address.1, what)
    });
    gap_among(&taken.collect::<Vec<_>>(), len, near, salt)
}

fn gap_among(taken: &[(u64, u64, Taken)], len: u64, near: u64, salt: u64) -> Option<u64> {
    let highest = taken.iter().map(|&(_, end, _)| end).max().unwrap_or(0);
    let user_end = arch::user_end(highest);
    let block = near / NEAR * NEAR..(near / NEAR + 1) * NEAR;
    let (mut largest, mut largest_near) = ((0, 0), (0, 0));
    let (mut end, mut below, mut stack_seen) = (USER_START, Taken::Other, false);
    let last = (user_end, user_end, Taken::Other);
    for &(start, next, above) in taken.iter().filter(|&&(start, ..)| start < user_end).chain([&last]) {
        let room = |(from, to): (u64, u64)| to.saturating_sub(from);
        let all = (end, start);
        if room(all) > room(largest) {
            largest = all;
        }
        let here = (end.max(block.start), start.min(block.end));
        let middle = here.0.saturating_add(room(here) / 2);
        let behind_heap = below == Taken::Heap && middle.saturating_sub(end) < HEAP_GROWTH;
        // Not below the stack, which grows down, nor above it, where nobody expects anything.
        stack_seen |= above == Taken::Stack;
        if !stack_seen && !behind_heap && room(here) >= ROOM && room(here) > room(largest_near) {
            largest_near = here;
        }
        if next > end {
            (end, below) = (next, above);
        } else if above == Taken::Heap {
            below = above;
        }
    }
    let (start, gap_end) = if largest_near == (0, 0) { largest } else { largest_near };
    let room = gap_end.saturating_sub(start);
    if room / 4 < len {
        return None;
    }
    let offset = room / 2 - len / 2 + (salt % 1024) * (1 << 21) % (room / 8).max(PAGE);
    Some((start + offset) / PAGE * PAGE)
}

/// Unused bytes at the end of an executable file mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// First byte, aligned to 16.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// The largest zero tail of an executable mapping of a file that is not unloaded while the process lives: the program
/// itself, a libpython, the C library, the loader.
#[must_use]
pub fn largest_tail(memory: &ProcessMemory, maps: &[MemoryMap], program: Option<(i32, i32, u64)>) -> Option<Tail> {
    let mut best: Option<Tail> = None;
    for map in maps {
        let MMapPath::Path(path) = &map.pathname else { continue };
        let wanted = MMPermissions::READ | MMPermissions::EXECUTE;
        if !map.perms.contains(wanted) || map.perms.contains(MMPermissions::WRITE) {
            continue;
        }
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let stays = [
            "libpython",
            "libc.so",
            "libc-",
            "ld-linux",
            "ld-musl",
            "ld-2",
            "libpthread",
            "libm.so",
            "libm-",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix));
        let is_program = program == Some((map.dev.0, map.dev.1, map.inode));
        if !stays && !is_program {
            continue;
        }
        let Some(bytes) = last_page_of_file(memory, map) else {
            continue;
        };
        let zeros = bytes.iter().rev().take_while(|&&b| b == 0).count() as u64;
        // Leave the first zeros alone: they may be operands of the last instruction.
        let start = (map.address.1 - zeros + 32).next_multiple_of(16);
        if start < map.address.1 && best.is_none_or(|b| b.len < map.address.1 - start) {
            best = Some(Tail {
                start,
                len: map.address.1 - start,
            });
        }
    }
    best
}

/// The last page of a mapping as its file has it: a stub that was abandoned in memory is not in it. From memory where the
/// file cannot be read.
fn last_page_of_file(memory: &ProcessMemory, map: &MemoryMap) -> Option<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let (start, end) = map.address;
    let MMapPath::Path(path) = &map.pathname else {
        return None;
    };
    let pid = crate::observe::reachable(memory.pid());
    let name = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
    let inside = format!("/proc/{pid}/root{}", path.display());
    let same = |file: &std::fs::File| {
        use std::os::unix::fs::MetadataExt;
        file.metadata().is_ok_and(|found| found.ino() == map.inode)
    };
    let file = [name, inside]
        .iter()
        .find_map(|path| std::fs::File::open(path).ok().filter(same));
    let Some(file) = file else {
        return memory.read_vec(RemoteAddr(end - PAGE), PAGE as usize).ok();
    };
    let mut bytes = vec![0; PAGE as usize];
    let (mut done, from) = (0, map.offset + (end - start) - PAGE);
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, from + done as u64).ok()? {
            0 => break,
            n => done += n,
        }
    }
    Some(bytes)
}

/// Instructions of the target's C library for [`crate::hijack::call`]: the first that are found in it, or else in the
/// program (which may be linked statically). Where these have no restorer, the kernel's own is used (vDSO).
#[must_use]
pub fn gadgets(memory: &ProcessMemory, maps: &[MemoryMap]) -> Option<Gadgets> {
    const MAX_TEXT_BYTES: u64 = 8 << 20;
    let texts = maps.iter().filter(|map| {
        let wanted = MMPermissions::READ | MMPermissions::EXECUTE;
        map.perms.contains(wanted) && matches!(map.pathname, MMapPath::Path(_))
    });
    let is_libc = |map: &&MemoryMap| match &map.pathname {
        MMapPath::Path(path) => {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl")
        }
        _ => false,
    };
    let program = maps
        .iter()
        .find(|map| matches!(map.pathname, MMapPath::Path(_)))
        .map(|map| map.inode);
    let is_program = |map: &&MemoryMap| Some(map.inode) == program;
    texts
        .clone()
        .filter(is_libc)
        .chain(texts.filter(is_program))
        .find_map(|map| {
            let len = (map.address.1 - map.address.0).min(MAX_TEXT_BYTES);
            let (call, own) = gadgets_in(memory, map.address.0, len)?;
            let call = call?;
            let restorer = own.or_else(|| vdso_restorer(memory, maps))?;
            Some(Gadgets { call, restorer })
        })
}

/// The call and the restorer, the first of each in `len` bytes from `start` on, as far as they are there. Read in pieces:
/// they are near the beginning of a C library. `None` if it cannot be read before both are found.
fn gadgets_in(memory: &impl RemoteMemory, start: u64, len: u64) -> Option<(Option<u64>, Option<u64>)> {
    const PIECE: u64 = 64 << 10;
    let overlap = arch::CALL_GADGET.len().max(arch::RESTORER_GADGET.len()) as u64;
    let (mut call, mut restorer) = (None, None);
    for at in (0..len).step_by(PIECE as usize) {
        let bytes = memory
            .read_vec(RemoteAddr(start + at), (PIECE + overlap).min(len - at) as usize)
            .ok()?;
        let in_text = |wanted| find(&bytes, wanted).map(|place| start + at + place);
        call = call.or_else(|| in_text(arch::CALL_GADGET));
        restorer = restorer.or_else(|| in_text(arch::RESTORER_GADGET));
        if call.is_some() && restorer.is_some() {
            break;
        }
    }
    Some((call, restorer))
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<u64> {
    memchr::memmem::find(bytes, wanted).map(|at| at as u64)
}

/// What signal handlers return to if the C library does not say where: on aarch64, glibc does not.
fn vdso_restorer(memory: &ProcessMemory, maps: &[MemoryMap]) -> Option<u64> {
    const MAX_VDSO_BYTES: u64 = 1 << 20;
    let (start, end) = maps.iter().find(|map| map.pathname == MMapPath::Vdso)?.address;
    let len = (end - start).min(MAX_VDSO_BYTES) as usize;
    let bytes = memory.read_vec(RemoteAddr(start), len).ok()?;
    find(&bytes, arch::RESTORER_GADGET).map(|offset| start + offset)
}

/// The mappings that may be stacks of threads.
#[must_use]
pub fn stacks(maps: &[MemoryMap]) -> Vec<Stack> {
    maps.iter()
        .filter(|map| map.perms.contains(MMPermissions::READ | MMPermissions::WRITE))
        .filter_map(|map| {
            let main = map.pathname == MMapPath::Stack;
            let anonymous = map.pathname == MMapPath::Anonymous;
            (main || anonymous).then_some(Stack {
                start: map.address.0,
                end: map.address.1,
                main,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    /// Where a region of 2 MiB goes, and how far it is from what is below and above it.
    fn place(taken: &[(u64, u64, Taken)], near: u64) -> (u64, u64, u64) {
        let at = gap_among(taken, 2 * MIB, near, 0).unwrap();
        assert!(taken.iter().all(|&(start, end, _)| at >= end || at + 2 * MIB <= start));
        let below = taken.iter().map(|t| t.1).filter(|&end| end <= at).max().unwrap_or(0);
        let above = taken.iter().map(|t| t.0).filter(|&start| start > at).min();
        (at, at - below, above.unwrap_or(u64::MAX) - at)
    }

    #[test]
    fn a_region_is_near_the_code_and_far_from_what_grows() {
        use Taken::{Heap, Other, Stack};
        let stack = (0x7ffd_0000_0000, 0x7ffd_0002_0000, Stack);
        let program = (0x55d4_8af2_f000, 0x55d4_8b00_0000, Other);
        let heap = (0x55d4_8b20_0000, 0x55d4_8c00_0000, Heap);
        // In a library: the next mappings come right below it.
        let library = 0x7f33_68b7_a000;
        let taken = [program, heap, (library, library + 8 * MIB, Other), stack];
        let (at, _, above) = place(&taken, library);
        assert!(at / NEAR == library / NEAR && above >= GIB / 2);
        // In the lower part of its block: the heap, far below it, is no reason to go elsewhere.
        for above_start in [2 * GIB, 17 * GIB, 31 * GIB] {
            let library = 0x7fa0_0000_0000 + above_start;
            let taken = [program, heap, (library, library + 8 * MIB, Other), stack];
            let (at, _, above) = place(&taken, library);
            assert!(at / NEAR == library / NEAR && above >= GIB / 2, "{at:x}");
        }
        // Little room below the library in its block: anywhere else but between it and the stack.
        let library = 0x7fe0_0010_0000;
        let taken = [program, heap, (library, library + 8 * MIB, Other), stack];
        let (at, below, above) = place(&taken, library);
        assert!(at < library && below > 64 * GIB && above > 64 * GIB);
        let libc = (0x7f33_68b7_a000, 0x7f33_68d7_a000, Other);
        // In the program: whichever side has more room, the heap keeps half of it.
        for program_at in [0x55c0_1000_0000, 0x55d4_8af2_f000, 0x55df_f000_0000_u64] {
            let program = (program_at, program_at + MIB, Other);
            let heap = (program_at + 4 * MIB, program_at + 64 * MIB, Heap);
            let (at, below, above) = place(&[program, heap, libc, stack], program_at);
            assert!(at / NEAR == program_at / NEAR, "{at:x}");
            assert!(
                if at > program_at {
                    below >= 16 * GIB
                } else {
                    above >= GIB / 2
                },
                "{at:x}"
            );
        }
        // At a fixed low address.
        let (at, below, _) = place(
            &[
                (0x40_0000, 0x80_0000, Other),
                (0x90_0000, 0x100_0000, Heap),
                libc,
                stack,
            ],
            0x40_0000,
        );
        assert!(at < NEAR && below >= 16 * GIB);
    }

    #[test]
    fn an_address_space_without_room_has_no_place() {
        let full = [(0, arch::user_end(u64::MAX) - MIB, Taken::Other)];
        assert_eq!(gap_among(&full, 2 * MIB, 0x40_0000, 0), None);
    }

    #[test]
    fn instructions_are_found_wherever_they_are() {
        let own = ProcessMemory::new(i32::try_from(std::process::id()).unwrap());
        let len = 200 << 10;
        for place in [
            0,
            100,
            (64 << 10) - 2,
            (128 << 10) - 1,
            len - arch::RESTORER_GADGET.len(),
        ] {
            let mut text = vec![0_u8; len];
            text[place..place + arch::RESTORER_GADGET.len()].copy_from_slice(arch::RESTORER_GADGET);
            let start = text.as_ptr().addr() as u64;
            assert_eq!(
                gadgets_in(&own, start, len as u64),
                Some((None, Some(start + place as u64)))
            );
            let other = if place < 50 << 10 { 70 << 10 } else { 40 << 10 };
            text[other..other + arch::CALL_GADGET.len()].copy_from_slice(arch::CALL_GADGET);
            assert_eq!(
                gadgets_in(&own, start, len as u64),
                Some((Some(start + other as u64), Some(start + place as u64)))
            );
        }
    }
}
