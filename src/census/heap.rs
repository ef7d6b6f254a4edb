//! Objects in memory that nobody vouches for: what type one has, how large it is, and what it refers to.
//!
//! Every word is an allegation. An object is one when its reference count can be one and its type is a type by all that types
//! have (`dump::types`); a size must lie in memory that is there; a table is read as far as it can be. What does not fit is
//! counted in [`Doubts`] and left out, never made up.

use super::blocks::Blocks;
use super::kinds::{self, Kind, TypeInfo, flag};
use super::layout::Layouts;
use super::marks::{Marks, Met};
use super::stacks::Held;
use crate::dump::types::Types;
use crate::frames::text::UnicodeState;
use pyheap_injector::RemoteMemory;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};

/// Addresses that are remembered not to be types.
const MAX_NO_TYPES: usize = 1 << 20;
/// Types that are told apart.
const MAX_TYPES: usize = 1 << 20;
/// The `dk_log2_size` of a dict that does not fit into an address space.
const MAX_LOG_SIZE: u8 = 40;
/// Of a word that is a reference: it may be something else.
pub const DOUBTFUL: u64 = 1;

/// How a reference says that the object was met.
#[must_use]
pub const fn met_by(reference: u64) -> Met {
    if reference & DOUBTFUL == 0 {
        Met::Referred
    } else {
        Met::Doubtful
    }
}

/// What did not fit: what was read while the program changed it, or what it has broken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubts {
    /// References that lead to no object.
    pub not_objects: u64,
    /// Objects whose size or tables do not fit into memory.
    pub odd_objects: u64,
    /// Tables that could be read in part only.
    pub cut_tables: u64,
    /// The collector's lists led nowhere at so many places, and were taken up again from their other end.
    pub broken_lists: u64,
}

impl Doubts {
    /// How many of all kinds.
    #[must_use]
    pub const fn all(&self) -> u64 {
        self.not_objects + self.odd_objects + self.cut_tables + self.broken_lists
    }
}

/// An object that was looked at.
#[derive(Debug, Clone, Copy)]
pub struct Looked {
    /// Index of its type.
    pub info: usize,
    /// Bytes as `sys.getsizeof` counts them.
    pub bytes: u64,
}

/// The heap of one process.
pub struct Heap<'a, M> {
    /// What is where.
    pub at: Layouts,
    /// Its memory.
    pub blocks: Blocks<'a, M>,
    /// What was met.
    pub marks: Marks,
    /// What did not fit.
    pub doubts: Doubts,
    /// The types that were met.
    pub infos: Vec<TypeInfo>,
    types: Types<&'a M>,
    known: HashMap<u64, usize, foldhash::fast::RandomState>,
    no_types: HashSet<u64, foldhash::fast::RandomState>,
    /// The last type that was asked for.
    last: (u64, usize),
    /// What running calls and threads hold.
    pub held: Vec<Held>,
    /// What the object that was looked at last refers to: addresses, those that may be something else with [`DOUBTFUL`].
    pub references: Vec<u64>,
}

impl<'a, M: RemoteMemory> Heap<'a, M> {
    /// A heap of which nothing was read; `None` for a version whose objects are not known.
    pub fn new(memory: &'a M, at: Layouts, marks: Marks) -> Option<Self> {
        Some(Self {
            types: Types::new(memory, &at.base)?,
            at,
            blocks: Blocks::new(memory),
            marks,
            doubts: Doubts::default(),
            infos: Vec::new(),
            known: HashMap::default(),
            no_types: HashSet::default(),
            last: (0, 0),
            held: Vec::new(),
            references: Vec::new(),
        })
    }

