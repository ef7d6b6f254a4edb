//! Turns raw frames into file, line and function.
//!
//! [`layout`] knows where the fields of CPython's structs are, [`text`] reads its strings, [`code`] its code objects,
//! [`lines`] their line tables. All of it reads through `RemoteMemory`, so the same code serves a live process, a code
//! object that the shim has copied ([`blob`]), and an array in a test. [`dwarf`] is the layout's last source.
//!
//! What it refuses to do: trust. Every length is capped by a named constant, every loop is bounded, and a string or
//! table that makes no sense is an error or a marked gap, never a panic.

pub mod blob;
pub mod code;
pub mod dwarf;
pub mod layout;
pub mod lines;
pub mod text;
pub mod version;

pub use blob::{BlobError, BlobMemory};
pub use code::{CodeError, CodeInfo, ResolvedFrame, resolve};
pub use layout::{Layout, ValidationError};
pub use lines::{FrameLine, InstrUnit, LineTable};
pub use version::{Build, PyVersion, SUPPORTED_MINORS};
