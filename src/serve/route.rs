//! What a request asks for. Pure: from a path and a query to a [`Route`], or the reason why there is none.

use std::time::Duration;

/// The longest time that a difference may be of.
pub const MAX_SECONDS: u64 = 600;
/// The longest path and query that are looked at, in bytes.
const MAX_PATH: usize = 2048;

/// Whose answer is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// All processes that are served.
    All,
    /// That of this number.
    Process(i32),
}

/// A profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Of which process.
    pub whose: Whose,
    /// The kind of value that a viewer shows first.
    pub shown_first: &'static str,
    /// As text for people.
    pub is_text: bool,
    /// What changes from now on, for so long.
    pub change: Option<Duration>,
    /// Whether samples say their thread and the like.
    pub has_labels: bool,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// The page that lists the others.
    Index(Whose),
    /// A profile.
    Profile(Wanted),
    /// The command line of a process.
    Cmdline(Whose),
    /// Numbers for Prometheus.
    Metrics,
    /// Whether we are there.
    Health,
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// There is nothing of that name.
    NotFound,
    /// A profile that Go has and we do not.
    NotOurs,
    /// A parameter that cannot be followed; says which and why.
    Parameter(&'static str),
}

/// What `path` with `query` asks for.
///
/// # Errors
/// When there is no such thing.
pub fn route(path: &str, query: &str) -> Result<Route, Wrong> {
    if path.len() + query.len() > MAX_PATH {
        return Err(Wrong::NotFound);
    }
    match path {
        "/metrics" => return Ok(Route::Metrics),
        "/healthz" => return Ok(Route::Health),
        "/" | "" => return Ok(Route::Index(Whose::All)),
        _ => {}
    }
    let (whose, rest) = process(path);
    match rest {
        "" | "/" if whose != Whose::All => Ok(Route::Index(whose)),
        "/debug/pprof" | "/debug/pprof/" => Ok(Route::Index(whose)),
        "/debug/pprof/heap" => wanted(whose, "inuse_space", query),
        "/debug/pprof/allocs" => wanted(whose, "alloc_space", query),
        "/debug/pprof/cmdline" => Ok(Route::Cmdline(whose)),
        other => match other.strip_prefix("/debug/pprof/") {
            Some("profile" | "trace" | "symbol" | "goroutine" | "threadcreate" | "block" | "mutex") => {
                Err(Wrong::NotOurs)
            }
            _ => Err(Wrong::NotFound),
        },
    }
}

/// The process that a path begins with, and the rest.
fn process(path: &str) -> (Whose, &str) {
    let Some(inner) = path.strip_prefix('/') else {
        return (Whose::All, path);
    };
    let (first, rest) = inner.split_at(inner.find('/').unwrap_or(inner.len()));
    let is_number = !first.is_empty() && first.len() <= 10 && first.bytes().all(|byte| byte.is_ascii_digit());
    match first.parse() {
        Ok(pid) if is_number => (Whose::Process(pid), rest),
        _ => (Whose::All, path),
    }
}

/// Parameters that are not known are ignored, as Go does; `gc` is one of them: there is no collection that we could run.
fn wanted(whose: Whose, shown_first: &'static str, query: &str) -> Result<Route, Wrong> {
    let mut wanted = Wanted {
        whose,
        shown_first,
        is_text: false,
        change: None,
        has_labels: true,
    };
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "seconds" => match value.parse() {
                Ok(seconds @ 1..=MAX_SECONDS) => wanted.change = Some(Duration::from_secs(seconds)),
                _ => return Err(Wrong::Parameter("seconds must be a whole number from 1 to 600")),
            },
            "debug" => match value.parse::<u8>() {
                Ok(level) => wanted.is_text = level > 0,
                Err(_) => return Err(Wrong::Parameter("debug must be 0 or 1")),
            },
            "labels" => match value {
                "0" => wanted.has_labels = false,
                "1" => wanted.has_labels = true,
                _ => return Err(Wrong::Parameter("labels must be 0 or 1")),
            },
            _ => {}
        }
    }
    if wanted.is_text && wanted.change.is_some() {
        return Err(Wrong::Parameter("debug=1 and seconds do not go together"));
    }
    Ok(Route::Profile(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(path: &str, query: &str) -> Wanted {
        match route(path, query) {
            Ok(Route::Profile(wanted)) => wanted,
            other => panic!("{path}?{query}: {other:?}"),
        }
    }

    #[test]
    fn the_paths_of_go() {
        assert_eq!(route("/", ""), Ok(Route::Index(Whose::All)));
        assert_eq!(route("/debug/pprof/", "x=1"), Ok(Route::Index(Whose::All)));
        assert_eq!(route("/77/debug/pprof/", ""), Ok(Route::Index(Whose::Process(77))));
        assert_eq!(route("/77/", ""), Ok(Route::Index(Whose::Process(77))));
        assert_eq!(
            route("/77/debug/pprof/cmdline", ""),
            Ok(Route::Cmdline(Whose::Process(77)))
        );
        assert_eq!(route("/debug/pprof/goroutine", ""), Err(Wrong::NotOurs));
        for nothing in [
            "/debug",
            "/debug/pprof/heap/",
            "//debug/pprof/heap",
            "/-1/debug/pprof/heap",
            "/99999999999/",
        ] {
            assert_eq!(route(nothing, ""), Err(Wrong::NotFound), "{nothing}");
        }
        assert_eq!(route(&"/a".repeat(2000), ""), Err(Wrong::NotFound));
    }

    #[test]
    fn parameters() {
        let heap = profile("/debug/pprof/heap", "gc=1&unknown&=&seconds=30");
        assert_eq!(
            (heap.change, heap.shown_first),
            (Some(Duration::from_secs(30)), "inuse_space")
        );
        let allocs = profile("/5/debug/pprof/allocs", "debug=1&labels=0");
        assert!(allocs.is_text && !allocs.has_labels && allocs.whose == Whose::Process(5));
        for wrong in [
            "seconds=0",
            "seconds=601",
            "seconds=1.5",
            "seconds",
            "debug=x",
            "labels=2",
            "debug=1&seconds=1",
        ] {
            assert!(
                matches!(route("/debug/pprof/heap", wrong), Err(Wrong::Parameter(_))),
                "{wrong}"
            );
        }
    }
}
