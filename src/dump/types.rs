//! What type the object in a block of memory has, read from outside while the process runs.
//!
//! A block may be freed and be used for something else at any moment, so nothing in it is trusted. The word in the place of
//! `ob_type` must lead to what is a type by all that types have: its own type is a metaclass, it is ready, its name is a
//! name, and, what decides, the space that objects of it need *before* the object (for the garbage collector, and from 3.11
//! for a managed `__dict__` or weak references) is exactly the distance from the block's begin to the object. Whether the block
//! was still the same one afterwards is for the caller to find out.
//!
//! What it refuses to do: guess. A block in which no type is found is `None`.

use super::objects::Objects;
use crate::frames::layout::{Layout, ObjectLayout};
use crate::frames::text;
use pyheap_injector::{RemoteAddr, RemoteMemory};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A metaclass has a metaclass, and so on; after so many it is `type`, which is its own.
const MAX_METACLASSES: usize = 8;
/// Longer names are cut, in characters.
const MAX_NAME: usize = 200;
/// Words that are remembered to lead to no type.
const MAX_NO_TYPES: usize = 1 << 18;
/// Types that are remembered.
const MAX_KNOWN: usize = 1 << 16;
/// No type that can be met has larger instances before their items begin.
const MAX_BASIC_SIZE: u64 = 1 << 20;
/// The largest block begin that is read: 32 bytes before the object, and its header.
const MAX_BEGIN: usize = 32 + 32;

/// Bits of `PyTypeObject.tp_flags`.
mod flag {
    /// Instances have a managed list of weak references, from 3.12.
    pub const MANAGED_WEAKREF: u64 = 1 << 3;
    /// Instances have a managed `__dict__`, from 3.11.
    pub const MANAGED_DICT: u64 = 1 << 4;
    /// The type was made while the program ran.
    pub const HEAP_TYPE: u64 = 1 << 9;
    /// It is complete.
    pub const READY: u64 = 1 << 12;
    /// The garbage collector looks after instances.
    pub const HAVE_GC: u64 = 1 << 14;
    /// It is `str` or derived from it, whose objects may be smaller than the type says.
    pub const STR: u64 = 1 << 28;
    /// Its instances are types.
    pub const TYPE: u64 = 1 << 31;
    /// Those that never change.
    pub const FIXED: u64 = MANAGED_WEAKREF | MANAGED_DICT | HEAP_TYPE | READY | HAVE_GC | STR | TYPE;
}

/// What tells a type from another one that is at its address later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    of: u64,
    name: u64,
    basic_size: u64,
    flags: u64,
    dict: u64,
}

/// Reads types of objects in one process.
#[derive(Debug)]
pub struct Types<M> {
    mem: M,
    layout: Layout,
    at: ObjectLayout,
    known: HashMap<u64, (Head, Arc<str>)>,
    /// Those that were read since [`Types::of_blocks`] began.
    fresh: HashMap<u64, (Head, Arc<str>)>,
    /// Words that led to no type since then.
    no_types: HashSet<u64>,
}

impl<M: RemoteMemory> Types<M> {
    /// A reader; `None` for a version whose objects are not known.
    pub fn new(mem: M, layout: &Layout) -> Option<Self> {
        Some(Self {
            mem,
            layout: *layout,
            at: ObjectLayout::of(layout)?,
            known: HashMap::new(),
            fresh: HashMap::new(),
            no_types: HashSet::new(),
        })
    }

    /// The names of the types of the objects in some blocks, each given by address and size, with their module unless that is
    /// `builtins`. Each type is read once for all of them, so an answer holds only for a block that was the same one from the
    /// call to its end: then its object kept its type alive.
    pub fn of_blocks(&mut self, blocks: impl Iterator<Item = (u64, u64)>) -> Vec<Option<Arc<str>>> {
        self.forget();
        blocks.map(|(address, size)| self.of_block(address, size)).collect()
    }

    /// True when a block of `size` bytes that begins with `begin` begins with an object. Each type is read once until
    /// [`Types::forget`], and each word that leads to none.
    pub fn is_object(&mut self, begin: &[u8], size: u64) -> bool {
        self.of_begin(begin, size, true).is_some()
    }