    /// The type at an address, by its index; `None` where there is none.
    pub fn type_at(&mut self, address: u64) -> Option<usize> {
        if self.last.0 == address {
            return Some(self.last.1);
        }
        if let Some(index) = self.known.get(&address) {
            self.last = (address, *index);
            return Some(*index);
        }
        if !address.is_multiple_of(8) || !self.marks.may_be(address) || self.no_types.contains(&address) {
            return None;
        }
        let info = self.types.name_at(address).and_then(|name| {
            let module = self.types.module_at(address);
            kinds::read(&mut self.blocks, &self.at, address, name, module)
        });
        let Some(info) = info.filter(|_| self.infos.len() < MAX_TYPES) else {
            if self.no_types.len() >= MAX_NO_TYPES {
                self.no_types.clear();
            }
            self.no_types.insert(address);
            return None;
        };
        self.marks.mark(address, Met::Referred);
        self.infos.push(info);
        self.known.insert(address, self.infos.len() - 1);
        self.last = (address, self.infos.len() - 1);
        Some(self.last.1)
    }

    /// The index of the type of the object at an address; `None` where there is no object.
    pub fn type_of(&mut self, object: u64) -> Option<usize> {
        let of = self.blocks.word(object.checked_add(self.at.base.ob_type)?)?;
        if !self.can_be_counted(object)? {
            return None;
        }
        self.type_at(of)
    }

    /// A reference count that an object in use can have. In a block that is free, a pointer is in its place, or 0.
    fn can_be_counted(&mut self, object: u64) -> Option<bool> {
        /// In builds without the GIL: flags (2 bytes, 0 in 3.13), `ob_mutex` (1), `ob_gc_bits` (1) and `ob_ref_local` (4); then
        /// `ob_ref_shared`, whose lowest two bits are flags.
        const FLAGS: u64 = 8;
        const SHARED: u64 = 16;
        /// Two bits: locked, and somebody waits.
        const MAX_LOCK: u8 = 3;
        const MAX_FLAGS: u16 = 256;
        /// Counts of objects that are counted elsewhere, too, begin with this.
        const DEFERRED: i64 = i64::MAX / 8;
        const MANY: u64 = 1 << 40;
        if self.at.base.free_threaded {
            let word = self.blocks.word(object.checked_add(FLAGS)?)?;
            let shared = self.blocks.word(object.checked_add(SHARED)?)?.cast_signed() >> 2;
            let (flags, lock, local) = (word as u16, (word >> 16) as u8, (word >> 32) as u32);
            let is_count = |count: i64| count.unsigned_abs() < MANY;
            return Some(
                flags < MAX_FLAGS
                    && lock <= MAX_LOCK
                    && (is_count(shared) || is_count(shared - DEFERRED))
                    && (local != 0 || shared != 0),
            );
        }
        let count = self.blocks.word(object)?;
        // Those that never die have high bits of their own from 3.14 on.
        Some(count as u32 != 0 && (count >> 32) as u16 == 0 && (self.at.base.minor >= 14 || count >> 48 == 0))
    }

    /// The bit that says so, in builds without the GIL.
    pub fn is_known_to_collector(&mut self, object: u64) -> bool {
        const TRACKED: u8 = 1;
        const BITS: u64 = 11;
        let bits = object.checked_add(BITS).and_then(|at| self.blocks.byte(at));
        bits.is_some_and(|bits| bits & TRACKED != 0)
    }

    /// What may be references, from one offset of something to another.
    pub fn look_through(&mut self, start: u64, from: u64, to: u64) {
        self.doubtful(start, from, to);
    }

    fn is_heap_type(&mut self, object: u64) -> bool {
        let flags = object.checked_add(self.at.objects.type_flags);
        flags
            .and_then(|at| self.blocks.word(at))
            .is_some_and(|flags| flags & flag::HEAP_TYPE != 0)
    }

    /// Looks at an object; afterwards [`Heap::references`] holds what it refers to. `None` where there is none: that is counted
    /// unless it was doubtful.
    pub fn look(&mut self, object: u64, doubtful: bool) -> Option<Looked> {
        self.references.clear();
        let Some(info) = self.type_of(object) else {
            self.doubts.not_objects += u64::from(!doubtful);
            return None;
        };
        let (kind, before) = self.infos.get(info).map(|info| (info.kind, info.before))?;
        let bytes = match self.contents(object, info, kind) {
            Some(bytes) => bytes,
            // A stale word, which leads to what is left of an object.
            None if doubtful => {
                self.references.clear();
                return None;
            }
            None => {
                self.doubts.odd_objects += 1;
                self.infos.get(info)?.basic
            }
        };
        let before = match kind {
            Kind::Type if !self.is_heap_type(object) && !matches!(self.at.base.minor, 11 | 12) => 0,
            _ => before,
        };
        Some(Looked {
            info,
            bytes: bytes.saturating_add(before),
        })
    }

