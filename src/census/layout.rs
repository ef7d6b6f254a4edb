//! Offsets that only a census needs: the garbage collector's lists, tables of containers, and how large things are.
//!
//! One table for all versions, a column each, made by a C probe against the headers of 3.7.16, 3.8.18, 3.9.18, 3.10.13,
//! 3.11.7, 3.12.1, 3.13.0, 3.14 and 3.15 (the latter three also with `Py_GIL_DISABLED`), as `scripts/gen-offsets` does. What is
//! in no header: `dequeobject`, `arrayobject` (`Modules/_collectionsmodule.c`, `Modules/arraymodule.c`), the same in all versions,
//! and `PyDictKeysObject` up to 3.10 (`Objects/dict-common.h`). `PyInterpreterState.gc.generations` is a pointer's place in most
//! versions, since distributors move the lists themselves.
//!
//! What is found with these is checked where it is read, by the types of objects and by lists that close: an offset that is
//! wrong gives an error, not a number.

use crate::frames::layout::objects::{NONE, Table, by_name};
use crate::frames::layout::{Layout, ObjectLayout};

#[rustfmt::skip]
const TABLE: &Table = &[
    //                                     3.7   3.8   3.9  3.10  3.11  3.12  3.13 3.13t  3.14 3.14t  3.15 3.15t
    ("_PyRuntimeState.gc.generation0", [496, 440, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("_PyRuntimeState.gc.permanent_generation", [512, 448, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("_PyRuntimeState.gc.collecting", [632, 544, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("PyInterpreterState.gc.generation0", [NONE, NONE, 712, 712, 744, 208, 7496, NONE, NONE, NONE, NONE, NONE]),
    // The lists themselves: `young` and `old` of the incremental collector are where `generations` are without it.
    ("PyInterpreterState.gc.generations", [NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 7432, NONE, 7408, NONE]),
    ("PyInterpreterState.gc.permanent_generation", [NONE, NONE, 720, 720, 752, 216, 7504, NONE, 7504, NONE, 7480, NONE]),
    ("PyInterpreterState.gc.collecting", [NONE, NONE, 816, 816, 848, 312, 7600, 7600, 7600, 7600, 7512, 7512]),
    ("sizeof(PyTypeObject)", [400, 416, 408, 408, 408, 416, 416, 432, 416, 432, 424, 440]),
    ("PyTypeObject.tp_itemsize", [40, 40, 40, 40, 40, 40, 40, 56, 40, 56, 40, 56]),
    ("PyTypeObject.tp_base", [256, 256, 256, 256, 256, 256, 256, 272, 256, 272, 256, 272]),
    ("PyListObject.ob_item", [24, 24, 24, 24, 24, 24, 24, 40, 24, 40, 24, 40]),
    ("PyListObject.allocated", [32, 32, 32, 32, 32, 32, 32, 48, 32, 48, 32, 48]),
    ("PyTupleObject.ob_item", [24, 24, 24, 24, 24, 24, 24, 40, 32, 48, 32, 48]),
    ("PySetObject.mask", [32, 32, 32, 32, 32, 32, 32, 48, 32, 48, 32, 48]),
    ("PySetObject.table", [40, 40, 40, 40, 40, 40, 40, 56, 40, 56, 40, 56]),
    ("PySetObject.smalltable", [64, 64, 64, 64, 64, 64, 64, 80, 64, 80, 64, 80]),
    ("PyByteArrayObject.ob_alloc", [24, 24, 24, 24, 24, 24, 24, 40, 24, 40, 24, 40]),
    // From 3.15 the buffer is a bytes object, which belongs to nobody else.
    ("PyByteArrayObject.ob_bytes_object", [NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 56, 72]),
    ("sizeof(PyUnicodeObject)", [80, 80, 80, 80, 80, 64, 64, 80, 64, 80, 64, 80]),
    ("PyASCIIObject.wstr", [40, 40, 40, 40, 40, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("PyCompactUnicodeObject.utf8_length", [48, 48, 48, 48, 48, 40, 40, 56, 40, 56, 40, 56]),
    ("PyCompactUnicodeObject.utf8", [56, 56, 56, 56, 56, 48, 48, 64, 48, 64, 48, 64]),
    ("PyCompactUnicodeObject.wstr_length", [64, 64, 64, 64, 64, NONE, NONE, NONE, NONE, NONE, NONE, NONE]),
    ("PyCodeObject.co_nlocalsplus", [NONE, NONE, NONE, NONE, 76, 72, 72, 88, 72, 88, 72, 88]),
    ("PyCodeObject.co_stacksize", [NONE, NONE, NONE, NONE, 68, 64, 64, 80, 64, 80, 64, 80]),
    ("PyGenObject.gi_iframe", [NONE, NONE, NONE, NONE, 80, 72, 72, 88, 72, 88, 72, 88]),
    ("PyFrameObject.f_frame", [NONE, NONE, NONE, NONE, 24, 24, 24, 40, 24, 40, 24, 40]),
    ("PyThreadState.datastack_chunk", [NONE, NONE, NONE, NONE, 296, 232, 232, 232, 232, 232, 256, 256]),
    ("PyThreadState.datastack_top", [NONE, NONE, NONE, NONE, 304, 240, 240, 240, 240, 240, 264, 264]),
];

/// Where the garbage collector's lists are, in builds with the GIL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListsLayout {
    /// They are in `_PyRuntimeState` (3.7, 3.8), not in each interpreter.
    pub in_runtime: bool,
    /// The offset is that of a pointer to the first list; else of the list itself.
    pub by_pointer: bool,
    /// `generation0`, or `generations`.
    pub first: u64,
    /// `permanent_generation`: what `gc.freeze()` has put aside.
    pub permanent: u64,
    /// From one list to the next.
    pub step: u64,
    /// `sizeof(PyGC_Head)`: from a list's entry to the object.
    pub head: u64,
}

/// All that a census needs and others do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CensusLayout {
    /// `None` in builds without the GIL, which have no lists.
    pub lists: Option<ListsLayout>,
    /// `gc.collecting`, in what the lists are in.
    pub collecting: u64,
    /// `sizeof(PyTypeObject)`.
    pub type_size: u64,
    /// `PyTypeObject.tp_itemsize`.
    pub type_itemsize: u64,
    /// `PyTypeObject.tp_base`.
    pub type_base: u64,
    /// `PyListObject.ob_item`.
    pub list_items: u64,
    /// `PyListObject.allocated`.
    pub list_allocated: u64,
    /// `PyTupleObject.ob_item`.
    pub tuple_items: u64,
    /// `PySetObject.mask`.
    pub set_mask: u64,
    /// `PySetObject.table`.
    pub set_table: u64,
    /// `PySetObject.smalltable`.
    pub set_small: u64,
    /// `PyByteArrayObject.ob_alloc`.
    pub bytearray_alloc: u64,
    /// `PyByteArrayObject.ob_bytes_object`, from 3.15.
    pub bytearray_object: Option<u64>,
    /// `sizeof(PyUnicodeObject)`.
    pub unicode_size: u64,
    /// `PyASCIIObject.wstr` and `PyCompactUnicodeObject.wstr_length`, up to 3.11.
    pub wide: Option<(u64, u64)>,
    /// `PyCompactUnicodeObject.utf8_length`.
    pub utf8_length: u64,
    /// `PyCompactUnicodeObject.utf8`.
    pub utf8: u64,
    /// From 3.11, where frames are in stacks, generators and frame objects.
    pub frames: Option<InlineFrames>,
}

/// Offsets that have to do with `_PyInterpreterFrame`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineFrames {
    /// `PyCodeObject.co_nlocalsplus`, an int.
    pub code_locals: u64,
    /// `PyCodeObject.co_stacksize`, an int.
    pub code_stack: u64,
    /// `PyGenObject.gi_iframe`: a frame.
    pub generator_frame: u64,
    /// `PyFrameObject.f_frame`: a pointer to one.
    pub object_frame: u64,
    /// `PyThreadState.datastack_chunk`.
    pub stack_chunk: u64,
    /// `PyThreadState.datastack_top`.
    pub stack_top: u64,
}

impl CensusLayout {
    /// The offsets that go with `layout`; `None` for a version that is not in the table.
    #[must_use]
    pub fn of(layout: &Layout) -> Option<Self> {
        let maybe = by_name(TABLE, layout.minor, layout.free_threaded)?;
        let in_runtime = layout.minor <= 8;
        let of = |field: &str| {
            maybe(&format!(
                "{}.{field}",
                if in_runtime {
                    "_PyRuntimeState"
                } else {
                    "PyInterpreterState"
                }
            ))
        };
        let pointer = of("gc.generation0");
        let lists = match pointer.or_else(|| of("gc.generations")) {
            Some(first) if !layout.free_threaded => Some(ListsLayout {
                in_runtime,
                by_pointer: pointer.is_some(),
                first,
                permanent: of("gc.permanent_generation")?,
                step: if layout.minor == 7 { 48 } else { 24 },
                head: if layout.minor == 7 { 32 } else { 16 },
            }),
            _ => None,
        };
        let frames = || {
            Some(InlineFrames {
                code_locals: maybe("PyCodeObject.co_nlocalsplus")?,
                code_stack: maybe("PyCodeObject.co_stacksize")?,
                generator_frame: maybe("PyGenObject.gi_iframe")?,
                object_frame: maybe("PyFrameObject.f_frame")?,
                stack_chunk: maybe("PyThreadState.datastack_chunk")?,
                stack_top: maybe("PyThreadState.datastack_top")?,
            })
        };
        let wide = maybe("PyASCIIObject.wstr").zip(maybe("PyCompactUnicodeObject.wstr_length"));
        Some(Self {
            lists,
            collecting: of("gc.collecting")?,
            type_size: maybe("sizeof(PyTypeObject)")?,
            type_itemsize: maybe("PyTypeObject.tp_itemsize")?,
            type_base: maybe("PyTypeObject.tp_base")?,
            list_items: maybe("PyListObject.ob_item")?,
            list_allocated: maybe("PyListObject.allocated")?,
            tuple_items: maybe("PyTupleObject.ob_item")?,
            set_mask: maybe("PySetObject.mask")?,
            set_table: maybe("PySetObject.table")?,
            set_small: maybe("PySetObject.smalltable")?,
            bytearray_alloc: maybe("PyByteArrayObject.ob_alloc")?,
            bytearray_object: maybe("PyByteArrayObject.ob_bytes_object"),
            unicode_size: maybe("sizeof(PyUnicodeObject)")?,
            wide,
            utf8_length: maybe("PyCompactUnicodeObject.utf8_length")?,
            utf8: maybe("PyCompactUnicodeObject.utf8")?,
            frames: frames(),
        })
    }
}

/// Everything that is known of a build, together.
#[derive(Debug, Clone, Copy)]
pub struct Layouts {
    /// For stacks.
    pub base: Layout,
    /// For dicts and types.
    pub objects: ObjectLayout,
    /// For a census.
    pub census: CensusLayout,
}

impl Layouts {
    /// `None` for a version whose objects are not known.
    #[must_use]
    pub fn of(layout: &Layout) -> Option<Self> {
        Some(Self {
            base: *layout,
            objects: ObjectLayout::of(layout)?,
            census: CensusLayout::of(layout)?,
        })
    }

    /// `sizeof(PyGC_Head)` before an object that the collector looks after.
    #[must_use]
    pub fn collector_head(&self) -> u64 {
        self.census.lists.map_or(0, |lists| lists.head)
    }

    /// `PyVarObject.ob_size`.
    #[must_use]
    pub const fn ob_size(&self) -> u64 {
        self.base.bytes.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::Build;

    #[test]
    fn every_build_has_a_column() {
        for build in Build::all() {
            let layouts = Layouts::of(&Layout::of(build).unwrap()).unwrap();
            assert_eq!(layouts.census.lists.is_none(), build.free_threaded, "{build}");
            assert_eq!(layouts.census.frames.is_some(), build.minor >= 11, "{build}");
            assert_eq!(layouts.census.wide.is_some(), build.minor <= 11, "{build}");
        }
    }
}