    /// Types are read again from now on.
    pub fn forget(&mut self) {
        self.fresh.clear();
        self.no_types.clear();
    }

    /// The name of the type at `address`, with its module unless that is `builtins`; `None` where there is no type. It is read
    /// once.
    pub fn name_at(&mut self, address: u64) -> Option<Arc<str>> {
        self.type_at(address).map(|(_, name)| name)
    }

    /// The module of the type at `address`, as far as the type says one.
    pub fn module_at(&mut self, address: u64) -> Option<String> {
        let (head, name) = self.type_at(address)?;
        if head.flags & flag::HEAP_TYPE == 0 {
            return name.rsplit_once('.').map(|(module, _)| module.to_owned());
        }
        self.module(&head)
    }

    fn of_block(&mut self, address: u64, size: u64) -> Option<Arc<str>> {
        let len = usize::try_from(size).unwrap_or(MAX_BEGIN).min(MAX_BEGIN);
        let begin = self.mem.read_vec(RemoteAddr(address), len).ok()?;
        self.of_begin(&begin, size, false)
    }

    fn of_begin(&mut self, begin: &[u8], size: u64, once: bool) -> Option<Arc<str>> {
        let distances: &[u64] = match (self.layout.free_threaded, self.layout.minor) {
            (true, _) => &[0, 16],
            (false, 7) => &[0, 32],
            (false, ..=10) => &[0, 16],
            (false, _) => &[0, 16, 32],
        };
        distances.iter().find_map(|&distance| {
            let at = usize::try_from(distance + self.layout.ob_type).ok()?;
            let word = begin.get(at..at + 8)?;
            let of = u64::from_le_bytes(word.try_into().ok()?);
            if once && self.no_types.contains(&of) {
                return None;
            }
            let Some((head, name)) = self.type_at(of) else {
                if once && self.no_types.len() < MAX_NO_TYPES {
                    self.no_types.insert(of);
                }
                return None;
            };
            let room = size.checked_sub(distance)?;
            let fits = head.flags & flag::STR != 0 || head.basic_size <= room;
            (fits && self.before(&head) == distance).then_some(name)
        })
    }

    /// Bytes before an object of this type.
    fn before(&self, head: &Head) -> u64 {
        let collected = match self.layout.minor {
            _ if self.layout.free_threaded || head.flags & flag::HAVE_GC == 0 => 0,
            7 => 32,
            _ => 16,
        };
        let managed = match self.layout.minor {
            ..=10 => 0,
            11 => flag::MANAGED_DICT,
            _ => flag::MANAGED_DICT | flag::MANAGED_WEAKREF,
        };
        collected + if head.flags & managed != 0 { 16 } else { 0 }
    }

    /// The type at `address`, if there is one.
    fn type_at(&mut self, address: u64) -> Option<(Head, Arc<str>)> {
        if let Some((head, name)) = self.fresh.get(&address) {
            return Some((*head, Arc::clone(name)));
        }
        let found = self.read_type(address)?;
        self.fresh.insert(address, found.clone());
        Some(found)
    }

    fn read_type(&mut self, address: u64) -> Option<(Head, Arc<str>)> {
        let head = self.head(address)?;
        if let Some((known, name)) = self.known.get(&address)
            && *known == head
        {
            return Some((head, Arc::clone(name)));
        }
        let is_sound = head.flags & flag::READY != 0 && (1..=MAX_BASIC_SIZE).contains(&head.basic_size);
        if !is_sound || !self.is_metaclass(head.of)? {
            return None;
        }
        let name: Arc<str> = self.name(address, &head)?.into();
        // It may have changed while it was read.
        if self.head(address)? != head {
            return None;
        }
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known.insert(address, (head, Arc::clone(&name)));
        Some((head, name))
    }