    fn field(&mut self, object: u64, offset: u64) -> Option<u64> {
        self.blocks.word(object.checked_add(offset)?)
    }

    /// `PyVarObject.ob_size`, which up to 3.11 is negative in negative integers.
    fn length(&mut self, object: u64) -> Option<u64> {
        let length = self.field(object, self.at.ob_size())?;
        Some(length.cast_signed().unsigned_abs())
    }

    /// The size of an object without what is before it; its references are collected. `None` when it makes no sense.
    fn contents(&mut self, object: u64, index: usize, kind: Kind) -> Option<u64> {
        let info = self.infos.get(index)?;
        let (basic, item, flags) = (info.basic, info.item, info.flags);
        let header = self.at.base.ob_type + 8;
        let heap_type = flags & flag::HEAP_TYPE != 0;
        // From where on its fixed part is looked through; what is before that is known.
        let (size, from) = match kind {
            Kind::Leaf => (basic, if heap_type { header + 8 } else { basic }),
            Kind::Int => (self.int(object)?, basic),
            Kind::Bytes => {
                let size = self.variable(object, basic, item)?;
                (size, basic)
            }
            Kind::Str => (self.str(object)?, self.at.census.unicode_size),
            Kind::List => (basic + self.list(object)?, self.at.census.list_allocated + 8),
            Kind::Tuple => {
                let size = self.variable(object, basic, item)?;
                let count = self.length(object)?;
                self.table(object.checked_add(self.at.census.tuple_items)?, count);
                (size, basic)
            }
            Kind::Dict => (basic + self.dict(object)?.0, self.at.objects.dict_values + 8),
            Kind::OrderedDict => {
                let (dict, places, used) = self.dict(object)?;
                // One pointer a place of the hash table once there was an entry (`od_fast_nodes`), one node an entry.
                let places = match self.field(object, self.at.objects.dict_values + 8)? {
                    0 => 0,
                    _ => places,
                };
                self.ordered_nodes(object, places);
                let nodes = places.checked_mul(8)?.checked_add(used.checked_mul(32)?)?;
                (basic + dict + nodes, self.at.objects.dict_values + 8)
            }
            Kind::Set => (basic + self.set(object)?, self.at.census.set_small + 128),
            Kind::ByteArray => (basic + self.bytearray(object)?, basic),
            Kind::Deque => (basic + self.deque(object)?, self.at.ob_size() + 8),
            Kind::Array => (basic + self.array(object)?, self.at.ob_size() + 8),
            Kind::Type => return self.type_object(object, index),
            Kind::Generator | Kind::Frame => return self.frame_holder(object, basic, item, kind),
            Kind::Weak => {
                // `wr_object` is not held, `wr_callback` is.
                self.doubtful(object, header + 8, header + 16);
                (basic, basic)
            }
            Kind::Code => (self.variable(object, basic, item)?.next_multiple_of(8), header),
            Kind::Buffered => (basic + self.buffered(object)?, header),
            Kind::Other => (self.variable(object, basic, item)?, header),
        };
        self.doubtful(object, from, basic);
        if kind == Kind::Other && item == 8 {
            self.doubtful(object, basic.max(from), size);
        }
        if !self.marks.holds(object, basic) {
            return None;
        }
        self.attributes(object, index);
        Some(size)
    }

    /// `tp_basicsize + ob_size * tp_itemsize`, all of which must be memory.
    fn variable(&mut self, object: u64, basic: u64, item: u64) -> Option<u64> {
        if item == 0 {
            return Some(basic);
        }
        let size = self.length(object)?.checked_mul(item)?.checked_add(basic)?;
        self.marks.holds(object, size).then_some(size)
    }

