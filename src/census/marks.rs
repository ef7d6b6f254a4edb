//! Which addresses were met, which of them are still to be looked at: six bits for each 8 bytes of memory in which
//! something was met, which is 9 % of it, however many objects there are.
//!
//! Objects are looked at in the order of addresses, so that memory is read in large pieces; what they refer to is marked, and
//! taken in the same round if it lies ahead, else in the next.

use std::collections::HashMap;
use std::ops::Range;

/// How an object was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Met {
    /// The collector has it in its lists.
    Listed,
    /// Something refers to it.
    Referred,
    /// A word that may be a reference, or anything else.
    Doubtful,
}

/// Bytes of memory that one region is about.
const REGION: u64 = 1 << 20;
const WORDS: usize = (REGION / 8 / 64) as usize;

struct Region {
    base: u64,
    seen: [u64; WORDS],
    pending: [u64; WORDS],
    listed: [u64; WORDS],
    /// It is an object.
    objects: [u64; WORDS],
    /// It was met where a word may be a reference, or anything else.
    doubtful: [u64; WORDS],
    /// A table of an object begins here.
    tables: [u64; WORDS],
    waiting: u64,
}

/// The addresses that were met.
pub struct Marks {
    /// Where objects may be: writable memory, sorted.
    memory: Vec<Range<u64>>,
    index: HashMap<u64, usize, foldhash::fast::RandomState>,
    regions: Vec<Box<Region>>,
    last: (u64, usize),
    /// Addresses that are still to be looked at.
    waiting: u64,
}

impl Marks {
    /// Marks for objects that are in `memory`.
    pub fn new(mut memory: Vec<Range<u64>>) -> Self {
        memory.sort_by_key(|range| range.start);
        Self {
            memory,
            index: HashMap::default(),
            regions: Vec::new(),
            last: (u64::MAX, 0),
            waiting: 0,
        }
    }

    /// True where objects may be.
    pub fn may_be(&self, address: u64) -> bool {
        let index = self.memory.partition_point(|range| range.end <= address);
        self.memory.get(index).is_some_and(|range| range.contains(&address))
    }

    /// True when all of a stretch is where objects may be.
    pub fn holds(&self, start: u64, len: u64) -> bool {
        let Some(end) = start.checked_add(len) else {
            return false;
        };
        let mut at = start;
        let mut index = self.memory.partition_point(|range| range.end <= start);
        while at < end {
            match self.memory.get(index) {
                Some(range) if range.start <= at => at = range.end,
                _ => return false,
            }
            index += 1;
        }
        true
    }

    /// Where objects may be.
    pub fn memory(&self) -> &[Range<u64>] {
        &self.memory
    }

    fn region(&mut self, address: u64) -> Option<&mut Region> {
        let number = address / REGION;
        if self.last.0 != number {
            let index = match self.index.get(&number) {
                Some(index) => *index,
                // Only memory that is there has marks: their size is bounded by its.
                None if !self.may_be(address) => return None,
                None => {
                    self.regions.push(Box::new(Region {
                        base: number * REGION,
                        seen: [0; WORDS],
                        pending: [0; WORDS],
                        listed: [0; WORDS],
                        objects: [0; WORDS],
                        doubtful: [0; WORDS],
                        tables: [0; WORDS],
                        waiting: 0,
                    }));
                    self.index.insert(number, self.regions.len() - 1);
                    self.regions.len() - 1
                }
            };
            self.last = (number, index);
        }
        self.regions.get_mut(self.last.1).map(|region| &mut **region)
    }

    /// Marks an address at which an object is, or, in doubt, may be. True when it was not met before.
    pub fn mark(&mut self, address: u64, met: Met) -> bool {
        if !address.is_multiple_of(8) || address < 4096 {
            return false;
        }
        let (word, bit) = place(address);
        let Some(region) = self.region(address) else {
            return false;
        };
        let Some(seen) = region.seen.get_mut(word) else {
            return false;
        };
        if *seen & bit != 0 {
            if met != Met::Doubtful
                && let Some(word) = region.doubtful.get_mut(word)
            {
                *word &= !bit;
            }
            return false;
        }
        *seen |= bit;
        if let Some(word) = region.pending.get_mut(word) {
            *word |= bit;
        }
        let kept = match met {
            Met::Listed => region.listed.get_mut(word),
            Met::Doubtful => region.doubtful.get_mut(word),
            Met::Referred => None,
        };
        if let Some(word) = kept {
            *word |= bit;
        }
        region.waiting += 1;
        self.waiting += 1;
        true
    }

    /// True when the address was met.
    pub fn is_seen(&mut self, address: u64) -> bool {
        let (word, bit) = place(address);
        let region = self.region(address);
        region.is_some_and(|region| region.seen.get(word).is_some_and(|word| word & bit != 0))
    }

