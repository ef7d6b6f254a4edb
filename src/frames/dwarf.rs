//! Offsets from the DWARF of an interpreter's own file: the last source of a [`Layout`].
//!
//! Used when the built-in table does not fit a process, as in a build whose structs were changed. It reads only debug
//! information in the same file, uncompressed; separate debug files are not looked for. All names of a layout are
//! looked up in one pass over the units: some 100 ms for a CPython with full debug information, which has 15 MB of it.

use super::layout::{Layout, LayoutError};
use super::version::Build;
use crate::attach::elf::{ElfError, ElfFile};
use gimli::{AttributeValue, DwarfSections, EndianSlice, LittleEndian, Section as _, SectionId, Unit, UnitOffset};
use std::collections::HashMap;

/// One section of debug information. CPython's largest is 15 MB, that of an embedder may be far more.
const MAX_DEBUG_SECTION_BYTES: u64 = 128 << 20;
/// A chain of typedefs and qualifiers ends sooner.
const MAX_TYPE_CHAIN: usize = 16;
/// No struct of CPython has so many members.
const MAX_MEMBERS: usize = 4096;

/// The structs that a layout asks about, by the name before the first dot.
const TYPES: &[&str] = &[
    "_PyRuntimeState",
    "PyInterpreterState",
    "PyThreadState",
    "_PyCFrame",
    "PyFrameObject",
    "_PyInterpreterFrame",
    "PyCodeObject",
    "PyASCIIObject",
    "PyCompactUnicodeObject",
    "PyUnicodeObject",
    "PyVarObject",
    "PyBytesObject",
    "PyObject",
    "PyTypeObject",
];

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// Why there is no layout by DWARF.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DwarfError {
    /// The file has none.
    #[error("the interpreter's file has no debug information")]
    None,
    /// The file cannot be read.
    #[error("the interpreter's debug information cannot be read")]
    Elf(#[from] ElfError),
    /// The debug information makes no sense.
    #[error("the interpreter's debug information is damaged")]
    Gimli(#[from] gimli::Error),
    /// It does not say all that is needed.
    #[error("the interpreter's debug information is not sufficient")]
    Layout(#[from] LayoutError),
}

/// The structs of an interpreter's file: each with its size and its members' offsets, by dotted path.
#[derive(Debug, Default, Clone)]
pub struct Structs {
    found: HashMap<&'static str, HashMap<String, u64>>,
}

impl Structs {
    /// Reads them from `file`.
    ///
    /// # Errors
    /// When there is no debug information or it cannot be read.
    pub fn read(file: &ElfFile) -> Result<Self, DwarfError> {
        let sections = DwarfSections::load(|id: SectionId| -> Result<Vec<u8>, ElfError> {
            // Nothing but these is needed to know types.
            match id {
                SectionId::DebugInfo
                | SectionId::DebugAbbrev
                | SectionId::DebugStr
                | SectionId::DebugLineStr
                | SectionId::DebugStrOffsets
                // A unit is only opened together with the header of its line program.
                | SectionId::DebugLine => {
                    let bytes = file.section_bytes(id.name(), MAX_DEBUG_SECTION_BYTES)?;
                    Ok(bytes.unwrap_or_default())
                }
                _ => Ok(Vec::new()),
            }
        })?;
        let dwarf = sections.borrow(|bytes| EndianSlice::new(bytes, LittleEndian));
        if dwarf.debug_info.reader().is_empty() {
            return Err(DwarfError::None);
        }
        let mut structs = Self::default();
        let mut units = dwarf.units();
        while let Some(header) = units.next()? {
            let unit = dwarf.unit(header)?;
            structs.read_unit(&dwarf, &unit)?;
            if structs.found.len() == TYPES.len() {
                break;
            }
        }
        Ok(structs)
    }

    fn read_unit(&mut self, dwarf: &gimli::Dwarf<Bytes<'_>>, unit: &Unit<Bytes<'_>>) -> Result<(), DwarfError> {
        let mut entries = unit.entries();
        if !entries.next_entry()? || entries.next_dfs()?.is_none() {
            return Ok(());
        }
        // Now at the unit's first child, or at its root if it has none.
        while let Some(entry) = entries.current() {
            if matches!(entry.tag(), gimli::DW_TAG_typedef | gimli::DW_TAG_structure_type)
                && let Some(name) = entry.attr_value(gimli::DW_AT_name)
                && let Ok(name) = dwarf.attr_string(unit, name)
                && let Some(&name) = TYPES.iter().find(|known| known.as_bytes() == name.slice())
                && !self.found.contains_key(name)
                && let Some(offset) = struct_behind(unit, entry.offset())?
            {
                let mut members = HashMap::new();
                read_members(dwarf, unit, offset, "", 0, &mut members)?;
                self.found.insert(name, members);
            }
            if entries.next_sibling()?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// The offset of a C path such as `PyCodeObject.co_filename`, or the size for `sizeof(PyCodeObject)`.
    #[must_use]
    pub fn offset(&self, path: &str) -> Option<u64> {
        let (name, member) = match path.strip_prefix("sizeof(") {
            Some(rest) => (rest.strip_suffix(')')?, ""),
            None => path.split_once('.')?,
        };
        self.found.get(name)?.get(member).copied()
    }

    /// The layout of `build` by these structs.
    ///
    /// # Errors
    /// When something is missing or absurd.
    pub fn layout(&self, build: Build) -> Result<Layout, DwarfError> {
        Ok(Layout::from_lookup(build, |path| self.offset(path))?)
    }
}

/// Follows typedefs and qualifiers from `offset` to the definition of a struct or union in the same unit.
fn struct_behind(unit: &Unit<Bytes<'_>>, offset: UnitOffset) -> Result<Option<UnitOffset>, DwarfError> {
    let mut offset = offset;
    for _ in 0..MAX_TYPE_CHAIN {
        let entry = unit.entry(offset)?;
        match entry.tag() {
            gimli::DW_TAG_structure_type | gimli::DW_TAG_union_type => {
                return Ok((!entry.has_attr(gimli::DW_AT_declaration)).then_some(offset));
            }
            gimli::DW_TAG_typedef | gimli::DW_TAG_const_type | gimli::DW_TAG_volatile_type => {}
            _ => return Ok(None),
        }
        match entry.attr_value(gimli::DW_AT_type) {
            Some(AttributeValue::UnitRef(next)) => offset = next,
            _ => return Ok(None),
        }
    }
    Ok(None)
}

/// Adds the members of the struct at `offset` with their paths, those of nested structs included where a layout needs
/// them, and the struct's size under the empty path.
fn read_members(
    dwarf: &gimli::Dwarf<Bytes<'_>>,
    unit: &Unit<Bytes<'_>>,
    offset: UnitOffset,
    prefix: &str,
    base: u64,
    members: &mut HashMap<String, u64>,
) -> Result<(), DwarfError> {
    let mut tree = unit.header.entries_tree(&unit.abbreviations, Some(offset))?;
    let root = tree.root()?;
    if let (true, Some(size)) = (prefix.is_empty(), root.entry().attr_value(gimli::DW_AT_byte_size)) {
        members.extend(size.udata_value().map(|size| (String::new(), size)));
    }
    let mut children = root.children();
    while let Some(child) = children.next()? {
        if members.len() >= MAX_MEMBERS {
            break;
        }
        let entry = child.entry();
        if entry.tag() != gimli::DW_TAG_member {
            continue;
        }
        let Some(name) = entry.attr_value(gimli::DW_AT_name) else {
            continue;
        };
        let name = dwarf.attr_string(unit, name)?;
        let name = name.to_string_lossy();
        let location = entry.attr_value(gimli::DW_AT_data_member_location);
        let at = base.saturating_add(location.and_then(|value| value.udata_value()).unwrap_or(0));
        let path = format!("{prefix}{name}");
        // `interpreters.head`, `allocators.standard.raw`: only these are looked into.
        let nested = matches!(
            path.as_str(),
            "interpreters" | "gilstate" | "threads" | "allocators" | "allocators.standard"
        );
        if let (true, Some(AttributeValue::UnitRef(kind))) = (nested, entry.attr_value(gimli::DW_AT_type))
            && let Some(inner) = struct_behind(unit, kind)?
        {
            read_members(dwarf, unit, inner, &format!("{path}."), at, members)?;
        }
        members.insert(path, at);
    }
    Ok(())
}
