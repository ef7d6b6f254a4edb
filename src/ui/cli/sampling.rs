//! The options that say what is sampled, shared by the commands that attach.

use crate::attach::native_stacks::PIECES;
use crate::attach::session::{DEFAULT_PERIOD, Options};
use crate::collect::Limits;
use crate::collect::period::LONGEST;
use crate::ui::units;
use pyheap_injector::region::Sizes;
use pyheap_protocol::domain;

/// Mappings count from this size on.
const DEFAULT_MMAP: u64 = 1 << 20;

/// See `--help`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Mean distance of samples in bytes of allocation, from 1 (every allocation) to 64MiB. Smaller is more precise and
    /// costs more. `auto`: 128KiB, and longer where that would cost more than --max-overhead; files that are written then go
    /// on in others (BASE.2, BASE.3 …), which begin with what is alive.
    #[arg(long, value_name = "BYTES", default_value = "auto", value_parser = parse_period)]
    pub period: Period,

    /// Share of the process's CPU time that samples may take with `--period auto`, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "1%", value_parser = parse_percent)]
    pub max_overhead: f64,

    /// Which of Python's allocator domains to record, of raw, mem, obj; with --native also malloc and mmap, which are added
    /// if neither is named.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "raw,mem,obj", value_parser = parse_domain)]
    pub domains: Vec<u8>,

    /// Sample also what native code gets from malloc and its like (extension modules, numpy's arrays, C and C++ libraries) and
    /// from mmap: by the same maths, with the Python stack that led there. Calls by ctypes and cffi are seen where these use a libffi
    /// that is a library. Not seen: other calls by addresses that were asked of the loader, as numba does, libffi inside of the interpreter, and allocators inside of a library
    /// (docs/native.md); `leaks` says what the process grows by beyond what is seen.
    #[arg(long)]
    pub native: bool,

    /// As --native, and with the whole native stack of each sample, Python's and C's frames in the order of their calls. SIZE is
    /// how much of the stack is looked at, 1KiB to 64KiB: what is further out has Python's frames only.
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "16KiB", value_parser = parse_piece)]
    pub native_stacks: Option<u64>,

    /// The size from which on mappings count, with --native.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_mapping)]
    pub mmap: u64,

    /// Most samples that may be alive at once; 64 bytes of the process's memory each. Before that number is reached the
    /// period is raised, as with `auto`.
    #[arg(long, value_name = "N", default_value_t = Sizes::default().live_samples,
          value_parser = clap::value_parser!(u64).range(1000..=1 << 24))]
    pub max_live: u64,

    /// Size of the buffer between the process and pyheap, a power of two of 256KiB to 64MiB. A larger one bridges longer
    /// pauses of pyheap.
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_ring)]
    pub ring_size: u64,

    /// Attach also to a Python (3.14 or later) that was started with PYTHON_DISABLE_REMOTE_DEBUG or `-X disable-remote-debug`.
    #[arg(long)]
    pub even_if_remote_debug_disabled: bool,
}

/// A period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Period {
    /// Longer when it costs too much.
    Auto,
    /// These bytes.
    Fixed(u64),
}

impl Default for Args {
    fn default() -> Self {
        Self {
            period: Period::Auto,
            max_overhead: 1.0,
            domains: vec![domain::RAW, domain::MEM, domain::OBJ],
            native: false,
            native_stacks: None,
            mmap: DEFAULT_MMAP,
            max_live: Sizes::default().live_samples,
            ring_size: Sizes::default().ring_bytes,
            even_if_remote_debug_disabled: false,
        }
    }
}

impl Args {
    /// What to attach with.
    #[must_use]
    pub fn options(&self) -> Options {
        Options {
            period: match self.period {
                Period::Auto => DEFAULT_PERIOD,
                Period::Fixed(period) => period,
            },
            sizes: Sizes {
                live_samples: self.max_live,
                ring_bytes: self.ring_size,
                ..Sizes::default()
            },
            even_if_disabled: self.even_if_remote_debug_disabled,
            native: self.is_native().then_some(self.mmap),
            native_stacks: self.native_stacks,
            // All are hooked, whatever is recorded: a block's domain is known only where each is.
            ..Options::default()
        }
    }