    fn refer(&mut self, word: u64) {
        if word != 0 {
            self.references.push(word);
        }
    }

    /// What may be references, from one offset of an object to another.
    fn doubtful(&mut self, object: u64, from: u64, to: u64) {
        let Some(start) = object.checked_add(from.next_multiple_of(8)) else {
            return;
        };
        // From 3.14 references in frames carry tags in their lowest bits.
        let mask = if self.at.base.minor >= 14 { !7 } else { !0 };
        let references = &mut self.references;
        let marks = &self.marks;
        let count = to.saturating_sub(from.next_multiple_of(8)) / 8;
        let unread = self.blocks.words(start, count, |word| {
            let word = word & mask;
            if word.is_multiple_of(8) && marks.may_be(word) {
                references.push(word | DOUBTFUL);
            }
        });
        self.doubts.cut_tables += u64::from(unread > 0);
    }

    /// References that stand in a row, where 0 is none.
    fn table(&mut self, at: u64, count: u64) {
        let references = &mut self.references;
        let unread = self.blocks.words(at, count, |word| {
            if word != 0 {
                references.push(word & !DOUBTFUL);
            }
        });
        self.doubts.cut_tables += u64::from(unread > 0);
    }

    fn int(&mut self, object: u64) -> Option<u64> {
        let word = self.field(object, self.at.ob_size())?;
        let (digits, least) = match self.at.base.minor {
            ..=10 => (word.cast_signed().unsigned_abs(), 0),
            11 => (word.cast_signed().unsigned_abs(), 1),
            // The lowest three bits of `lv_tag` are the sign and a mark.
            _ => (word >> 3, 1),
        };
        let size = digits.max(least).checked_mul(4)?.checked_add(self.at.ob_size() + 8)?;
        self.marks.holds(object, size).then_some(size)
    }

    fn str(&mut self, object: u64) -> Option<u64> {
        let unicode = self.at.base.unicode;
        let state = self.blocks.number(object.checked_add(unicode.state)?)?;
        let state = UnicodeState::from_word(state, unicode.kind_bit);
        let length = self.field(object, unicode.length)?;
        let data = length.checked_add(1)?.checked_mul(u64::from(state.kind))?;
        let inline = match (state.compact, state.ascii) {
            (true, true) => unicode.ascii_data.checked_add(data)?,
            (true, false) => unicode.compact_data.checked_add(data)?,
            (false, _) => self.at.census.unicode_size,
        };
        if !self.marks.holds(object, inline) {
            return None;
        }
        let mut size = inline;
        // Where the characters are; other forms of the string may share them.
        let characters = match state.compact {
            true => object.checked_add(unicode.compact_data)?,
            false => {
                let at = self.field(object, unicode.data_pointer)?;
                if at != 0 {
                    size += self.apart(at, data)?;
                }
                at
            }
        };
        if let Some((wide, wide_length)) = self.at.census.wide {
            let at = self.field(object, wide)?;
            let is_own =
                at != 0 && at != characters && !(state.compact && state.ascii && at == object + unicode.ascii_data);
            if is_own {
                let length = match state.compact && state.ascii {
                    true => length,
                    false => self.field(object, wide_length)?,
                };
                size += self.apart(at, length.checked_add(1)?.checked_mul(4)?)?;
            }
        }
        if !(state.compact && state.ascii) {
            let at = self.field(object, self.at.census.utf8)?;
            if at != 0 && at != characters {
                let length = self.field(object, self.at.census.utf8_length)?;
                // Of strings that are part of the program it is a constant, which is not writable.
                self.blocks.byte(at.checked_add(length)?)?;
                self.marks.is_table(at);
                size = size.checked_add(length)?.checked_add(1)?;
            }
        }
        Some(size)
    }

    /// The size of something apart from its object, which must be memory.
    fn apart(&mut self, at: u64, len: u64) -> Option<u64> {
        let holds = self.marks.holds(at, len);
        if holds {
            self.marks.is_table(at);
        }
        holds.then_some(len)
    }

