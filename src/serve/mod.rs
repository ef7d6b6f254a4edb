//! Profiles by HTTP: what `pyheap serve` answers and `pyheap push` sends.
//!
//! The paths, names and formats are those of Go's `net/http/pprof`, so that what scrapes a Go service scrapes a Python one. Nothing
//! here knows how a process is attached to: whoever records one writes what comes into a [`served::Served`], and
//! [`answer`] makes bytes of it. A client can make us work and wait, never the process that is profiled: its records are drained and
//! counted by threads that no request reaches.
//!
//! Whoever connects is hostile until proven otherwise: [`http`] bounds the number of connections, the length of what they
//! send, the time that they take and the answers that are made at once.

pub mod answer;
pub mod heap;
pub mod http;
pub mod metrics;
pub mod push;
pub mod route;
pub mod served;
mod tls;
