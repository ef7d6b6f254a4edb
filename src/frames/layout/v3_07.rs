//! Struct offsets of CPython 3.7, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.7.16; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.7.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.7.16/Include/internal/pystate.h#L78
    ("_PyRuntimeState.interpreters.head", 24),
    ("_PyRuntimeState.interpreters.main", 32),
    ("_PyRuntimeState.core_initialized", 4),
    ("_PyRuntimeState.initialized", 0),
    ("_PyRuntimeState.finalizing", 8),
    ("_PyRuntimeState.gilstate.tstate_current", 1480),
    // https://github.com/python/cpython/blob/v3.7.16/Include/pystate.h#L113
    ("PyInterpreterState.next", 0),
    ("PyInterpreterState.id", 16),
    ("PyInterpreterState.tstate_head", 8),
    // https://github.com/python/cpython/blob/v3.7.16/Include/pystate.h#L212
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 176),
    ("PyThreadState.frame", 24),
    // https://github.com/python/cpython/blob/v3.7.16/Include/frameobject.h#L17
    ("PyFrameObject.f_back", 24),
    ("PyFrameObject.f_code", 32),
    ("PyFrameObject.f_lasti", 104),
    // https://github.com/python/cpython/blob/v3.7.16/Include/code.h#L51
    ("sizeof(PyCodeObject)", 144),
    ("PyCodeObject.co_flags", 32),
    ("PyCodeObject.co_firstlineno", 36),
    ("PyCodeObject.co_filename", 96),
    ("PyCodeObject.co_name", 104),
    ("PyCodeObject.co_lnotab", 112),
    ("PyCodeObject.co_code", 40),
    // https://github.com/python/cpython/blob/v3.7.16/Include/unicodeobject.h#L331
    ("sizeof(PyASCIIObject)", 48),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.7.16/Include/unicodeobject.h#L343
    ("sizeof(PyCompactUnicodeObject)", 72),
    // https://github.com/python/cpython/blob/v3.7.16/Include/unicodeobject.h#L356
    ("PyUnicodeObject.data", 72),
    // https://github.com/python/cpython/blob/v3.7.16/Include/object.h#L115
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.7.16/Include/bytesobject.h#L41
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.7.16/Include/object.h#L106
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.7.16/Include/object.h#L346
    ("PyTypeObject.tp_name", 24),
];