    /// The type of a type is a metaclass, that one's, too, and the last is `type` itself. Chance may put together what looks
    /// like two of them (links of the garbage collector, read as types, have); not that.
    fn is_metaclass(&self, mut address: u64) -> Option<bool> {
        for _ in 0..MAX_METACLASSES {
            let head = self.head(address)?;
            if head.flags & flag::TYPE == 0 {
                return Some(false);
            }
            if head.of == address {
                let name = self.mem.read_array(RemoteAddr(head.name)).ok()?;
                return Some(&name == b"type\0");
            }
            address = head.of;
        }
        Some(false)
    }

    fn head(&self, address: u64) -> Option<Head> {
        if !(4096..1 << 47).contains(&address) || !address.is_multiple_of(8) {
            return None;
        }
        let fields = [
            self.layout.ob_type,
            self.layout.tp_name,
            self.at.type_basicsize,
            self.at.type_flags,
            self.at.type_dict,
        ];
        // Some 280 bytes.
        let len = usize::try_from(fields.into_iter().max()?).ok()? + 8;
        let bytes = self.mem.read_vec(RemoteAddr(address), len).ok()?;
        let [of, name, basic_size, flags, dict] = fields.map(|field| {
            let at = usize::try_from(field).unwrap_or(len);
            let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
            word.map_or(0, u64::from_le_bytes)
        });
        Some(Head {
            of,
            name,
            basic_size,
            flags: flags & flag::FIXED,
            dict,
        })
    }

    fn name(&self, address: u64, head: &Head) -> Option<String> {
        if head.flags & flag::HEAP_TYPE != 0
            && let Some(name) = self.qualified(address, head)
        {
            return Some(name);
        }
        let bytes = text::read_prefix(&self.mem, RemoteAddr(head.name), MAX_NAME).ok()?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        proper(std::str::from_utf8(bytes.get(..end)?).ok()?)
    }

    fn string(&self, at: RemoteAddr) -> Option<String> {
        text::expect_type(&self.mem, at, &self.layout, "str").ok()?;
        text::read_str(&self.mem, at, &self.layout).ok()
    }

    /// What a type that was made while the program ran says of its module.
    fn module(&self, head: &Head) -> Option<String> {
        let objects = Objects::new(&self.mem, &self.layout)?;
        let module = objects.get(RemoteAddr(head.dict), "__module__").ok().flatten()?;
        proper(&self.string(module)?)
    }

    /// Module and qualified name of a type that was made while the program ran.
    fn qualified(&self, address: u64, head: &Head) -> Option<String> {
        let at = RemoteAddr(address).checked_add(self.at.type_qualname)?;
        let name = proper(&self.string(self.mem.read_ptr(at).ok()?)?)?;
        Some(match self.module(head) {
            Some(module) if module != "builtins" => format!("{module}.{name}"),
            _ => name,
        })
    }
}

