//! What kind of objects a type has: how large they are and where their references lie.
//!
//! Known are the built-in containers and a few types of the standard library. Of all others the fixed part is looked through
//! word by word, which finds attributes, `__slots__` and the members of types written in C alike; a word that happens to look
//! like a reference must still lead to an object of a type to count.

use super::blocks::Blocks;
use super::layout::Layouts;
use pyheap_injector::RemoteMemory;
use std::sync::Arc;

/// Bits of `PyTypeObject.tp_flags`.
pub mod flag {
    /// Values of attributes follow the object, from 3.13.
    pub const INLINE_VALUES: u64 = 1 << 2;
    /// A managed list of weak references, from 3.12.
    pub const MANAGED_WEAKREF: u64 = 1 << 3;
    /// A managed `__dict__`, from 3.11.
    pub const MANAGED_DICT: u64 = 1 << 4;
    /// Made while the program ran.
    pub const HEAP_TYPE: u64 = 1 << 9;
    /// The garbage collector looks after instances.
    pub const HAVE_GC: u64 = 1 << 14;
    /// `int` or derived from it; then the same for the others.
    pub const INT: u64 = 1 << 24;
    /// `list`.
    pub const LIST: u64 = 1 << 25;
    /// `tuple`.
    pub const TUPLE: u64 = 1 << 26;
    /// `bytes`.
    pub const BYTES: u64 = 1 << 27;
    /// `str`.
    pub const STR: u64 = 1 << 28;
    /// `dict`.
    pub const DICT: u64 = 1 << 29;
    /// Its objects are types.
    pub const TYPE: u64 = 1 << 31;
}

/// Base classes of one type that are followed.
const MAX_BASES: usize = 256;
/// No type that can be met has larger instances before their items begin.
pub const MAX_BASIC_SIZE: u64 = 1 << 20;

/// How to read objects of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing is known but the sizes that the type tells.
    Other,
    /// No references inside: `float` and what else has none.
    Leaf,
    /// `int`, `bool`.
    Int,
    /// `bytes`.
    Bytes,
    /// `str`.
    Str,
    /// `list`.
    List,
    /// `tuple`, named tuples, results of system calls.
    Tuple,
    /// `dict`.
    Dict,
    /// `collections.OrderedDict`, the one in C.
    OrderedDict,
    /// `set`, `frozenset`.
    Set,
    /// `bytearray`.
    ByteArray,
    /// `collections.deque`.
    Deque,
    /// `array.array`.
    Array,
    /// Files with a buffer: `io.BufferedReader` and the like.
    Buffered,
    /// `type`.
    Type,
    /// Generators, coroutines.
    Generator,
    /// Frame objects.
    Frame,
    /// Code objects.
    Code,
    /// Weak references: what they lead to is not held by them.
    Weak,
}

/// A type, and what was counted of it.
#[derive(Debug, Clone)]
pub struct TypeInfo {
    /// Where it is.
    pub address: u64,
    /// Module and qualified name, the module left out if it is `builtins`.
    pub name: Arc<str>,
    /// The module.
    pub module: Arc<str>,
    /// How its objects are read.
    pub kind: Kind,
    /// `tp_flags`.
    pub flags: u64,
    /// `tp_basicsize`.
    pub basic: u64,
    /// `tp_itemsize`.
    pub item: u64,
    /// `tp_dictoffset`.
    pub dict: i64,
    /// Bytes before an object, for the collector and for managed attributes: `sys.getsizeof` counts them.
    pub before: u64,
    /// `PyHeapTypeObject.ht_cached_keys`, where there are any.
    pub keys: u64,
    /// Objects.
    pub count: u64,
    /// Of them, those that the garbage collector knows.
    pub tracked: u64,
    /// Bytes as `sys.getsizeof` counts them.
    pub bytes: u64,
    /// Of the objects, those that only C code holds.
    pub from_c: u64,
    /// Bytes of these.
    pub from_c_bytes: u64,
}

