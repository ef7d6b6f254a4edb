//! Reads Python's dicts and attributes from outside, as far as it takes to learn what a thread is called.
//!
//! A name is in `sys.modules['threading']._active[IDENT]._name`. Up to 3.14 the kernel is not told of it, so there is no
//! other place. Dicts are read by their entries, never by hashing; an int key is known by its hash, which for a thread's
//! identifier is the identifier itself.
//!
//! What it refuses to do: guess. Modules and names are compared as strings, types by name, and what is not as expected is
//! a missing name.

use super::budget::Budget;
use crate::frames::layout::{Layout, ObjectLayout};
use crate::frames::{CodeError, text};
use pyheap_injector::{MemoryError, RemoteAddr, RemoteMemory};
use std::collections::HashMap;

/// Entries of one dict that are looked at. A large program has some 10,000 modules.
const MAX_ENTRIES: u64 = 200_000;
/// Attributes of one thread that are looked at.
const MAX_ATTRIBUTES: u64 = 4096;
/// A hash table of more entries than this makes no sense here.
const MAX_LOG_SIZE: u8 = 40;
/// `Py_TPFLAGS_INLINE_VALUES`, from 3.13: the values follow the object.
const INLINE_VALUES: u64 = 1 << 2;
/// `Py_TPFLAGS_MANAGED_DICT`, from 3.11: the `__dict__` is before the object.
const MANAGED_DICT: u64 = 1 << 4;

/// Where the names of an interpreter's threads are: its `threading._active`.
#[derive(Debug, Clone, Copy)]
pub struct Active(RemoteAddr);

/// A dict's entry.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Only where the dict has it.
    hash: Option<u64>,
    key: RemoteAddr,
    value: RemoteAddr,
}

/// Reads objects of one interpreter.
pub struct Objects<'a, M> {
    mem: &'a M,
    layout: &'a Layout,
    at: ObjectLayout,
}

fn offset(base: RemoteAddr, by: u64) -> RemoteAddr {
    // A sum that wraps is null, which cannot be read.
    base.checked_add(by).unwrap_or(RemoteAddr::NULL)
}

fn before(base: RemoteAddr, by: u64) -> RemoteAddr {
    // A difference below zero is null, which cannot be read.
    RemoteAddr(base.0.saturating_sub(by))
}

const fn unexpected(what: &'static str) -> CodeError {
    CodeError::Absurd(what)
}

impl<'a, M: RemoteMemory> Objects<'a, M> {
    /// A reader of objects; `None` for a version whose objects are not known.
    pub fn new(mem: &'a M, layout: &'a Layout) -> Option<Self> {
        let at = ObjectLayout::of(layout)?;
        Some(Self { mem, layout, at })
    }

    fn pointer(&self, base: RemoteAddr, by: u64) -> Result<RemoteAddr, MemoryError> {
        self.mem.read_ptr(offset(base, by))
    }

    /// Finds `threading._active` of the interpreter at `interpreter`; `None` where `threading` was not imported.
    pub fn active(&self, interpreter: RemoteAddr) -> Option<Active> {
        let modules = self.pointer(interpreter, self.at.modules).ok()?;
        let threading = self.get(modules, "threading").ok()??;
        text::expect_type(self.mem, threading, self.layout, "module").ok()?;
        let dict = self.pointer(threading, self.at.module_dict).ok()?;
        let active = self.get(dict, "_active").ok()??;
        text::expect_type(self.mem, active, self.layout, "dict").ok()?;
        Some(Active(active))
    }

    /// The names of threads by their identifiers, as many as `budget` allows for.
    pub fn names(&self, active: Active, budget: Budget) -> HashMap<u64, String> {
        let entries = self.entries(active.0, MAX_ENTRIES).unwrap_or_default();
        let mut names = HashMap::new();
        for entry in entries {
            if budget.is_spent() {
                break;
            }
            let name = self.attribute(entry.value, "_name");
            if let (Some(ident), Ok(Some(name))) = (entry.hash, name)
                && text::expect_type(self.mem, name, self.layout, "str").is_ok()
                && let Ok(name) = text::read_str(self.mem, name, self.layout)
            {
                names.insert(ident, name);
            }
        }
        names
    }

    /// The value of string `key` in `dict`.
    pub(super) fn get(&self, dict: RemoteAddr, key: &str) -> Result<Option<RemoteAddr>, CodeError> {
        text::expect_type(self.mem, dict, self.layout, "dict")?;
        let entries = self.entries(dict, MAX_ENTRIES)?;
        Ok(entries
            .iter()
            .find(|entry| self.is(entry.key, key))
            .map(|entry| entry.value))
    }

    /// True when the object is a string that says `wanted`, which is ASCII.
    fn is(&self, object: RemoteAddr, wanted: &str) -> bool {
        let length = self.mem.read_u64(offset(object, self.layout.unicode.length));
        length.is_ok_and(|length| length == wanted.len() as u64)
            && text::read_str(self.mem, object, self.layout).is_ok_and(|text| text == wanted)
    }

