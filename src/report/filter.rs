//! Which traces count: by file, function and thread, with patterns as in a shell, and by domain.

use std::cell::RefCell;

use foldhash::HashMap;
use glob::Pattern;

use super::TraceUsage;
use crate::profile::model::{Event, StackFrame};
use crate::profile::reader::{ReadError, Reader};
use crate::profile::sidecar::{Origin, Sidecar};

/// A text is no pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{pattern}` is no pattern: {why}")]
pub struct PatternError {
    /// The text.
    pub pattern: String,
    /// What is wrong with it.
    pub why: String,
}

/// A pattern of file or function names: `*`, `?` and `[…]` as in a shell, `*` stands for slashes too; `!` before it means
/// all that do not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern {
    pattern: Pattern,
    /// Whether what fits counts; else what does not.
    pub is_inclusive: bool,
}

impl NamePattern {
    /// A pattern.
    ///
    /// # Errors
    /// If a `[` is not closed, or three `*` stand together.
    pub fn new(text: &str, is_inclusive: bool) -> Result<Self, PatternError> {
        let pattern = Pattern::new(text).map_err(|error| PatternError {
            pattern: text.to_owned(),
            why: error.msg.to_owned(),
        })?;
        Ok(Self { pattern, is_inclusive })
    }

    /// Whether a name fits, whatever that means for it.
    pub fn fits(&self, name: &str) -> bool {
        self.pattern.matches(name)
    }
}

impl std::str::FromStr for NamePattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        match text.strip_prefix('!') {
            Some(rest) => Self::new(rest, false),
            None => Self::new(text, true),
        }
    }
}

/// What users ask to see. A trace counts if it fits one of the inclusive patterns of each kind (or there is none), and
/// none of the exclusive ones.
#[derive(Debug, Clone, Default)]
pub struct Filters {
    /// File names; a pattern without a slash is matched with the last part of a name too.
    pub files: Vec<NamePattern>,
    /// Function names.
    pub functions: Vec<NamePattern>,
    /// Thread names, or thread ids.
    pub threads: Vec<NamePattern>,
    /// Numbers of allocator domains; empty for all.
    pub domains: Vec<u8>,
    /// Whether any frame of a stack may fit; else only the one that allocated.
    pub all_frames: bool,
}

impl Filters {
    /// Whether nothing is filtered.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.functions.is_empty() && self.threads.is_empty() && self.domains.is_empty()
    }

    /// Keeps the traces that count.
    pub fn retain(&self, traces: &mut Vec<TraceUsage<'_>>, sidecar: Option<&Sidecar>) {
        traces.retain(|trace| self.counts(trace.index, trace.frames.as_deref().unwrap_or_default(), sidecar));
    }

    /// Whether a trace counts.
    pub fn counts(&self, index: u32, frames: &[StackFrame<'_>], sidecar: Option<&Sidecar>) -> bool {
        let first = if self.all_frames {
            0
        } else {
            frames.len().saturating_sub(1)
        };
        let frames = &frames[first..];
        accepts(&self.files, |pattern| {
            frames.iter().any(|frame| fits_file(pattern, &frame.file))
        }) && accepts(&self.functions, |pattern| {
            frames
                .iter()
                .any(|frame| pattern.fits(frame.function.unwrap_or_default()))
        }) && accepts(&self.threads, |pattern| fits_thread(pattern, index, sidecar))
            && (self.domains.is_empty() || origins(index, sidecar).any(|origin| self.domains.contains(&origin.domain)))
    }
}

/// Remembers which traces count, for what asks again and again.
#[derive(Debug)]
pub struct Counted<'a> {
    reader: &'a Reader,
    filters: &'a Filters,
    known: RefCell<HashMap<u32, bool>>,
}

impl<'a> Counted<'a> {
    /// Nothing is remembered yet.
    pub fn new(reader: &'a Reader, filters: &'a Filters) -> Self {
        Self {
            reader,
            filters,
            known: RefCell::default(),
        }
    }

    /// The profile.
    pub fn reader(&self) -> &'a Reader {
        self.reader
    }

    /// Hands every event of traces that count to `visit`.
    ///
    /// # Errors
    /// When the events cannot be opened.
    pub fn visit(&self, mut visit: impl FnMut(&Event)) -> Result<(), ReadError> {
        self.reader.visit(|event| {
            if self.counts(event.trace) {
                visit(event);
            }
        })
    }

    /// Whether a trace counts.
    pub fn counts(&self, index: u32) -> bool {
        self.filters.is_empty()
            || *self.known.borrow_mut().entry(index).or_insert_with(|| {
                let frames = self.reader.frames(index).unwrap_or_default();
                self.filters.counts(index, &frames, self.reader.sidecar())
            })
    }
}

fn accepts(patterns: &[NamePattern], fits: impl Fn(&NamePattern) -> bool) -> bool {
    let (inclusive, exclusive): (Vec<_>, Vec<_>) = patterns.iter().partition(|pattern| pattern.is_inclusive);
    (inclusive.is_empty() || inclusive.into_iter().any(&fits)) && !exclusive.into_iter().any(&fits)
}

fn fits_file(pattern: &NamePattern, file: &str) -> bool {
    let last = file.rsplit('/').next().unwrap_or(file);
    pattern.fits(file) || !pattern.pattern.as_str().contains('/') && pattern.fits(last)
}

fn fits_thread(pattern: &NamePattern, index: u32, sidecar: Option<&Sidecar>) -> bool {
    origins(index, sidecar).any(|origin| {
        let name = sidecar.and_then(|sidecar| sidecar.threads.get(&origin.thread));
        pattern.fits(&origin.thread.to_string()) || name.is_some_and(|name| pattern.fits(name))
    })
}

/// Where the allocations of a trace came from; nothing without a sidecar.
fn origins(index: u32, sidecar: Option<&Sidecar>) -> impl Iterator<Item = &Origin> {
    let known = sidecar.and_then(|sidecar| sidecar.origins.get(&index));
    known.map_or(&[][..], Vec::as_slice).iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(file: &'static str, function: &'static str) -> StackFrame<'static> {
        StackFrame {
            file: file.into(),
            line: 1,
            function: Some(function),
        }
    }

    fn patterns(texts: &[&str]) -> Vec<NamePattern> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn inclusive_and_exclusive_patterns() {
        let stack = [
            frame("/srv/app/main.py", "main"),
            frame("/usr/lib/json/decoder.py", "decode"),
        ];
        let counts = |files: &[&str], functions: &[&str], all_frames| {
            let filters = Filters {
                files: patterns(files),
                functions: patterns(functions),
                all_frames,
                ..Filters::default()
            };
            filters.counts(1, &stack, None)
        };
        assert!(counts(&[], &[], false));
        assert!(counts(&["*/json/*"], &[], false) && counts(&["decoder.py"], &["dec*"], false));
        assert!(!counts(&["main.py"], &[], false) && counts(&["main.py"], &[], true));
        assert!(counts(&["main.py", "*.py"], &["!encode"], false));
        assert!(!counts(&["*.py", "!/usr/*"], &[], false) && !counts(&[], &["!main"], true));
        assert!(!counts(&["json/decoder.py"], &[], false), "a path is matched whole");
        assert!("a[".parse::<NamePattern>().is_err());
    }
}
