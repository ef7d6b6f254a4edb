//! From the ring in the target to events, traces and numbers here.
//!
//! Three threads joined by bounded queues. [`drain`] copies the ring's bytes out every few milliseconds and does nothing
//! else, so that the target never waits and a slow disk costs nothing but memory here; [`resolve`] turns records into
//! traces and events and keeps the model of what is live; the writer thread in [`recorder`] puts them into files.

pub mod drain;
pub mod files;
pub mod live;
pub mod memory;
pub mod merge;
pub mod missed;
pub mod names;
pub mod native_names;
pub mod native_stacks;
pub mod period;
pub mod pieces;
pub mod recorder;
pub mod resolve;
pub mod rotation;
pub mod stacks;
pub mod threads;
pub mod tree;
pub mod types;
pub mod unwind;

pub use files::Files;
pub use live::Live;
pub use period::Limits;
pub use recorder::{Outcome, Recorder, Stop};
pub use rotation::Rotation;
