//! Reads CPython's `str` and `bytes` objects.
//!
//! Strings may be of any kind (1, 2 or 4 bytes a character), compact or not. They become UTF-8; a lone surrogate (an
//! undecodable byte of a file name) becomes U+FFFD. A string longer than [`MAX_STRING_CHARS`], or whose end cannot be
//! read, ends with [`CUT_MARK`].
//!
//! What it refuses to do: interpret. Control characters stay in the result; whoever shows it must mask them.

use super::code::CodeError;
use super::layout::Layout;
use pyheap_injector::{RemoteAddr, RemoteMemory};

/// Names and file names longer than this are cut. Linux paths end at 4,096 bytes.
pub const MAX_STRING_CHARS: u64 = 4096;

/// The end of a string that was cut.
pub const CUT_MARK: char = '…';

/// A length above this is no length: no object that we read can be larger than the address space of a process.
const MAX_PLAUSIBLE_LENGTH: u64 = 1 << 47;

/// The longest type name that is compared.
const MAX_TYPE_NAME_BYTES: usize = 64;

/// `PyASCIIObject.state`. The bits above these are not zeroed by CPython.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnicodeState {
    /// Bytes a character: 1, 2, 4; 0 for a legacy string that is not ready (up to 3.11). Three bits.
    pub kind: u8,
    /// The characters follow the header. The next bit.
    pub compact: bool,
    /// All characters are ASCII. The next bit.
    pub ascii: bool,
}

impl UnicodeState {
    /// Takes the word apart; `kind_bit` is the lowest bit of `kind`.
    #[must_use]
    pub const fn from_word(word: u32, kind_bit: u8) -> Self {
        let bits = word >> (kind_bit & 31);
        Self {
            kind: (bits & 7) as u8,
            compact: bits >> 3 & 1 == 1,
            ascii: bits >> 4 & 1 == 1,
        }
    }
}

/// `base + offset`, both from the target.
pub(super) fn offset(base: RemoteAddr, by: u64) -> Result<RemoteAddr, CodeError> {
    base.checked_add(by).ok_or(CodeError::Absurd("an address"))
}

/// Reads `len` bytes, or as many of them as can be read. The caller bounds `len`.
///
/// A capture by the shim may hold only the beginning of a long object, and memory may end in the middle of a length
/// that is a lie. At most about 2 * log2(len) reads are made.
pub(crate) fn read_prefix(mem: &impl RemoteMemory, at: RemoteAddr, len: usize) -> Result<Vec<u8>, CodeError> {
    let error = match mem.read_vec(at, len) {
        Ok(all) => return Ok(all),
        Err(error) => error,
    };
    let (mut readable, mut unreadable) = (0, len);
    while readable + 1 < unreadable {
        let middle = readable + (unreadable - readable) / 2;
        if mem.read_vec(at, middle).is_ok() {
            readable = middle;
        } else {
            unreadable = middle;
        }
    }
    if readable == 0 {
        return Err(error.into());
    }
    Ok(mem.read_vec(at, readable)?)
}

/// Where the content of an object is: its address, how many items it has, and how many bytes each takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Content {
    data: RemoteAddr,
    length: u64,
    width: u64,
    kind: u8,
}

/// Where the characters of the `str` object at `address` are.
///
/// # Errors
/// When `address` is null, cannot be read, or is no string that makes sense.
pub(super) fn characters(mem: &impl RemoteMemory, address: RemoteAddr, layout: &Layout) -> Result<Content, CodeError> {
    let unicode = &layout.unicode;
    if address.is_null() {
        return Err(CodeError::Null("a string"));
    }
    let length = mem.read_u64(offset(address, unicode.length)?)?;
    let state = UnicodeState::from_word(mem.read_u32(offset(address, unicode.state)?)?, unicode.kind_bit);
    if length > MAX_PLAUSIBLE_LENGTH {
        return Err(CodeError::Absurd("a string's length"));
    }
    if !matches!(state.kind, 1 | 2 | 4) {
        return Err(CodeError::Absurd("a string's state"));
    }
    let data = match (state.compact, state.ascii) {
        (true, true) => offset(address, unicode.ascii_data)?,
        (true, false) => offset(address, unicode.compact_data)?,
        (false, _) => mem.read_ptr(offset(address, unicode.data_pointer)?)?,
    };
    Ok(Content {
        data,
        length,
        width: u64::from(state.kind),
        kind: state.kind,
    })
}