/// A name that can be one: not empty, and without control characters. Cut if it is long.
fn proper(name: &str) -> Option<String> {
    let is_name = !name.is_empty() && !name.chars().any(char::is_control);
    is_name.then(|| name.chars().take(MAX_NAME).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::image::{BASE, Image};
    use crate::frames::SUPPORTED_MINORS;
    use rand::{RngExt, SeedableRng};

    const BYTES: usize = 0x4000;
    const TYPE: u64 = BASE + 0x400;
    const META: u64 = BASE + 0x800;
    const NAME: u64 = BASE + 0xc00;
    const BLOCK: u64 = BASE + 0x1000;
    const TYPE_NAME: u64 = BASE + 0x1400;

    fn put_type(image: &mut Image, layout: &Layout, address: u64, of: u64, flags: u64) {
        let at = ObjectLayout::of(layout).unwrap();
        image.put(address + layout.ob_type, of);
        image.put(address + layout.tp_name, NAME);
        image.put(address + at.type_basicsize, 48);
        image.put(address + at.type_flags, flags | flag::READY);
    }

    /// A type whose objects are looked after by the garbage collector, with an object of it in a block.
    fn image(layout: &Layout, flags: u64, before: u64) -> Image {
        let mut image = Image::new(BYTES);
        put_type(&mut image, layout, TYPE, META, flags);
        put_type(&mut image, layout, META, META, flag::TYPE | flag::HAVE_GC);
        image.put(META + layout.tp_name, TYPE_NAME);
        image.text(TYPE_NAME, b"type\0");
        image.text(NAME, b"collections.deque\0");
        image.put(BLOCK + before + layout.ob_type, TYPE);
        image
    }

    fn one(types: &mut Types<Image>, size: u64) -> Option<Arc<str>> {
        types.of_blocks(std::iter::once((BLOCK, size))).pop()?
    }

    fn read(image: &Image, layout: &Layout, size: u64) -> Option<Arc<str>> {
        one(&mut Types::new(image.clone(), layout).unwrap(), size)
    }

    #[test]
    fn the_object_is_found_behind_what_its_type_puts_before_it() {
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            let head = if minor == 7 { 32 } else { 16 };
            let found = read(&image(&layout, flag::HAVE_GC, head), &layout, 96);
            assert_eq!(found.as_deref(), Some("collections.deque"), "3.{minor}");
            assert!(read(&image(&layout, 0, 0), &layout, 48).is_some(), "3.{minor}");
            // A pointer to a type that would need another place, or that is too large for the block, is something else.
            assert_eq!(read(&image(&layout, flag::HAVE_GC, 0), &layout, 96), None, "3.{minor}");
            assert_eq!(read(&image(&layout, 0, head), &layout, 96), None, "3.{minor}");
            assert_eq!(read(&image(&layout, 0, 0), &layout, 47), None, "3.{minor}");
            let managed = image(&layout, flag::HAVE_GC | flag::MANAGED_DICT, head + 16);
            assert_eq!(read(&managed, &layout, 96).is_some(), minor >= 11, "3.{minor}");
        }
    }

    #[test]
    fn what_is_no_type_is_not_taken_for_one() {
        let layout = Layout::of_minor(12).unwrap();
        let good = image(&layout, 0, 0);
        assert!(read(&good, &layout, 64).is_some());
        let at = ObjectLayout::of(&layout).unwrap();
        for (address, value) in [
            (TYPE + at.type_flags, 0),
            (META + at.type_flags, flag::READY),
            (TYPE + layout.ob_type, TYPE),
            (META + layout.ob_type, TYPE),
            (META + layout.tp_name, NAME),
            (TYPE + at.type_basicsize, u64::MAX),
            (TYPE + layout.tp_name, 0),
            (NAME, 0x0a0a_0a0a),
            (NAME, 0),
            (BLOCK + layout.ob_type, TYPE + 4),
            (BLOCK + layout.ob_type, BASE + BYTES as u64 - 8),
        ] {
            let mut bad = good.clone();
            bad.put(address, value);
            assert_eq!(read(&bad, &layout, 64), None, "{value:#x} at {address:#x}");
        }
    }

    /// Another type at the same address has another name; the one that was read earlier is not believed.
    #[test]
    fn a_type_that_was_replaced_is_read_again() {
        let layout = Layout::of_minor(12).unwrap();
        let mut types = Types::new(image(&layout, 0, 0), &layout).unwrap();
        assert_eq!(one(&mut types, 64).as_deref(), Some("collections.deque"));
        types.mem.text(NAME + 0x40, b"other\0");
        types.mem.put(TYPE + layout.tp_name, NAME + 0x40);
        assert_eq!(one(&mut types, 64).as_deref(), Some("other"));
    }

    #[test]
    fn garbage_is_read_without_harm() {
        let mut random = rand::rngs::StdRng::seed_from_u64(7);
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            for _ in 0..2000 {
                let more = if random.random() { flag::HEAP_TYPE } else { 0 };
                let flags = flag::HAVE_GC | more;
                let mut image = image(&layout, flags, 16);
                for _ in 0..random.random_range(1..8) {
                    let at = BASE + 8 * random.random_range(0..BYTES as u64 / 8);
                    let near = BASE + random.random_range(0..BYTES as u64);
                    image.put(at, if random.random() { near } else { random.random() });
                }
                read(&image, &layout, random.random_range(0..200));
            }
        }
    }
}