    /// Says that a table of an object begins at an address.
    pub fn is_table(&mut self, address: u64) {
        let (word, bit) = place(address);
        if let Some(word) = self.region(address).and_then(|region| region.tables.get_mut(word)) {
            *word |= bit;
        }
    }

    /// True when an object or a table was found in this stretch, which lies in one region.
    pub fn is_accounted(&mut self, start: u64, len: u64) -> bool {
        self.any(start, len, |region, word| {
            Some(region.objects.get(word)? | region.tables.get(word)?)
        })
    }

    /// True when something in this stretch was met, object or not.
    pub fn is_met(&mut self, start: u64, len: u64) -> bool {
        self.any(start, len, |region, word| region.seen.get(word).copied())
    }

    /// True when there is a bit for one of these addresses; those of blocks that begin in one region end there, too, or at its end.
    fn any(&mut self, start: u64, len: u64, bits: impl Fn(&Region, usize) -> Option<u64>) -> bool {
        let Some(region) = self
            .index
            .get(&(start / REGION))
            .and_then(|index| self.regions.get(*index))
        else {
            return false;
        };
        let first = start % REGION / 8;
        let end = (first + len / 8).min(REGION / 8);
        let mut at = first;
        while at < end {
            let here = (64 - at % 64).min(end - at);
            let mask = (!0 >> (64 - here)) << (at % 64);
            if bits(region, (at / 64) as usize).is_some_and(|word| word & mask != 0) {
                return true;
            }
            at += here;
        }
        false
    }

    /// How many addresses are still to be looked at.
    pub const fn waiting(&self) -> u64 {
        self.waiting
    }

    /// The regions in which something waits, in the order of addresses.
    pub fn round(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.regions.len()).collect();
        order.retain(|index| self.regions.get(*index).is_some_and(|region| region.waiting > 0));
        order.sort_by_key(|index| self.regions.get(*index).map_or(0, |region| region.base));
        order
    }

    /// The next address of a region that waits, from the `from`th word on, and how it was met. It waits no more.
    pub fn take(&mut self, region: usize, from: &mut usize) -> Option<(u64, Met)> {
        let region = self.regions.get_mut(region)?;
        if region.waiting == 0 {
            return None;
        }
        let rest = region.pending.get(*from..)?;
        let step = rest.iter().position(|word| *word != 0)?;
        *from += step;
        let word = region.pending.get_mut(*from)?;
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        let is_in = |words: &[u64; WORDS]| words.get(*from).is_some_and(|word| word & (1 << bit) != 0);
        let met = match (is_in(&region.listed), is_in(&region.doubtful)) {
            (true, _) => Met::Listed,
            (_, true) => Met::Doubtful,
            _ => Met::Referred,
        };
        region.waiting -= 1;
        self.waiting -= 1;
        Some((region.base + (*from as u64 * 64 + u64::from(bit)) * 8, met))
    }
}

/// Numbers for the objects, in the order of their addresses.
pub struct Numbers {
    index: HashMap<u64, usize, foldhash::fast::RandomState>,
    /// In the order of addresses.
    regions: Vec<Numbered>,
    count: u32,
}

struct Numbered {
    base: u64,
    objects: Vec<u64>,
    /// The number of the first object of each so many words.
    first: Vec<u32>,
}

/// Words of bits of which the first object's number is kept.
const STRIDE: usize = 8;

impl Marks {
    /// Says that there is an object at an address that was met.
    pub fn is_object(&mut self, address: u64) {
        let (word, bit) = place(address);
        if let Some(word) = self.region(address).and_then(|region| region.objects.get_mut(word)) {
            *word |= bit;
        }
    }

    /// Numbers all objects.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let mut numbers = Numbers {
            index: HashMap::default(),
            regions: Vec::new(),
            count: 0,
        };
        let mut order: Vec<&Region> = self.regions.iter().map(|region| &**region).collect();
        order.sort_by_key(|region| region.base);
        for region in order {
            let mut first = Vec::with_capacity(WORDS / STRIDE);
            for words in region.objects.chunks(STRIDE) {
                first.push(numbers.count);
                numbers.count = words
                    .iter()
                    .fold(numbers.count, |count, word| count.saturating_add(word.count_ones()));
            }
            numbers.index.insert(region.base / REGION, numbers.regions.len());
            numbers.regions.push(Numbered {
                base: region.base,
                objects: region.objects.to_vec(),
                first,
            });
        }
        numbers
    }
}

impl Numbers {
    /// How many objects there are.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// The number of the object at an address.
    #[must_use]
    pub fn number(&self, address: u64) -> Option<u32> {
        let region = self.regions.get(*self.index.get(&(address / REGION))?)?;
        let (word, bit) = place(address);
        let bits = region.objects.get(word)?;
        if !address.is_multiple_of(8) || bits & bit == 0 {
            return None;
        }
        let start = word / STRIDE;
        let before = region
            .objects
            .get(start * STRIDE..word)?
            .iter()
            .map(|word| word.count_ones());
        let before: u32 = before.sum::<u32>() + (bits & (bit - 1)).count_ones();
        Some(region.first.get(start)? + before)
    }

