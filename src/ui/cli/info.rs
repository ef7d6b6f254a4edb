//! `pyheap info`: of a profile, or of a process.

use super::info_run;
use super::select::FilterArgs;
use crate::attach::frozen::copies;
use crate::attach::session::{is_copy, regions, user_of};
use crate::attach::{Refusal, preflight};
use crate::profile::names::ProfileNames;
use crate::report::human;
use crate::ui::output::to_stdout;
use crate::ui::units::Moment;
use pyheap_injector::infect::Found;
use serde::Serialize;
use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

/// Show what a profile contains, or what pyheap finds in a process: can it be attached to, is somebody recording it, has
/// an earlier pyheap left something there.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A profile (its filebase `run`, or any of its files), or a process id. A number is a process unless there is a
    /// profile of that name.
    #[arg(value_name = "BASE|PID")]
    pub what: PathBuf,

    /// Of a profile: the moment for what is alive: time since the start (`90s`), before the end (`-1m`), or absolute.
    #[arg(long, value_name = "TIME", default_value = "end", allow_hyphen_values = true)]
    pub at: Moment,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,

    /// Of a profile: which traces count for what is alive.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// What there is in a process.
#[derive(Debug, Serialize)]
struct Process {
    pid: i32,
    attachable: bool,
    /// Whether its memory may be looked at.
    visible: bool,
    python: Option<String>,
    /// Where the places of the interpreter's fields are known from.
    offsets: Option<String>,
    why_not: Option<String>,
    regions: Vec<Region>,
    /// Frozen copies of it, alive or dead.
    copies: Vec<FrozenCopy>,
    /// Executable pages that are no longer the file's: where stubs of a pyheap (or a debugger's breakpoints) have been.
    private_code: Vec<PrivateCode>,
}

#[derive(Debug, Serialize)]
struct FrozenCopy {
    pid: i32,
    /// A zombie: its parent has to take its status, and does not by itself.
    ended: bool,
    /// A pyheap that lives works with it.
    in_use: bool,
}

#[derive(Debug, Serialize)]
struct PrivateCode {
    mapping: (u64, u64),
    path: String,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Region {
    base: u64,
    len: u64,
    state: &'static str,
    owner: Option<u32>,
}

/// Runs the command.
///
/// # Errors
/// When there is neither such a profile nor such a process.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let pid = args.what.to_str().and_then(|text| text.parse::<i32>().ok());
    match pid {
        Some(pid) if ProfileNames::find(&args.what).is_none() => Ok(process(pid, args.json)?),
        _ => info_run::run(args),
    }
}

fn process(pid: i32, json: bool) -> Result<(), Box<dyn Error>> {
    let checked = preflight::check(pid);
    if let Err(refusal @ (Refusal::NoSuchProcess { .. } | Refusal::Thread { .. } | Refusal::Ended { .. })) = checked {
        return Err(super::failure::Failure::from(refusal).into());
    }
    let regions = regions(pid)
        .into_iter()
        .map(|found| match found {
            Found::Region(identity) => {
                let owner = user_of(pid, &identity);
                let state = match owner {
                    Some(_) => "recording",
                    None if is_copy(pid, &identity) => "inherited by fork, inert",
                    None => "left behind by a pyheap that is gone",
                };
                Region {
                    base: identity.base,
                    len: identity.len,
                    state,
                    owner,
                }
            }
            Found::Empty { base, len } => Region {
                base,
                len,
                state: "mapped by a pyheap that was killed",
                owner: None,
            },
        })
        .collect();
    let (copies, in_use) = copies(pid);
    let found = Process {
        pid,
        attachable: checked.is_ok(),
        visible: !matches!(checked, Err(Refusal::NotPermitted { .. })),
        python: checked.as_ref().ok().map(|target| target.interpreter.description()),
        offsets: checked
            .as_ref()
            .ok()
            .map(|target| target.interpreter.offset_source.to_string()),
        why_not: checked.err().map(|refusal| super::failure::chain(&refusal)),
        regions,
        copies: copies
            .into_iter()
            .map(|copy| FrozenCopy {
                pid: copy.pid,
                ended: copy.is_dead,
                in_use,
            })
            .collect(),
        private_code: private_code(pid),
    };
    let text = if json {
        serde_json::to_string_pretty(&found)? + "\n"
    } else {
        render(&found)
    };
    Ok(to_stdout(&text)?)
}

/// Private copies of pages of executable file mappings.
fn private_code(pid: i32) -> Vec<PrivateCode> {
    let Ok(maps) = procfs::process::Process::new(pid).and_then(|process| process.smaps()) else {
        return Vec::new();
    };
    maps.iter()
        .filter(|map| map.perms.contains(procfs::process::MMPermissions::EXECUTE))
        .filter_map(|map| {
            let procfs::process::MMapPath::Path(path) = &map.pathname else {
                return None;
            };
            let bytes = *map.extension.map.get("Anonymous")?;
            (bytes > 0).then(|| PrivateCode {
                mapping: map.address,
                path: path.display().to_string(),
                bytes,
            })
        })
        .collect()
}

fn render(found: &Process) -> String {
    let pid = found.pid;
    let mut text = match (&found.python, &found.why_not) {
        (Some(version), _) => {
            let owner = found.regions.iter().find_map(|region| region.owner);
            let state = owner.map_or_else(
                || "can be attached to".to_owned(),
                |owner| format!("recorded by pyheap (pid {owner})"),
            );
            let offsets = found.offsets.as_deref().unwrap_or("unknown");
            format!("process {pid}: Python {version}, {state}\nits structs are known from {offsets}\n")
        }
        (None, Some(why)) => format!("process {pid} cannot be attached to: {why}\n"),
        (None, None) => format!("process {pid}\n"),
    };
    for copy in &found.copies {
        let state = match (copy.in_use, copy.ended) {
            (true, _) => "in use by a pyheap that reads it".to_owned(),
            (false, false) => {
                format!("left by a pyheap that is gone, ends by itself; remove it with: pyheap cure {pid}")
            }
            (false, true) => {
                format!("left by a pyheap that is gone, has ended and is a zombie; remove it with: pyheap cure {pid}")
            }
        };
        let _ = writeln!(text, "frozen copy of it (pid {}): {state}", copy.pid);
    }
    if found.regions.is_empty() && found.copies.is_empty() {
        text += if found.visible {
            "nothing of pyheap is in it\n"
        } else {
            "whether pyheap is in it cannot be seen without rights\n"
        };
    }
    for PrivateCode {
        mapping: (start, end),
        path,
        bytes,
    } in &found.private_code
    {
        let path = human::clean(path);
        let _ = writeln!(
            text,
            "{bytes} bytes of code at {start:#x}-{end:#x} ({path}) are private copies: pyheap's stubs are or were there \
             (written back when it leaves), or a debugger's breakpoints"
        );
    }
    for region in &found.regions {
        let owner = region
            .owner
            .map_or_else(String::new, |owner| format!(" by pyheap (pid {owner})"));
        let remedy = if region.owner.is_none() {
            format!("; remove it with: pyheap cure {pid}")
        } else {
            String::new()
        };
        let end = region.base.saturating_add(region.len);
        let _ = writeln!(
            text,
            "pyheap at {:#x}-{end:#x}: {}{owner}{remedy}",
            region.base, region.state
        );
    }
    text
}
