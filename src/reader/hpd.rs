//! The events as the original's low-level reader gives them.

use std::fs::File;
use std::io::Take;

use super::{Mode, ReaderError};
use crate::profile::hpd::{Ending, Events};
use crate::profile::reader::Reader as Profile;
use crate::profile::sampling::SamplingTable;

/// An event.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HpdEvent {
    /// Seconds since 1970. Steps back in time are included.
    pub timestamp: f64,
    /// Index of the trace that allocated, 0 if unknown.
    pub traceindex: u32,
    /// Bytes asked for, not scaled; negative for a free.
    pub size: i64,
    /// What the event stands for by the sampling table: 1/p, or 0 where p is 0.
    pub scale_factor: f64,
}

/// Iterates over the events of a profile; ends at a cut or damaged one.
#[derive(Debug)]
pub struct HpdEvents {
    events: Events<Take<File>>,
    table: SamplingTable,
    mode: Mode,
    start: f64,
    /// The original adds up seconds since 1970, step by step.
    clock: f64,
    micros: i64,
}

impl HpdEvents {
    pub(super) fn new(profile: &Profile, mode: Mode) -> Result<Self, ReaderError> {
        Ok(Self {
            events: profile.events()?,
            table: profile.sampling_table().clone(),
            mode,
            start: profile.initial_time(),
            clock: profile.initial_time(),
            micros: 0,
        })
    }

    /// How the file ended, once `next` has returned `None`.
    pub fn ending(&self) -> &Ending {
        self.events.ending()
    }
}

impl Iterator for HpdEvents {
    type Item = HpdEvent;

    fn next(&mut self) -> Option<HpdEvent> {
        let event = self.events.next()?;
        let step = event.micros.saturating_sub(self.micros);
        self.micros = event.micros;
        self.clock += (step / 1_000_000) as f64 + 1e-6 * (step % 1_000_000) as f64;
        let size = i64::try_from(event.size).unwrap_or(i64::MAX);
        let probability = self.table.probability(event.size);
        Some(HpdEvent {
            timestamp: match self.mode {
                Mode::Exact => self.start + event.micros as f64 * 1e-6,
                Mode::Compat => self.clock,
            },
            traceindex: event.trace,
            size: if event.is_free { -size } else { size },
            scale_factor: if probability > 0.0 { probability.recip() } else { 0.0 },
        })
    }
}