    /// The address of an object.
    #[must_use]
    pub fn address(&self, number: u32) -> Option<u64> {
        let begins = |region: &Numbered| region.first.first().copied().unwrap_or(0);
        let index = self.regions.partition_point(|region| begins(region) <= number);
        // Regions without objects begin where the next one does.
        let region = self.regions.get(index.checked_sub(1)?)?;
        let start = region.first.partition_point(|first| *first <= number).checked_sub(1)?;
        let mut left = number - region.first.get(start)?;
        for (i, word) in region.objects.iter().enumerate().skip(start * STRIDE).take(STRIDE) {
            if left < word.count_ones() {
                let mut word = *word;
                for _ in 0..left {
                    word &= word - 1;
                }
                return Some(region.base + (i as u64 * 64 + u64::from(word.trailing_zeros())) * 8);
            }
            left -= word.count_ones();
        }
        None
    }

    /// All addresses, in the order of numbers.
    pub fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.regions.iter().flat_map(|region| {
            let base = region.base;
            let words = region.objects.iter().enumerate();
            words.flat_map(move |(i, word)| {
                let bits = (0..64_u64).filter(move |bit| word & (1 << bit) != 0);
                bits.map(move |bit| base + (i as u64 * 64 + bit) * 8)
            })
        })
    }
}

const fn place(address: u64) -> (usize, u64) {
    let number = address % REGION / 8;
    ((number / 64) as usize, 1 << (number % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use std::collections::BTreeMap;

    #[test]
    fn every_address_is_taken_once() {
        let mut random = rand::rngs::SmallRng::seed_from_u64(3);
        let mut marks = Marks::new(vec![0x10_0000..0x50_0000, 0x4000_0000..0x4000_1000]);
        let mut expected = BTreeMap::new();
        let mut taken = Vec::new();
        for _ in 0..20 {
            for _ in 0..500 {
                let address = 0x10_0000 + 8 * random.random_range(0..0x8_0000_u64);
                let met = if random.random() { Met::Doubtful } else { Met::Listed };
                let new = marks.mark(address, met);
                assert_eq!(new, expected.insert(address, ()).is_none());
                assert!(marks.is_seen(address));
            }
            for region in marks.round() {
                let mut from = 0;
                while let Some((address, _)) = marks.take(region, &mut from) {
                    taken.push(address);
                }
            }
            assert_eq!(marks.waiting(), 0);
        }
        taken.sort_unstable();
        assert!(taken.iter().eq(expected.keys()));
    }

    #[test]
    fn objects_are_numbered_in_the_order_of_addresses() {
        let mut random = rand::rngs::SmallRng::seed_from_u64(4);
        let mut marks = Marks::new(vec![0x10_0000..0x90_0000, 0x4000_0000..0x4010_0000]);
        let mut expected = std::collections::BTreeSet::new();
        for _ in 0..5000 {
            let address = match random.random_range(0..3) {
                0 => 0x4000_0000 + 8 * random.random_range(0..0x2000_u64),
                // A region in between has nothing.
                _ => 0x10_0000 + 8 * random.random_range(0..0x4_0000_u64) + 0x40_0000 * random.random_range(0..2),
            };
            marks.mark(address, Met::Referred);
            if random.random() {
                marks.is_object(address);
                expected.insert(address);
            }
        }
        let numbers = marks.numbers();
        assert_eq!(numbers.count() as usize, expected.len());
        assert!(numbers.addresses().eq(expected.iter().copied()));
        for (number, address) in expected.iter().enumerate() {
            assert_eq!(numbers.number(*address), Some(number as u32));
            assert_eq!(numbers.address(number as u32), Some(*address));
        }
        assert_eq!(numbers.address(numbers.count()), None);
        assert_eq!(numbers.number(0x4000_0001), None);
    }

    #[test]
    fn only_memory_that_is_there_has_marks() {
        let mut marks = Marks::new(std::iter::once(0x4000_0000..0x4000_1000).collect());
        for address in [0, 8, 0x3fff_fff8, 0x7fff_ffff_fff8, u64::MAX - 7, 0x4000_0001] {
            assert!(!marks.mark(address, Met::Referred), "{address:#x}");
        }
        assert!(marks.regions.is_empty());
        assert!(marks.mark(0x4000_0ff8, Met::Doubtful));
        assert!(!marks.mark(0x4000_0ff8, Met::Referred), "it is no longer in doubt");
        assert_eq!(marks.take(0, &mut 0), Some((0x4000_0ff8, Met::Referred)));
    }
}