    fn list(&mut self, object: u64) -> Option<u64> {
        let count = self.length(object)?;
        let allocated = self.field(object, self.at.census.list_allocated)?;
        let items = self.field(object, self.at.census.list_items)?;
        if items == 0 {
            return (count == 0).then_some(0);
        }
        let size = self.apart(items, allocated.checked_mul(8)?)?;
        self.table(items, count.min(allocated));
        (count <= allocated).then_some(size)
    }

    /// The nodes of an `OrderedDict`, which keep the order: a table with a pointer to each.
    fn ordered_nodes(&mut self, object: u64, places: u64) -> Option<()> {
        let nodes = self.field(object, self.at.objects.dict_values + 8)?;
        if places > 0 && self.marks.holds(nodes, places.checked_mul(8)?) {
            let marks = &mut self.marks;
            marks.is_table(nodes);
            self.blocks.words(nodes, places, |node| marks.is_table(node));
        }
        Some(())
    }

    /// Bytes of a dict's tables, the places of its hash table, and its entries in use.
    fn dict(&mut self, object: u64) -> Option<(u64, u64, u64)> {
        let keys = self.field(object, self.at.objects.dict_keys)?;
        let values = self.field(object, self.at.objects.dict_values)?;
        // `ma_used` is where others have `ob_size`.
        let used = self.field(object, self.at.ob_size())?;
        let table = self.keys(keys)?;
        let mut size = 0;
        if values != 0 {
            self.values(values, &table);
            size += table.values * 8;
        }
        self.entries(&table, values == 0);
        // Keys that are shared belong to the type.
        let own = self.blocks.word(keys)? == 1;
        if own {
            size += table.size;
        }
        Some((size, table.places, used.min(table.used)))
    }

    /// The keys of a dict, or those that the instances of a type share.
    fn keys(&mut self, keys: u64) -> Option<Keys> {
        /// `dk_size`; from 3.11 `dk_log2_size`, `dk_log2_index_bytes` and `dk_kind`, a byte each.
        const SIZE: u64 = 8;
        /// `dk_usable`, from 3.11.
        const USABLE: u64 = 16;
        const GENERAL: u8 = 0;
        let (places, index_bytes, hashed) = if self.at.base.minor <= 10 {
            let places = self.field(keys, SIZE)?;
            let width = match places {
                0..=0xff => 1,
                0x100..=0xffff => 2,
                0x1_0000..=0xffff_ffff => 4,
                _ => return None,
            };
            (places, places * width, true)
        } else {
            let mut bytes = [0; 3];
            if !self.blocks.copy(keys.checked_add(SIZE)?, &mut bytes) {
                return None;
            }
            let [log, log_bytes, kind] = bytes;
            if log > MAX_LOG_SIZE || log_bytes > MAX_LOG_SIZE {
                return None;
            }
            (1 << log, 1 << log_bytes, kind == GENERAL)
        };
        let used = self.field(keys, self.at.objects.keys_used)?;
        let room = places * 2 / 3;
        let values = match self.at.base.minor {
            ..=10 => room,
            // Keys that are shared take fewer entries than there is room for.
            _ => used.checked_add(self.field(keys, USABLE)?)?.min(room),
        };
        let words = if hashed { 3 } else { 2 };
        let start = self.at.objects.keys_indices + index_bytes;
        let size = start + room * words * 8;
        // A size of 1 has no room, and nothing in it.
        if used > room.max(1) || !self.marks.holds(keys, size) {
            return None;
        }
        self.marks.is_table(keys);
        Some(Keys {
            entries: keys.checked_add(start)?,
            used: used.min(room),
            values,
            words,
            size,
            places,
        })
    }

    /// Refers to the keys, and to the values where they are beside them.
    fn entries(&mut self, keys: &Keys, values: bool) {
        let references = &mut self.references;
        let first = keys.words - 2;
        let (mut i, mut key) = (0, 0);
        let unread = self.blocks.words(keys.entries, keys.used * keys.words, |word| {
            let place = i % keys.words;
            if place == first {
                key = word;
                if !values && word != 0 {
                    references.push(word & !DOUBTFUL);
                }
            } else if place == first + 1 && values && key != 0 && word != 0 {
                references.extend([key & !DOUBTFUL, word & !DOUBTFUL]);
            }
            i += 1;
        });
        self.doubts.cut_tables += u64::from(unread > 0);
    }

