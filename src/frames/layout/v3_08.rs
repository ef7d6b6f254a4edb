//! Struct offsets of CPython 3.8, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.8.18; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.8.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.8.18/Include/internal/pycore_pystate.h#L197
    ("_PyRuntimeState.interpreters.head", 32),
    ("_PyRuntimeState.interpreters.main", 40),
    ("_PyRuntimeState.core_initialized", 8),
    ("_PyRuntimeState.initialized", 12),
    ("_PyRuntimeState.finalizing", 16),
    ("_PyRuntimeState.gilstate.tstate_current", 1368),
    // https://github.com/python/cpython/blob/v3.8.18/Include/internal/pycore_pystate.h#L67
    ("PyInterpreterState.next", 0),
    ("PyInterpreterState.id", 16),
    ("PyInterpreterState.tstate_head", 8),
    // https://github.com/python/cpython/blob/v3.8.18/Include/cpython/pystate.h#L51
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 176),
    ("PyThreadState.frame", 24),
    // https://github.com/python/cpython/blob/v3.8.18/Include/frameobject.h#L16
    ("PyFrameObject.f_back", 24),
    ("PyFrameObject.f_code", 32),
    ("PyFrameObject.f_lasti", 104),
    // https://github.com/python/cpython/blob/v3.8.18/Include/code.h#L69
    ("sizeof(PyCodeObject)", 176),
    ("PyCodeObject.co_flags", 36),
    ("PyCodeObject.co_firstlineno", 40),
    ("PyCodeObject.co_filename", 104),
    ("PyCodeObject.co_name", 112),
    ("PyCodeObject.co_lnotab", 120),
    ("PyCodeObject.co_code", 48),
    // https://github.com/python/cpython/blob/v3.8.18/Include/cpython/unicodeobject.h#L222
    ("sizeof(PyASCIIObject)", 48),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.8.18/Include/cpython/unicodeobject.h#L234
    ("sizeof(PyCompactUnicodeObject)", 72),
    // https://github.com/python/cpython/blob/v3.8.18/Include/cpython/unicodeobject.h#L247
    ("PyUnicodeObject.data", 72),
    // https://github.com/python/cpython/blob/v3.8.18/Include/object.h#L116
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.8.18/Include/bytesobject.h#L41
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.8.18/Include/object.h#L104
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.8.18/Include/cpython/object.h#L177
    ("PyTypeObject.tp_name", 24),
];
