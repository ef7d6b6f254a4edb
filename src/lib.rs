//! pyheap: a heap profiler for running CPython processes, attached from outside.
//!
//! The folders of this crate sort in the order in which a sample visits them: [`attach`] finds the interpreter and puts
//! the shim there, [`collect`] drains its ring, [`frames`] turns raw frames into file, line and function, [`profile`]
//! writes and reads the files, [`reader`] answers questions about them, [`report`] makes answers of them, [`serve`] gives them by HTTP,
//! [`ui`] shows them. [`threads`] starts the threads of all that.
//! [`dump`] goes another way: it reads the stacks of all threads as they are now. So do [`census`], which reads the objects, and
//! [`rss`], which reads where all of the memory is.

pub mod attach;
pub mod census;
pub mod collect;
pub mod dump;
pub mod frames;
pub mod profile;
pub mod reader;
pub mod report;
pub mod rss;
pub mod serve;
pub mod threads;
pub mod ui;

/// Version and commit of this build.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("PYHEAP_COMMIT"), ")");

/// Version, commit and shim protocol of this build.
#[must_use]
pub fn version_and_protocol() -> String {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("PYHEAP_COMMIT"));
    format!("{version} ({commit}, shim protocol {})", pyheap_protocol::PROTOCOL)
}
