//! Versions of CPython.

use std::fmt;

/// The versions of CPython that are supported, as minors of 3.
pub const SUPPORTED_MINORS: std::ops::RangeInclusive<u8> = 7..=15;

/// The first minor version with a free-threaded build.
const FIRST_FREE_THREADED: u8 = 13;

/// What decides where the fields of the structs are: the minor version, and whether there is a GIL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Build {
    /// The X of Python 3.X.
    pub minor: u8,
    /// Built without the GIL (`3.13t`).
    pub free_threaded: bool,
}

impl Build {
    /// The ordinary build of 3.`minor`.
    #[must_use]
    pub const fn default_of(minor: u8) -> Self {
        Self {
            minor,
            free_threaded: false,
        }
    }

    /// Every build that has a table, oldest first.
    pub fn all() -> impl Iterator<Item = Self> {
        SUPPORTED_MINORS.flat_map(|minor| {
            [false, true]
                .into_iter()
                .filter(move |free_threaded| !free_threaded || minor >= FIRST_FREE_THREADED)
                .map(move |free_threaded| Self { minor, free_threaded })
        })
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "3.{}{}", self.minor, if self.free_threaded { "t" } else { "" })
    }
}

/// A version of CPython.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PyVersion {
    /// 3.
    pub major: u8,
    /// The one that decides the layout.
    pub minor: u8,
    /// Patch level.
    pub micro: u8,
    /// The low byte of `PY_VERSION_HEX`: 0xf0 for a final release, 0xa1 for alpha 1, 0xc2 for candidate 2.
    pub release: u8,
}

impl PyVersion {
    /// From `PY_VERSION_HEX`, the value of the symbol `Py_Version` and of the second word of the debug offsets.
    #[must_use]
    pub const fn from_hex(hex: u32) -> Self {
        let [major, minor, micro, release] = hex.to_be_bytes();
        Self {
            major,
            minor,
            micro,
            release,
        }
    }

    /// A final release.
    #[must_use]
    pub const fn new(major: u8, minor: u8, micro: u8) -> Self {
        Self {
            major,
            minor,
            micro,
            release: 0xf0,
        }
    }

    /// True for 3.7 to 3.15.
    #[must_use]
    pub fn is_supported(self) -> bool {
        self.major == 3 && SUPPORTED_MINORS.contains(&self.minor)
    }
}

impl fmt::Display for PyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)?;
        let serial = self.release & 0xf;
        match self.release >> 4 {
            0xa => write!(f, "a{serial}"),
            0xb => write!(f, "b{serial}"),
            0xc => write!(f, "rc{serial}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_shown_as_python_shows_them() {
        assert_eq!(PyVersion::from_hex(0x030d_12f0).to_string(), "3.13.18");
        assert_eq!(PyVersion::from_hex(0x030e_00c2).to_string(), "3.14.0rc2");
    }
}
