//! Offsets that stacks do not need and `pyheap dump` does: who holds the GIL, and what the threads are called.
//!
//! One table for all versions, a column each, made by a C probe against the headers of 3.7.16, 3.8.18, 3.9.18, 3.10.13,
//! 3.11.7, 3.12.1, 3.13.0, 3.14 and 3.15 (the latter three also with `Py_GIL_DISABLED`), as `scripts/gen-offsets` does. Not in
//! those headers: `PyDictKeysObject` up to 3.10 (`Objects/dict-common.h`) and `PyModuleObject` up to 3.10
//! (`Objects/moduleobject.c`), read from the sources of 3.7 to 3.10. `PyInterpreterState.imports.modules` is called
//! `modules` up to 3.11, and `MANAGED_DICT_OFFSET` is counted downwards from the object.
//!
//! What is found with these is checked where it is read, by the types of objects and by membership in lists that are known:
//! an offset that is wrong gives no name, not a wrong one.

use super::Layout;

/// A table of offsets: C path and offset in bytes, a column each version.
pub(crate) type Table = [(&'static str, [u64; COLUMNS.len()])];

/// Minor version, and whether it is the free-threaded build.
const COLUMNS: [(u8, bool); 12] = [
    (7, false),
    (8, false),
    (9, false),
    (10, false),
    (11, false),
    (12, false),
    (13, false),
    (13, true),
    (14, false),
    (14, true),
    (15, false),
    (15, true),
];

/// There is no such field.
pub(crate) const NONE: u64 = u64::MAX;

#[rustfmt::skip]
const TABLE: &Table = &[
    //                                     3.7   3.8   3.9  3.10  3.11  3.12  3.13 3.13t  3.14 3.14t  3.15 3.15t
    ("_PyRuntimeState.ceval.gil", [1264, 1152, 352, 352, 360, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("PyInterpreterState.ceval.gil", [NONE, NONE, NONE, NONE, NONE, 384, 16, 16, 16, 16, 16, 16]),
    ("sizeof(_gil_runtime_state)", [208, 208, 208, 208, 208, 208, 208, 216, 208, 216, 208, 216]),
    ("_gil_runtime_state.last_holder", [8, 8, 8, 8, 8, 8, 8, 16, 8, 16, 8, 16]),
    ("_gil_runtime_state.locked", [16, 16, 16, 16, 16, 16, 16, 24, 16, 24, 16, 24]),
    ("PyInterpreterState.imports.modules", [40, 56, 856, 856, 888, 944, 7656, 7664, 7688, 7712, 7592, 7592]),
    ("PyDictObject.ma_keys", [32, 32, 32, 32, 32, 32, 32, 48, 32, 48, 32, 48]),
    ("PyDictObject.ma_values", [40, 40, 40, 40, 40, 40, 40, 56, 40, 56, 40, 56]),
    ("PyTypeObject.tp_flags", [168, 168, 168, 168, 168, 168, 168, 184, 168, 184, 168, 184]),
    ("PyTypeObject.tp_basicsize", [32, 32, 32, 32, 32, 32, 32, 48, 32, 48, 32, 48]),
    ("PyTypeObject.tp_dictoffset", [288, 288, 288, 288, 288, 288, 288, 304, 288, 304, 288, 304]),
    ("PyTypeObject.tp_dict", [264, 264, 264, 264, 264, 264, 264, 280, 264, 280, 264, 280]),
    ("PyHeapTypeObject.ht_qualname", [848, 864, 856, 864, 864, 872, 872, 888, 872, 888, 880, 896]),
    ("PyHeapTypeObject.ht_cached_keys", [856, 872, 864, 872, 872, 880, 880, 896, 880, 896, 888, 904]),
    ("PyModuleObject.md_dict", [16, 16, 16, 16, 16, 16, 16, 32, 16, 32, 16, 32]),
    ("PyDictKeysObject.dk_nentries", [32, 32, 32, 32, 24, 24, 24, 24, 24, 24, 24, 24]),
    ("PyDictKeysObject.dk_indices", [40, 40, 40, 40, 32, 32, 32, 32, 32, 32, 32, 32]),
    ("PyDictValues.values", [0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8]),
    ("PyDictValues.valid", [NONE, NONE, NONE, NONE, NONE, NONE, 3, 3, 3, 3, 3, 3]),
    ("MANAGED_DICT_OFFSET", [NONE, NONE, NONE, NONE, 24, 24, 24, 8, 24, 8, 24, 8]),
];

/// Looks offsets of one version up in a table; `None` for a version that has no column.
pub(crate) fn by_name(table: &'static Table, minor: u8, free_threaded: bool) -> Option<impl Fn(&str) -> Option<u64>> {
    let column = COLUMNS.iter().position(|column| *column == (minor, free_threaded))?;
    Some(move |name: &str| {
        let (_, offsets) = table.iter().find(|(known, _)| *known == name)?;
        offsets.get(column).copied().filter(|offset| *offset != NONE)
    })
}

/// Where the GIL's state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GilPlace {
    /// Up to 3.11: in `_PyRuntimeState`, at this offset.
    Runtime(u64),
    /// From 3.12: `PyInterpreterState` has a pointer to it at this offset; interpreters may share one.
    Interpreter(u64),
}

/// Offsets of what tells about threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectLayout {
    /// Where the GIL's state is.
    pub gil: GilPlace,
    /// `sizeof(struct _gil_runtime_state)`: a thread that waits for a futex in there waits for the GIL.
    pub gil_size: u64,
    /// `_gil_runtime_state.last_holder`, a `PyThreadState *`.
    pub gil_last_holder: u64,
    /// `_gil_runtime_state.locked`, an int.
    pub gil_locked: u64,
    /// `PyInterpreterState.imports.modules`: `sys.modules`.
    pub modules: u64,
    /// `PyDictObject.ma_keys`.
    pub dict_keys: u64,
    /// `PyDictObject.ma_values`: not null when the keys are shared and the values are apart.
    pub dict_values: u64,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u64,
    /// `PyTypeObject.tp_basicsize`.
    pub type_basicsize: u64,
    /// `PyTypeObject.tp_dictoffset`.
    pub type_dictoffset: u64,
    /// `PyTypeObject.tp_dict`.
    pub type_dict: u64,
    /// `PyHeapTypeObject.ht_qualname`, a str.
    pub type_qualname: u64,
    /// `PyHeapTypeObject.ht_cached_keys`: the keys that instances share.
    pub cached_keys: u64,
    /// `PyModuleObject.md_dict`.
    pub module_dict: u64,
    /// `PyDictKeysObject.dk_nentries`.
    pub keys_used: u64,
    /// `PyDictKeysObject.dk_indices`: a hash table, and after it the entries.
    pub keys_indices: u64,
    /// `PyDictValues.values`.
    pub values: u64,
    /// `PyDictValues.valid`, one byte, from 3.13.
    pub values_valid: Option<u64>,
    /// How far before an object its `__dict__` is, from 3.11, where the type says that it is there.
    pub managed_dict: Option<u64>,
}

impl ObjectLayout {
    /// The offsets that go with `layout`; `None` for a version that is not in the table.
    #[must_use]
    pub fn of(layout: &Layout) -> Option<Self> {
        /// `sizeof(PyObject)` less the type: 8, and in free-threaded builds 24.
        const DEFAULT_OB_TYPE: u64 = 8;
        let free_threaded = layout.ob_type != DEFAULT_OB_TYPE;
        let maybe = by_name(TABLE, layout.minor, free_threaded)?;
        let gil = match maybe("_PyRuntimeState.ceval.gil") {
            Some(offset) => GilPlace::Runtime(offset),
            None => GilPlace::Interpreter(maybe("PyInterpreterState.ceval.gil")?),
        };
        Some(Self {
            gil,
            gil_size: maybe("sizeof(_gil_runtime_state)")?,
            gil_last_holder: maybe("_gil_runtime_state.last_holder")?,
            gil_locked: maybe("_gil_runtime_state.locked")?,
            modules: maybe("PyInterpreterState.imports.modules")?,
            dict_keys: maybe("PyDictObject.ma_keys")?,
            dict_values: maybe("PyDictObject.ma_values")?,
            type_flags: maybe("PyTypeObject.tp_flags")?,
            type_basicsize: maybe("PyTypeObject.tp_basicsize")?,
            type_dictoffset: maybe("PyTypeObject.tp_dictoffset")?,
            type_dict: maybe("PyTypeObject.tp_dict")?,
            type_qualname: maybe("PyHeapTypeObject.ht_qualname")?,
            cached_keys: maybe("PyHeapTypeObject.ht_cached_keys")?,
            module_dict: maybe("PyModuleObject.md_dict")?,
            keys_used: maybe("PyDictKeysObject.dk_nentries")?,
            keys_indices: maybe("PyDictKeysObject.dk_indices")?,
            values: maybe("PyDictValues.values")?,
            values_valid: maybe("PyDictValues.valid"),
            managed_dict: maybe("MANAGED_DICT_OFFSET"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::SUPPORTED_MINORS;

    #[test]
    fn every_supported_version_has_a_column() {
        for minor in SUPPORTED_MINORS {
            let layout = Layout::of_minor(minor).unwrap();
            let objects = ObjectLayout::of(&layout).unwrap();
            assert_eq!(objects.managed_dict.is_some(), minor >= 11, "3.{minor}");
            assert_eq!(matches!(objects.gil, GilPlace::Runtime(_)), minor <= 11, "3.{minor}");
        }
    }

    #[test]
    fn columns_are_complete() {
        for column in 0..COLUMNS.len() {
            for (name, offsets) in TABLE {
                let optional = name.contains("ceval.gil") || name.contains("valid") || name.contains("MANAGED");
                assert!(optional || offsets[column] != NONE, "{name} of {:?}", COLUMNS[column]);
            }
        }
    }
}
