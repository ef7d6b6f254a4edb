//! Addresses in another process.

use core::fmt;

/// An address in the target process. It has no conversion to a pointer, so that a remote address can never be
/// dereferenced here by mistake, and its arithmetic is checked, because the numbers come from the target.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct RemoteAddr(pub u64);

impl RemoteAddr {
    /// The null address.
    pub const NULL: Self = Self(0);

    /// True for address zero.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// `self + bytes`, or `None` when that overflows.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// `self - bytes`, or `None` when that overflows.
    #[must_use]
    pub const fn checked_sub(self, bytes: u64) -> Option<Self> {
        match self.0.checked_sub(bytes) {
            Some(difference) => Some(Self(difference)),
            None => None,
        }
    }
}

impl fmt::Debug for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
