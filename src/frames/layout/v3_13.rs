//! Struct offsets of CPython 3.13, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.13.0; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.13.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.13.0/Include/internal/pycore_runtime.h#L208
    ("_PyRuntimeState.interpreters.head", 632),
    ("_PyRuntimeState.interpreters.main", 640),
    ("_PyRuntimeState.core_initialized", 596),
    ("_PyRuntimeState.initialized", 600),
    ("_PyRuntimeState._finalizing", 608),
    ("_PyRuntimeState.allocators.mutex", 696),
    ("_PyRuntimeState.allocators.standard.raw", 704),
    ("_PyRuntimeState.allocators.standard.mem", 744),
    ("_PyRuntimeState.allocators.standard.obj", 784),
    ("_PyRuntimeState.autoTSSkey", 2160),
    // https://github.com/python/cpython/blob/v3.13.0/Include/internal/pycore_interp.h#L94
    ("PyInterpreterState.next", 7264),
    ("PyInterpreterState.id", 7272),
    ("PyInterpreterState.threads.head", 7344),
    ("PyInterpreterState.runtime", 7376),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/pystate.h#L59
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 152),
    ("PyThreadState.current_frame", 72),
    ("PyThreadState.native_thread_id", 160),
    // https://github.com/python/cpython/blob/v3.13.0/Include/internal/pycore_frame.h#L61
    ("_PyInterpreterFrame.previous", 8),
    ("_PyInterpreterFrame.owner", 70),
    ("_PyInterpreterFrame.f_executable", 0),
    ("_PyInterpreterFrame.instr_ptr", 56),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/code.h#L73
    ("sizeof(PyCodeObject)", 208),
    ("PyCodeObject.co_flags", 48),
    ("PyCodeObject.co_firstlineno", 68),
    ("PyCodeObject.co_filename", 112),
    ("PyCodeObject.co_name", 120),
    ("PyCodeObject.co_linetable", 136),
    ("PyCodeObject.co_qualname", 128),
    ("PyCodeObject._co_firsttraceable", 184),
    ("PyCodeObject.co_code_adaptive", 200),
    ("PyCodeObject.co_version", 92),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/unicodeobject.h#L151
    ("sizeof(PyASCIIObject)", 40),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/unicodeobject.h#L161
    ("sizeof(PyCompactUnicodeObject)", 56),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/unicodeobject.h#L172
    ("PyUnicodeObject.data", 56),
    // https://github.com/python/cpython/blob/v3.13.0/Include/object.h#L227
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/bytesobject.h#L15
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.13.0/Include/object.h#L163
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.13.0/Include/cpython/object.h#L147
    ("PyTypeObject.tp_name", 24),
];
