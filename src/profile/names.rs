//! Which files a profile consists of and what they are called.
//!
//! A profile has a *filebase*, for example `run`; its files are `run._hpm`, `run._hpd`, `run._hpc` and `run._hpx`. The
//! original heapprof opens only names without the underscore, so both spellings exist. Nothing here looks inside a file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// How the suffixes of a profile are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SuffixStyle {
    /// `run._hpm`: what pyheap writes unless told otherwise.
    #[default]
    Underscore,
    /// `run.hpm`: what the original heapprof writes and opens.
    Plain,
}

impl SuffixStyle {
    /// Both, the default first.
    pub const ALL: [Self; 2] = [Self::Underscore, Self::Plain];

    /// The spelling of the .hpm suffix, as a user gives it on the command line.
    pub fn example(self) -> &'static str {
        match self {
            Self::Underscore => "._hpm",
            Self::Plain => ".hpm",
        }
    }
}

impl std::str::FromStr for SuffixStyle {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|style| style.example() == text)
            .ok_or_else(|| format!("`{text}` is neither `._hpm` nor `.hpm`"))
    }
}

/// One of the files of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// `.hpm`: header and stack traces.
    Traces,
    /// `.hpd`: events.
    Events,
    /// `.hpc`: the digest, made afterwards.
    Digest,
    /// `.hpx`: what only pyheap knows.
    Sidecar,
}

impl Part {
    /// All of them, in the order in which reports list them.
    pub const ALL: [Self; 4] = [Self::Traces, Self::Events, Self::Sidecar, Self::Digest];

    /// The three letters of its suffix.
    pub fn letters(self) -> &'static str {
        match self {
            Self::Traces => "hpm",
            Self::Events => "hpd",
            Self::Digest => "hpc",
            Self::Sidecar => "hpx",
        }
    }
}

/// A filebase with the spelling of its suffixes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileNames {
    base: PathBuf,
    style: SuffixStyle,
}

impl ProfileNames {
    /// Names below `base`. If `base` is itself the name of a part (`run._hpm`), its suffix is dropped first.
    pub fn new(base: &Path, style: SuffixStyle) -> Self {
        match split(base) {
            Some((base, _)) => Self { base, style },
            None => Self {
                base: base.to_owned(),
                style,
            },
        }
    }

    /// The profile that a user means by `given`: a filebase or the name of any of its files. A name that is spelled out
    /// decides the spelling; else, if there are profiles of both spellings, the one written last is meant. `None` if
    /// there is no .hpm under either spelling.
    pub fn find(given: &Path) -> Option<Self> {
        if let Some((base, style)) = split(given) {
            let names = Self { base, style };
            if names.path(Part::Traces).is_file() {
                return Some(names);
            }
        }
        SuffixStyle::ALL
            .into_iter()
            .map(|style| Self {
                base: given.to_owned(),
                style,
            })
            .filter_map(|names| {
                let written = std::fs::metadata(names.path(Part::Traces))
                    .ok()
                    .filter(|found| found.is_file())?;
                let at = std::fs::metadata(names.path(Part::Events))
                    .unwrap_or(written)
                    .modified()
                    .ok();
                Some((at, names))
            })
            // Of equals the first, the default spelling, wins.
            .reduce(|first, second| if second.0 > first.0 { second } else { first })
            .map(|(_, names)| names)
    }

    /// The name without suffix.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The spelling.
    pub fn style(&self) -> SuffixStyle {
        self.style
    }

    /// The name of one file.
    pub fn path(&self, part: Part) -> PathBuf {
        let mut name = OsString::from(&self.base);
        name.push(match self.style {
            SuffixStyle::Underscore => "._",
            SuffixStyle::Plain => ".",
        });
        name.push(part.letters());
        name.into()
    }
}

/// A base without its directory: what a file says of the part before or after it.
#[must_use]
pub fn last_word(base: &Path) -> String {
    base.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The part of this number of the recording `first`: `run.2` of `run`.
#[must_use]
pub fn numbered(first: &Path, number: u32) -> PathBuf {
    let mut base = first.as_os_str().to_owned();
    base.push(format!(".{number}"));
    PathBuf::from(base)
}

/// The part before this one, if it were one: `run` before `run.2`, `run.2` before `run.3`.
#[must_use]
pub fn before(base: &Path) -> Option<PathBuf> {
    let name = base.file_name()?.to_str()?;
    let (first, number) = name.rsplit_once('.')?;
    let first = base.with_file_name(first);
    match number.parse::<u32>().ok()? {
        0 | 1 => None,
        2 => Some(first),
        number => Some(numbered(&first, number - 1)),
    }
}

/// `run._hpd` → `run` and its spelling, if it is the name of a part.
fn split(given: &Path) -> Option<(PathBuf, SuffixStyle)> {
    let extension = given.extension()?.to_str()?;
    let (letters, style) = match extension.strip_prefix('_') {
        Some(rest) => (rest, SuffixStyle::Underscore),
        None => (extension, SuffixStyle::Plain),
    };
    Part::ALL
        .iter()
        .any(|part| part.letters() == letters)
        .then(|| (given.with_extension(""), style))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_and_full_names_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("my.run");
        assert_eq!(ProfileNames::find(&base), None);
        for style in SuffixStyle::ALL {
            let names = ProfileNames::new(&base, style);
            std::fs::write(names.path(Part::Traces), b"").unwrap();
            for part in Part::ALL {
                assert_eq!(ProfileNames::find(&names.path(part)).as_ref(), Some(&names));
            }
            if style == SuffixStyle::Underscore {
                assert_eq!(ProfileNames::find(&base).as_ref(), Some(&names));
            }
        }
    }

    #[test]
    fn of_two_spellings_the_younger_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let [underscore, plain] = SuffixStyle::ALL.map(|style| ProfileNames::new(&base, style));
        for (names, seconds) in [(&underscore, 10), (&plain, 20)] {
            let file = std::fs::File::create(names.path(Part::Traces)).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds))
                .unwrap();
        }
        assert_eq!(ProfileNames::find(&base), Some(plain));
    }

    #[test]
    fn a_part_given_as_base_is_no_part_of_a_part() {
        let names = ProfileNames::new(Path::new("out/run.hpm"), SuffixStyle::Underscore);
        assert_eq!(names.path(Part::Events), Path::new("out/run._hpd"));
        let dotted = ProfileNames::new(Path::new("out/v1.2"), SuffixStyle::Plain);
        assert_eq!(dotted.path(Part::Sidecar), Path::new("out/v1.2.hpx"));
    }

    #[test]
    fn styles_parse_as_suffixes() {
        assert_eq!(".hpm".parse(), Ok(SuffixStyle::Plain));
        assert_eq!("._hpm".parse(), Ok(SuffixStyle::Underscore));
        assert!("hpm".parse::<SuffixStyle>().is_err());
    }
}