    /// Refers to values that are in an array of their own.
    fn values(&mut self, values: u64, keys: &Keys) {
        if let Some(at) = values.checked_add(self.at.objects.values) {
            self.marks.is_table(values);
            self.table(at, keys.used);
        }
    }

    fn set(&mut self, object: u64) -> Option<u64> {
        let mask = self.field(object, self.at.census.set_mask)?;
        let table = self.field(object, self.at.census.set_table)?;
        let places = mask.checked_add(1)?;
        let size = places.checked_mul(16)?;
        self.apart(table, size)?;
        let references = &mut self.references;
        let (mut key, mut is_hash) = (0, false);
        let unread = self.blocks.words(table, places * 2, |word| {
            // Deleted entries have this hash, which no object has, and in place of the key what is not one in all versions.
            if is_hash && key != 0 && word != u64::MAX {
                references.push(key & !DOUBTFUL);
            }
            (key, is_hash) = (word, !is_hash);
        });
        self.doubts.cut_tables += u64::from(unread > 0);
        let inside = table == object + self.at.census.set_small;
        Some(if inside { 0 } else { size })
    }

    fn bytearray(&mut self, object: u64) -> Option<u64> {
        let allocated = self.field(object, self.at.census.bytearray_alloc)?;
        let place = self.at.census.bytearray_object;
        let Some(place) = place else {
            let buffer = self.field(object, self.at.census.bytearray_alloc + 8)?;
            return if allocated == 0 {
                Some(0)
            } else {
                self.apart(buffer, allocated)
            };
        };
        let buffer = self.field(object, place)?;
        // The buffer is counted here, not as an object: nobody else has it.
        let header = self.at.base.bytes.data + 1;
        if buffer == 0 || allocated == 0 {
            return Some(0);
        }
        self.apart(buffer, allocated.checked_add(header)?)
    }

    fn deque(&mut self, object: u64) -> Option<u64> {
        /// Items of a block, which begins with a link to the one at its left and ends with one to its right.
        const ITEMS: u64 = 64;
        const BLOCK: u64 = (ITEMS + 2) * 8;
        let at = self.at.ob_size() + 8;
        let count = self.length(object)?;
        let mut block = self.field(object, at)?;
        let mut first = self.field(object, at + 16)?;
        let blocks = first.checked_add(count)?.checked_add(ITEMS - 1)? / ITEMS;
        if first > ITEMS || blocks > 1 << 40 {
            return None;
        }
        let mut left = count;
        while left > 0 {
            self.apart(block, BLOCK)?;
            let here = left.min(ITEMS - first.min(ITEMS));
            if here == 0 && first < ITEMS {
                return None;
            }
            self.table(block + 8 + first * 8, here);
            left -= here;
            first = 0;
            if left > 0 {
                block = self.field(block, BLOCK - 8)?;
            }
        }
        blocks.checked_mul(BLOCK)
    }

    fn array(&mut self, object: u64) -> Option<u64> {
        /// After `ob_size`: `ob_item`, `allocated`, `ob_descr`; `arraydescr.itemsize`, an int.
        const ITEM_SIZE: u64 = 4;
        let at = self.at.ob_size() + 8;
        let items = self.field(object, at)?;
        let allocated = self.field(object, at + 8)?;
        let about = self.field(object, at + 16)?;
        let width = self.blocks.number(about.checked_add(ITEM_SIZE)?)?;
        let size = allocated.checked_mul(u64::from(width))?;
        if size == 0 {
            return Some(0);
        }
        self.apart(items, size)
    }

    /// The buffer of a file.
    fn buffered(&mut self, object: u64) -> Option<u64> {
        /// `buffered.buffer` and `buffered.buffer_size` behind the header, in all versions.
        const BUFFER: u64 = 40;
        const SIZE: u64 = 104;
        let header = self.at.base.ob_type + 8;
        match self.field(object, header + BUFFER)? {
            0 => Some(0),
            buffer => {
                let size = self.field(object, header + SIZE)?;
                self.apart(buffer, size)
            }
        }
    }

