//! Threads of pyheap's own, and what to say where there can be none: a program whose leak is threads may have used up what its
//! container is allowed, and pyheap with it.

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

/// What helps when there can be no more threads or processes.
const TOO_MANY: &str = "the limit of processes is reached, pyheap's own or its container's (ulimit -u; pids.max of the cgroup): raise it, or run pyheap outside of the container";

/// Starts a thread.
///
/// # Errors
/// When there can be none, with what helps.
pub fn start<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(work).map_err(explain)
}

/// The same within a scope.
///
/// # Errors
/// As for [`start`].
pub fn start_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new()
        .name(name.into())
        .spawn_scoped(scope, work)
        .map_err(explain)
}

fn explain(error: io::Error) -> io::Error {
    let kind = error.kind();
    let more = if kind == io::ErrorKind::WouldBlock {
        TOO_MANY
    } else {
        "try again"
    };
    io::Error::new(
        kind,
        format!("pyheap cannot start a thread of its own ({error}): {more}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_helps_is_said() {
        let none_left = explain(io::Error::from_raw_os_error(libc::EAGAIN));
        assert!(none_left.to_string().contains("pids.max"), "{none_left}");
        assert_eq!(none_left.kind(), io::ErrorKind::WouldBlock);
        let other = explain(io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(!other.to_string().contains("pids.max"), "{other}");
    }
}
