//! Struct offsets of CPython 3.15, default build, 64-bit Linux.
//!
//! Written by `scripts/gen-offsets` from the headers of 3.15.2; do not edit. Names are C paths:
//! `PyCodeObject.co_filename` is that member's offset in bytes. They held in every 3.15.x looked at; a process that
//! they do not fit is found out when they are validated.

/// C path and offset (or, for `sizeof(T)`, size) in bytes; before each struct, where it is defined.
pub(super) const TABLE: &[(&str, u64)] = &[
    // https://github.com/python/cpython/blob/v3.15.2/Include/internal/pycore_runtime_structs.h#L134
    ("_PyRuntimeState.interpreters.head", 936),
    ("_PyRuntimeState.interpreters.main", 944),
    ("_PyRuntimeState.core_initialized", 900),
    ("_PyRuntimeState.initialized", 904),
    ("_PyRuntimeState._finalizing", 912),
    ("_PyRuntimeState.allocators.mutex", 1000),
    ("_PyRuntimeState.allocators.standard.raw", 1008),
    ("_PyRuntimeState.allocators.standard.mem", 1048),
    ("_PyRuntimeState.allocators.standard.obj", 1088),
    // https://github.com/python/cpython/blob/v3.15.2/Include/internal/pycore_interp_structs.h#L842
    ("PyInterpreterState.next", 7264),
    ("PyInterpreterState.id", 7272),
    ("PyInterpreterState.threads.head", 7336),
    ("PyInterpreterState.runtime", 7376),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/pystate.h#L66
    ("PyThreadState.next", 8),
    ("PyThreadState.interp", 16),
    ("PyThreadState.thread_id", 176),
    ("PyThreadState.current_frame", 72),
    ("PyThreadState.native_thread_id", 184),
    // https://github.com/python/cpython/blob/v3.15.2/Include/internal/pycore_interpframe_structs.h#L29
    ("_PyInterpreterFrame.previous", 8),
    ("_PyInterpreterFrame.owner", 74),
    ("_PyInterpreterFrame.f_executable", 0),
    ("_PyInterpreterFrame.instr_ptr", 56),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/code.h#L45
    ("sizeof(PyCodeObject)", 216),
    ("PyCodeObject.co_flags", 48),
    ("PyCodeObject.co_firstlineno", 68),
    ("PyCodeObject.co_filename", 112),
    ("PyCodeObject.co_name", 120),
    ("PyCodeObject.co_linetable", 136),
    ("PyCodeObject.co_qualname", 128),
    ("PyCodeObject._co_firsttraceable", 192),
    ("PyCodeObject.co_code_adaptive", 208),
    ("PyCodeObject.co_version", 92),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/unicodeobject.h#L161
    ("sizeof(PyASCIIObject)", 40),
    ("PyASCIIObject.length", 16),
    ("PyASCIIObject.hash", 24),
    ("PyASCIIObject.state", 32),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/unicodeobject.h#L171
    ("sizeof(PyCompactUnicodeObject)", 56),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/unicodeobject.h#L182
    ("PyUnicodeObject.data", 56),
    // https://github.com/python/cpython/blob/v3.15.2/Include/object.h#L174
    ("PyVarObject.ob_size", 16),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/bytesobject.h#L15
    ("PyBytesObject.ob_sval", 32),
    // https://github.com/python/cpython/blob/v3.15.2/Include/object.h#L127
    ("PyObject.ob_type", 8),
    // https://github.com/python/cpython/blob/v3.15.2/Include/cpython/object.h#L148
    ("PyTypeObject.tp_name", 24),
];