/// Where the bytes of the `bytes` object at `address` are.
///
/// # Errors
/// When `address` is null, cannot be read, or its length makes no sense.
pub(super) fn content(mem: &impl RemoteMemory, address: RemoteAddr, layout: &Layout) -> Result<Content, CodeError> {
    if address.is_null() {
        return Err(CodeError::Null("a bytes object"));
    }
    let length = mem.read_u64(offset(address, layout.bytes.size)?)?;
    if length > MAX_PLAUSIBLE_LENGTH {
        return Err(CodeError::Absurd("a bytes object's length"));
    }
    Ok(Content {
        data: offset(address, layout.bytes.data)?,
        length,
        width: 1,
        kind: 1,
    })
}

/// Checks that a zero follows the content, as after every `str` and `bytes` of CPython: it is the surest sign that length
/// and place are what they were taken for.
///
/// # Errors
/// When there is none or it cannot be read.
pub(super) fn expect_end(mem: &impl RemoteMemory, content: Content) -> Result<(), CodeError> {
    let end = offset(content.data, content.length.saturating_mul(content.width))?;
    let zero = mem.read_vec(end, usize::from(content.kind))?;
    if zero.iter().any(|&byte| byte != 0) {
        return Err(CodeError::Absurd("the end of a string"));
    }
    Ok(())
}

/// Reads the `str` object at `address`.
///
/// # Errors
/// When `address` is null, cannot be read, or is no string that makes sense.
pub fn read_str(mem: &impl RemoteMemory, address: RemoteAddr, layout: &Layout) -> Result<String, CodeError> {
    let Content {
        data,
        length,
        width,
        kind,
    } = characters(mem, address, layout)?;
    if length == 0 {
        return Ok(String::new());
    }
    // At most 4 * 4,096 bytes.
    let wanted = usize::try_from(length.min(MAX_STRING_CHARS) * width).unwrap_or(0);
    let bytes = read_prefix(mem, data, wanted)?;
    let cut = (bytes.len() as u64) < length * width;
    let mut text: String = match kind {
        1 => bytes.iter().copied().map(char::from).collect(),
        2 => decode(&bytes, |&[a, b]: &[u8; 2]| u32::from(u16::from_le_bytes([a, b]))),
        _ => decode(&bytes, |&unit: &[u8; 4]| u32::from_le_bytes(unit)),
    };
    if cut {
        text.push(CUT_MARK);
    }
    Ok(text)
}

/// One number a character, as CPython stores them: no surrogate pairs, so a surrogate is always a lone one.
fn decode<const N: usize>(bytes: &[u8], number: impl Fn(&[u8; N]) -> u32) -> String {
    bytes
        .as_chunks::<N>()
        .0
        .iter()
        .map(|unit| char::from_u32(number(unit)).unwrap_or(char::REPLACEMENT_CHARACTER))
        .collect()
}

/// The content of the `bytes` object at `address`, at most `cap` bytes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteBytes {
    /// The content.
    pub bytes: Vec<u8>,
    /// True when there is more than could or should be read.
    pub cut: bool,
}

/// Reads the `bytes` object at `address`, at most `cap` bytes of it.
///
/// # Errors
/// When `address` is null, cannot be read, or its length makes no sense.
pub fn read_bytes(
    mem: &impl RemoteMemory,
    address: RemoteAddr,
    layout: &Layout,
    cap: usize,
) -> Result<RemoteBytes, CodeError> {
    let Content { data, length, .. } = content(mem, address, layout)?;
    let wanted = usize::try_from(length).unwrap_or(cap).min(cap);
    if wanted == 0 {
        return Ok(RemoteBytes {
            bytes: Vec::new(),
            cut: length != 0,
        });
    }
    let bytes = read_prefix(mem, data, wanted)?;
    let cut = (bytes.len() as u64) < length;
    Ok(RemoteBytes { bytes, cut })
}

/// Checks that the object at `address` has a type of the name `expected`. Reads the type, so it is for live processes,
/// not for captured code objects.
///
/// # Errors
/// When it has another type, or cannot be read.
pub fn expect_type(
    mem: &impl RemoteMemory,
    address: RemoteAddr,
    layout: &Layout,
    expected: &'static str,
) -> Result<(), CodeError> {
    let kind = mem.read_ptr(offset(address, layout.ob_type)?)?;
    let name = mem.read_ptr(offset(kind, layout.tp_name)?)?;
    let bytes = read_prefix(mem, name, MAX_TYPE_NAME_BYTES)?;
    let found: Vec<u8> = bytes.into_iter().take_while(|byte| *byte != 0).collect();
    if found == expected.as_bytes() {
        Ok(())
    } else {
        Err(CodeError::WrongType {
            expected,
            found: String::from_utf8_lossy(&found).into_owned(),
        })
    }
}