    fn type_object(&mut self, object: u64, index: usize) -> Option<u64> {
        let heap_type = self.is_heap_type(object);
        let basic = self.infos.get(index)?.basic;
        let header = self.at.base.ob_type + 8;
        if !heap_type {
            let size = self.at.census.type_size;
            self.doubtful(object, header, size);
            return self.marks.holds(object, size).then_some(size);
        }
        if !self.marks.holds(object, basic) {
            return None;
        }
        self.doubtful(object, header, basic);
        let keys = self.field(object, self.at.objects.cached_keys)?;
        // `PyHeapTypeObject`: what a metaclass adds is not counted by `sys.getsizeof`.
        let mut size = self.meta_size(index);
        if keys != 0 {
            let keys = self.keys(keys)?;
            self.entries(&keys, false);
            size += keys.size;
        }
        self.attributes(object, index);
        Some(size)
    }

    /// `sizeof(PyHeapTypeObject)`: the size of objects of `type` itself, which is its own type.
    fn meta_size(&mut self, index: usize) -> u64 {
        let mut address = self.infos.get(index).map_or(0, |info| info.address);
        let mut size = self.infos.get(index).map_or(0, |info| info.basic);
        for _ in 0..8 {
            let Some(of) = self.field(address, self.at.base.ob_type) else {
                break;
            };
            if let Some(basic) = self.field(of, self.at.objects.type_basicsize) {
                size = basic.min(kinds::MAX_BASIC_SIZE);
            }
            if of == address {
                break;
            }
            address = of;
        }
        size
    }

    /// Generators and frame objects: with them are the variables of a call.
    fn frame_holder(&mut self, object: u64, basic: u64, item: u64, kind: Kind) -> Option<u64> {
        let header = self.at.base.ob_type + 8;
        let Some(frames) = self.at.census.frames else {
            if kind == Kind::Generator {
                self.doubtful(object, header, basic);
                return self.marks.holds(object, basic).then_some(basic);
            }
            // One item is in the fixed part already.
            let size = self
                .length(object)?
                .saturating_sub(1)
                .checked_mul(item)?
                .checked_add(basic)?;
            if !self.marks.holds(object, size) {
                return None;
            }
            self.doubtful(object, header, size);
            return Some(size);
        };
        let frame = match kind {
            Kind::Generator => object.checked_add(frames.generator_frame)?,
            _ => self.field(object, frames.object_frame)?,
        };
        let code = self.field(frame, self.at.base.frame.code)? & !7;
        let slots = match self.type_of(code).and_then(|index| self.infos.get(index)) {
            Some(info) if info.kind == Kind::Code => {
                let locals = self.blocks.number(code.checked_add(frames.code_locals)?)?;
                let stack = self.blocks.number(code.checked_add(frames.code_stack)?)?;
                u64::from(locals) + u64::from(stack)
            }
            // It is over, and has nothing any more.
            _ => 0,
        };
        let size = basic.checked_add(slots.checked_mul(8)?)?;
        // A frame object may have its call elsewhere: then its own place for it ends early, or is not used.
        let here = if self.marks.holds(object, size) { size } else { basic };
        self.doubtful(object, header, here);
        Some(size)
    }

    /// Attributes that are not in the fixed part.
    fn attributes(&mut self, object: u64, index: usize) {
        let Some(info) = self.infos.get(index) else { return };
        let (flags, keys) = (info.flags, info.keys);
        let (basic, item, dict) = (info.basic, info.item, info.dict);
        match self.at.objects.managed_dict.filter(|_| flags & flag::MANAGED_DICT != 0) {
            Some(managed) => {
                self.managed(object, managed, flags, keys, basic);
            }
            None if dict < 0 && item > 0 => {
                // After the items, at an aligned address.
                let at = self.length(object).and_then(|length| {
                    let size = length
                        .checked_mul(item)?
                        .checked_add(basic)?
                        .checked_next_multiple_of(8)?;
                    object.checked_add(size)?.checked_sub(dict.unsigned_abs())
                });
                if let Some(word) = at.and_then(|at| self.blocks.word(at)) {
                    self.refer(word & !DOUBTFUL);
                }
            }
            // In the fixed part, which is looked through in any case.
            None => {}
        }
    }

