//! `pyheap where`: where a live object of a process that is being recorded was allocated.

use std::error::Error;
use std::fmt::Write;
use std::mem::offset_of;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use zerocopy::FromBytes;

use super::failure::{Failure, code};
use crate::attach::session::{regions, user_of};
use crate::profile::reader::Reader;
use crate::report::human::{bytes, clean};
use crate::ui::output::to_stdout;
use pyheap_injector::infect::Found;
use pyheap_injector::{MemoryError, ProcessMemory, RemoteAddr, RemoteMemory};
use pyheap_protocol::control::{Config, Control, Identity};
use pyheap_protocol::domain;
use pyheap_protocol::table::Entry;

/// The recorder writes its files twice a second; after so long a stack is not coming any more.
const PATIENCE: Duration = Duration::from_secs(3);
/// No live table is larger; the number comes from the target.
const MAX_ENTRIES: u64 = 1 << 26;

/// Say where an object was allocated, in a process that is being recorded now.
///
/// ADDRESS is what `hex(id(obj))` says in the process, or any address within a block. Only blocks that were sampled are known:
/// the answer for all others is "not sampled". Memory that Python reuses without freeing it (free lists) counts as allocated where it
/// first was.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The process.
    #[arg(value_name = "PID")]
    pub process: i32,

    /// The address, hexadecimal with `0x`, or decimal.
    #[arg(value_name = "ADDRESS", value_parser = parse_address)]
    pub address: u64,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn parse_address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "not an address; write 0x7f12… or a decimal number, as hex(id(obj)) or id(obj) say".to_owned())
}

/// Runs the command.
///
/// # Errors
/// When there is no such process, it may not be read, or nobody records it into files.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let pid = args.process;
    if !std::path::Path::new(&format!("/proc/{pid}")).exists() {
        return Err(Failure::new(code::NO_PROCESS, format!("there is no process {pid}")).into());
    }
    let (identity, owner) = recording(pid)?;
    let memory = ProcessMemory::new(pid);
    let (found, period) = find(&memory, &identity, args.address)
        .map_err(|error| Failure::failed(format!("the live table of process {pid} cannot be read: {error}")))?;
    let Some(entry) = found else {
        let text = if args.json {
            serde_json::json!({"address": args.address, "sampled": false, "period_bytes": period}).to_string() + "\n"
        } else {
            format!(
                "not sampled: {:#x} is in no live block that pyheap has sampled. It was allocated before the recording began, is \
                 one of those between the samples (one per {} of allocation), or is no block of Python's allocators\n",
                args.address,
                bytes(period as f64)
            )
        };
        return Ok(to_stdout(&text)?);
    };
    let files = files_of(owner).ok_or_else(|| {
        Failure::failed(format!(
            "the block was sampled, but pyheap (pid {owner}) keeps no files that can be found; `pyheap record` does"
        ))
    })?;
    let started = Instant::now();
    loop {
        let reader = Reader::open(&files)?;
        let trace = reader
            .sidecar()
            .and_then(|sidecar| sidecar.stacks.get(&(entry.stack, entry.domain as u8)).copied());
        if let Some(frames) = trace.and_then(|trace| reader.frames(trace)) {
            return Ok(to_stdout(&answer(args, &entry, &frames)?)?);
        }
        if started.elapsed() >= PATIENCE {
            let why = "the block was sampled, but its stack is not in the recording's files (it was lost, or they cannot be written)";
            return Err(Failure::failed(why).into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The region of the pyheap that records a process, and its pid.
fn recording(pid: i32) -> Result<(Identity, u32), Failure> {
    let found = regions(pid).into_iter().find_map(|found| match found {
        Found::Region(identity) => Some((identity, user_of(pid, &identity)?)),
        Found::Empty { .. } => None,
    });
    found.ok_or_else(|| {
        let memory = std::fs::File::open(format!("/proc/{pid}/mem"));
        match memory {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Failure::new(
                code::NOT_PERMITTED,
                format!(
                    "the memory of process {pid} may not be read; run pyheap as the user of the process, or as root"
                ),
            ),
            _ => Failure::new(
                code::REFUSED,
                format!("process {pid} is not being recorded; start with: pyheap record {pid}"),
            ),
        }
    })
}

/// The live sampled block that contains an address, and the period of the recording.
fn find(memory: &ProcessMemory, identity: &Identity, address: u64) -> Result<(Option<Entry>, u64), MemoryError> {
    let at = |offset: usize| RemoteAddr(identity.control.wrapping_add(offset as u64));
    let config: [u8; size_of::<Config>()] = memory.read_array(at(offset_of!(Control, config)))?;
    let Ok(config) = Config::read_from_bytes(&config) else {
        return Ok((None, 0));
    };
    let used = memory.read_u64(at(offset_of!(Control, slab_used)))?;
    let used = used.min(config.slab_entries).min(MAX_ENTRIES);
    let table = memory.read_vec(RemoteAddr(config.slab), used as usize * size_of::<Entry>())?;
    let found = table
        .chunks_exact(size_of::<Entry>())
        .filter_map(|bytes| Entry::read_from_bytes(bytes).ok())
        .filter(Entry::is_live)
        .filter(|entry| address >= entry.address && address - entry.address < entry.size.max(1))
        .max_by_key(|entry| entry.address);
    Ok((found, config.period))
}

/// The profile that a recorder writes, found by the sidecar that it holds open.
fn files_of(owner: u32) -> Option<PathBuf> {
    let fds = std::fs::read_dir(format!("/proc/{owner}/fd")).ok()?;
    fds.flatten().find_map(|fd| {
        let path = std::fs::read_link(fd.path()).ok()?;
        let extension = path.extension()?.to_str()?;
        matches!(extension, "_hpx" | "hpx").then_some(path)
    })
}

fn answer(
    args: &Args,
    entry: &Entry,
    frames: &[crate::profile::model::StackFrame<'_>],
) -> Result<String, serde_json::Error> {
    let domain = domain::NAMES.get(entry.domain as usize).copied().unwrap_or("unknown");
    if args.json {
        let stack = frames
            .iter()
            .map(|frame| serde_json::json!({"file": frame.file, "line": frame.line, "function": frame.function}));
        let answer = serde_json::json!({
            "address": args.address,
            "sampled": true,
            "block": entry.address,
            "size": entry.size,
            "domain": domain,
            "period_bytes": entry.period,
            "stack": stack.collect::<Vec<_>>(),
        });
        return Ok(serde_json::to_string_pretty(&answer)? + "\n");
    }
    let mut text = format!(
        "{:#x} is in a block of {} bytes at {:#x} ({domain} domain), allocated at\n",
        args.address, entry.size, entry.address
    );
    for frame in frames.iter().rev() {
        let function = frame
            .function
            .map(|name| format!(" {}", clean(name)))
            .unwrap_or_default();
        let _ = writeln!(text, "  {}:{}{function}", clean(&frame.file), frame.line);
    }
    Ok(text)
}
