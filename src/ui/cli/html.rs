//! `pyheap html`: a report for a browser.

use std::error::Error;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use super::failure::{Failure, code};
use super::info_run;
use super::leaks;
use super::select::{self, DomainArgs};
use crate::profile::reader::Reader;
use crate::report::filter::{Counted, Filters};
use crate::report::human::{bytes, clean};
use crate::report::leaks::render::headline;
use crate::report::page::page;
use crate::ui::output::{note, to_stdout};
use crate::ui::save::save;
use crate::ui::units;

/// Write a report as one HTML file that needs nothing else: the verdict, memory over time with a range to choose, sites,
/// flame graph, tree, sizes of blocks, facts, and what cannot be known.
///
/// It loads nothing and sends nothing, and can be mailed as it is (it names files and functions of the program). Prints the
/// verdict. docs/report.md tells what is in it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The profile: its filebase (`run`) or any of its files (`run._hpm`, `run.hpd`). It may still be recorded.
    #[arg(value_name = "BASE")]
    pub base: PathBuf,

    /// Write to this file, which is replaced once the new one is complete; `-` is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,

    /// Code below this path is your own, too, as for `pyheap leaks`. May be given several times.
    #[arg(long, value_name = "PATH")]
    pub own: Vec<String>,

    /// Tell when the process hits this size, for example 2GiB. Without it: the limit of its memory cgroup, if it has one.
    #[arg(long, value_name = "BYTES", value_parser = units::parse_size)]
    pub limit: Option<u64>,

    /// Which domains are on the page.
    #[command(flatten)]
    pub domain: DomainArgs,
}

/// Runs the command.
///
/// # Errors
/// When the profile cannot be read, or the file not be written.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let is_stdout = args.output == Path::new("-");
    if is_stdout && io::stdout().is_terminal() {
        let why = "a page would fill the terminal; use -o FILE, or a pipe";
        return Err(Failure::new(code::USAGE, why).into());
    }
    let reader = Reader::open(&args.base)?;
    let verdict = leaks::report(&reader, &args.own, args.limit, &args.domain)?;
    let filters = Filters {
        domains: args.domain.of(&reader)?,
        ..Filters::default()
    };
    let mut info = info_run::collect(&reader)?;
    if !filters.is_empty() {
        info.set_live(&select::live(&reader, None, &filters)?.total);
    }
    for warning in &info.warnings {
        note(&format!("warning: {warning}"));
    }
    let page = page(&Counted::new(&reader, &filters), &verdict, &info)?;
    save(&args.output, page.as_bytes())?;
    if is_stdout {
        return Ok(());
    }
    Ok(to_stdout(&format!(
        "{}\n{}: {}\n",
        headline(&verdict),
        clean(&args.output.display().to_string()),
        bytes(page.len() as f64)
    ))?)
}
