//! Struct offsets of CPython 3.11, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.11.7; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.11.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.11.7/Include/internal/pycore_runtime.h#L59
    ("_PyRuntimeState.interpreters.head", 40),
    ("_PyRuntimeState.interpreters.main", 48),
    ("_PyRuntimeState.core_initialized", 12),
    ("_PyRuntimeState.initialized", 16),
    ("_PyRuntimeState._finalizing", 24),
    ("_PyRuntimeState.gilstate.tstate_current", 576),
    // https://github.com/python/cpython/blob/v3.11.7/Include/internal/pycore_interp.h#L78
    ("PyInterpreterState.next", 0),
    ("PyInterpreterState.id", 48),
    ("PyInterpreterState.threads.head", 16),
    ("PyInterpreterState.runtime", 40),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/pystate.h#L82
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 152),
    ("PyThreadState.cframe", 56),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/pystate.h#L38
    ("_PyCFrame.current_frame", 8),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/pystate.h#L82
    ("PyThreadState.native_thread_id", 160),
    // https://github.com/python/cpython/blob/v3.11.7/Include/internal/pycore_frame.h#L47
    ("_PyInterpreterFrame.previous", 48),
    ("_PyInterpreterFrame.owner", 69),
    ("_PyInterpreterFrame.f_code", 32),
    ("_PyInterpreterFrame.prev_instr", 56),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/code.h#L36
    ("sizeof(PyCodeObject)", 192),
    ("PyCodeObject.co_flags", 48),
    ("PyCodeObject.co_firstlineno", 72),
    ("PyCodeObject.co_filename", 112),
    ("PyCodeObject.co_name", 120),
    ("PyCodeObject.co_linetable", 136),
    ("PyCodeObject.co_qualname", 128),
    ("PyCodeObject._co_firsttraceable", 168),
    ("PyCodeObject.co_code_adaptive", 184),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/unicodeobject.h#L206
    ("sizeof(PyASCIIObject)", 48),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/unicodeobject.h#L218
    ("sizeof(PyCompactUnicodeObject)", 72),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/unicodeobject.h#L231
    ("PyUnicodeObject.data", 72),
    // https://github.com/python/cpython/blob/v3.11.7/Include/object.h#L112
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/bytesobject.h#L15
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.11.7/Include/object.h#L100
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.11.7/Include/cpython/object.h#L148
    ("PyTypeObject.tp_name", 24),
];