    /// What is in a dict of at most `most` entries, in the order of insertion.
    fn entries(&self, dict: RemoteAddr, most: u64) -> Result<Vec<Entry>, CodeError> {
        let keys = self.pointer(dict, self.at.dict_keys)?;
        let values = self.pointer(dict, self.at.dict_values)?;
        let values = (!values.is_null()).then(|| offset(values, self.at.values));
        self.entries_of(keys, values, most)
    }

    /// The entries of `keys`; their values are in an array of their own where `values` says so.
    fn entries_of(&self, keys: RemoteAddr, values: Option<RemoteAddr>, most: u64) -> Result<Vec<Entry>, CodeError> {
        /// `dk_size`, up to 3.10: the number of indices.
        const SIZE: u64 = 8;
        /// `dk_log2_index_bytes` and `dk_kind`, from 3.11.
        const LOG_INDEX_BYTES: u64 = 9;
        /// Of `dk_kind`: keys of any type, with their hashes.
        const GENERAL: u8 = 0;

        let old = self.layout.minor <= 10;
        let (index_bytes, hashed) = if old {
            let size = self.mem.read_u64(offset(keys, SIZE))?;
            let width = match size {
                0..=0xff => 1,
                0x100..=0xffff => 2,
                0x1_0000..=0xffff_ffff => 4,
                _ => return Err(unexpected("the size of a dict")),
            };
            (size * width, true)
        } else {
            let [log, kind] = self.mem.read_array(offset(keys, LOG_INDEX_BYTES))?;
            if log > MAX_LOG_SIZE {
                return Err(unexpected("the size of a dict"));
            }
            (1 << log, kind == GENERAL)
        };
        let used = self.mem.read_u64(offset(keys, self.at.keys_used))?;
        if used > most {
            return Err(unexpected("the number of a dict's entries"));
        }
        // At most 200,000: 5 MB.
        let used = usize::try_from(used).unwrap_or(0);
        let words = if hashed { 3 } else { 2 };
        let start = offset(offset(keys, self.at.keys_indices), index_bytes);
        let raw = self.mem.read_vec(start, used * words * 8)?;
        let values = match values {
            Some(values) => Some(self.mem.read_vec(values, used * 8)?),
            None => None,
        };
        let word = |bytes: &[u8], at: usize| {
            let chunk = bytes.as_chunks::<8>().0.get(at);
            chunk.copied().map_or(0, u64::from_le_bytes)
        };
        let entries = (0..used).map(|i| Entry {
            hash: hashed.then(|| word(&raw, i * words)),
            key: RemoteAddr(word(&raw, i * words + words - 2)),
            value: RemoteAddr(match &values {
                Some(values) => word(values, i),
                None => word(&raw, i * words + words - 1),
            }),
        });
        // A deleted entry has neither.
        Ok(entries
            .filter(|entry| !entry.key.is_null() && !entry.value.is_null())
            .collect())
    }

    /// Attribute `name` in an object's own `__dict__`, wherever that is.
    fn attribute(&self, object: RemoteAddr, name: &str) -> Result<Option<RemoteAddr>, CodeError> {
        let entries = self.attributes(object)?;
        Ok(entries
            .iter()
            .find(|entry| self.is(entry.key, name))
            .map(|entry| entry.value))
    }

    fn attributes(&self, object: RemoteAddr) -> Result<Vec<Entry>, CodeError> {
        let of = self.pointer(object, self.layout.ob_type)?;
        let flags = self.mem.read_u64(offset(of, self.at.type_flags))?;
        let shared = |values: RemoteAddr| {
            let keys = self.pointer(of, self.at.cached_keys)?;
            self.entries_of(keys, Some(offset(values, self.at.values)), MAX_ATTRIBUTES)
        };
        let Some(managed) = self.at.managed_dict.filter(|_| flags & MANAGED_DICT != 0) else {
            let by = self.mem.read_u64(offset(of, self.at.type_dictoffset))?;
            // Negative for objects of variable size, which threads are not.
            if by == 0 || by > 1 << 20 {
                return Err(unexpected("a thread's attributes"));
            }
            return self.entries(self.pointer(object, by)?, MAX_ATTRIBUTES);
        };
        let place = self.mem.read_ptr(before(object, managed))?;
        match self.layout.minor {
            // The values are one word before the dict.
            ..=11 => match self.mem.read_ptr(before(object, managed + 8))? {
                values if !values.is_null() => shared(values),
                _ => self.entries(place, MAX_ATTRIBUTES),
            },
            // One word for both, an odd one for the values, which begin at the next even address.
            12 if place.0 & 1 == 1 => shared(offset(place, 1)),
            12 => self.entries(place, MAX_ATTRIBUTES),
            _ if !place.is_null() => self.entries(place, MAX_ATTRIBUTES),
            _ if flags & INLINE_VALUES != 0 => {
                let values = offset(object, self.mem.read_u64(offset(of, self.at.type_basicsize))?);
                let valid = self.at.values_valid.unwrap_or(0);
                match self.mem.read_array(offset(values, valid))? {
                    [0] => Err(unexpected("a thread's attributes")),
                    [_] => shared(values),
                }
            }
            _ => Err(unexpected("a thread's attributes")),
        }
    }
}
