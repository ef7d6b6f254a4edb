//! `record --census`: what was on the heap when a recording began and when it ended, in two files beside it, and how
//! `leaks` shows the difference.

use super::census::{How, changes_json, load, of_target};
use super::failure::chain;
use crate::attach::frozen::Limits;
use crate::attach::process::ProcessId;
use crate::attach::{Target, preflight};
use crate::census::render;
use crate::census::table::{Census, changes};
use crate::profile::names::ProfileNames;
use crate::profile::reader::Reader;
use crate::ui::output::note;
use crate::ui::save::save;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A census may take so long.
const MAX_TIME: Duration = Duration::from_secs(600);
/// When a census of a recording was taken.
#[derive(Debug, Clone, Copy)]
pub enum When {
    /// Before the hooks came.
    Begin,
    /// After they had gone.
    End,
}

/// Where it is.
fn path(names: &ProfileNames, when: When) -> PathBuf {
    let mut name = OsString::from(names.base());
    name.push(match when {
        When::Begin => "._census-begin",
        When::End => "._census-end",
    });
    name.into()
}

/// Takes the first census; `None` when there can be none, which is said.
pub fn begin(target: &Target) -> Option<Census> {
    let how = How {
        live: false,
        limits: Limits::default(),
        max_time: MAX_TIME,
    };
    match of_target(target, &how, None) {
        Ok((census, _)) => Some(census),
        Err(error) => {
            note(&format!("no census: {}", chain(&error)));
            None
        }
    }
}

/// Puts the first census beside the files of a recording that has begun. Without one, what an older recording has left is removed.
pub fn begun(names: &ProfileNames, census: Option<&Census>) {
    for when in [When::Begin, When::End] {
        let _ = std::fs::remove_file(path(names, when));
    }
    if let Some(census) = census {
        put(names, When::Begin, census);
    }
}

/// Takes the second census and puts it beside the first one.
pub fn end(names: &ProfileNames, id: ProcessId) {
    let target = match preflight::check_readable(id.pid) {
        Ok(target) if target.facts.id == id => target,
        Ok(_) => return note("no census of the end: the process is another one"),
        Err(error) => return note(&format!("no census of the end: {}", chain(&error))),
    };
    if let Some(census) = begin(&target) {
        put(names, When::End, &census);
    }
}

fn put(names: &ProfileNames, when: When, census: &Census) {
    let written = serde_json::to_string(census)
        .map_err(|error| error.to_string())
        .and_then(|text| save(&path(names, when), (text + "\n").as_bytes()).map_err(|error| error.to_string()));
    if let Err(error) = written {
        note(&format!("the census is not saved: {error}"));
    }
}

/// The two censuses of a recording.
pub struct Growth {
    before: Census,
    after: Census,
}

impl Growth {
    /// Those beside a profile, if they are of its process; what is wrong with them is said.
    pub fn of(reader: &Reader) -> Option<Self> {
        let [before, after] = [When::Begin, When::End].map(|when| path(reader.names(), when));
        if !before.exists() || !after.exists() {
            return None;
        }
        let both = load(&before).and_then(|before| Ok((before, load(&after)?)));
        let (before, after) = match both {
            Ok(both) => both,
            Err(error) => {
                note(&format!("warning: {}", chain(&error)));
                return None;
            }
        };
        let pid = reader.sidecar().and_then(|sidecar| sidecar.header.facts.pid);
        let is_ours = before.pid == after.pid && pid.is_none_or(|pid| i64::from(pid) == i64::from(before.pid));
        is_ours.then_some(Self { before, after })
    }

    /// As text: the `limit` types that have changed the most, and how much of what is there was born since the attach.
    pub fn text(&self, live_bytes: f64, limit: usize) -> String {
        use crate::report::human::{bytes, share};
        let rows = changes(&self.before.types, &self.after.types);
        let all = self.after.total.bytes as f64;
        let mut text = String::from("\nthe heap, from the census at the begin to the one at the end\n");
        text += &format!(
            "{} in objects at the end; allocated since the attach and still there, by the samples: {} ({} of it)\n",
            bytes(all),
            bytes(live_bytes),
            share(live_bytes.min(all), all).trim_start()
        );
        text + &render::changes(&self.before, &self.after, &rows, "type", limit)
    }

    /// As JSON.
    pub fn json(&self, limit: usize) -> Result<serde_json::Value, serde_json::Error> {
        let rows = changes(&self.before.types, &self.after.types);
        changes_json(&self.before, &self.after, &rows, "type", limit)
    }
}