    /// What the recording has to keep within.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            max_overhead: (self.period == Period::Auto).then_some(self.max_overhead / 100.0),
            max_live: self.max_live,
            domains: self.domains(),
            company: 1,
        }
    }

    /// As options on a command line.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let period = match self.period {
            Period::Auto => "auto".to_owned(),
            Period::Fixed(period) => period.to_string(),
        };
        let domains = self.domains.iter().map(|domain| domain::NAMES[usize::from(*domain)]);
        let named = [
            (
                self.even_if_remote_debug_disabled,
                "--even-if-remote-debug-disabled".to_owned(),
            ),
            (self.native, "--native".to_owned()),
            (
                self.native_stacks.is_some(),
                format!("--native-stacks={}", self.native_stacks.unwrap_or_default()),
            ),
            (self.is_native(), format!("--mmap={}", self.mmap)),
        ];
        let named = named.into_iter().filter(|(given, _)| *given).map(|(_, word)| word);
        let words = vec![
            format!("--period={period}"),
            format!("--max-overhead={}", self.max_overhead),
            format!("--domains={}", domains.collect::<Vec<_>>().join(",")),
            format!("--max-live={}", self.max_live),
            format!("--ring-size={}", self.ring_size),
        ];
        words.into_iter().chain(named).collect()
    }

    /// Says what is wrong with them together.
    ///
    /// # Errors
    /// When a domain is named, or a size of mappings, that needs `--native`.
    pub fn check(&self) -> Result<(), String> {
        let native = self.domains.iter().find(|&domain| domain::NATIVE >> domain & 1 == 1);
        match native {
            Some(&domain) if !self.is_native() => {
                let name = domain::NAMES[usize::from(domain)];
                Err(format!("the domain {name} is recorded with --native only"))
            }
            _ if self.mmap != DEFAULT_MMAP && !self.is_native() => Err("--mmap needs --native".to_owned()),
            _ => Ok(()),
        }
    }

    /// Native memory is recorded.
    #[must_use]
    pub fn is_native(&self) -> bool {
        self.native || self.native_stacks.is_some()
    }

    /// A bit per domain that is recorded.
    #[must_use]
    pub fn domains(&self) -> u8 {
        let named = self.domains.iter().fold(0, |bits, domain| bits | 1 << domain);
        match (self.is_native(), named & domain::NATIVE) {
            (false, _) => named & domain::PYTHON,
            (true, 0) => named | domain::NATIVE,
            (true, _) => named,
        }
    }
}

/// Parses `auto`, or a period that makes sense: 1 byte to 64 MiB.
fn parse_period(text: &str) -> Result<Period, String> {
    if text == "auto" {
        return Ok(Period::Auto);
    }
    let period = units::parse_size(text).map_err(|error| error.to_string())?;
    if (1..=LONGEST).contains(&period) {
        Ok(Period::Fixed(period))
    } else {
        Err("must lie between 1 byte and 64 MiB, or be `auto`".to_owned())
    }
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    match number.parse() {
        Ok(percent) if (0.01..=100.0).contains(&percent) => Ok(percent),
        _ => Err("must be a number of percent from 0.01 to 100, such as 1%".to_owned()),
    }
}

/// The number of a domain by its name.
pub(super) fn parse_domain(text: &str) -> Result<u8, String> {
    let found = domain::NAMES.iter().position(|name| *name == text);
    found
        .map(|number| number as u8)
        .ok_or_else(|| "is none of raw, mem, obj, malloc, mmap".to_owned())
}

fn parse_piece(text: &str) -> Result<u64, String> {
    let size = units::parse_size(text).map_err(|error| error.to_string())?;
    if PIECES.contains(&size) {
        Ok(size)
    } else {
        Err("must be between 1KiB and 64KiB".to_owned())
    }
}

fn parse_mapping(text: &str) -> Result<u64, String> {
    let size = units::parse_size(text).map_err(|error| error.to_string())?;
    if (4096..=1 << 46).contains(&size) {
        Ok(size)
    } else {
        Err("must be at least 4KiB, and a size that memory can have".to_owned())
    }
}

fn parse_ring(text: &str) -> Result<u64, String> {
    let size = units::parse_size(text).map_err(|error| error.to_string())?;
    if size.is_power_of_two() && (256 << 10..=64 << 20).contains(&size) {
        Ok(size)
    } else {
        Err("must be a power of two between 256KiB and 64MiB".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked() {
        assert_eq!(parse_period("auto"), Ok(Period::Auto));
        assert_eq!(parse_period("64MiB"), Ok(Period::Fixed(64 << 20)));
        assert!(parse_period("0").is_err() && parse_period("65MiB").is_err() && parse_period("often").is_err());
        assert_eq!((parse_percent("1%"), parse_percent("0.5")), (Ok(1.0), Ok(0.5)));
        assert!(parse_percent("0").is_err() && parse_percent("inf").is_err() && parse_percent("-1%").is_err());
        assert_eq!((parse_domain("raw"), parse_domain("obj")), (Ok(0), Ok(2)));
        assert!(parse_domain("heap").is_err());
        assert!(parse_mapping("64KiB").is_ok() && parse_mapping("1").is_err());
        let with = |native, domains| Args {
            native,
            domains,
            ..Args::default()
        };
        assert_eq!(
            (
                with(false, vec![0, 1, 2]).domains(),
                with(true, vec![0, 1, 2]).domains()
            ),
            (7, 31)
        );
        assert_eq!(
            (with(true, vec![3]).domains(), with(false, vec![3]).check().is_err()),
            (8, true)
        );
        assert_eq!(parse_ring("1MiB"), Ok(1 << 20));
        assert!(parse_ring("1000000").is_err() && parse_ring("128KiB").is_err());
    }
}