/// What the struct of a type says.
pub fn read<M: RemoteMemory>(
    blocks: &mut Blocks<'_, M>,
    at: &Layouts,
    address: u64,
    name: Arc<str>,
    module: Option<String>,
) -> Option<TypeInfo> {
    let objects = &at.objects;
    let field = |blocks: &mut Blocks<'_, M>, offset: u64| blocks.word(address.checked_add(offset)?);
    let flags = field(blocks, objects.type_flags)?;
    let basic = field(blocks, objects.type_basicsize)?;
    let item = field(blocks, at.census.type_itemsize)?;
    let dict = field(blocks, objects.type_dictoffset)?.cast_signed();
    if basic > MAX_BASIC_SIZE || item > MAX_BASIC_SIZE {
        return None;
    }
    let keys = match flags & flag::HEAP_TYPE {
        0 => 0,
        _ => field(blocks, objects.cached_keys)?,
    };
    let kind = kind_of(blocks, at, address, flags);
    Some(TypeInfo {
        address,
        name,
        module: module.unwrap_or_else(|| "builtins".to_owned()).into(),
        kind,
        flags,
        basic,
        item,
        dict,
        before: before(at, flags),
        keys,
        count: 0,
        tracked: 0,
        bytes: 0,
        from_c: 0,
        from_c_bytes: 0,
    })
}

/// Bytes before an object of a type with these flags.
fn before(at: &Layouts, flags: u64) -> u64 {
    let collected = if flags & flag::HAVE_GC == 0 {
        0
    } else {
        at.collector_head()
    };
    let managed = match at.base.minor {
        ..=10 => 0,
        11 => flag::MANAGED_DICT,
        _ => flag::MANAGED_DICT | flag::MANAGED_WEAKREF,
    };
    collected + if flags & managed == 0 { 0 } else { 16 }
}

fn kind_of<M: RemoteMemory>(blocks: &mut Blocks<'_, M>, at: &Layouts, address: u64, flags: u64) -> Kind {
    let derived = [
        (flag::INT, Kind::Int),
        (flag::LIST, Kind::List),
        (flag::TUPLE, Kind::Tuple),
        (flag::BYTES, Kind::Bytes),
        (flag::STR, Kind::Str),
        (flag::TYPE, Kind::Type),
    ];
    if let Some((_, kind)) = derived.iter().find(|(bit, _)| flags & bit != 0) {
        return *kind;
    }
    let mut base = address;
    for _ in 0..MAX_BASES {
        if let Some(kind) = known(blocks, at, base) {
            return kind;
        }
        let next = base.checked_add(at.census.type_base).and_then(|at| blocks.word(at));
        base = match next {
            Some(next) if next != 0 && next != base => next,
            _ => break,
        };
    }
    if flags & flag::DICT != 0 {
        Kind::Dict
    } else {
        Kind::Other
    }
}

/// What is known of exactly this type, by its name: one that was written in C, since a class statement makes no dotted names.
fn known<M: RemoteMemory>(blocks: &mut Blocks<'_, M>, at: &Layouts, address: u64) -> Option<Kind> {
    const LONGEST: usize = 40;
    let name = blocks.word(address.checked_add(at.base.tp_name)?)?;
    let flags = blocks.word(address.checked_add(at.objects.type_flags)?)?;
    let mut text = Vec::with_capacity(LONGEST);
    while text.len() < LONGEST {
        match blocks.byte(name.checked_add(text.len() as u64)?)? {
            0 => break,
            byte => text.push(byte),
        }
    }
    if flags & flag::HEAP_TYPE != 0 && !text.contains(&b'.') {
        return None;
    }
    Some(match text.as_slice() {
        b"set" | b"frozenset" => Kind::Set,
        b"dict" | b"frozendict" => Kind::Dict,
        b"collections.OrderedDict" => Kind::OrderedDict,
        b"bytearray" => Kind::ByteArray,
        b"collections.deque" => Kind::Deque,
        b"array.array" => Kind::Array,
        b"_io.BufferedReader" | b"_io.BufferedWriter" | b"_io.BufferedRandom" => Kind::Buffered,
        b"generator" | b"coroutine" | b"async_generator" => Kind::Generator,
        b"frame" => Kind::Frame,
        b"code" => Kind::Code,
        b"float" | b"complex" | b"NoneType" | b"ellipsis" | b"NotImplementedType" => Kind::Leaf,
        b"weakref"
        | b"weakref.ReferenceType"
        | b"weakproxy"
        | b"weakref.ProxyType"
        | b"weakcallableproxy"
        | b"weakref.CallableProxyType" => Kind::Weak,
        _ => return None,
    })
}
