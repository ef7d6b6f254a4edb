//! What a recording tells of its target and of itself, beside samples: facts, memory, losses, its end.
//!
//! Plain data with the form it has in the sidecar; see `docs/format.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What is known of the target when a recording starts. Unknown facts are `None` or empty, never guessed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// Process id of the target, as the recorder sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its executable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exe: Option<String>,
    /// Its command line.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmdline: Vec<String>,
    /// Version of its interpreter, for example `3.11.7`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// Its C library, for example `glibc 2.36`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libc: Option<String>,
    /// Name of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Names of the allocator domains that were hooked, for example `raw`, `mem`, `obj`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<String>,
    /// Limit of the target's memory cgroup, or of the nearest one above it that has one, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// How long the target stood still while the hooks were installed, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attach_stop_micros: Option<u64>,
    /// Version of pyheap that recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pyheap_version: Option<String>,
    /// Anything else worth showing, by name.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// Memory of the target at one moment, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemorySample {
    /// Resident set size.
    pub rss: u64,
    /// Proportional set size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pss: Option<u64>,
    /// Resident anonymous memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon: Option<u64>,
    /// Resident file-backed memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<u64>,
    /// Memory swapped out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap: Option<u64>,
    /// What of the resident anonymous memory is pyheap's own, in the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pyheap: Option<u64>,
    /// Memory that counts against the limit of the target's memory cgroup and cannot simply be dropped: its usage without inactive
    /// pages of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<u64>,
}

/// What was lost since the start, by reason (for example `events_lost_ring_full`; `docs/format.md` lists them). Counters
/// only grow; the last line counts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Losses(pub BTreeMap<String, u64>);

impl Losses {
    /// Whether nothing was lost.
    pub fn is_empty(&self) -> bool {
        self.0.values().all(|count| *count == 0)
    }
}

/// Why a recording ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndReason {
    /// The user stopped it.
    Stopped,
    /// The requested duration was over.
    DurationReached,
    /// The target exited by itself.
    TargetExited {
        /// Its exit code, if it could be learned.
        code: Option<i32>,
    },
    /// A signal ended the target.
    TargetKilled {
        /// Its number.
        signal: i32,
    },
    /// The target replaced itself by another program (`execve`).
    TargetReplaced,
    /// The recording goes on in other files, which begin with what is alive.
    Continued {
        /// Their filebase, without directory.
        next: String,
    },
    /// The recording could not go on.
    Failed {
        /// The error and its causes.
        error: String,
    },
}

/// The last line: when and why the recording ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Microseconds since the start.
    pub at: u64,
    /// A word for the reason.
    pub reason: String,
    /// Exit code of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The signal that ended the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The error that ended the recording.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Filebase of the files in which the recording goes on, in the same directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl End {
    /// The line for `reason` at `at` microseconds.
    pub fn new(at: u64, reason: &EndReason) -> Self {
        let mut end = Self {
            at,
            reason: String::new(),
            code: None,
            signal: None,
            error: None,
            next: None,
        };
        end.reason = match reason {
            EndReason::Stopped => "stopped",
            EndReason::DurationReached => "duration-reached",
            EndReason::TargetExited { code } => {
                end.code = *code;
                "target-exited"
            }
            EndReason::TargetKilled { signal } => {
                end.signal = Some(*signal);
                "target-killed"
            }
            EndReason::TargetReplaced => "target-replaced",
            EndReason::Continued { next } => {
                end.next = Some(next.clone());
                "continued"
            }
            EndReason::Failed { error } => {
                end.error = Some(error.clone());
                "failed"
            }
        }
        .to_owned();
        end
    }

    /// For people.
    pub fn describe(&self) -> String {
        match (self.reason.as_str(), self.code, self.signal, &self.error) {
            ("stopped", ..) => "stopped by the user".to_owned(),
            ("duration-reached", ..) => "the requested duration was over".to_owned(),
            ("target-exited", Some(code), ..) => format!("the target exited with code {code}"),
            ("target-exited", ..) => "the target exited".to_owned(),
            ("target-killed", _, Some(signal), _) => format!("signal {signal} ended the target"),
            ("target-replaced", ..) => "the target replaced itself by another program".to_owned(),
            ("continued", ..) => match &self.next {
                Some(next) => format!("it goes on in {next}"),
                None => "it goes on in other files".to_owned(),
            },
            ("failed", _, _, Some(error)) => format!("the recording failed: {error}"),
            (other, ..) => other.to_owned(),
        }
    }
}
