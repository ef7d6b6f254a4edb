//! Struct offsets of CPython 3.10, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.10.13; do not edit. They hold for every 3.10.x: no
//! patch release moved any of these. Names are C paths: `PyCodeObject.co_filename` is that member's offset in bytes.

/// C path and offset (or, for `sizeof(T)`, size) in bytes.
pub(super) const TABLE: &[(&str, u64)] = &[
    ("_PyRuntimeState.interpreters.head", 32),
    ("_PyRuntimeState.interpreters.main", 40),
    ("_PyRuntimeState.core_initialized", 8),
    ("_PyRuntimeState.initialized", 12),
    ("_PyRuntimeState._finalizing", 16),
    ("_PyRuntimeState.gilstate.tstate_current", 568),
    ("PyInterpreterState.next", 0),
    ("PyInterpreterState.id", 24),
    ("PyInterpreterState.tstate_head", 8),
    ("PyInterpreterState.runtime", 16),
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 176),
    ("PyThreadState.frame", 24),
    ("PyFrameObject.f_back", 24),
    ("PyFrameObject.f_code", 32),
    ("PyFrameObject.f_lasti", 96),
    ("sizeof(PyCodeObject)", 176),
    ("PyCodeObject.co_flags", 36),
    ("PyCodeObject.co_firstlineno", 40),
    ("PyCodeObject.co_filename", 104),
    ("PyCodeObject.co_name", 112),
    ("PyCodeObject.co_linetable", 120),
    ("PyCodeObject.co_code", 48),
    ("sizeof(PyASCIIObject)", 48),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    ("sizeof(PyCompactUnicodeObject)", 72),
    ("PyUnicodeObject.data", 72),
    ("PyVarObject.ob_size", 16),
    ("PyBytesObject.ob_sval", 32),
    ("PyObject.ob_type", 8),
    ("PyTypeObject.tp_name", 24),
];