    /// The managed `__dict__`, or the values instead of it.
    fn managed(&mut self, object: u64, managed: u64, flags: u64, keys: u64, basic: u64) -> Option<()> {
        match self.managed_place(object, managed, flags, basic)? {
            Attributes::Values(values) => {
                let keys = self.keys(keys)?;
                self.values(values, &keys);
            }
            Attributes::Dict(dict) => self.refer(dict & !DOUBTFUL),
        }
        Some(())
    }

    /// Keys and values of a dict, or of the attributes of an object that has no dict for them; at most `most`.
    pub fn pairs(&mut self, object: u64, index: usize, most: u64) -> Vec<(u64, u64)> {
        self.try_pairs(object, index, most).unwrap_or_default()
    }

    fn try_pairs(&mut self, object: u64, index: usize, most: u64) -> Option<Vec<(u64, u64)>> {
        let info = self.infos.get(index)?;
        let (keys, values) = if matches!(info.kind, Kind::Dict | Kind::OrderedDict) {
            let keys = self.field(object, self.at.objects.dict_keys)?;
            (keys, self.field(object, self.at.objects.dict_values)?)
        } else if info.flags & flag::MANAGED_DICT != 0 {
            let (keys, flags, basic) = (info.keys, info.flags, info.basic);
            match self.managed_place(object, self.at.objects.managed_dict?, flags, basic)? {
                Attributes::Values(values) => (keys, values),
                Attributes::Dict(_) => return None,
            }
        } else {
            return None;
        };
        let keys = self.keys(keys)?;
        let count = keys.used.min(most);
        let mut words = Vec::new();
        self.blocks
            .words(keys.entries, count * keys.words, |word| words.push(word));
        let entries = words.chunks_exact(usize::try_from(keys.words).ok()?);
        let pair = |entry: &[u64]| Some((*entry.get(entry.len() - 2)?, *entry.last()?));
        let mut pairs: Vec<(u64, u64)> = entries.filter_map(pair).collect();
        if values != 0 {
            let mut apart = Vec::new();
            let at = values.checked_add(self.at.objects.values)?;
            self.blocks.words(at, count, |word| apart.push(word));
            for (pair, value) in pairs.iter_mut().zip(apart) {
                pair.1 = value;
            }
        }
        pairs.retain(|(key, value)| *key != 0 && *value != 0);
        Some(pairs)
    }

    fn managed_place(&mut self, object: u64, managed: u64, flags: u64, basic: u64) -> Option<Attributes> {
        let place = self.blocks.word(object.checked_sub(managed)?)?;
        let values = match self.at.base.minor {
            // Two words: the values, then the dict.
            ..=11 => match self.blocks.word(object.checked_sub(managed + 8)?)? {
                0 => None,
                values => Some(values),
            },
            // One word, an odd one for the values.
            12 => (place & 1 == 1).then_some(place.wrapping_add(1)),
            _ if place == 0 && flags & flag::INLINE_VALUES != 0 => {
                let values = object.checked_add(basic.next_multiple_of(8))?;
                let valid = self.blocks.byte(values.checked_add(self.at.objects.values_valid?)?)?;
                (valid != 0).then_some(values)
            }
            _ => None,
        };
        Some(values.map_or(Attributes::Dict(place), Attributes::Values))
    }
}

/// Where the attributes of an object are.
enum Attributes {
    Dict(u64),
    Values(u64),
}

/// The keys of a dict.
struct Keys {
    entries: u64,
    /// Entries in use or deleted.
    used: u64,
    /// Values for which there is room where they are apart.
    values: u64,
    /// Words of an entry.
    words: u64,
    /// All bytes.
    size: u64,
    /// Places of the hash table.
    places: u64,
}
