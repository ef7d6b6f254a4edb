//! Profiles on disk: the heapprof files that a recording writes, and what can be read from them.
//!
//! [`writer`] makes them, [`reader`] opens them, [`digest`] condenses a finished run into snapshots. The files are those
//! of the original heapprof, plus a sidecar of facts that those cannot hold; `docs/format.md` has them byte by byte.
//! Nothing here knows a process: it is told sizes, times and names, and gives them back.

pub mod digest;
mod digest_file;
pub mod facts;
pub mod format;
pub mod hpc;
pub mod hpd;
pub mod hpm;
pub mod interval;
pub mod live;
pub mod model;
pub mod names;
mod output;
pub mod place;
mod ranking;
pub mod reader;
pub mod sampling;
pub mod sidecar;
pub mod writer;
