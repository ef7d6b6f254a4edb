//! Plain data that the reader makes and reports are made of. Nothing here reads a file or prints.

use std::borrow::Cow;
use std::time::Duration;

/// A function as the sidecar names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Function {
    /// File of its code.
    pub file: String,
    /// Its name, if known.
    pub name: Option<String>,
}

/// One line of a stack.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackFrame<'a> {
    /// File name, as the code object has it.
    pub file: Cow<'a, str>,
    /// Line number, 0 if there is none.
    pub line: u32,
    /// Name of the function, which only the sidecar knows.
    pub function: Option<&'a str>,
}

/// One allocation or free.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Event {
    /// Its place in the file, from 0.
    pub number: u64,
    /// Microseconds since the start of the recording, steps back in time included.
    pub micros: i64,
    /// The same, with steps back in time left out: never decreases.
    pub clock: Duration,
    /// The trace of the allocation, 0 if unknown.
    pub trace: u32,
    /// Whether it ends an allocation.
    pub is_free: bool,
    /// Bytes the program asked for, not scaled.
    pub size: u64,
    /// Whether it is a further piece of the block in the event before, and so no object of its own.
    pub continues: bool,
}

impl Event {
    /// The size, negative for a free.
    pub fn signed_size(&self) -> i128 {
        let size = i128::from(self.size);
        if self.is_free { -size } else { size }
    }
}

/// What is alive of one trace, or of many together. Everything named `sampled` counts records; all else is an estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Live {
    /// Live bytes.
    pub bytes: f64,
    /// Live objects.
    pub objects: f64,
    /// Variance of `bytes`.
    pub bytes_variance: f64,
    /// Variance of `objects`.
    pub objects_variance: f64,
    /// Bytes allocated so far, freed ones included.
    pub alloc_bytes: f64,
    /// Objects allocated so far, freed ones included.
    pub alloc_objects: f64,
    /// Records of live blocks.
    pub sampled: u64,
    /// Bytes of these blocks, not scaled.
    pub sampled_bytes: u64,
}

impl Live {
    /// Half the width of the 95 % interval of `bytes`.
    pub fn bytes_margin(&self) -> f64 {
        1.96 * self.bytes_variance.max(0.0).sqrt()
    }

    /// Half the width of the 95 % interval of `objects`.
    pub fn objects_margin(&self) -> f64 {
        1.96 * self.objects_variance.max(0.0).sqrt()
    }

    /// Adds what is alive elsewhere; samples are independent, so variances add up.
    pub fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.objects += other.objects;
        self.bytes_variance += other.bytes_variance;
        self.objects_variance += other.objects_variance;
        self.alloc_bytes += other.alloc_bytes;
        self.alloc_objects += other.alloc_objects;
        self.sampled += other.sampled;
        self.sampled_bytes += other.sampled_bytes;
    }
}
