//! Struct offsets of CPython 3.12, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.12.1; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.12.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.12.1/Include/internal/pycore_runtime.h#L61
    ("_PyRuntimeState.interpreters.head", 40),
    ("_PyRuntimeState.interpreters.main", 48),
    ("_PyRuntimeState.core_initialized", 12),
    ("_PyRuntimeState.initialized", 16),
    ("_PyRuntimeState._finalizing", 24),
    ("_PyRuntimeState.allocators.mutex", 88),
    ("_PyRuntimeState.allocators.standard.raw", 96),
    ("_PyRuntimeState.allocators.standard.mem", 136),
    ("_PyRuntimeState.allocators.standard.obj", 176),
    ("_PyRuntimeState.autoTSSkey", 1544),
    // https://github.com/python/cpython/blob/v3.12.1/Include/internal/pycore_interp.h#L75
    ("PyInterpreterState.next", 0),
    ("PyInterpreterState.id", 8),
    ("PyInterpreterState.threads.head", 72),
    ("PyInterpreterState.runtime", 96),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/pystate.h#L115
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 136),
    ("PyThreadState.cframe", 56),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/pystate.h#L67
    ("_PyCFrame.current_frame", 0),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/pystate.h#L115
    ("PyThreadState.native_thread_id", 144),
    // https://github.com/python/cpython/blob/v3.12.1/Include/internal/pycore_frame.h#L51
    ("_PyInterpreterFrame.previous", 8),
    ("_PyInterpreterFrame.owner", 70),
    ("_PyInterpreterFrame.f_code", 0),
    ("_PyInterpreterFrame.prev_instr", 56),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/code.h#L109
    ("sizeof(PyCodeObject)", 200),
    ("PyCodeObject.co_flags", 48),
    ("PyCodeObject.co_firstlineno", 68),
    ("PyCodeObject.co_filename", 112),
    ("PyCodeObject.co_name", 120),
    ("PyCodeObject.co_linetable", 136),
    ("PyCodeObject.co_qualname", 128),
    ("PyCodeObject._co_firsttraceable", 176),
    ("PyCodeObject.co_code_adaptive", 192),
    ("PyCodeObject.co_version", 92),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/unicodeobject.h#L149
    ("sizeof(PyASCIIObject)", 40),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/unicodeobject.h#L159
    ("sizeof(PyCompactUnicodeObject)", 56),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/unicodeobject.h#L170
    ("PyUnicodeObject.data", 56),
    // https://github.com/python/cpython/blob/v3.12.1/Include/object.h#L199
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/bytesobject.h#L15
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.12.1/Include/object.h#L166
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.12.1/Include/cpython/object.h#L146
    ("PyTypeObject.tp_name", 24),
];
